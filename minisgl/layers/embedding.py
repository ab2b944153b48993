"""The vocabulary, divided over the ranks by token id: token embedding and language-model head."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from minisgl.core import ConfigError
from minisgl.distributed.comm import Communicator
from minisgl.kernel.dispatch import best_candidate, gather_embedding, local_candidate, sample
from minisgl.kernel.sampling import GROUP, SampledTokens, SamplingTensors
from minisgl.layers.shards import Placement, split_evenly


class ParallelEmbedding(nn.Module):
    """The token embedding. weight: [n, H], the rows of this rank's n token ids.

    Rows past the vocabulary are padding and stay zero. With several ranks, each rank holds whole
    groups of ids, because the sampler draws a random number for a whole group.
    Raises ConfigError if a rank would hold no token id.

    images: [rows, H], the features of image tokens, which id ~i takes from row i. None: no id is
    negative, or rank 0 has them.

    norm_eps: the epsilon of a norm without weights, which the loader applies to the rows; None: the
    rows are those of the checkpoint.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        comm: Communicator,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.comm, self.norm_eps = comm, norm_eps
        self.images: Tensor | None = None
        rank, size = comm.tp.rank, comm.tp.size
        self.shard = split_evenly("", vocab_size, rank, size, GROUP if size > 1 else 1)
        if self.shard.local * (size - 1) >= vocab_size:
            raise ConfigError(
                f"{vocab_size} token ids cannot be split over tensor-parallel {size}: ranks hold "
                f"multiples of {GROUP} ids, and the last would hold none; use fewer ranks"
            )
        self.weight = nn.Parameter(torch.empty(self.shard.local, hidden_size))

    def forward(self, ids: Tensor) -> Tensor:
        """Look up `ids`, integers [T]. Returns [T, H], zeros for the ids of other ranks."""
        return gather_embedding(ids, self.weight, self.shard.begin, self.images)

    def placements(self, name: str) -> Iterator[Placement]:
        shard = self.shard
        shape = (shard.full, self.weight.shape[1])
        name, convert = f"{name}.weight", None
        if self.norm_eps is not None:
            convert = partial(_normalised, eps=self.norm_eps)
        yield Placement(name, shape, name, 0, shard.begin, shard.end, convert=convert)


def _normalised(rows: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(rows.float(), rows.shape[1:], eps=eps)


class LMHead(ParallelEmbedding):
    """The language-model head: logits of this rank's token ids, and sampling over all ranks.

    Its weight has the shape of the embedding's. With tied embeddings, both share one weight.

    soft_cap: each logit x becomes soft_cap * tanh(x / soft_cap); None: no cap.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        comm: Communicator,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, comm)
        self.soft_cap = soft_cap

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits [N, n] of this rank's ids and padding. hidden: [N, H].

        out: [N, n], overwritten and returned if given.
        """
        return self.cap(torch.mm(hidden, self.weight.t(), out=out))

    def cap(self, logits: Tensor) -> Tensor:
        """Cap the logits in place, and return them."""
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits

    def all_gather_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [N, V] of the whole vocabulary, equal on every rank.

        logits: [N, n], the result of `logits` on this rank.
        """
        parts = self.comm.gather(logits)
        return parts.transpose(0, 1).reshape(len(logits), -1)[:, : self.shard.full]

    def sample(self, logits: Tensor, params: SamplingTensors) -> SampledTokens:
        """Sample a token for each row of `logits` [N, n]. Every rank returns the same tokens.

        On a CPU, logits must be float32. Without filters (top_k, top_p, min_p) each rank sends only
        its best candidate of each row. Filters need the whole distribution, so the ranks gather all
        logits.
        """
        if self.comm.tp.size == 1 or params.filters:
            return sample(self.all_gather_logits(logits), params)
        begin, end = self.shard.begin, self.shard.end
        candidate = local_candidate(logits[:, : end - begin], params, begin)
        return best_candidate(self.comm.gather(candidate), params)
