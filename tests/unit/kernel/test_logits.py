"""Log-probabilities beside what was sampled."""

import torch

from minisgl.kernel import top_logprobs


def test_more_logprobs_than_ids_are_all_there_are() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0], [1.0, 0.0, 3.0]])
    found = top_logprobs(logits, torch.tensor([0, 2]), 20)
    assert found.top_ids.tolist() == [[1, 0, 2], [2, 0, 1]]
    torch.testing.assert_close(found.top, logits.log_softmax(-1).sort(descending=True).values)
    torch.testing.assert_close(found.chosen, logits.log_softmax(-1)[[0, 1], [0, 2]])
