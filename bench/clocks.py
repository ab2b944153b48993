"""Clocks and power of CPU and GPU while a row of a campaign runs.

Machines of one kind differ: in clocks under a power limit, and in other work on their cores.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_INTERVAL_S = 0.5
_GPU = {"clocks.sm": "gpu_{}_mhz", "power.draw": "gpu_{}_w", "temperature.gpu": "gpu_{}_c"}
_STAT, _CPUINFO = Path("/proc/stat"), Path("/proc/cpuinfo")


class Clocks:
    """Samples clocks and power in a `with sampled()` block. Columns end in mhz, w, c or percent."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}
        self._shares: dict[str, float] = {}
        self._done = threading.Event()

    @contextlib.contextmanager
    def sampled(self) -> Iterator[None]:
        """Sample until the block ends. Without nvidia-smi, only the CPU.

        The GPUs are those of CUDA_VISIBLE_DEVICES, which nvidia-smi does not read by itself.
        """
        program, before = shutil.which("nvidia-smi"), _STAT.read_text()
        reader = threading.Thread(target=self._read_cpu)
        reader.start()
        command = [str(program), f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader,nounits"]
        command += ["-lms", str(round(_INTERVAL_S * 1e3))]
        if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
            command.append(f"--id={visible}")
        # A file, because a full pipe would stop nvidia-smi during a long row.
        with tempfile.TemporaryFile("w+") as output:
            smi = subprocess.Popen(command, stdout=output) if program else None
            try:
                yield
            finally:
                self._done.set()
                reader.join()
                if smi is not None:
                    smi.terminate()
                    smi.wait()
                    output.seek(0)
                    self._add_gpu(output.read())
                self._shares = cpu_shares(before, _STAT.read_text())

    def values(self) -> dict[str, float]:
        """Return the median and the smallest value of each quantity, and shares of CPU time."""
        found = {name.format("p50"): float(np.median(v)) for name, v in self._samples.items()}
        found |= {name.format("min"): min(v) for name, v in self._samples.items()}
        return found | self._shares

    def _read_cpu(self) -> None:
        while not self._done.wait(_INTERVAL_S):
            lines = _CPUINFO.read_text().splitlines()
            mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
            if mhz:
                self._samples.setdefault("fastest_core_{}_mhz", []).append(max(mhz))

    def _add_gpu(self, output: str) -> None:
        for line in output.splitlines():
            for name, text in zip(_GPU.values(), line.split(","), strict=False):
                with contextlib.suppress(ValueError):  # "[N/A]": the GPU does not measure it
                    self._samples.setdefault(name, []).append(float(text))


def cpu_shares(before: str, after: str) -> dict[str, float]:
    """Return the percents of all cores' time that were busy and stolen, from two /proc/stat."""
    old, new = (np.array(text.split("\n", 1)[0].split()[1:9], float) for text in (before, after))
    spent = new - old
    total = max(float(spent.sum()), 1.0)
    idle, stolen = float(spent[3] + spent[4]), float(spent[7])
    return {
        "cpu_busy_percent": 100 * (total - idle - stolen) / total,
        "cpu_stolen_percent": 100 * stolen / total,
    }
