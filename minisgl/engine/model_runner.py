"""What an engine holds on its device, and the two halves of a step over it: forward and choice.

Both halves run eagerly or inside a CUDA graph: nothing in them waits or asks the device anything.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl.attention import AttentionBackend, AttentionStep, StepAttention
from minisgl.core import Int32Array
from minisgl.kernel import SamplingTensors, StepViews, put_tokens, sample, stage_tokens
from minisgl.kvcache.pool import KVPool
from minisgl.models import Attended, CausalLM, ForwardContext


@dataclass(frozen=True, slots=True, eq=False)
class DeviceState:
    """page_table  int32 [max_running_reqs + 1, max_pages]; the last row is for padding and points
                at the dummy page.
    token_pool  int32 [max_running_reqs + 1, max_seq_len + 1]; (row, position) is the id of the
                token at that position once it has been sampled. The next step's decode reqs read
                their ids here, so that the host need not know them.
    """

    model: CausalLM
    pool: KVPool
    attention: AttentionBackend
    cos_sin: Tensor
    page_table: Tensor
    token_pool: Tensor

    @property
    def device(self) -> torch.device:
        return self.pool.device

    @property
    def dummy_row(self) -> int:
        return self.page_table.shape[0] - 1

    def attention_step(
        self, views: StepViews, num_decode: int, start: Int32Array, lengths: Int32Array
    ) -> AttentionStep:
        return AttentionStep(
            num_decode=num_decode,
            start=start,
            lengths=lengths,
            device_rows=views.rows,
            device_start=views.start,
            device_lengths=views.lengths,
            page_table=self.page_table,
        )

    def forward(
        self, views: StepViews, num_decode: int, tokens: Tensor, attention: StepAttention
    ) -> Attended:
        """What model.logits takes; keys and values of the T tokens are in the pool then.

        tokens: int32 [3, T], overwritten with ids, positions and slots.
        """
        self.stage(views, num_decode, tokens)
        return self.run(tokens, attention)

    def stage(self, views: StepViews, num_decode: int, tokens: Tensor) -> None:
        """The first half of `forward`: fill `tokens`."""
        ids, positions, slots = tokens.unbind(0)
        stage_tokens(
            views.rows,
            views.start,
            views.first,
            views.chunk_ids,
            num_decode,
            self.page_table,
            self.token_pool,
            self.pool.page_size,
            ids,
            positions,
            slots,
        )

    def run(self, tokens: Tensor, attention: StepAttention) -> Attended:
        """The second half: the model over what stands in `tokens`."""
        ids, positions, slots = tokens.unbind(0)
        context = ForwardContext(positions, slots, self.cos_sin, self.pool, attention)
        return self.model.model.forward_to_last_attention(ids, context)

    def choose(
        self, logits: Tensor, views: StepViews, draws: bool, filters: bool, whole: bool = False
    ) -> Tensor:
        """Sample a token for each of the N rows, and put it where the next step reads it.

        logits: as LMHead.logits, or as LMHead.all_gather_logits. Returns int32 [2, N]: tokens, and
        whether the row was finite.
        """
        params = SamplingTensors(
            temperature=views.temperature,
            top_k=views.top_k,
            top_p=views.top_p,
            min_p=views.min_p,
            seed=views.seed,
            position=views.start + views.lengths,
            draws=draws,
            filters=filters,
        )
        choose = sample if whole else self.model.lm_head.sample
        sampled = choose(logits.float() if logits.is_cpu else logits, params)
        put_tokens(
            self.token_pool, views.rows, views.start, views.lengths, views.samples, sampled.tokens
        )
        return torch.stack((sampled.tokens, sampled.finite.int()))
