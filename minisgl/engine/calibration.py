"""The step cost of an engine: measured at its first start, and read from a file at later starts.

The file is in the folder minisgl/step-times of the user's cache folder, which is $XDG_CACHE_HOME or
~/.cache. Its name is a hash of `Subject`: the model, the settings and the device. A start of the
same subject reads the timings and times three of the steps again, because the driver, the power
limit and other programs change the time of a step as well. The start measures all steps again and
replaces the file if one of these times differs by more than _LARGEST_CHANGE in each of several
rounds, if the versions differ, if the file has a step that is no longer timed, or if it cannot be
read. To measure again, delete the file. The log names it.

Memory is measured at each start. It depends on the driver and on the other processes of the GPU,
and a wrong size would end in OutOfMemory.
"""

import hashlib
import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Self

import msgspec
import torch

import minisgl
from minisgl.build import AttentionKernel, compiled
from minisgl.build.cache import current_versions
from minisgl.core import EngineConfig, EngineLike, StepCost
from minisgl.distributed.comm import Communicator
from minisgl.engine.extensions import Extensions
from minisgl.engine.step_timing import Timing, change_of, fit, time_steps
from minisgl.utils import cache_folder

logger = logging.getLogger(__name__)

# The largest factor between the old and the new time of a step for which a file is used. Steps of
# the same GPU differ by up to 8 % between a cool and a warm chip.
_LARGEST_CHANGE = 1.25
_MODEL_FILES = ("config.json", "hf_quant_config.json")
_HEAD_BYTES = 4096  # the beginning of /proc/cpuinfo, which describes the first core


class Subject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The properties that determine the time of a step, except for the versions of the programs.

    model             SHA-256 of the files that describe the model, by name.
    weights           sizes of the weight files in bytes, by name.
    settings          EngineConfig, without the folders.
    max_chunk_tokens  limit of the prompt tokens of one step.
    device            name of the GPU, or "cpu".
    device_bytes, multiprocessors
                      of the GPU, which may be a part of a chip; 0 for a CPU.
    host, threads     name of the CPU, and number of torch's threads.
    """

    model: dict[str, str]
    weights: dict[str, int]
    settings: dict[str, str | int | float | bool | None]
    max_chunk_tokens: int
    device: str
    device_bytes: int
    multiprocessors: int
    host: str
    threads: int

    @classmethod
    def of(cls, config: EngineConfig, device: torch.device, max_chunk_tokens: int) -> Self:
        """Describe the engine of this rank. All ranks must have the same kind of device."""
        folder, on_gpu = Path(config.model_path), device.type == "cuda"
        present = [folder / name for name in _MODEL_FILES if (folder / name).exists()]
        gpu = torch.cuda.get_device_properties(device) if on_gpu else None
        return cls(
            model={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in present},
            weights={path.name: path.stat().st_size for path in folder.glob("*.safetensors")},
            settings=msgspec.to_builtins(
                msgspec.structs.replace(config, model_path="", kernel_cache=None)
            ),
            max_chunk_tokens=max_chunk_tokens,
            device="cpu" if gpu is None else gpu.name,
            device_bytes=0 if gpu is None else gpu.total_memory,
            multiprocessors=0 if gpu is None else gpu.multi_processor_count,
            host=_cpu_name(),
            threads=torch.get_num_threads(),
        )


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file.

    versions  versions of Python and of the packages that run a step; "sources" is a hash of
              minisgl's modules.
    timings   the timings, in the order in which time_steps returns them.
    """

    subject: Subject
    versions: dict[str, str]
    timings: Annotated[tuple[Timing, ...], msgspec.Meta(min_length=2)]


class StepTimesFile:
    """The file of one subject, which other servers may read and replace at the same time."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self._subject = subject
        name = hashlib.sha256(msgspec.json.encode(subject, order="sorted")).hexdigest()[:24]
        self.path = folder / f"{name}.json"

    def read(self) -> tuple[Timing, ...]:
        """Return the timings, or () if there is no file or the file cannot be used.

        If a file cannot be used, the log says why.
        """
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=StepTimes)
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError) as error:
            self._refuse(str(error))
            return ()
        versions = _versions()
        names = found.versions.keys() | versions.keys()
        stale = sorted(n for n in names if found.versions.get(n) != versions.get(n))
        if stale:
            self._refuse(f"other versions of {', '.join(stale)}")
        elif found.subject != self._subject:
            self._refuse("it describes another model, other settings or another device")
        else:
            return found.timings
        return ()

    def write(self, timings: Sequence[Timing]) -> None:
        """Replace the file atomically: a reader finds the old file or the new one.

        If the folder cannot be written, the log says so, and later starts measure again.
        """
        content = StepTimes(subject=self._subject, versions=_versions(), timings=tuple(timings))
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # If the disk is full, the end of the temporary folder removes the incomplete file.
            with tempfile.TemporaryDirectory(dir=folder) as own:
                written = Path(own) / self.path.name
                written.write_bytes(msgspec.json.encode(content, order="sorted"))
                written.replace(self.path)
        except OSError as error:
            logger.info("each start measures the step times, because they are not kept: %s", error)
        else:
            logger.info("later starts read the step times: %s", self.path)

    def _refuse(self, reason: str) -> None:
        logger.warning("the step times are measured again: %s: %s", self.path, reason)


def file_for(
    config: EngineConfig,
    device: torch.device,
    max_chunk_tokens: int,
    extensions: Extensions,
    kernels: Sequence[AttentionKernel],
) -> StepTimesFile | None:
    """Return the file of an engine, or None if its steps must be timed at each start.

    There are three such cases. Another package computes a part of the model: its version is not
    known. Attention kernels compile in the background: steps then take longer. The user has no
    cache folder. kernels: the FlashInfer modules that the engine runs.
    """
    added = [*extensions.attention_backends, *extensions.moe_backends]
    formats = [*extensions.quantizations.values(), *extensions.online_quantizations.values()]
    packages = {part.__module__.partition(".")[0] for part in [*added, *formats]}
    folder = cache_folder("step-times")
    if folder is None or packages - {"minisgl"}:
        return None
    if not all(compiled(kernel)() for kernel in kernels):
        return None
    return StepTimesFile(folder, Subject.of(config, device, max_chunk_tokens))


def step_cost(
    engine: EngineLike,
    comm: Communicator,
    max_chunk_tokens: int,
    vocab_size: int,
    drafting: bool,
    file: StepTimesFile | None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> StepCost:
    """Return the cost of the engine's steps, from `file` if possible. All ranks call it together.

    The ranks use a file only if all of them have read the same timings. Rank 0 writes it. With
    file=None the steps are timed, and the timings are not kept. drafting: as in time_steps.
    """

    def slowest_ns(own_ns: int) -> int:
        return -comm.agree_min(-own_ns)

    arguments = (engine, max_chunk_tokens, vocab_size, drafting, slowest_ns, clock_ns)
    first = comm.tp.rank == 0
    timings: Sequence[Timing] = () if file is None else file.read()
    if _equal_on_all(comm, timings) and timings and file is not None:
        change = change_of(timings, _LARGEST_CHANGE, *arguments)
        if change <= _LARGEST_CHANGE:
            if first:
                logger.info("the step times are those of an earlier start: %s", file.path)
            return fit(timings)
        if first:
            reason = f"steps now differ by a factor of {change:.2f}"
            if change == math.inf:
                reason = "it has steps that are no longer timed"
            logger.warning("the step times are measured again: %s: %s", file.path, reason)
    timings = time_steps(*arguments)
    if first and file is not None:
        file.write(timings)
    return fit(timings)


def _equal_on_all(comm: Communicator, timings: Sequence[Timing]) -> bool:
    """Whether all ranks have the same timings. All ranks get the same answer."""
    digest = int.from_bytes(hashlib.sha256(msgspec.json.encode(timings)).digest()[:7])
    return comm.agree_min(digest) == -comm.agree_min(-digest)


def _versions() -> dict[str, str]:
    sources = hashlib.sha256()
    for path in sorted(Path(minisgl.__file__).parent.rglob("*.py")):
        sources.update(path.read_bytes())
    return {**current_versions(), "torch": str(torch.__version__), "sources": sources.hexdigest()}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return ""
    found = [line.partition(":")[2].strip() for line in head.splitlines() if "model name" in line]
    return found[0] if found else ""
