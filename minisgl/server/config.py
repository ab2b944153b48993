"""Everything a server process is told: built once by the launcher, sent to each child as JSON."""

import sys
from collections.abc import Sequence

import msgspec

from minisgl.core import EngineConfig, SchedulerConfig
from minisgl.core.sampling import MAX_LOGPROBS
from minisgl.utils import supervise

CHILD_COMMAND = (sys.executable, "-m", "minisgl.server.worker_main")  # and a name, and a descriptor


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may ask for, and all of them together: flags.toml says what each one means,
    and their names here are those in minisgl_limits_exceeded_total."""

    max_body_bytes: int = 16 * 2**20
    max_bodies_bytes: int = 512 * 2**20
    max_prompt_chars: int | None = None
    max_prompts: int = 256
    max_choices: int = 1024
    max_n: int = 128
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 128
    max_messages: int = 8192
    max_logprobs: int = MAX_LOGPROBS
    max_logit_bias: int = 1024
    max_queued_reqs: int = 1024
    max_queued_tokens: int = 4 * 2**20
    max_wait_s: float = 300.0
    max_total_s: float = 3600.0
    max_connections: int = 4096
    max_head_bytes: int = 64 * 2**10
    head_timeout_s: float = 30.0
    read_timeout_s: float = 60.0
    template_timeout_s: float = 5.0
    max_template_chars: int = 8 * 2**20


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved command line; what each field means is told by its flag in flags.toml.

    served_names        names that `model` may have; the first one is told to clients.
    api_key_hashes, admin_key_hashes   SHA-256 in hex; the keys themselves stay with the launcher.
    commit              of the source that runs, or unknown.
    """

    engine: EngineConfig
    scheduler: SchedulerConfig
    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 1919
    num_tokenizers: int = 1
    limits: Limits = Limits()
    log_level: str = "info"
    log_format: str = "text"
    shell: bool = False
    ignore_generation_config: bool = False
    allow_unknown_params: bool = False
    api_key_hashes: tuple[str, ...] = ()
    admin_key_hashes: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    drain_grace_s: float = 5.0
    drain_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    commit: str = "unknown"


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one child reads first from its inherited pipe.

    role        api, tokenizer, detokenizer or scheduler; index counts within a role.
    listen_fd   the bound TCP socket (api only).
    reason_fd   where a fatal error is reported as one line, so that the user sees it once.
    """

    role: str
    index: int
    parent_pid: int
    socket_dir: str
    reason_fd: int
    config: ServerConfig
    listen_fd: int | None = None
    url: str = ""

    @property
    def name(self) -> str:
        """scheduler, scheduler-1, tokenizer-0: unique among the children."""
        many = self.role == "tokenizer" or (self.role == "scheduler" and self.index > 0)
        return f"{self.role}-{self.index}" if many else self.role

    def spawn(self, command: Sequence[str] = CHILD_COMMAND) -> supervise.Child:
        """Start it. The name is for people who look at `ps`; the child reads this spec."""
        argv, payload = [*command, self.name], msgspec.json.encode(self)
        fds = [self.reason_fd] if self.listen_fd is None else [self.reason_fd, self.listen_fd]
        return supervise.spawn_child(self.name, argv, payload, fds)
