"""Clocks and power of CPU and GPU while a row of a campaign runs.

Machines of one kind differ: in clocks under a power limit, and in other work on their cores.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

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
        """Sample until the block ends. Without nvidia-smi or visible GPUs, only the CPU.

        The GPUs are those of CUDA_VISIBLE_DEVICES, which nvidia-smi does not read by itself. It
        counts GPUs as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID. By default CUDA counts the
        fastest first. If nvidia-smi ends before the block, stderr gets a line, and the row has no
        values of GPUs.
        """
        command, before = _smi_command(), _STAT.read_text()
        reader = threading.Thread(target=self._read_cpu)
        reader.start()
        # A file, because a full pipe would stop nvidia-smi during a long row.
        with tempfile.TemporaryFile("w+") as output:
            smi = subprocess.Popen(command, stdout=output) if command else None
            try:
                yield
            finally:
                self._done.set()
                reader.join()
                if smi is not None:
                    self._end(smi, output)
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

    def _end(self, smi: "subprocess.Popen[bytes]", output: IO[str]) -> None:
        """End nvidia-smi, which runs until then, and add its samples."""
        status = smi.poll()
        smi.terminate()
        smi.wait()
        output.seek(0)
        if status is None:
            self._add_gpu(output.read())
        else:
            sys.stderr.write(f"nvidia-smi ended with {status}: {output.read().strip()[-200:]}\n")

    def _add_gpu(self, output: str) -> None:
        for line in output.splitlines():
            for name, text in zip(_GPU.values(), line.split(","), strict=False):
                with contextlib.suppress(ValueError):  # "[N/A]": the GPU does not measure it
                    value = float(text)
                    self._samples.setdefault(name, []).append(value)


def _smi_command() -> list[str]:
    """Return the command that samples the visible GPUs until its end; [] without such GPUs."""
    program, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if program is None or visible == "":
        return []
    command = [program, f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader,nounits"]
    command += ["-lms", str(round(_INTERVAL_S * 1e3))]
    return command if visible is None else [*command, f"--id={visible}"]


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
