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


def _bounded(
    kind: type[int] | type[float], low: float, high: float | None = None
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= (high if high is not None else float("inf")):
            what = "an integer" if kind is int else "a number"
            upper = "" if high is None else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {what} of at least {low:g}{upper}")
        return value

    return parse


def _page_size(text: str) -> int:
    if not text.isdigit() or int(text) < 1 or int(text) & (int(text) - 1):
        raise argparse.ArgumentTypeError("must be a power of two")
    return int(text)


def build_parser() -> ArgumentParser:
    """All flags of `minisgl`. Names that mini-sglang has too mean the same here."""
    parser = ArgumentParser(
        prog="minisgl",
        description="Serve a language model over the OpenAI API. Without --model: a demo model.",
        epilog="Further commands: minisgl bench ..., minisgl compile ...",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"minisgl {minisgl.__version__}")
    _add_model_flags(parser)
    _add_memory_flags(parser)
    _add_scheduling_flags(parser)
    _add_serving_flags(parser)
    _add_limit_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        "--model-path",
        metavar="ID_OR_FOLDER",
        help="Hugging Face id or local folder; none: the embedded demo model",
    )
    model.add_argument("--revision", help="branch, tag or commit of the Hugging Face repository")
    model.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names that requests may use; none: the id or the folder's name",
    )
    model.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "float16", "bfloat16", "float32"],
        help="auto: the checkpoint's on a GPU, float32 on CPU",
    )
    model.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    model.add_argument(
        "--tensor-parallel-size",
        "--tp-size",
        "--tp",
        type=_bounded(int, 1, 64),
        default=1,
        metavar="N",
        help="processes that share the model, one per GPU",
    )
    model.add_argument(
        "--dummy-weight",
        action="store_true",
        help="random weights; only the model's config is read",
    )
    model.add_argument(
        "--ignore-generation-config",
        action="store_true",
        help="sampling defaults are OpenAI's and not the model's own",
    )


def _add_memory_flags(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory and kernels")
    memory.add_argument(
        "--memory-ratio",
        type=_bounded(float, 0.01, 1),
        default=0.9,
        metavar="SHARE",
        help="share of the device's free memory to use, 0 to 1",
    )
    memory.add_argument(
        "--num-pages", type=_bounded(int, 2), metavar="N", help="KV pages; none: sized from memory"
    )
    memory.add_argument(
        "--page-size",
        type=_page_size,
        default=16,
        metavar="TOKENS",
        help="tokens per KV page, a power of two",
    )
    memory.add_argument(
        "--max-seq-len-override",
        type=_bounded(int, 2),
        metavar="TOKENS",
        help="context length; none: the model's",
    )
    memory.add_argument(
        "--attention-backend",
        "--attn",
        default="auto",
        metavar="NAME",
        help="auto, one name, or PREFILL,DECODE",
    )
    memory.add_argument("--moe-backend", default="auto", metavar="NAME")
    memory.add_argument(
        "--cuda-graph-max-bs",
        "--graph",
        type=_bounded(int, 0),
        metavar="N",
        help="largest captured decode batch; 0: no CUDA graphs; none: up to 256",
    )


def _add_scheduling_flags(parser: argparse.ArgumentParser) -> None:
    scheduling = parser.add_argument_group("scheduling")
    scheduling.add_argument(
        "--max-running-requests",
        type=_bounded(int, 1, 65536),
        default=256,
        metavar="N",
        help="requests that decode together",
    )
    scheduling.add_argument(
        "--max-prefill-length",
        "--max-extend-length",
        type=_bounded(int, 1),
        default=8192,
        metavar="TOKENS",
        help="prompt tokens per step at most",
    )
    scheduling.add_argument(
        "--target-step-ms",
        type=_bounded(float, 0),
        default=20.0,
        metavar="MS",
        help="while streams decode, prefill is cut to keep a step below this; 0: no target",
    )
    scheduling.add_argument(
        "--cache-type", "--cache", default="radix", choices=["radix", "naive"], help="prefix cache"
    )
    scheduling.add_argument(
        "--step-timeout",
        type=_bounded(float, 0),
        default=60.0,
        metavar="SECONDS",
        help="work pending and no step for so long is a hang, which ends the service; 0: never",
    )


def _add_serving_flags(parser: argparse.ArgumentParser) -> None:
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", help="address to listen on")
    serving.add_argument("--port", type=_bounded(int, 0, 65535), default=1919, help="0: a free one")
    serving.add_argument(
        "--num-tokenizer",
        "--tokenizer-count",
        type=_bounded(int, 1, 64),
        default=1,
        metavar="N",
        help="tokenizer processes",
    )
    serving.add_argument(
        "--drain-grace",
        type=_bounded(float, 0),
        default=5.0,
        metavar="SECONDS",
        help="after SIGTERM, new requests are still accepted for so long",
    )
    serving.add_argument(
        "--drain-timeout",
        type=_bounded(float, 0),
        default=60.0,
        metavar="SECONDS",
        help="after SIGTERM, running requests are ended after so long",
    )
    serving.add_argument(
        "--shell",
        "--shell-mode",
        action="store_true",
        help="chat in this terminal; the server ends with the shell",
    )
    serving.add_argument(
        "--log-level",
        default=None,
        choices=["debug", "info", "warning", "error"],
        help="none: info, in the shell warning",
    )


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    preset = Limits()
    limits.add_argument(
        "--max-queued-requests",
        type=_bounded(int, 1),
        metavar="N",
        default=preset.max_queued_reqs,
        help="answers without a first token; more are refused with 503",
    )
    limits.add_argument(
        "--max-body-bytes",
        type=_bounded(int, 1024),
        metavar="BYTES",
        default=preset.max_body_bytes,
        help="size of one HTTP body",
    )
    limits.add_argument(
        "--max-prompt-chars",
        type=_bounded(int, 1),
        metavar="CHARS",
        help="of one prompt, before tokenizing; none: 32 per token of context",
    )
    limits.add_argument(
        "--allow-unknown-params",
        action="store_true",
        help="ignore request parameters that minisgl does not know",
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
