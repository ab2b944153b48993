"""The command `minisgl plan`: its flags, and a plan as text or as JSON."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec

from minisgl.core import ConfigError, EngineConfig
from minisgl.cost.gpus import GPUS, Gpu, find_gpu
from minisgl.models.config import engine_model
from minisgl.models.spec import ModelSpec
from minisgl.planning.plan import Plan, make_plan, planned_weights
from minisgl.quantization import with_quantizations
from minisgl.settings.command_line import ArgumentParser
from minisgl.settings.places import command_line
from minisgl.settings.resolve import resolve
from minisgl.utils import setup_logging

_GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Print a plan for each GPU. Returns 1 if the model fits on none. Raises ConfigError."""
    setup_logging("plan", "warning")
    parser = ArgumentParser(
        prog="minisgl plan",
        usage="minisgl plan [MODEL] [--gpu GPU] [--json] [FLAGS]",
        description="Compute from the config.json of a model: the tokens and requests that fit on "
        "a GPU, the shortest time of a token, and the flags to set. Needs no GPU and no weights.",
        epilog="Takes all flags of minisgl. Give the flags that the server will have, such as "
        "--tp, --quantization, --kv-cache-dtype and --context.",
        allow_abbrev=False,
    )
    known = f"{', '.join(GPUS)}, or the memory in bytes"
    parser.add_argument(
        "--gpu", type=find_gpu, help=f"The GPU: {known}. Default: one line for each known GPU."
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    options, flags = parser.parse_known_args(argv)
    command = (parser.prog, "--gpu", "--json")
    config = resolve(flags, os.environ, weights=False, command=command)
    engine = config.engine
    model = engine_model(engine)
    chunk = config.scheduler.prefill_budget_tokens
    plan_on = partial(make_plan, model=model, max_chunk_tokens=chunk)
    gpus = [options.gpu] if options.gpu else list(GPUS.values())

    def plans_with(engine: EngineConfig) -> list[Plan]:
        weights = planned_weights(engine, model)
        return [plan_on(engine, gpu=gpu, weights=weights) for gpu in gpus]

    given = command_line(config)
    plans = [_with_flags(plan, given) for plan in plans_with(engine)]
    name = config.served_names[0]
    if options.json:
        lines = [msgspec.json.encode({"model": name, "plans": plans}).decode()]
    elif len(plans) > 1:
        lines = _as_table(name, plans)
    else:
        lines = _as_text(name, plans[0], gpus[0])
        if not plans[0].tokens:
            lines.append(_remedy(config.engine, model, partial(plan_on, gpu=gpus[0])))
    if not options.json and plans[0].quantization == "none":
        lines += _by_weights(plans, engine, plans_with)
    sys.stdout.write("\n".join([*lines, ""]))
    return 0 if any(plan.tokens for plan in plans) else 1


def _with_flags(plan: Plan, given: Sequence[str]) -> Plan:
    """Add the given flags to the settings of a plan, which replace flags of the same name."""
    flags = {flag.split("=")[0]: flag for flag in [*given, *plan.settings]}
    return msgspec.structs.replace(plan, settings=list(flags.values()))


def _remedy(config: EngineConfig, model: ModelSpec, plan: Callable[[EngineConfig], Plan]) -> str:
    """Name the smallest number of GPUs on which the model fits."""
    for size in (2, 4, 8):
        wider = msgspec.structs.replace(config, tp_size=size, num_pages=None)
        if size > config.tp_size and model.q_heads % size == 0 and plan(wider).tokens:
            return f"It fits on {size} such GPUs: --tensor-parallel-size={size}"
    return "It does not fit on 8 such GPUs either: choose a larger GPU or a smaller model."


def _as_text(name: str, plan: Plan, gpu: Gpu) -> list[str]:
    weights = plan.dtype if plan.quantization == "none" else plan.quantization
    stored = f"{plan.dtype}, weights {weights}, KV cache {plan.kv_cache_dtype}"
    lines = [
        f"{name} on {plan.tp} x {gpu.name}, context {plan.context:,} tokens ({stored})",
        "",
        "on each GPU",
        f"  memory                  {plan.gpu_bytes / _GIB:8.2f} GiB",
        f"  weights                 {plan.weight_bytes / _GIB:8.2f} GiB",
        f"  steps, graphs, CUDA     {plan.remainder_bytes / _GIB:8.2f} GiB (predicted)",
        f"  KV cache                {plan.kv_bytes / _GIB:8.2f} GiB, "
        f"{plan.kv_token_bytes / 1024:g} KiB for each token",
    ]
    if gpu.state is not None:
        lines.insert(1, f"{gpu.name}: {gpu.state}")
    if plan.state_bytes:
        count = f"of {plan.max_running_reqs:,} requests"
        lines.insert(-1, f"  recurrent states        {plan.state_bytes / _GIB:8.2f} GiB, {count}")
    if plan.image_bytes:
        stored = f"{plan.image_bytes / _GIB:8.2f} GiB"
        lines.insert(-1, f"  of both, for images     {stored} (on rank 0; none with --no-images)")
    if plan.window is not None:
        each = f"{plan.window_token_bytes / 1024:g} KiB for each token of a window"
        lines[-1] += f" and {each} ({plan.window:,} tokens)"
    if not plan.tokens:
        return [*lines, "", "The model does not fit."]
    fitting = ", ".join(f"{count} of {size:,} tokens" for size, count in plan.requests.items())
    pages = f"{plan.pages:,} pages"
    if plan.window is not None:
        pages += f", and {plan.window_pages:,} pages of layers with a window"
    lines += ["", f"tokens that fit: {plan.tokens:,} ({pages})"]
    lines += [f"requests that fit: {fitting}"]
    if plan.floor_ms:
        lines += ["", "requests  shortest time of a token   tokens/s   (no engine is faster)"]
    for size, ms in plan.floor_ms.items():
        shown = "does not fit" if ms is None else f"{ms:20.2f} ms {1e3 * size / ms:16,.0f}"
        lines.append(f"{size:8} {shown}")
    if plan.floor_ms:
        rates = "measured on this GPU" if gpu.measured else "taken from its data sheet"
        lines.append(f"Bandwidth and arithmetic rate are {rates}.")
    else:
        lines += ["", "No shortest times: the bandwidth of this GPU is unknown."]
    return [*lines, "", f"set: {' '.join(plan.settings) or 'nothing; the defaults fit'}"]


def _as_table(name: str, plans: Sequence[Plan]) -> list[str]:
    first = plans[0]
    lines = [
        f"{name}, tensor-parallel size {first.tp}: each GPU holds {first.weight_bytes / _GIB:.2f} "
        f"GiB of weights and {first.kv_token_bytes / 1024:g} KiB for each token",
        "",
        f"{'GPU':10} {'tokens that fit':>16} {'full contexts':>14} {'ms per token, 1 request':>24}",
    ]
    for plan in plans:
        ms = plan.floor_ms.get(1)
        floor = "" if ms is None else f"{ms:.2f}"
        full = plan.requests[plan.context]
        tokens = f"{plan.tokens:,}" if plan.tokens else "none"
        lines.append(f"{plan.gpu:10} {tokens:>16} {full:>14} {floor:>24}")
    lines += ["", *_states(plan.gpu for plan in plans)]
    return [*lines, "minisgl plan --gpu NAME shows one of them in full."]


def _by_weights(
    plans: Sequence[Plan], config: EngineConfig, plans_with: Callable[[EngineConfig], list[Plan]]
) -> list[str]:
    """Return a table of the tokens that fit with each format of --quantization.

    plans: those of unquantised weights. A format that does not suit the model has a remark.
    """
    tokens, remarks = {plans[0].dtype: plans}, []
    for name in with_quantizations().online_quantizations:
        try:
            tokens[name] = plans_with(msgspec.structs.replace(config, quantization=name))
        except ConfigError as error:
            remarks.append(f"{name}: {error}")
    lines = ["", "tokens that fit, by the weights (--quantization)", "GPU       "]
    lines[-1] += "".join(f"{name:>14}" for name in tokens)
    for row, plan in enumerate(plans):
        cells = (
            f"{of_gpu[row].tokens:,}" if of_gpu[row].tokens else "none"
            for of_gpu in tokens.values()
        )
        lines.append(f"{plan.gpu:10}" + "".join(f"{cell:>14}" for cell in cells))
    return [*lines, *remarks]


def _states(names: Iterable[str]) -> list[str]:
    """One line for all GPUs of the same state."""
    of_state: dict[str | None, list[str]] = {}
    for name in names:
        of_state.setdefault(GPUS[name].state, []).append(name)
    return [f"{', '.join(gpus)}: {state}" for state, gpus in of_state.items()]
