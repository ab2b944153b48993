"""The table of GPUs by compute capability."""

import pytest

from minisgl.cost.gpus import GPUS
from minisgl.kernel.chips import CHIPS, COMPILED, RAN, UNTRIED, chip_of


@pytest.mark.parametrize(
    ("gpu", "arch", "kib"),
    [
        ("H200", 90, 227),
        ("B200", 100, 227),
        ("B300", 103, 227),
        ("RTX5090", 120, 99),
        ("RTXPRO6000", 120, 99),
        ("GB10", 121, 99),
        ("A100", 80, 163),
        ("L40S", 89, 99),
    ],
)
def test_a_gpu_has_the_limits_and_the_state_of_its_capability(
    gpu: str, arch: int, kib: int
) -> None:
    found = GPUS[gpu]
    assert (found.arch, found.state) == (arch, CHIPS[arch].state)
    assert CHIPS[arch].shared_bytes == kib * 1024


def test_only_hopper_ran() -> None:
    assert {chip.arch for chip in CHIPS.values() if chip.state == RAN} == {90}
    assert CHIPS[80].state == COMPILED


def test_a_gpu_outside_the_table_has_the_limits_of_the_nearest_older_one() -> None:
    newer = chip_of(130)
    assert (newer.arch, newer.shared_bytes) == (130, CHIPS[121].shared_bytes)
    assert newer.state == chip_of(91).state == UNTRIED
    assert chip_of(75).shared_bytes == CHIPS[80].shared_bytes
