"""How far quantisation moves the next-token distributions of a model.

Two models read the same texts. At each token the benchmark compares their distributions of the next
token: the KL divergence from the first to the second in nats, and whether the likeliest tokens are
equal (top-1 agreement).
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.attention.registry import create_attention_backend
from minisgl.benchmark.flag_types import positive_int
from minisgl.core import ConfigError, EngineConfig
from minisgl.core.hub import resolve_model
from minisgl.demo import evaluation_path, model_path
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine.memory import resolve_device, resolve_dtype
from minisgl.kvcache.pool import KVPool
from minisgl.layers.rotary import rope_table
from minisgl.models.build import build_model
from minisgl.models.config import load_model_config
from minisgl.models.decoder import ForwardContext, local_kv_spec
from minisgl.quantization import with_quantizations
from minisgl.tokenizer import TextTokenizer

_PAGE = 16


class Agreement(NamedTuple):
    """Over all tokens: the mean and the largest KL divergence in nats, and the share of tokens at
    which the likeliest next tokens are equal."""

    tokens: int
    mean_kl: float
    max_kl: float
    top_1: float


class Reader:
    """Computes the logits at every token of a text. Keeps no prefix cache."""

    def __init__(self, config: EngineConfig, max_tokens: int) -> None:
        """Load the model. Raises ConfigError."""
        comm, model = SingleCommunicator(), load_model_config(config.model_path)
        device = resolve_device(config, comm.tp)
        dtype = resolve_dtype(config, model, device)
        self._device = device
        self._model = build_model(
            model,
            config.model_path,
            device=device,
            dtype=dtype,
            comm=comm,
            quantization=config.quantization,
            dummy_weight=config.dummy_weight,
            extensions=with_quantizations(),
        )
        pages = -(-max_tokens // _PAGE)
        spec = local_kv_spec(model, comm, dtype)
        self._pool = KVPool(
            spec, num_layers=model.num_kv_layers, num_pages=pages, page_size=_PAGE, device=device
        )
        self._attention = create_attention_backend("torch", self._pool, model.q_heads)
        self._table = rope_table(
            model.rope_theta, model.head_dim, model.rope_scaling, max_tokens, device
        )
        self._pages = torch.arange(pages, dtype=torch.int32, device=device)[None]

    @torch.inference_mode()
    def log_probs(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities of the next token after each id, float32 [len(ids), V]."""
        start, lengths = np.zeros(1, dtype=np.int32), np.array([len(ids)], dtype=np.int32)
        step = AttentionStep(
            num_decode=0,
            start=start,
            lengths=lengths,
            device_rows=torch.zeros(1, dtype=torch.int32, device=self._device),
            device_start=torch.from_numpy(start).to(self._device),
            device_lengths=torch.from_numpy(lengths).to(self._device),
            page_table=self._pages,
        )
        places = torch.arange(len(ids), dtype=torch.int32, device=self._device)
        attention = self._attention.prepare(step)
        context = ForwardContext(places, places, self._table, self._pool, attention)
        tokens = torch.tensor(ids, dtype=torch.int32, device=self._device)
        hidden = self._model.model.forward(tokens, context)
        logits = self._model.lm_head.all_gather_logits(self._model.lm_head.logits(hidden))
        return logits.float().log_softmax(-1)


def compare(first: Reader, second: Reader, texts: Sequence[Sequence[int]]) -> Agreement:
    """Compare two models with the same vocabulary on texts of at least one token."""
    divergences: list[Tensor] = []
    equal = 0
    for ids in texts:
        p, q = first.log_probs(ids), second.log_probs(ids)
        divergences.append((p.exp() * (p - q)).sum(-1).cpu())
        equal += int((p.argmax(-1) == q.argmax(-1)).sum())
    kl = torch.cat(divergences)
    return Agreement(len(kl), kl.mean().item(), kl.max().item(), equal / len(kl))


def main(argv: Sequence[str]) -> int:
    """Print the agreement and one line of JSON."""
    parser = argparse.ArgumentParser(prog="minisgl bench agreement", description=__doc__)
    parser.add_argument("--model", help="the first model; without this flag, the demo model")
    parser.add_argument("--other", help="the second model; without this flag, the same model")
    parser.add_argument("--quantization", help="converts the second model, as in the server")
    parser.add_argument(
        "--text", type=Path, help="a text file; without this flag, the demo model's held-out chats"
    )
    parser.add_argument("--tokens", type=positive_int, default=1024, help="of one text (1024)")
    parser.add_argument("--texts", type=positive_int, default=200, help="at most so many (200)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", help="of the activations, as in the server")
    options = parser.parse_args(argv)
    path = str(model_path()) if options.model is None else resolve_model(options.model)
    other = path if options.other is None else resolve_model(options.other)
    texts = [ids for ids in _texts(options.text, path, options.tokens) if ids][: options.texts]
    readers = [
        Reader(
            EngineConfig(
                model_path=folder,
                device=options.device,
                dtype=options.dtype,
                quantization=quantization,
            ),
            options.tokens,
        )
        for folder, quantization in ((path, None), (other, options.quantization))
    ]
    found = compare(readers[0], readers[1], texts)
    print(
        f"{found.tokens} tokens: KL divergence {found.mean_kl:.2e} nats on average, "
        f"{found.max_kl:.2e} at most; top-1 agreement {found.top_1:.2%}"
    )
    print(json.dumps({"quantization": options.quantization, **found._asdict()}))
    return 0 if math.isfinite(found.mean_kl) else 1


def _texts(path: Path | None, model: str, num_tokens: int) -> Iterator[list[int]]:
    """Yield token ids in pieces of num_tokens: of a text file, or of the demo's held-out chats."""
    tokenizer = TextTokenizer(model)
    if path is not None:
        try:
            ids = tokenizer.encode_text(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"--text {path} cannot be read: {error}") from None
        yield from (ids[i : i + num_tokens] for i in range(0, len(ids), num_tokens))
        return
    for line in evaluation_path().read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        tools = {"tools": prompt["tools"]} if prompt.get("tools") else {}
        ids = tokenizer.encode_chat(prompt["messages"], tools)
        answer = tokenizer.encode_text(prompt["answer"]) if prompt.get("answer") else []
        yield [*ids, *answer][:num_tokens]
