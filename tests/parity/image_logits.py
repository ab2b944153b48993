"""The logits of a prompt with images, without an engine. Ranks import this file, so it is small."""

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.distributed.comm import Communicator
from minisgl.layers.images import ImageFeatures, MixedAngles
from tests.parity.hybrid import CPU, Runner

DECODED = 4  # of the tokens after the last image, which run as decode steps


class Prompt(NamedTuple):
    """A prompt with images, and the results of transformers for it.

    ids        row i of all features of images stands as the id ~i.
    pictures   uint8, as ImageEncoder.encode takes them.
    positions  int32 [3, n]. delta: the position of a later token, less its index.
    logits     float32 [n, V].
    """

    ids: list[int]
    pictures: list[Tensor]
    positions: Tensor
    delta: int
    logits: Tensor


def check_logits(comm: Communicator, path: str, prompt: Prompt, size: int) -> None:
    """Compare the logits of a rank's share, computed in chunks of `size` tokens."""
    runner = Runner(path, comm, images=True)
    encoder, spec = runner.model.encoder, runner.spec.encoder
    assert (encoder is not None) == (comm.tp.rank == 0), "rank 0 alone has the encoder"
    assert spec is not None
    (table,) = runner.tables
    angles = MixedAngles.of(spec.sections, runner.spec.kv_specs[0].head_dim, len(table), CPU)
    table = torch.cat((table, torch.full_like(table, torch.nan)))
    runner.tables = (table,)
    found, count = [], len(prompt.ids)
    with torch.inference_mode():
        features: Tensor | None = None
        if encoder is not None:
            features = torch.cat([encoder.encode(pixels) for pixels in prompt.pictures])
            runner.model.model.embed_tokens.images = features[:, : spec.size]
        for start in [*range(0, count - DECODED, size), *range(count - DECODED, count)]:
            decode = start >= count - DECODED
            end = start + 1 if decode else min(start + size, count - DECODED)
            ids = torch.tensor(prompt.ids[start:end])
            turns = torch.arange(start, end, dtype=torch.int32) + prompt.delta
            if not decode:
                angles.mix(table, prompt.positions[:, start:end], turns)
            images = None if features is None else ImageFeatures(ids, features)
            found.append(runner.run(ids.tolist(), start, decode, turns, images))
        shares = comm.gather(torch.cat(found))
    logits = torch.cat(list(shares), dim=-1)[:, : prompt.logits.shape[1]]
    torch.testing.assert_close(logits, prompt.logits, atol=2e-3, rtol=2e-3)
