"""Main of every child process: `python -m minisgl.launch.worker_main NAME PARENT_PID`.

The first line of standard input is a ChildSpec as JSON. Only the scheduler loads torch; the other
roles import only their own modules.
"""

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NoReturn

import msgspec

from minisgl.core import ConfigError, InvariantBroken, MinisglError
from minisgl.settings.child import ChildSpec
from minisgl.settings.config import resized_tokens
from minisgl.utils import setup_logging, supervise
from minisgl.utils.cuda_context import open_context_early

logger = logging.getLogger(__name__)


def main() -> None:
    """Run one role until the launcher ends it. A fatal error goes to the launcher as one line."""
    supervise.bind_to_parent()
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    setup_logging(spec.name, spec.config.log_level, spec.config.log_format)
    try:
        _MAINS[spec.role](spec)
    # The outermost handler of the process. minisgl reports its own errors in one line.
    # Any other error, and a broken invariant, is a bug and is logged once with its traceback.
    except Exception as error:  # noqa: BLE001
        fail(spec, error)


def fail(spec: ChildSpec, error: Exception) -> NoReturn:
    """Report a fatal error of any thread, and end the process."""
    on_purpose = isinstance(error, MinisglError) and not isinstance(error, InvariantBroken)
    if not on_purpose:
        logger.error("process failed", exc_info=error)
    reason = str(error) if on_purpose else f"{type(error).__name__}: {error}"
    supervise.write_reason(spec.reason_fd, spec.name, reason)
    logging.shutdown()
    sys.stdout.flush()
    # Not sys.exit: threads of libraries would keep the failed process alive.
    os._exit(supervise.CONFIG_EXIT if isinstance(error, ConfigError) else 1)


def _api(spec: ChildSpec) -> None:
    gc.disable()  # imports leave no garbage; run_api enables the collector again
    from minisgl.server.process import run_api

    run_api(spec)


def _tokenizer(spec: ChildSpec) -> None:
    from minisgl.images import ImageDecoder
    from minisgl.tokenizer.worker import run_tokenizer
    from minisgl.tool_calls.detect import detect_format

    config, limits = spec.config, spec.config.limits
    new_decoder = partial(
        ImageDecoder,
        max_pixels=limits.max_image_pixels,
        max_tokens=resized_tokens(config.engine, config.max_image_tokens),
        max_request_pixels=limits.max_request_pixels,
        timeout_s=limits.image_timeout_s,
    )
    run_tokenizer(
        spec.name,
        config.engine.model_path,
        spec.socket_dir,
        limits.template_timeout_s,
        config.escape_special_tokens,
        None if config.engine.no_images else new_decoder,
        partial(detect_format, given=config.tool_format),
        spec.report_checked,
        partial(fail, spec),
    )


def _detokenizer(spec: ChildSpec) -> None:
    from minisgl.tokenizer.worker import run_detokenizer
    from minisgl.tool_calls.formats import ToolCallParsers

    run_detokenizer(spec.config.engine.model_path, spec.socket_dir, ToolCallParsers)


def _grammars(spec: ChildSpec) -> None:
    from minisgl.structured.service import GrammarService, run_grammars
    from minisgl.tokenizer.tokenizer import load_vocabulary
    from minisgl.tool_calls.formats import ToolGrammarWriter

    model_path = spec.config.engine.model_path
    vocabulary = load_vocabulary(model_path)
    write_tools = ToolGrammarWriter(vocabulary)
    service = GrammarService(model_path, vocabulary.think_ids, write_tools)
    run_grammars(service, spec.name, spec.socket_dir)


def _scheduler(spec: ChildSpec) -> None:
    config, model_path = spec.config, spec.config.engine.model_path
    # Imports and the capture of graphs make objects that live on. run_scheduler enables the
    # collector again.
    gc.disable()
    open_context_early(config.engine.device, spec.index)
    from dataclasses import replace

    from minisgl.drafts import with_speculation
    from minisgl.kv_events import CacheEvents
    from minisgl.kv_events.publisher import Publisher
    from minisgl.models.config import draft_method
    from minisgl.quantization import with_quantizations
    from minisgl.scheduler import run_scheduler
    from minisgl.structured.processor import with_grammars

    extensions = with_grammars(model_path)
    events, model = config.kv_events, config.served_names[0]
    if events.endpoint is not None and spec.index == 0:
        topic = f"kv@{events.pod or socket.gethostname()}@{model}"
        publisher = Publisher(events.endpoint, events.replay_endpoint, topic)
        publisher.start(partial(fail, spec))
        put, totals = publisher.put, publisher.totals
        reporter = partial(CacheEvents, events.block_size, model, put, totals)
        extensions = replace(extensions, cache_reporters=(reporter,))
    run_scheduler(
        msgspec.structs.replace(config.engine, spare_cores=1),
        config.scheduler,
        tp_rank=spec.index,
        socket_dir=spec.socket_dir,
        extensions=with_speculation(draft_method(config.engine), with_quantizations(extensions)),
        on_checked=spec.report_checked,
    )


_MAINS: Mapping[str, Callable[[ChildSpec], None]] = MappingProxyType(
    {
        "api": _api,
        "tokenizer": _tokenizer,
        "detokenizer": _detokenizer,
        "grammars": _grammars,
        "scheduler": _scheduler,
    }
)


if __name__ == "__main__":
    main()
