"""Generates the Grafana dashboards of the chart: one about the service, one about the engine.

A test checks that the dashboards use only metrics of the table in docs/operations.md.
"""

import json
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard

from tools.chart.panels import DATASOURCE, Panel, graph, heat, number, percentiles

__all__ = ["write_dashboards"]

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "dashboards"


def _variable(name: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(name)
        .datasource(DATASOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard.VariableOption(text="All", value="$__all"))
    )


def _new(title: str, uid: str, about: str) -> builders.Dashboard:
    """An empty dashboard with the variables that all queries use."""
    chosen = 'namespace=~"$namespace",model_name=~"$model"'
    return (
        builders.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["minisgl"])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .link(
            builders.DashboardLink("minisgl")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags(["minisgl"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(
            builders.DatasourceVariable("datasource").label("data source").type("prometheus")
        )
        .with_variable(_variable("namespace", "label_values(minisgl_requests_running, namespace)"))
        .with_variable(
            _variable(
                "model",
                'label_values(minisgl_requests_running{namespace=~"$namespace"}, model_name)',
            )
        )
        .with_variable(_variable("pod", f"label_values(minisgl_requests_running{{{chosen}}}, pod)"))
    )


def _summary() -> list[Panel]:
    return [
        number("Ready pods", "sum(minisgl_ready{p})", "none", "Pods that accept requests."),
        number(
            "Draining",
            "sum(minisgl_draining{p})",
            "none",
            "Pods that complete their requests and then stop.",
        ),
        number(
            "Requests",
            "sum(rate(minisgl_requests_total{m}[r]))",
            "reqps",
            "Completed requests per second.",
        ),
        number(
            "Failed",
            'sum(rate(minisgl_requests_total{m,outcome="error"}[r]))'
            " / sum(rate(minisgl_requests_total{m}[r]))",
            "percentunit",
            "Share of requests that ended with an error of the server.",
        ),
        number("Running", "sum(minisgl_requests_running{m})", "none", "Requests that are running."),
        number("Waiting", "sum(minisgl_requests_waiting{m})", "none", "Requests in the queue."),
    ]


def _traffic() -> list[Panel]:
    return [
        graph(
            "Requests by outcome",
            {"{{outcome}}": "sum by (outcome) (rate(minisgl_requests_total{m}[r]))"},
            "reqps",
            "Completed requests per second by outcome.",
            stacked=True,
        ),
        graph(
            "Refused",
            {
                "{{reason}}": "sum by (reason) (rate(minisgl_requests_rejected_total{m}[r]))",
                "over {{limit}}": "sum by (limit) (rate(minisgl_limits_exceeded_total{m}[r]))",
            },
            "reqps",
            "Requests per second that the server refused, by reason, and exceeded limits by name.",
        ),
        graph(
            "HTTP responses",
            {
                "{{route}} {{code}}": "sum by (route, code) "
                "(rate(minisgl_http_requests_total{p}[r]))"
            },
            "reqps",
            "All HTTP responses per second, including scrapes and probes.",
        ),
        graph(
            "Tool calls",
            {
                "calls": "sum(rate(minisgl_tool_calls_total{m}[r]))",
                "incomplete": "sum(rate(minisgl_tool_call_failures_total{m}[r]))",
                "ignored {{feature}}": "sum by (feature) "
                "(rate(minisgl_ignored_features_total{m}[r]))",
            },
            "ops",
            "Tool calls in answers per second, texts that began as a call but did not end, and "
            "features of Responses and Messages that the server ignored.",
        ),
        graph(
            "Tokens per second",
            {
                "prompt": "sum(rate(minisgl_prompt_tokens_total{m}[r]))",
                "generated": "sum(rate(minisgl_generation_tokens_total{m}[r]))",
            },
            "none",
            "Prompt tokens of admitted requests, and generated tokens.",
        ),
        graph(
            "Running and waiting",
            {
                "running": "sum(minisgl_requests_running{m})",
                "waiting": "sum(minisgl_requests_waiting{m})",
            },
            "none",
            "The metrics that the autoscaler and the endpoint picker use.",
        ),
        graph(
            "Tokens by key",
            {
                "{{key}} prompt": "sum by (key) (rate(minisgl_key_prompt_tokens_total{m}[r]))",
                "{{key}} generated": "sum by (key) "
                "(rate(minisgl_key_generation_tokens_total{m}[r]))",
            },
            "none",
            "Prompt tokens of admitted requests and generated tokens per second, for each key.",
        ),
        graph(
            "Open and refused requests by key",
            {
                "{{key}}": "sum by (key) (minisgl_key_requests_open{m})",
                "{{key}} refused per second": "sum by (key) "
                "(rate(minisgl_key_rejected_total{m}[r]))",
            },
            "none",
            "Requests accepted and not ended, and requests refused with 503.",
        ),
        graph(
            "Mean time to first token by key",
            {
                "{{key}}": "sum by (key) (rate(minisgl_key_wait_seconds_total{m}[r])) / "
                "sum by (key) (rate(minisgl_key_requests_total{m}[r]))",
            },
            "s",
            "Time from arrival to the first output, per request that ended.",
        ),
        graph(
            "Mean time to first token by priority",
            {
                "{{class}}": "sum by (class) (rate(minisgl_class_wait_seconds_total{m}[r])) / "
                "sum by (class) (rate(minisgl_class_requests_total{m}[r]))",
            },
            "s",
            "Per request that ended, for priorities below 0 (high), 0 (default) and above 0 (low).",
        ),
        graph(
            "HTTP requests in flight",
            {"{{pod}}": "sum by (pod) (minisgl_http_requests_in_flight{p})"},
            "none",
            "HTTP requests without a complete response. Falls to 0 while a pod drains.",
        ),
    ]


def _latency() -> list[Panel]:
    first = "minisgl_time_to_first_token_seconds"
    between = "minisgl_inter_token_latency_seconds"
    mean = "minisgl_time_per_output_token_seconds"
    whole = "minisgl_request_duration_seconds"
    return [
        percentiles(
            "Time to first token", first, "From the arrival of a request to its first output."
        ),
        percentiles("Inter-token latency", between, "Between two outputs of a request."),
        percentiles(
            "Time per output token", mean, "Mean time per token of a request after its first token."
        ),
        percentiles("End to end", whole, "From the arrival of a request to its last output."),
        percentiles(
            "In the queue",
            "minisgl_request_queue_seconds",
            "From the arrival of a request to its admission.",
        ),
        percentiles(
            "Prefill",
            "minisgl_request_prefill_seconds",
            "From the admission of a request to its first output.",
        ),
        percentiles(
            "Decode",
            "minisgl_request_decode_seconds",
            "From the first to the last output of a request.",
        ),
        heat("Time to first token, distribution", first, "Requests by time to first token."),
        heat("Inter-token latency, distribution", between, "Outputs by inter-token latency."),
        heat(
            "End to end, distribution", whole, "Requests with outcome stop or length, by duration."
        ),
    ]


def _batches() -> list[Panel]:
    return [
        graph(
            "Mean batch size",
            {
                "{{phase}}": "sum by (phase) (rate(minisgl_batch_size_sum{m}[r]))"
                " / sum by (phase) (rate(minisgl_batch_size_count{m}[r]))"
            },
            "none",
            "Mean number of requests in a forward pass.",
        ),
        heat(
            "Batch size, distribution",
            "minisgl_batch_size",
            "Forward passes by batch size.",
            "none",
        ),
        graph(
            "Mean tokens in a forward pass",
            {
                "{{phase}}": "sum by (phase) (rate(minisgl_batch_tokens_sum{m}[r]))"
                " / sum by (phase) (rate(minisgl_batch_tokens_count{m}[r]))"
            },
            "none",
            "Mean number of tokens that a forward pass computes.",
        ),
        graph(
            "Forward passes per second",
            {"{{phase}}": "sum by (phase) (rate(minisgl_forward_passes_total{m}[r]))"},
            "none",
            "Forward passes of the model per second, by phase.",
        ),
        graph(
            "Time in forward passes",
            {"{{pod}}": "sum by (pod) (rate(minisgl_forward_seconds_total{m}[r]))"},
            "percentunit",
            "Share of time in which a forward pass runs.",
        ),
        graph(
            "CUDA graph coverage",
            {
                "{{phase}}": "sum by (phase) "
                '(rate(minisgl_forward_passes_total{m,cuda_graph="true"}[r]))'
                " / sum by (phase) (rate(minisgl_forward_passes_total{m}[r]))"
            },
            "percentunit",
            "Share of passes that are one CUDA graph. Passes with prompts use several graphs.",
        ),
    ]


def _memory() -> list[Panel]:
    return [
        graph(
            "KV memory by state",
            {"{{state}}": "sum by (state) (minisgl_kv_cache_tokens{m})"},
            "none",
            "Tokens that requests use, that the prefix cache can evict, and that are free.",
            stacked=True,
        ),
        graph(
            "KV memory of window layers by state",
            {"{{state}}": "sum by (state) (minisgl_kv_window_tokens{m})"},
            "none",
            "The same for layers with a sliding window, which have a KV pool of their own.",
            stacked=True,
        ),
        graph(
            "KV memory in use",
            {"{{pod}}": "max by (pod) (minisgl_kv_cache_usage_ratio{m})"},
            "percentunit",
            "Share of KV memory that requests use. Evictable tokens do not count.",
        ),
        graph(
            "Prefix cache hit rate",
            {
                "current": "sum(rate(minisgl_prefix_cache_hit_tokens_total{m}[r]))"
                " / sum(rate(minisgl_prefix_cache_query_tokens_total{m}[r]))",
                "recent requests": "avg(minisgl_prefix_cache_hit_ratio{m})",
                "known": "sum(rate(minisgl_prefix_cache_known_tokens_total{m}[r]))"
                " / sum(rate(minisgl_prefix_cache_query_tokens_total{m}[r]))",
            },
            "percentunit",
            "Share of prompt tokens that the prefix cache contained. Known: also tokens without "
            "their window or state.",
        ),
        graph(
            "Snapshots of states",
            {"{{event}}": "sum by (event) (rate(minisgl_state_snapshots_total{m}[r]))"},
            "none",
            "Copies per second of the recurrent states of hybrid models.",
        ),
        graph(
            "KV events",
            {
                "{{event}}": "sum by (event) (rate(minisgl_kv_event_blocks_total{m}[r]))",
                "dropped batches": "sum(rate(minisgl_kv_event_batches_dropped_total{m}[r]))",
            },
            "none",
            "Blocks per second announced to routers. Dropped batches: the publisher was late.",
        ),
        graph(
            "Evicted and preempted",
            {
                "evicted tokens": "sum(rate(minisgl_prefix_cache_evicted_tokens_total{m}[r]))",
                "preempted requests": "sum(rate(minisgl_preemptions_total{m}[r]))",
            },
            "none",
            "Per second. Preemptions over minutes mean that KV memory is too small.",
        ),
        heat(
            "Prompt length",
            "minisgl_request_prompt_tokens",
            "Requests by prompt tokens.",
            "none",
        ),
        heat(
            "Output length",
            "minisgl_request_generation_tokens",
            "Requests by generated tokens.",
            "none",
        ),
    ]


def _health() -> list[Panel]:
    last_step = "max by (pod) (minisgl_scheduler_last_step_timestamp_seconds{m})"
    return [
        graph(
            "Start-up phases",
            {"{{pod}} {{phase}}": "max by (pod, phase) (minisgl_startup_seconds{p})"},
            "s",
            "Duration of each phase of the start. startup.budgetSeconds must exceed the total.",
        ),
        graph(
            "Time since the last step",
            {"{{pod}}": f"time() - {last_step}"},
            "s",
            "Grows while the server is idle. If it grows while requests run, the server hangs.",
        ),
        graph(
            "Non-finite rows",
            {"{{pod}}": "sum by (pod) (rate(minisgl_nonfinite_rows_total{m}[r]))"},
            "none",
            "Rows of logits with NaN or infinity per second. The weights or the device are broken.",
        ),
    ]


def _structured() -> list[Panel]:
    return [
        graph(
            "Structured requests per second",
            {"{{kind}}": "sum by (kind) (rate(minisgl_structured_requests_total{m}[r]))"},
            "none",
            "Requests with a constraint on the output, by kind.",
        ),
        graph(
            "Time per grammar and per mask",
            {
                "compile": "sum(rate(minisgl_grammar_compile_seconds_total{m}[r]))"
                " / sum(rate(minisgl_grammar_compiles_total{m}[r]))",
                "mask": "sum(rate(minisgl_grammar_mask_seconds_total{m}[r]))"
                " / sum(rate(minisgl_grammar_masks_total{m}[r]))",
            },
            "s",
            "Mean time of compiling a grammar, and host time of the mask of one token.",
        ),
        graph(
            "Rows without a mask per second",
            {"rows": "sum(rate(minisgl_grammar_withheld_total{m}[r]))"},
            "none",
            "Rows that got no token in a step, because the masks of their client took too long.",
        ),
        graph(
            "Forced tokens",
            {
                "forced": "sum(rate(minisgl_forced_tokens_total{m}[r]))",
                "generated": "sum(rate(minisgl_generation_tokens_total{m}[r]))",
            },
            "none",
            "Tokens per second that a grammar forced, beside all generated tokens.",
        ),
        graph(
            "Outputs that left their grammar",
            {"{{reason}}": "sum by (reason) (rate(minisgl_grammar_failures_total{m}[r]))"},
            "none",
            "Requests per second that ended because no token was allowed or a limit was reached.",
        ),
    ]


def _drafts() -> list[Panel]:
    return [
        graph(
            "Draft tokens",
            {
                "forwarded": "sum(rate(minisgl_draft_tokens_total{m}[r]))",
                "accepted": "sum(rate(minisgl_draft_tokens_accepted_total{m}[r]))",
                "generated": "sum(rate(minisgl_generation_tokens_total{m}[r]))",
            },
            "none",
            "Tokens per second that --speculative forwards and accepts, beside generated tokens.",
        ),
        graph(
            "Accepted drafts by position",
            {
                "{{position}}": "sum by (position)"
                " (rate(minisgl_draft_tokens_accepted_total{m}[r]))"
                " / clamp_min(sum by (position) (rate(minisgl_draft_tokens_total{m}[r])), 1e-9)"
            },
            "percentunit",
            "Share of the draft tokens at a position that became output tokens.",
        ),
    ]


def _service_board() -> builders.Dashboard:
    board = _new(
        "minisgl / service",
        "minisgl-service",
        "Readiness, traffic, errors and latency of the service.",
    )
    _add(board, _summary())
    _add(board.with_row(builders.Row("Traffic and errors")), _traffic())
    return _add(board.with_row(builders.Row("Latency")), _latency())


def _engine_board() -> builders.Dashboard:
    board = _new(
        "minisgl / engine",
        "minisgl-engine",
        "Batches, CUDA graphs, KV memory, prefix cache, grammars, drafts and start of the engine.",
    )
    _add(board.with_row(builders.Row("Batches")), _batches())
    _add(board.with_row(builders.Row("Memory and prefix cache")), _memory())
    _add(board.with_row(builders.Row("Structured output")), _structured())
    _add(board.with_row(builders.Row("Drafts")), _drafts())
    return _add(board.with_row(builders.Row("Health and start")), _health())


def _add(board: builders.Dashboard, panels: list[Panel]) -> builders.Dashboard:
    for panel in panels:
        board.with_panel(panel)
    return board


def write_dashboards() -> dict[Path, str]:
    """The path and the text of each dashboard file, with one panel per line."""
    boards = {"minisgl-service.json": _service_board(), "minisgl-engine.json": _engine_board()}
    return {FOLDER / name: _dump(board.build()) for name, board in boards.items()}


def _dump(board: dashboard.Dashboard) -> str:
    plain = json.loads(json.dumps(board, cls=JSONEncoder))
    for number_, panel in enumerate(plain["panels"], start=1):
        panel["id"] = number_
    lines = []
    for key, value in sorted(plain.items()):
        if key == "panels":
            panels = ",\n    ".join(json.dumps(panel, sort_keys=True) for panel in value)
            lines.append(f'  "panels": [\n    {panels}\n  ]')
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value, sort_keys=True)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
