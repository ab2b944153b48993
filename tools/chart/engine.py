"""The panels of the dashboard about the engine."""

from tools.chart.panels import Panel, graph, heat

__all__ = ["batches", "drafts", "health", "images", "memory", "structured"]


def batches() -> list[Panel]:
    """Forward passes: their sizes, their time and their CUDA graphs."""
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


def memory() -> list[Panel]:
    """KV memory, prefix cache, and lengths of prompts and outputs."""
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
            "Host cache by state",
            {"{{state}}": "sum by (state) (minisgl_host_cache_tokens{m})"},
            "none",
            "Tokens' worth of host memory. Copied: also on the GPU. Moving: a copy runs.",
            stacked=True,
        ),
        graph(
            "Host cache, copies",
            {
                "{{direction}}": "sum by (direction)"
                " (rate(minisgl_host_cache_copied_bytes_total{m}[r]))"
            },
            "Bps",
            "Bytes per second between the first GPU of each pod and host memory.",
        ),
        graph(
            "Host cache, hits and evictions",
            {
                "hit tokens": "sum(rate(minisgl_host_cache_hit_tokens_total{m}[r]))",
                "evicted tokens": "sum(rate(minisgl_host_cache_evicted_tokens_total{m}[r]))",
                "requests that load": "sum(minisgl_host_cache_loading_requests{m})",
            },
            "none",
            "Tokens per second copied for requests, and lost; requests that wait for a copy.",
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
                "tokens of ended sessions": "sum"
                "(rate(minisgl_prefix_cache_ended_tokens_total{m}[r]))",
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


def structured() -> list[Panel]:
    """Grammars and the tokens that they force."""
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


def images() -> list[Panel]:
    """The image encoder and its buffer."""
    return [
        graph(
            "Images encoded",
            {
                "encoded": "sum(rate(minisgl_images_encoded_total{m}[r]))",
                "reused": "sum(rate(minisgl_images_reused_total{m}[r]))",
            },
            "none",
            "Images per second that steps encoded, and images whose features the buffer had.",
        ),
        graph(
            "Patches encoded",
            {"patches": "sum(rate(minisgl_image_patches_total{m}[r]))"},
            "none",
            "Patches per second. An image of 1,024 x 1,024 pixels has 4,096 of 16 x 16 pixels.",
        ),
        graph(
            "Image buffer",
            {"{{state}}": "sum by (state) (minisgl_image_buffer_tokens{m})"},
            "none",
            "Tokens of images whose features the buffer has, and free rows.",
        ),
    ]


def drafts() -> list[Panel]:
    """Draft tokens and how many of them the model accepts."""
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


def health() -> list[Panel]:
    """Start, hangs and broken weights."""
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
