"""Log-probabilities of sampled tokens and of the most likely ones."""

import torch

from minisgl.kernel import top_logprobs


def test_the_number_of_logprobs_is_limited_by_the_number_of_ids() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0], [1.0, 0.0, 3.0]])
    found = top_logprobs(logits, torch.tensor([0, 2]), 20)
    assert found.top_ids.tolist() == [[1, 0, 2], [2, 0, 1]]
    torch.testing.assert_close(found.top, logits.log_softmax(-1).sort(descending=True).values)
    torch.testing.assert_close(found.chosen, logits.log_softmax(-1)[[0, 1], [0, 2]])
