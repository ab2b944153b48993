"""The training network against transformers, batches, and answers of the shipped weights."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo.batches import BatchStream, Plan
from demo.evaluate import Prompt, is_correct, load_evaluation, transformers_answers
from demo.network import Network, Shape
from demo.train import document_loss, learning_rate, packed_loss
from minisgl.demo import model_path

_TINY = Shape(
    vocab_size=1280, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16,
)  # fmt: skip


@pytest.fixture
def tiny() -> Network:
    torch.manual_seed(0)
    return Network(_TINY)


def test_network_is_qwen3(tiny: Network) -> None:
    reference = Qwen3ForCausalLM(Qwen3Config(**_TINY.config([2, 0], 0))).eval()
    missing, unexpected = reference.load_state_dict(tiny.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()
    ids = torch.randint(0, 1280, (2, 37))
    with torch.no_grad():
        torch.testing.assert_close(tiny.logits(tiny.hidden(ids)), reference(ids).logits)


def test_documents_of_a_row_do_not_see_each_other(tiny: Network) -> None:
    ids = torch.randint(0, 1280, (1, 24))
    document = torch.tensor([[0] * 10 + [1] * 10 + [-1] * 4])
    produced = torch.zeros(1, 24, dtype=torch.bool)
    produced[0, 12:18] = True
    other = ids.clone()
    other[0, :10] = (ids[0, :10] + 1) % 1280
    same = (document[:, :, None] == document[:, None, :]) & torch.ones(24, 24).bool().tril()
    with torch.no_grad():
        first, second = (tiny.hidden(i, same[:, None])[0, 10:20] for i in (ids, other))
    torch.testing.assert_close(first, second)
    assert packed_loss(tiny, ids, document, produced).isfinite()


def test_batches_do_not_depend_on_the_number_of_workers(tiny: Network) -> None:
    stream = BatchStream(Plan(seed=1, steps=100, short_tokens=4096, long_tokens=768))
    first, again = (list(itertools.islice(iter(stream), 2)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    batch = first[0]
    assert not torch.equal(batch.short_ids, first[1].short_ids)
    assert (batch.short_document >= 0).float().mean() > 0.9
    assert not (batch.short_produced & (batch.short_document < 0)).any()
    targets = batch.long_ids.flatten()[batch.long_positions + 1].long()
    assert torch.equal(targets, batch.long_targets)
    loss = document_loss(tiny, batch.long_ids, batch.long_positions, batch.long_targets)
    assert loss.isfinite()


def test_learning_rate_warms_up_and_ends_at_zero() -> None:
    assert learning_rate(0, 0.0, 1.0) < 0.01
    assert learning_rate(400, 0.0, 1.0) == 1.0
    assert learning_rate(9999, 1.0, 1.0) == 0.0


def test_shipped_weights_have_the_shape_and_are_bf16() -> None:
    shipped = load_file(model_path() / "model.safetensors")
    expected = Network(Shape()).state_dict()
    assert {k: v.shape for k, v in shipped.items()} == {k: v.shape for k, v in expected.items()}
    assert {v.dtype for v in shipped.values()} == {torch.bfloat16}


def test_shipped_model_answers() -> None:
    evaluation = [p for p in load_evaluation() if len(p.messages) == 1]
    by_task = {prompt.task: prompt for prompt in reversed(evaluation) if prompt.task != "lookup"}
    prompts: list[Prompt] = list(by_task.values())
    texts = transformers_answers(prompts, model_path(), "cpu", "float32")
    right = [is_correct(p, t) for p, t in zip(prompts, texts, strict=True)]
    assert sum(right) >= len(prompts) - 1, list(zip(prompts, texts, strict=True))
