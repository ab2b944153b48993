"""Settings of the engine and the scheduler. Each object is built once and is immutable."""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

import msgspec

from minisgl.core.errors import ConfigError

# The numbers of tokens that the decode requests of a step may forward: 1 and the drafts.
DRAFT_WIDTHS = (1, 2, 4, 8)
MAX_DRAFTS = DRAFT_WIDTHS[-1] - 1
MAX_DRAFT_TOKENS = 256  # tokens of all decode requests together in a step with drafts
DRAFT_METHODS = ("ngram", "mtp", "auto")  # of EngineConfig.speculative
MIN_CHUNK_TOKENS = 32  # of smallest_chunk

T = TypeVar("T")


def smallest_chunk(page_size: int) -> int:
    """Return the prompt tokens for which each step has room, also above the limit of its time."""
    return max(MIN_CHUNK_TOKENS, page_size)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine. All of its tensor-parallel ranks have the same values.

    model_path    a local folder.
    cpu_kv_bytes  size of the KV pool on a CPU; not used when num_pages is set.
    spare_cores   cores of a CPU that torch leaves to the other processes of a server.

    settings/flags.toml describes the other settings together with their flags.
    """

    model_path: str
    dtype: str = "auto"
    device: str = "auto"
    tp_size: int = 1
    page_size: int = 16
    num_pages: int | None = None
    memory_ratio: float = 0.9
    cpu_kv_bytes: int = 512 * 2**20
    spare_cores: int = 0
    max_running_reqs: int = 256
    max_seq_len: int | None = None
    kv_request_tokens: int = 4096
    kv_cache_dtype: str = "auto"
    host_cache_gb: float = 0.0
    no_images: bool = False
    image_cache_tokens: int = 16_384
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    quantization: str | None = None
    cuda_graph_max_bs: int | None = None
    speculative: str | None = None
    dummy_weight: bool = False
    kernel_cache: str | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that is wrong for every model and every machine.

        The engine later checks the values against its model and its machine.
        """
        for name in (
            "tp_size",
            "max_running_reqs",
            "page_size",
            "num_pages",
            "kv_request_tokens",
            "image_cache_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.host_cache_gb < math.inf:
            raise ConfigError(f"host_cache_gb must be at least 0 GB, not {self.host_cache_gb}")
        if self.max_running_reqs > 8192:
            raise ConfigError("max_running_reqs must be at most 8192, the limit of the kernels")
        if self.speculative not in (None, *DRAFT_METHODS):
            known = ", ".join(DRAFT_METHODS)
            raise ConfigError(f"speculative {self.speculative!r} is not known; known: {known}")
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size {self.page_size} is not a power of two")


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the scheduler. settings/flags.toml and settings/resolve.py describe them."""

    prefill_budget_tokens: int = 8192
    target_step_ms: float | None = 16.0
    max_slowdown: float = 2.25
    cache_type: str = "radix"
    overlap: bool = True
    check_plans: bool = False

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        if self.prefill_budget_tokens < 1:
            raise ConfigError(
                f"prefill_budget_tokens must be at least 1 token, not {self.prefill_budget_tokens}"
            )
        if not self.max_slowdown >= 1:
            raise ConfigError(f"max_slowdown must be at least 1, not {self.max_slowdown}")
        if self.cache_type not in ("radix", "naive"):
            raise ConfigError(f"cache_type {self.cache_type!r} is not known; known: radix, naive")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a loaded engine that the front end needs, since it does not open the model.

    max_seq_len         limit of prompt and output tokens together.
    kv_capacity_tokens  tokens that fit into the KV pool.
    kv_dtype            dtype of the keys and values in the KV pool, such as fp8.
    sampling_defaults   values that the model's author recommends, by their names in SamplingParams.
    tool_format         how the model writes tool calls: the name of a format, NO_TOOLS if the chat
                        template does not render tools, or UNKNOWN_TOOL_FORMAT. A tokenizer process
                        finds it.
    template_variables  the variables that the chat template reads.
    drafts              the engine makes drafts, so a prediction of the client has an effect.
    images              the engine computes images.
    """

    NO_TOOLS: ClassVar[str] = "none"
    UNKNOWN_TOOL_FORMAT: ClassVar[str] = "unknown"

    max_seq_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_capacity_tokens: int
    page_size: int
    device: str
    dtype: str
    kv_dtype: str
    sampling_defaults: dict[str, int | float] = {}
    tool_format: str = NO_TOOLS
    template_variables: tuple[str, ...] = ()
    drafts: bool = False
    images: bool = False


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the tokenizer that clients need. The special tokens are given as text.

    vocab_size     number of token ids.
    chat_template  Jinja source that another program can render with the messages only. None: the
                   model has no chat template.
    """

    vocab_size: int
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    chat_template: str | None = None


def select_backend(
    kind: str, name: str, known: Mapping[str, T], obstacle: Callable[[T], str | None]
) -> T:
    """Return the backend called `name`, or for auto the first that can run.

    kind: a word for messages. known: the backends by name, in the order of preference. obstacle:
    returns the reason why a backend cannot run, or None. Raises ConfigError for an unknown name,
    and for a named backend that cannot run.
    """
    for known_name, backend in known.items():
        if name in ("auto", known_name):
            reason = obstacle(backend)
            if reason is None:
                return backend
            if name == known_name:
                raise ConfigError(f"{kind} backend {name!r} cannot be used: {reason}")
    raise ConfigError(f"{kind} backend {name!r} is not known; known: auto, {', '.join(known)}")
