"""Train the demo model from scratch: `python -m demo.train --out DIR`.

Writes the weights, the configuration and report.json. On one H200 it takes a few minutes; with
`--steps 20 --short-tokens 2048 --long-tokens 2048 --device cpu` it only tests the code.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.batches import Batch, Plan, loader
from demo.export import export, round_to_bf16, train_facts
from demo.network import Network, Shape
from demo.ranks import Ranks
from demo.validation import Validation

# The weight of prompt tokens in the loss. It is small, because the words of prompts are random.
_PROMPT_WEIGHT = 0.03
_LONG_WEIGHT = 0.5
_WARM_UP_STEPS = 300


def learning_rate(step: int, progress: float, peak: float) -> float:
    """Return the rate of a step: linear warm-up, then a cosine that reaches zero at the end."""
    return peak * min(1.0, (step + 1) / _WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))


def packed_loss(network: Network, ids: Tensor, document: Tensor, produced: Tensor) -> Tensor:
    """Return the mean loss over packed rows. A document attends to no other document of its row."""
    ids, length = ids.int(), ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
    same = document[:, :, None] == document[:, None, :]
    states = network.hidden(ids, (same & causal)[:, None])
    follows = (document[:, 1:] == document[:, :-1]) & (document[:, 1:] >= 0)
    weight = torch.where(produced[:, 1:], 1.0, _PROMPT_WEIGHT) * follows
    logits = network.logits(states[:, :-1]).flatten(0, 1).float()
    losses = F.cross_entropy(logits, ids[:, 1:].flatten().long(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum()


def document_loss(network: Network, ids: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over the answers of long documents, one to a row."""
    states = network.hidden(ids.int()).flatten(0, 1)
    return F.cross_entropy(network.logits(states[positions]).float(), targets)


def optimizer_for(network: Network, peak: float, fused: bool) -> torch.optim.AdamW:
    """Return AdamW; norms and the embedding are not decayed."""
    decayed = [p for n, p in network.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in network.named_parameters() if p.dim() != 2 or "embed" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=fused)


def train(arguments: argparse.Namespace) -> None:
    """Run the whole training and export the result."""
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    ranks = Ranks()
    device = ranks.device(arguments.device)
    plan = Plan(arguments.seed, arguments.steps, arguments.short_tokens, arguments.long_tokens)
    network = Network(Shape()).to(device)
    optimizer = optimizer_for(network, arguments.peak, fused=device.type == "cuda")
    validation = Validation(arguments.seed, device)
    if arguments.compile:
        # Every row length is its own static shape; there are five of them.
        torch._dynamo.config.cache_size_limit = 32
        for layer in network.model.layers:
            layer.compile(dynamic=False)
    started_s = time.monotonic()
    tokens, done, elapsed_s = 0, 0, 0.0
    for step, batch in enumerate(loader(plan, arguments.workers)):
        # On a slow machine the time limit shortens the schedule, so that the rate still ends at 0.
        progress = max(step / plan.steps, ranks.from_first(elapsed_s) / arguments.limit_s)
        if progress >= 1.0:
            print(f"the time limit ended the training at step {step}")
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, progress, arguments.peak)
        part = Batch(*(t.to(device, non_blocking=True) for t in ranks.part(batch)))
        losses = _losses(network, part)
        (losses[0] + _LONG_WEIGHT * losses[1]).backward()
        ranks.average(network)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        tokens += batch.short_ids.numel() + batch.long_ids.numel()
        elapsed_s = time.monotonic() - started_s
        if ranks.rank:
            continue
        if step % arguments.log_every == 0:
            print(
                f"step {step} {elapsed_s:.0f} s {tokens / elapsed_s / 1e6:.2f} Mtok/s "
                f"short {losses[0].item():.4f} long {losses[1].item():.4f}"
            )
        if step and step % arguments.validate_every == 0:
            print(validation.table(network))
    if device.type == "cuda":
        torch.cuda.synchronize()
    if ranks.rank:
        return
    facts = train_facts(arguments, done, tokens, time.monotonic() - started_s, device)
    round_to_bf16(network)
    print("as exported", validation.table(network))
    export(network, arguments.out, facts)


def _losses(network: Network, batch: Batch) -> tuple[Tensor, Tensor]:
    with torch.autocast(batch.short_ids.device.type, dtype=torch.bfloat16):
        return (
            packed_loss(network, batch.short_ids, batch.short_document, batch.short_produced),
            document_loss(network, batch.long_ids, batch.long_positions, batch.long_targets),
        )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train the minisgl demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the result")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=8_500)
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--short-tokens", type=int, default=43_008, help="per step, packed")
    parser.add_argument("--long-tokens", type=int, default=12_544, help="per step, documents")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="stop after this time")
    parser.add_argument("--log-every", type=int, default=200)
    parser.add_argument("--validate-every", type=int, default=1500)
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
