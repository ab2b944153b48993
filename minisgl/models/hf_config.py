"""The fields that minisgl reads from config.json and generation_config.json, with their types.

Field names are those of Hugging Face checkpoints. A field that is absent or null has the default
given here. Fields that are not listed are ignored.
"""

import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, field

from minisgl.core import ConfigError
from minisgl.layers.rotary import Positive

_Fields = TypeVar("_Fields")
# config.json, from which a family reads fields that no other has.
Raw = Mapping[str, Any]

# The engine stores sizes as int32.
Count = Annotated[int, Meta(ge=1, lt=2**31)]
# A number of layers or experts. The engine makes objects for each of them, so a larger number would
# fill the memory before the weights are found to be missing.
PartCount = Annotated[int, Meta(ge=1, le=10_000)]
# A number in the range of float32. The engine stores these settings as float32.
Number = Annotated[float, Meta(gt=-(2.0**128), lt=2.0**128)]


def read_fields(values: Mapping[str, Any], fields: type[_Fields], where: str) -> _Fields:
    """Convert a JSON object to an instance of the struct or dataclass `fields`.

    where: the name of the file or object, for the message. Raises ConfigError that names the field.
    """
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return msgspec.convert(given, fields)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        name = re.split(r"\W", path)[0]
        found = f"{name} is {reprlib.repr(given[name])}: " if name else ""
        raise ConfigError(f"{where}: {found}{problem}") from None


def check_supported(setting: str, value: object, supported: Collection[object]) -> None:
    """Raise ConfigError with the supported values if `value` is not one of them."""
    if value not in supported:
        names = ", ".join(str(each) for each in supported) or "none"
        raise ConfigError(f"{setting} {value!r} is not supported; supported: {names}")


class AddedToken(msgspec.Struct, frozen=True):
    """An entry of added_tokens in tokenizer.json."""

    id: int
    content: str


class HfTokenizer(msgspec.Struct, frozen=True):
    """The tokens of tokenizer.json that are not in the vocabulary of its model."""

    added_tokens: list[AddedToken] = []

    def ids_of(self, texts: Collection[str]) -> list[int]:
        return [token.id for token in self.added_tokens if token.content in texts]


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that a model takes as they are.

    logits_soft_cap: each logit x becomes cap * tanh(x / cap). None: no cap.
    quantization: the settings of quantised weights. None: unquantised.
    """

    vocab_size: Count
    hidden_size: Count
    norm_eps: Number = field(default=1e-6, name="rms_norm_eps")
    tied_embeddings: bool = field(default=False, name="tie_word_embeddings")
    logits_soft_cap: Positive | None = field(default=None, name="final_logit_softcapping")
    quantization: dict[str, Any] | None = field(default=None, name="quantization_config")


class HfConfig(ModelSettings, frozen=True, kw_only=True):
    """config.json of every supported architecture."""

    intermediate_size: Count
    num_layers: PartCount = field(name="num_hidden_layers")
    q_heads: Count = field(name="num_attention_heads")
    max_position_embeddings: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] = []
    layer_types: list[str] | None = None
    sliding_window: Any = None
    use_sliding_window: bool = False
    max_window_layers: Number = 28
    sliding_window_pattern: Any = None
    use_bidirectional_attention: bool | str = False
    query_pre_attn_scalar: Positive | None = None
    attn_logit_softcapping: Positive | None = None
    rope_local_base_freq: Number | None = None
    rope_theta: Number = 10000.0
    rope_scaling: dict[str, Any] = {}
    rope_parameters: dict[str, Any] = {}
    partial_rotary_factor: Number = 1.0
    original_max_position_embeddings: Count | None = None
    attention_out_bias: bool | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    embedding_multiplier: Positive = 1.0
    attention_multiplier: Positive | None = None
    residual_multiplier: Positive = 1.0
    logits_scaling: Positive = 1.0

    @property
    def width_of_heads(self) -> int:
        """The elements of an attention head. Raises ConfigError if they are not pairs."""
        head_dim = self.head_dim or self.hidden_size // self.q_heads
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(f"head_dim {head_dim} is not even; rotary embedding needs pairs")
        return head_dim


class HfExperts(msgspec.Struct, frozen=True):
    """The fields of config.json that describe a mixture of experts.

    norm_topk_prob: whether the routing weights of a token sum to 1.
    shared_expert_intermediate_size: inner size of the expert of all tokens; 0: there is none.
    swiglu_alpha, swiglu_limit: the constants of the clamped SwiGLU of gpt-oss.
    """

    num_experts: PartCount = 128
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    decoder_sparse_step: Count = 1
    mlp_only_layers: int | list[int] = []

    def in_layer(self, layer: int) -> bool:
        """Whether the MLP of this layer is a mixture of experts; otherwise it is dense."""
        dense = self.mlp_only_layers
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        return sparse and layer not in (dense if isinstance(dense, list) else [dense])


class HfRope(msgspec.Struct, frozen=True, kw_only=True):
    """Rope settings with a default. The classes in layers/rotary.py name all other settings."""

    rope_theta: Number | None = None
    partial_rotary_factor: Number = 1.0
    original_max_position_embeddings: Count | None = None
    factor: Positive | None = None
    mscale: Number = 0.0
    mscale_all_dim: Number = 0.0
    llama_4_scaling_beta: Number = 0.0


class HfGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """generation_config.json: end-of-sequence ids, and recommended sampling parameters."""

    eos_token_id: int | list[int] = []
    do_sample: Any = None
    temperature: Number | None = None
    top_k: Number | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
