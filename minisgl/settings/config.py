"""The configuration of all processes. The launcher builds it once and sends it to each child."""

import re

import msgspec

from minisgl.core import ConfigError, EngineConfig, SchedulerConfig
from minisgl.core.sampling import MAX_JSON_WHITESPACE, MAX_LOGPROBS

# An origin as browsers send it. "null" is the origin of local files and of sandboxed frames.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#@\s]+")

DEMO_NAME = "minisgl-demo"  # the served name of the embedded model
# The client of requests whose key has no name, and of all requests to a server without keys.
DEFAULT_CLIENT = "default"
MAX_IMAGE_TOKENS = 4096  # of one image, unless the server has another limit


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on one request and on all requests together. flags.toml explains each of them.

    The names of the fields are labels of minisgl_limits_exceeded_total (metrics.toml).
    """

    max_body_bytes: int = 20 * 2**20
    max_bodies_bytes: int = 128 * 2**20
    max_prompt_chars: int | None = None
    max_choices: int = 1024
    max_messages: int = 8192
    max_logprobs: int = MAX_LOGPROBS
    max_logit_bias: int = 1024
    max_queued_reqs: int = 1024
    max_queued_tokens: int = 4 * 2**20
    max_call_tokens: int = 2 * 2**20
    max_key_reqs: int | None = None
    max_key_tokens: int | None = None
    max_wait_s: float = 300.0
    max_total_s: float = 3600.0
    max_connections: int = 2048
    max_head_bytes: int = 64 * 2**10
    head_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    template_timeout_s: float = 5.0
    max_images: int = 8
    max_image_pixels: int = 2**24
    max_request_pixels: int = 2**24
    max_image_bytes: int = 2**31
    image_timeout_s: float = 5.0


def resized_tokens(engine: EngineConfig, most: int = MAX_IMAGE_TOKENS) -> int:
    """Return the number of tokens to which a larger image is resized.

    most: the limit of a user. The image buffer takes an image of at most a third of its tokens.
    """
    return min(most, engine.image_cache_tokens // 3)


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The stream of KV events (minisgl/kv_events). flags.toml explains each field."""

    endpoint: str | None = None
    replay_endpoint: str | None = None
    block_size: int = 64
    pod: str | None = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved command line. flags.toml explains each field at its flag.

    served_names        values of `model` that requests may use; responses contain the first.
    api_key_hashes, admin_key_hashes   map the SHA-256 of each key, in hex, to the client of the
                        key. Only the launcher holds the keys.
    lowest_priorities   the lowest priority that the requests of a client may have; 0 for clients
                        without an entry.
    commit              the Git commit of the running source, or "unknown".
    """

    engine: EngineConfig
    scheduler: SchedulerConfig
    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 1919
    probe_port: int | None = None
    num_tokenizers: int = 1
    limits: Limits = Limits()
    kv_events: KVEventsConfig = KVEventsConfig()
    log_level: str = "info"
    log_format: str = "text"
    shell: bool = False
    render_only: bool = False
    ignore_generation_config: bool = False
    allow_unknown_params: bool = False
    strict_max_tokens: bool = False
    key_metrics: bool = False
    no_playground: bool = False
    no_grammars: bool = False
    escape_special_tokens: bool = False
    tool_format: str = "auto"
    max_image_tokens: int = MAX_IMAGE_TOKENS
    max_json_whitespace: int = MAX_JSON_WHITESPACE
    api_key_hashes: dict[str, str] = {}
    admin_key_hashes: dict[str, str] = {}
    lowest_priorities: dict[str, int] = {}
    cache_isolation: str = "none"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    drain_grace_s: float = 5.0
    drain_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    commit: str = "unknown"

    def __post_init__(self) -> None:
        """Refuse settings that would have no effect. Raises ConfigError."""
        if self.kv_events.endpoint is not None and self.scheduler.cache_type == "naive":
            raise ConfigError(
                "--kv-events-endpoint publishes the blocks of the prefix cache, and --cache-type "
                "naive has no prefix cache; remove one of the two flags"
            )
        if self.cache_isolation == "key" and not self.api_key_hashes:
            raise ConfigError(
                "--cache-isolation key separates the prompts of clients by their keys, and the "
                "server has no key; set --api-key-file, or remove --cache-isolation"
            )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allow-origin {origin[:64]!r} is no origin, so it would match no page; set "
                    "SCHEME://HOST, such as https://example.com, without a path, or *"
                )
