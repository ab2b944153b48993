"""Settings of the engine and the scheduler: built once, complete, and never edited."""

import msgspec


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine (all of its tensor-parallel ranks share these values).

    model_path           local folder with config.json and safetensors (already resolved).
    dtype                auto, float32, bfloat16 or float16; auto: the checkpoint's on a GPU,
                         float32 on CPU.
    device               auto, cpu or cuda.
    page_size            tokens per page, a power of two.
    num_pages            KV pages; None: sized from memory.
    memory_ratio         share of the device's free memory that weights, KV and the rest may use.
    cpu_kv_bytes         KV pool size on CPU when num_pages is None.
    max_running_reqs     rows of the page table.
    max_seq_len          context length in tokens; None: the model's.
    attention_backend    auto, or one name, or prefill,decode.
    cuda_graph_max_bs    largest captured decode batch; None: max_running_reqs up to 256;
                         0: no graphs.
    kernel_cache         folder that minisgl compile has filled; GPU kernels are looked for there
                         before they are compiled.
    """

    model_path: str
    dtype: str = "auto"
    device: str = "auto"
    tp_size: int = 1
    page_size: int = 16
    num_pages: int | None = None
    memory_ratio: float = 0.9
    cpu_kv_bytes: int = 512 * 2**20
    max_running_reqs: int = 256
    max_seq_len: int | None = None
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    cuda_graph_max_bs: int | None = None
    dummy_weight: bool = False
    kernel_cache: str | None = None


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Policy of the scheduler.

    prefill_budget_tokens  prompt tokens per step at most (the chunk size).
    target_step_ms         while streams decode, prefill chunks are cut so that the predicted step
                           stays under this, or what the planner allows a crowded engine; None:
                           no target (the offline LLM).
    cache_type             radix or naive.
    overlap                plan and launch step n+1 before the result of step n is read.
    check_plans            for debugging: tensor-parallel ranks compare a hash of each plan.
    """

    prefill_budget_tokens: int = 8192
    target_step_ms: float | None = 15.0
    cache_type: str = "radix"
    overlap: bool = True
    check_plans: bool = False


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the front end must know of a loaded engine (it never opens the model itself)."""

    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_capacity_tokens: int
    page_size: int
    device: str
    dtype: str
    default_temperature: float | None = None
    default_top_k: int | None = None
    default_top_p: float | None = None
    default_min_p: float | None = None
    default_repetition_penalty: float | None = None
