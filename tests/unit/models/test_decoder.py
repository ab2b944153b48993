"""The parts of a forward give the logits of transformers, of all tokens or of some."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from minisgl.attention.base import AttentionStep
from minisgl.attention.registry import create_attention_backend
from minisgl.core import EngineConfig
from minisgl.distributed.comm import SingleCommunicator
from minisgl.kvcache.pool import KVPool
from minisgl.layers.mixer import ForwardContext
from minisgl.layers.mlp import DenseMlp
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.rotary import rope_table
from minisgl.models.build import build_model
from minisgl.models.config import load_model_spec
from minisgl.models.decoder import CausalLM, local_kv_specs
from minisgl.models.layer import Attended, DecoderLayer
from tests.parity.models import build_model as save_random_model
from tests.parity.models import transformers_logits

CPU = torch.device("cpu")
PROMPT = list(range(5, 30))


def load(path: str) -> tuple[CausalLM, ForwardContext]:
    """The model, and the context of one prompt in the pages 0, 1, ... of a pool."""
    config, comm = load_model_spec(path), SingleCommunicator()
    engine = EngineConfig(model_path=path)
    model = build_model(config, engine, device=CPU, dtype=torch.float32, comm=comm)
    (spec,) = local_kv_specs(config, comm, torch.float32)
    pool = KVPool(spec, layers=range(len(config.rules)), num_pages=4, page_size=16, device=CPU)
    start, lengths = np.zeros(1, dtype=np.int32), np.array([len(PROMPT)], dtype=np.int32)
    step = AttentionStep(
        num_decode=0,
        start=start,
        lengths=lengths,
        device_rows=torch.zeros(1, dtype=torch.int32),
        device_start=torch.from_numpy(start),
        device_lengths=torch.from_numpy(lengths),
        page_table=torch.arange(4, dtype=torch.int32)[None],
    )
    tokens = torch.arange(len(PROMPT), dtype=torch.int32)
    table = rope_table(config.ropes[0], config.kv_specs[0].head_dim, 64, CPU)
    attention = create_attention_backend("torch", pool, config.q_heads).prepare(step)
    return model, ForwardContext(tokens, (tokens,), (table,), (pool,), attention)


@pytest.mark.parametrize("family", ["qwen3", "llama-linear-biases", "qwen3-moe"])
@pytest.mark.parametrize("rows", [[0, 7, 7, 24], [*range(len(PROMPT))]], ids=["some", "all"])
@torch.inference_mode()
def test_logits_equal_those_of_transformers(family: str, rows: list[int], tmp_path: Path) -> None:
    path = save_random_model(family, tmp_path)
    model, context = load(path)
    attended = model.model.forward_to_last_attention(torch.tensor(PROMPT), context)
    taken = attended.take_rows(torch.tensor(rows), SingleCommunicator())
    empty = model.model.empty_attended(len(rows))
    assert [part.shape for part in empty] == [part.shape for part in taken]
    expected = transformers_logits(path, PROMPT)[rows]
    torch.testing.assert_close(model.logits(taken), expected, atol=2e-4, rtol=2e-4)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    model, _ = load(save_random_model("qwen2-yarn-tied", tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_heads_of_attention_are_free_while_the_mlp_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: in a large step they were 8 % of the live memory at its peak."""
    heads: list[StorageWeakRef] = []
    dead: list[bool] = []
    attend, forward = DecoderLayer.attend, DenseMlp.forward

    def recorded(self: DecoderLayer, stream: ResidualStream, context: ForwardContext) -> Attended:
        attended = attend(self, stream, context)
        heads.append(StorageWeakRef(attended.heads.untyped_storage()))
        return attended

    def checked(self: DenseMlp, block_input: BlockInput, residual: torch.Tensor) -> ResidualStream:
        dead.append(heads[-1].expired())
        return forward(self, block_input, residual)

    monkeypatch.setattr(DecoderLayer, "attend", recorded)
    monkeypatch.setattr(DenseMlp, "forward", checked)
    model, context = load(save_random_model("qwen3", tmp_path))
    with torch.inference_mode():
        model.model.forward_to_last_attention(torch.tensor(PROMPT), context)
    assert dead == [True] * (len(model.model.layers) - 1)
