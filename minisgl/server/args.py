"""The command line: grouped flags with units and defaults, resolved into one `ServerConfig`."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import minisgl
from minisgl.core import ConfigError, EngineConfig, SchedulerConfig
from minisgl.env import EnvError, read_env
from minisgl.server.config import Limits, ServerConfig
from minisgl.server.flags import FLAGS, Flag
from minisgl.utils import near_names

__all__ = ["ArgumentParser", "build_parser", "resolve"]

_DEMO_NAME = "minisgl-demo"


class ArgumentParser(argparse.ArgumentParser):
    """Errors are one line with near names; flags are never abbreviated."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: error: {message}; see --help\n")
        sys.exit(2)

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, or exit 2 naming the unknown flag and the nearest known ones."""
        options, rest = self.parse_known_args(argv)
        if rest:
            flag = rest[0].split("=")[0]
            self.error(f"unknown argument {flag}{near_names(flag, self._option_string_actions)}")
        return options


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not those that say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


def build_parser() -> ArgumentParser:
    """All flags of `minisgl`, grouped as in the table."""
    parser = ArgumentParser(
        prog="minisgl",
        description="Serve a language model over the OpenAI API. Without --model: a demo model.",
        epilog="Further commands: minisgl bench ..., minisgl compile ...",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {minisgl.__version__}")
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    names = flag.names.split()
    if flag.kind is None:
        group.add_argument(*names, action="store_true", help=flag.help)
    elif isinstance(flag.kind, tuple):
        group.add_argument(*names, choices=flag.kind, default=flag.default, help=flag.help)
    else:
        group.add_argument(
            *names,
            type=flag.kind,
            default=flag.default,
            metavar=flag.unit,
            nargs="+" if flag.many else None,
            help=flag.help,
        )


def resolve(
    argv: Sequence[str],
    environ: Mapping[str, str],
    resolve_model: Callable[[str, str | None], str],
    demo_path: Callable[[], Path],
) -> ServerConfig:
    """Parse flags and environment, find the model, and return the complete configuration.

    Exits with 2 for a wrong flag; raises ConfigError for a model or setting that cannot be used.
    """
    options = build_parser().parse_strictly(argv)
    try:
        settings = read_env(environ)
    except EnvError as error:
        raise ConfigError(str(error)) from None
    if options.model is None:
        folder = str(demo_path())
    else:
        folder = resolve_model(options.model, options.revision)
    engine = EngineConfig(
        model_path=folder,
        dtype=options.dtype,
        device=options.device,
        tp_size=options.tensor_parallel_size,
        page_size=options.page_size,
        num_pages=options.num_pages,
        memory_ratio=options.memory_ratio,
        max_running_reqs=options.max_running_requests,
        max_seq_len=options.max_seq_len_override,
        attention_backend=options.attention_backend,
        moe_backend=options.moe_backend,
        cuda_graph_max_bs=options.cuda_graph_max_bs,
        dummy_weight=options.dummy_weight,
    )
    scheduler = SchedulerConfig(
        prefill_budget_tokens=options.max_prefill_length,
        target_step_ms=options.target_step_ms or None,
        cache_type=options.cache_type,
        overlap=not settings.disable_overlap_scheduling,
        check_plans=settings.check_plans,
    )
    limits = Limits(
        max_body_bytes=options.max_body_bytes,
        max_prompt_chars=options.max_prompt_chars,
        max_queued_reqs=options.max_queued_requests,
    )
    return ServerConfig(
        engine=engine,
        scheduler=scheduler,
        served_names=tuple(options.served_model_name or [_served_name(options.model)]),
        host=options.host,
        port=options.port,
        num_tokenizers=options.num_tokenizer,
        limits=limits,
        log_level=options.log_level or ("warning" if options.shell else "info"),
        shell=options.shell,
        ignore_generation_config=options.ignore_generation_config,
        allow_unknown_params=options.allow_unknown_params,
        drain_grace_s=options.drain_grace,
        drain_timeout_s=options.drain_timeout,
        step_timeout_s=options.step_timeout,
    )


def _served_name(model: str | None) -> str:
    """The Hugging Face id; of a folder only its name, so that no path is told to clients."""
    if model is None:
        return _DEMO_NAME
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model
