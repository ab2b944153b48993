"""The change of a model's next-token distributions by quantisation.

Two engines compute the distribution after every token of the same texts: one in the model's dtype,
one with the given settings. For each position the benchmark compares the two: the KL divergence
from the first to the second in nats, and whether the most likely token is the same (top-1
agreement). It also prints the mean negative log-likelihood of the text's next tokens.

The texts of a model folder are the demo model's held-out conversations, or a file. The texts of a
benchmark model with random weights are random ids.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.benchmark.flag_types import add_model_flags, positive_int
from minisgl.benchmark.floor import load_shape
from minisgl.benchmark.models import SHAPES
from minisgl.core import ConfigError, EngineConfig, SamplingParams
from minisgl.core.batch import Batch, LogprobsRequest, PageUpdates
from minisgl.core.columns import sampling_arrays
from minisgl.demo import evaluation_path, model_path
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine
from minisgl.quantization import with_quantizations
from minisgl.tokenizer.tokenizer import TextTokenizer

_PAGE = 16
Floats = NDArray[np.float32]


class Divergence(NamedTuple):
    """The comparison of one or more positions.

    kl    float32 [n], nats.
    same  bool [n]; True where the most likely token is the same.
    nll   float32 [2, n]: the negative log-likelihood of the next token in both engines.
    """

    kl: Floats
    same: NDArray[np.bool_]
    nll: Floats


def distributions(engine: Engine, ids: Sequence[int], vocab_size: int) -> Floats:
    """Log-probabilities of every id after each token of one text, float32 [len(ids), V]."""
    pages = np.arange(-(-len(ids) // _PAGE), dtype=np.int32)
    batch = Batch(
        step_id=0,
        num_decode=0,
        rows=np.zeros(1, dtype=np.int32),
        start=np.zeros(1, dtype=np.int32),
        lengths=np.array([len(ids)], dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
        chunk_ids=np.array(ids, dtype=np.int32),
        page_updates=PageUpdates(np.zeros_like(pages), pages, pages),
        sampling=sampling_arrays([SamplingParams(temperature=0.0, seed=0)]),
        logprobs=(
            LogprobsRequest(0, -1, vocab_size, targets=np.full(len(ids), -1, dtype=np.int32)),
        ),
    )
    found = engine.launch(batch).wait().prompt_logprobs
    assert found is not None, "the step must report the logprobs of its prompt; this is a bug"
    result = np.empty((len(ids), vocab_size), dtype=np.float32)
    np.put_along_axis(result, found[0].top_ids.astype(np.int64), found[0].top, axis=1)
    return result


def compare(plain: Floats, changed: Floats, ids: Sequence[int]) -> Divergence:
    """Compare the distributions of one text. plain, changed: float32 [len(ids), V]."""
    kl = (np.exp(plain) * (plain - changed)).sum(axis=1)
    following = np.array(ids[1:], dtype=np.int64)[:, None]
    nll = [-np.take_along_axis(each[:-1], following, axis=1)[:, 0] for each in (plain, changed)]
    return Divergence(kl, plain.argmax(axis=1) == changed.argmax(axis=1), np.stack(nll))


def texts_of(options: argparse.Namespace, path: str, vocab_size: int) -> Iterator[list[int]]:
    """Yield the token ids of the texts."""
    if options.model in SHAPES:
        rng = np.random.default_rng(0)
        while True:
            yield rng.integers(0, vocab_size, options.tokens).tolist()
    tokenizer = TextTokenizer(path)
    if options.text is not None:
        ids = tokenizer.encode_text(options.text.read_text(encoding="utf-8"))
        for first in range(0, len(ids), options.tokens):
            yield ids[first : first + options.tokens]
        return
    lines = evaluation_path().read_text(encoding="utf-8").splitlines()
    for index in np.random.default_rng(0).permutation(len(lines)):
        prompt = json.loads(lines[index])
        ids = tokenizer.encode_chat(prompt["messages"], {"tools": prompt.get("tools", [])})
        yield (ids + tokenizer.encode_text(prompt["answer"], add_special=False))[: options.tokens]


def main(argv: Sequence[str]) -> int:
    """Print the result and a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench divergence", description=__doc__)
    further = "--device", "--kv-cache-dtype", "--quantization"
    add_model_flags(parser, str(model_path()), *further)
    parser.add_argument("--text", type=Path, help="text file, cut into texts of --tokens tokens")
    parser.add_argument("--texts", type=positive_int, default=64, help="number of texts (64)")
    parser.add_argument(
        "--tokens", type=positive_int, default=1024, help="most tokens of a text (1024)"
    )
    parser.add_argument("--dtype", default="auto", help="as in the server (auto)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path, model = load_shape(options.model, Path(folder))
        common: dict[str, Any] = {
            "model_path": path,
            "dtype": options.dtype,
            "device": options.device,
            "dummy_weight": options.model in SHAPES,
            "page_size": _PAGE,
            "num_pages": -(-options.tokens // _PAGE),
            "max_running_reqs": 1,
            "max_seq_len": min(options.tokens + 1, model.max_position),
            "cuda_graph_max_bs": 0,
        }
        changed = {"kv_cache_dtype": options.kv_cache_dtype, "quantization": options.quantization}
        engines = [
            Engine(
                EngineConfig(**common, **settings),
                SingleCommunicator(),
                options.tokens,
                with_quantizations(),
            )
            for settings in ({}, changed)
        ]
        found: list[Divergence] = []
        for ids, _ in zip(
            texts_of(options, path, model.vocab_size), range(options.texts), strict=False
        ):
            plain, other = (distributions(engine, ids, model.vocab_size) for engine in engines)
            found.append(compare(plain, other, ids))
    for engine in engines:
        engine.close()
    if not found:
        raise ConfigError("there is no text: the file is empty")
    report(found, {"model": options.model, **changed})
    return 0


def report(found: Sequence[Divergence], settings: dict[str, Any]) -> None:
    """Print the means over all positions, and a line of JSON."""
    kl = np.concatenate([each.kl for each in found])
    same = np.concatenate([each.same for each in found])
    nll = np.concatenate([each.nll for each in found], axis=1).mean(axis=1)
    result = {
        "texts": len(found),
        "positions": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "top1_agreement": float(same.mean()),
        "nll": float(nll[0]),
        "nll_changed": float(nll[1]),
    }
    print(f"{len(found)} texts, {len(kl):,} positions")
    print(
        f"KL divergence: mean {result['kl_mean']:.2e}, p99 {result['kl_p99']:.2e}, "
        f"max {result['kl_max']:.2e} nats; top-1 agreement {result['top1_agreement']:.3%}"
    )
    print(
        f"negative log-likelihood of the next token: {nll[0]:.4f} nats, with the settings "
        f"{nll[1]:.4f}"
    )
    print(json.dumps({**settings, **result}))
