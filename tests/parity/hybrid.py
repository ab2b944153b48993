"""Runs a model without an engine: one request, in pages 0, 1, ... Models may have states."""

import itertools
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.attention.registry import create_attention_backend
from minisgl.core import EngineConfig
from minisgl.core.images import ImageSpan
from minisgl.distributed.comm import Communicator
from minisgl.engine.states import allocate_states
from minisgl.kernel.states import StateStep, begin_states
from minisgl.kvcache.pool import KVPool
from minisgl.layers.images import ImageFeatures
from minisgl.layers.mixer import ForwardContext
from minisgl.layers.rotary import rope_table
from minisgl.layers.states import StateBuild
from minisgl.models.build import build_model
from minisgl.models.config import load_model_spec
from minisgl.models.decoder import local_kv_specs
from minisgl.quantization import with_quantizations

CPU, PAGE, PAGES = torch.device("cpu"), 16, 8
PROMPT = [(7 * i + 3) % 151 for i in range(57)]


class Runner:
    """Runs the tokens of one request, in row 1 of the states and in the pages 0, 1, ..."""

    def __init__(self, path: str, comm: Communicator, *, images: bool = False) -> None:
        spec = load_model_spec(path, images=images)
        self.spec, self.comm = spec, comm
        self.model = build_model(
            spec,
            EngineConfig(model_path=path),
            device=CPU,
            dtype=torch.float32,
            comm=comm,
            extensions=with_quantizations(),
        )
        kvs = local_kv_specs(spec, comm, torch.float32)
        self.pools = tuple(
            KVPool(kv, layers=layers, num_pages=PAGES, page_size=PAGE, device=CPU)
            for kv, layers in zip(kvs, spec.pools, strict=True)
        )
        widths = spec.rope_widths.items()
        self.tables = tuple(rope_table(rope, dim, PAGE * PAGES, CPU) for rope, dim in widths)
        heads = spec.q_heads // comm.tp.size
        self.attention = create_attention_backend(
            "torch", self.pools[0], heads, spec.rules, (), *self.pools[1:]
        )
        build = StateBuild(2, PAGE, False, comm.tp, torch.float32, CPU)
        self.states = allocate_states(spec.states, build)
        # Poisoned memory: a value that is read before it is written reaches the output.
        for part in itertools.chain.from_iterable(self.states.layers if self.states else ()):
            part.fill_(torch.nan)

    def run(
        self,
        ids: list[int],
        start: int,
        decode: bool,
        turns: Tensor | None = None,
        images: ImageFeatures | None = None,
        spans: tuple[ImageSpan, ...] = (),
    ) -> Tensor:
        """Return the logits [len(ids), V] of this rank.

        turns: as ForwardContext.positions; None: the positions from `start` on. images: as there.
        spans: as AttentionStep.spans.
        """
        one = [torch.tensor([n], dtype=torch.int32) for n in (1, start, len(ids), 0)]
        row, begin, length, _ = one
        layers: Any = ()
        states = None
        if self.states is not None:
            out, count = row.new_empty(6, 1), len(ids)
            begin_states(self.states.boundaries, *one, int(decode), PAGE, count, count, out)
            layers, states = self.states.layers, StateStep.of(out, chunks=int(not decode))
        step = AttentionStep(
            num_decode=int(decode),
            start=begin.numpy(),
            lengths=length.numpy(),
            device_rows=row,
            device_start=begin,
            device_lengths=length,
            page_table=torch.arange(PAGES, dtype=torch.int32).repeat(2, 1),
            spans=spans,
        )
        places = torch.arange(start, start + len(ids), dtype=torch.int32)
        context = ForwardContext(
            places if turns is None else turns,
            (places,) * len(self.pools),
            self.tables,
            self.pools,
            self.attention.prepare(step),
            states=layers,
            state_step=states,
            images=images,
        )
        attended = self.model.model.forward_to_last_attention(torch.tensor(ids), context)
        return self.model.logits(attended)


def check_rank(comm: Communicator, path: str, expected: Any) -> None:
    """Compare a whole prompt, and chunks with single tokens between and after them."""
    wanted = torch.from_numpy(expected)
    with torch.inference_mode():
        shares = comm.gather(Runner(path, comm).run(PROMPT, 0, decode=False))
        whole = torch.cat(list(shares), dim=-1)[:, : wanted.shape[1]]
        torch.testing.assert_close(whole, wanted, atol=2e-3, rtol=2e-3)
        runner, parts = Runner(path, comm), []
        for start, end in ((0, 16), (16, 48), (48, 53), *((i, i + 1) for i in range(53, 57))):
            parts.append(runner.run(PROMPT[start:end], start, decode=end == start + 1))
        shares = comm.gather(torch.cat(parts))
        steps = torch.cat(list(shares), dim=-1)[:, : wanted.shape[1]]
        torch.testing.assert_close(steps, wanted, atol=2e-3, rtol=2e-3)
