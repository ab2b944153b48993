"""Log-probabilities of sampled tokens and of the most likely ones."""

import torch

from minisgl.kernel.dispatch import apply_token_mask
from minisgl.kernel.logits import top_logprobs


def test_the_number_of_logprobs_is_limited_by_the_number_of_ids() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0], [1.0, 0.0, 3.0]])
    found = top_logprobs(logits, torch.tensor([0, 2]), 20)
    assert found.top_ids.tolist() == [[1, 0, 2], [2, 0, 1]]
    torch.testing.assert_close(found.top, logits.log_softmax(-1).sort(descending=True).values)
    torch.testing.assert_close(found.chosen, logits.log_softmax(-1)[[0, 1], [0, 2]])


def test_a_token_mask_forbids_the_ids_whose_bits_are_clear() -> None:
    """Also for a shard that begins in the middle of a word, and for ids after the last word."""
    rng = torch.Generator().manual_seed(1)
    mask = torch.randint(-(2**31), 2**31, (3, 4), dtype=torch.int32, generator=rng)
    allowed = [[bool(mask[r, i // 32] >> (i % 32) & 1) for i in range(128)] for r in range(3)]
    rows, first_id = torch.tensor([4, 0, 2], dtype=torch.int32), 48
    logits = torch.randn(5, 100, generator=rng)
    masked = logits.clone()
    apply_token_mask(masked, rows, mask, first_id)
    assert torch.equal(masked[[1, 3]], logits[[1, 3]])
    for index, row in enumerate(rows.tolist()):
        for column in range(100):
            token = first_id + column
            kept = token < 128 and allowed[index][token]
            assert masked[row, column] == (logits[row, column] if kept else -torch.inf)
