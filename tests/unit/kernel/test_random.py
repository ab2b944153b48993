"""Philox equals the published vectors; distribution and independence of the noise."""

import pytest
import torch

from minisgl.kernel.random import gumbel_noise, philox4x32

FULL = 0xFFFFFFFF
# Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    """The same rounds on Python's unbounded integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 2**32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in philox4x32(words(counter), words(key))) == result


def test_philox_is_exact_on_many_words() -> None:
    """Products that wrap keep all 64 bits that the algorithm uses."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 2**32, (6, 500), generator=generator)
    result = torch.stack(philox4x32(tuple(inputs[:4]), tuple(inputs[4:]))).T.tolist()
    for row, expected in zip(inputs.T.tolist(), result, strict=True):
        assert philox_in_integers(row[:4], row[4:]) == expected


def test_noise_is_a_function_of_seed_position_and_id_alone() -> None:
    seeds = torch.tensor([5, -1, 2**62, 5])
    positions = torch.tensor([0, 9, 70000, 1], dtype=torch.int32)
    together = gumbel_noise(seeds, positions, 103)
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 64)
        assert torch.equal(alone[0], together[row, :64])
    assert not torch.equal(together[0], together[3])


def test_all_64_bits_of_a_seed_count() -> None:
    seeds = torch.tensor([1, 1 + 2**32, 1 - 2**63, -(2**63), 0])
    noise = gumbel_noise(seeds, torch.zeros(5, dtype=torch.int32), 8)
    assert len({tuple(row) for row in noise.tolist()}) == 5


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(200), torch.arange(200), 5000).double().flatten()
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.005)  # Euler's constant
    assert noise.var().item() == pytest.approx(1.64493, abs=0.01)  # pi**2 / 6
    for x in (-1.0, 0.0, 2.0, 5.0):
        share = (noise <= x).double().mean().item()
        assert share == pytest.approx(torch.exp(-torch.exp(torch.tensor(-x))).item(), abs=0.002)
