"""One tensor-parallel worker: model, KV pool, page table, token pool and sampler.

It does what a Batch says and knows nothing of queues, prefixes or ownership.
"""

import logging

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import AttentionStep, create_attention_backend
from minisgl.core import Batch, EngineConfig, ModelFacts, StepCost
from minisgl.distributed import Communicator, TPInfo
from minisgl.engine import probe
from minisgl.engine.extras import apply_history, edited, start_logprobs
from minisgl.engine.inputs import StepInputs, stage
from minisgl.engine.pending import LaunchedStep
from minisgl.engine.settings import (
    cpu_threads,
    resolve_device,
    resolve_dtype,
    resolve_max_seq_len,
    resolve_num_pages,
)
from minisgl.kernel import SampledTokens, sample
from minisgl.kvcache.pool import KVPool
from minisgl.layers import rope_table
from minisgl.models import ForwardContext, build_model, load_model_config, local_kv_heads

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine:
    """Runs steps in the order in which they are launched; implements core.EngineLike.

    page_table  int32 [max_running_reqs + 1, max_pages] on the device, with a twin on the host;
                the last row is for padding and points at the dummy page.
    token_pool  int32 [max_running_reqs + 1, max_seq_len + 1]; (row, position) is the id of the
                token at that position once it has been sampled. The next step's decode reqs read
                their ids here, so that the host need not know them.
    """

    def __init__(self, config: EngineConfig, tp: TPInfo, comm: Communicator) -> None:
        """Load the model and allocate everything. Raises ConfigError or OutOfMemory."""
        self._config = config
        self._comm = comm
        self._model_config = load_model_config(config.model_path)
        self._device = resolve_device(config, tp)
        dtype = resolve_dtype(config, self._model_config, self._device)
        self._max_seq_len = resolve_max_seq_len(config, self._model_config)
        if self._device.type == "cpu" and (threads := cpu_threads(tp.size)) is not None:
            torch.set_num_threads(threads)
        free_before = self._free_bytes()
        self._model = build_model(
            self._model_config,
            config.model_path,
            device=self._device,
            dtype=dtype,
            comm=comm,
            moe_backend=config.moe_backend,
            dummy_weight=config.dummy_weight,
            show_progress=tp.rank == 0,
        )
        self._num_pages = resolve_num_pages(
            config,
            self._model_config,
            comm,
            dtype=dtype,
            max_seq_len=self._max_seq_len,
            available_bytes=self._kv_bytes(free_before),
        )
        self._pool = KVPool(
            num_layers=self._model_config.num_layers,
            num_pages=self._num_pages,
            page_size=config.page_size,
            kv_heads=local_kv_heads(self._model_config, comm),
            head_dim=self._model_config.head_dim,
            dtype=dtype,
            device=self._device,
        )
        self._attention = create_attention_backend(
            config.attention_backend, self._pool, self._device
        )
        self._cos_sin = rope_table(
            self._model_config.rope_theta,
            self._model_config.head_dim,
            self._model_config.rope_scaling,
            self._max_seq_len,
            self._device,
        )
        rows, max_pages = config.max_running_reqs + 1, -(-self._max_seq_len // config.page_size)
        self._host_page_table = np.full((rows, max_pages), self._pool.dummy_page, dtype=np.int32)
        self._page_table = torch.from_numpy(self._host_page_table.copy()).to(self._device)
        self._token_pool = torch.zeros(
            (rows, self._max_seq_len + 1), dtype=torch.int32, device=self._device
        )
        self._dtype = dtype
        logger.info(
            "engine loaded device=%s dtype=%s pages=%d page_size=%d kv_bytes=%d max_seq_len=%d",
            self._device,
            dtype,
            self._num_pages,
            config.page_size,
            self._pool.num_bytes,
            self._max_seq_len,
        )

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def page_size(self) -> int:
        return self._config.page_size

    @property
    def max_running_reqs(self) -> int:
        return self._config.max_running_reqs

    @property
    def max_seq_len(self) -> int:
        return self._max_seq_len

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Start the step. On CPU it is done on return; on a GPU it is queued on the stream."""
        inputs = stage(batch, self._host_page_table, self.page_size, self._device)
        self._page_table[inputs.page_rows, inputs.page_cols] = inputs.page_ids
        if batch.extras is not None:
            apply_history(batch.extras, self._token_pool)
        hidden = self._forward(batch, inputs)
        logits, sampled = self._sample(hidden, batch, inputs)
        tokens = None if sampled is None else sampled.tokens
        logprobs = start_logprobs(self._model, hidden, logits, tokens, batch, inputs)
        return LaunchedStep(batch.num_reqs, inputs, sampled, logprobs)

    def _forward(self, batch: Batch, inputs: StepInputs) -> Tensor:
        """Hidden states [T, H]; keys and values of the T tokens are in the pool afterwards."""
        decode_ids = self._token_pool[inputs.decode_rows, inputs.decode_cols]
        attention = self._attention.prepare(
            AttentionStep(
                num_decode=batch.num_decode,
                rows=batch.rows,
                start=batch.start,
                lengths=batch.lengths,
                host_page_table=self._host_page_table,
                page_table=self._page_table,
                slots=inputs.slots,
            )
        )
        context = ForwardContext(inputs.positions, self._cos_sin, attention)
        hidden: Tensor = self._model(torch.cat((decode_ids, inputs.chunk_ids)), context)
        return hidden

    def _sample(
        self, hidden: Tensor, batch: Batch, inputs: StepInputs
    ) -> tuple[Tensor | None, SampledTokens | None]:
        """Choose the next tokens where a req samples, and put them where the next step reads.

        Returns the unedited logits [N, V] and the choice; None when nobody samples.
        """
        if inputs.sampling is None:
            return None, None
        logits = self._model.logits(hidden[inputs.last_tokens])
        sampled = sample(edited(logits, batch, inputs, self._token_pool), inputs.sampling)
        self._token_pool[inputs.write_rows, inputs.write_cols] = sampled.tokens
        return logits, sampled

    def facts(self) -> ModelFacts:
        """What the front end must know."""
        model, defaults = self._model_config, self._model_config.defaults
        return ModelFacts(
            max_seq_len=self._max_seq_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            kv_capacity_tokens=self._num_pages * self.page_size,
            page_size=self.page_size,
            device=str(self._device),
            dtype=str(self._dtype).removeprefix("torch."),
            default_temperature=defaults.temperature,
            default_top_k=defaults.top_k,
            default_top_p=defaults.top_p,
            default_min_p=defaults.min_p,
            default_repetition_penalty=defaults.repetition_penalty,
        )

    def warm_up(self) -> None:
        """Run every kind of step once, on the dummy page, so that nothing compiles later."""
        probe.warm_up(self, self._pool.dummy_page)
        self._pool.clear_dummy()

    def calibrate(self) -> StepCost:
        """Time a few steps on the dummy page and fit the cost formula; the same on all ranks."""

        def slowest_ns(own: int) -> int:
            return -self._comm.agree_min(-own)

        cost = probe.calibrate(self, self._pool.dummy_page, slowest_ns)
        self._pool.clear_dummy()
        logger.info("step cost calibrated %s", cost)
        return cost

    def close(self) -> None:
        """Give the memory back. The communicator stays open: it belongs to the caller."""
        del self._model, self._pool, self._attention, self._page_table, self._token_pool
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _free_bytes(self) -> int:
        if self._device.type == "cpu":
            return 0
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def _kv_bytes(self, free_before: int) -> int:
        """Bytes for KV pages: a setting on CPU; on a GPU what the weights leave of the share."""
        if self._device.type == "cpu":
            return self._config.cpu_kv_bytes
        used = free_before - self._free_bytes()
        return int(self._config.memory_ratio * free_before) - used
