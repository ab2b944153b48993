"""The panels of the dashboard about the service."""

from tools.chart.panels import Panel, graph, heat, number, percentiles

__all__ = ["latency", "summary", "traffic"]


def summary() -> list[Panel]:
    """Numbers at the top: pods, requests and failures."""
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


def traffic() -> list[Panel]:
    """Requests, responses and tokens, in all and by key."""
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
            "Images",
            {
                "decoded": "sum(rate(minisgl_images_total{m}[r]))",
                "refused {{reason}}": "sum by (reason) (rate(minisgl_images_refused_total{m}[r]))",
                "processes that decode": "sum(rate(minisgl_image_decode_seconds_total{m}[r]))",
            },
            "none",
            "Images decoded and requests refused for an image per second, and the mean number of "
            "tokenizer processes that decode an image.",
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


def latency() -> list[Panel]:
    """Times of a request, from its arrival to its last output."""
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
