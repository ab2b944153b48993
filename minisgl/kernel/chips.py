"""The limits of a kernel on the GPUs of each compute capability.

Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", the
maximum of a thread block. All of these GPUs have 65,536 registers of 32 bits on a multiprocessor,
and up to 255 for a thread.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

OLDEST: Final = 80  # bfloat16 and asynchronous copies begin here
REGISTERS: Final = 65_536  # of a multiprocessor, and at most of one program
HOPPER: Final = 90

RAN: Final = "minisgl ran on this kind of GPU"
COMPILED: Final = "compiled for, never run"
UNTRIED: Final = "not tried: neither compiled for nor run"

_KIB = 1024


class Chip(NamedTuple):
    """GPUs of one compute capability.

    arch             90 for compute capability 9.0.
    shared_bytes     the most shared memory of one program.
    multiprocessors  of the largest GPU of this kind.
    state            whether minisgl ran on such a GPU, and whether its kernels compiled for it.
    """

    arch: int
    shared_bytes: int
    multiprocessors: int
    state: str = UNTRIED

    @property
    def capability(self) -> str:
        """The compute capability as CUDA writes it, such as 9.0."""
        return f"{self.arch // 10}.{self.arch % 10}"

    @property
    def overlaps(self) -> bool:
        """Whether a kernel can start before the kernel ahead of it has ended (PDL)."""
        return self.arch >= HOPPER

    @property
    def converts_fp8(self) -> bool:
        """Whether an instruction converts e4m3 to float16."""
        return self.arch >= 89

    @property
    def has_large_tiles(self) -> bool:
        """Whether a program may have 227 KiB: on Hopper, and on Blackwell for servers."""
        return self.shared_bytes >= 227 * _KIB


CHIPS: Final[Mapping[int, Chip]] = MappingProxyType(
    {
        chip.arch: chip
        for chip in (
            Chip(80, 163 * _KIB, 108, COMPILED),  # A100
            Chip(86, 99 * _KIB, 84),  # A40, RTX 3090
            Chip(87, 163 * _KIB, 16),  # Jetson Orin
            Chip(89, 99 * _KIB, 142, COMPILED),  # L40S, RTX 4090
            Chip(90, 227 * _KIB, 132, RAN),  # H100, H200, GH200
            Chip(100, 227 * _KIB, 148, COMPILED),  # B200
            Chip(103, 227 * _KIB, 160),  # B300
            Chip(110, 227 * _KIB, 20),  # Jetson Thor
            Chip(120, 99 * _KIB, 188, COMPILED),  # RTX 5090, RTX PRO 6000
            Chip(121, 99 * _KIB, 48),  # GB10
        )
    }
)


def chip_of(arch: int) -> Chip:
    """Return the chip of an architecture.

    A GPU that is newer than the table has the limits of the newest chip in it that is older than
    the GPU. A GPU before OLDEST has those of OLDEST.
    """
    known = max((each for each in CHIPS if each <= arch), default=OLDEST)
    return CHIPS[known] if known == arch else CHIPS[known]._replace(arch=arch, state=UNTRIED)
