"""Published weights in 4 bits, rounded and packed by compressed-tensors, beside its own reading.

`pytest -m proof -s tests/proof/test_packed_weights.py` prints the figures of
bench/notebook/2026-11-28-four-bits.md: of each model, the mean KL divergence from transformers'
float32 model of the unquantised weights, and how often its most likely token is the same.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl.tokenizer.tokenizer import TextTokenizer
from tests.proof.published import MODELS, Published, model_folder, prompt_ids, prompts
from tests.proof.test_published_rounding import Change, Runner, change
from tests.proof.venvs import pip

pytestmark = pytest.mark.proof

SCRIPT = Path(__file__).parent / "scripts" / "pack_weights.py"
PACKAGES = ("compressed-tensors", "loguru")
SMOL, GEMMA = MODELS
CASES = [
    (SMOL, "int4", 64),  # the group divides 576 columns
    (SMOL, "int4-zeros", 64),
    (SMOL, "nvfp4", 16),
    (GEMMA, "int4", 128),
]
# Of the two KL divergences, relative to the larger. compressed-tensors unpacks NVFP4 to bfloat16,
# so the weights of the reference are rounded once more.
MOST_DIFFERENCE = {"int4": 1e-3, "int4-zeros": 1e-3, "nvfp4": 5e-3}


def quantised(model: Published, scheme: str, group: int, folder: Path) -> tuple[Path, Path]:
    """Return the packed folder, and that of the float32 weights that compressed-tensors reads."""
    packages, packed, reference = folder / "packages", folder / "packed", folder / "reference"
    pip(Path(sys.executable), "install", "--no-deps", "--target", str(packages), *PACKAGES)
    arguments = [str(model_folder(model)), scheme, str(group), str(packed), str(reference)]
    found = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), *arguments]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": found})
    return packed, reference


@pytest.mark.parametrize(
    ("model", "scheme", "group"), CASES, ids=[f"{each[0].name}-{each[1]}" for each in CASES]
)
def test_packed_weights_change_the_distributions_as_their_own_reading(
    model: Published, scheme: str, group: int, tmp_path: Path
) -> None:
    packed, reference = quantised(model, scheme, group, tmp_path)
    tokenizer = TextTokenizer(packed)
    texts = [prompt_ids(tokenizer, row) for row in prompts()]
    runner = Runner(packed, max(map(len, texts)), {})
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval()
        for each in (model_folder(model), reference)
    )
    ours, theirs = list[Change](), list[Change]()
    for ids in texts:
        with torch.inference_mode():
            logits, other = (each(torch.tensor([ids])).logits[0] for each in (exact, rounded))
        ours.append(change(logits, runner.logits(ids)))
        theirs.append(change(logits, other))
    kl = [float(torch.cat([part.kl for part in side]).mean()) for side in (ours, theirs)]
    same = [
        float(torch.cat([part.same for part in side]).double().mean()) for side in (ours, theirs)
    ]
    positions = sum(len(part.kl) for part in ours)
    print(
        f"\n{model.name}, {scheme} group {group}, {positions} positions: mean KL {kl[0]:.4e}, "
        f"compressed-tensors {kl[1]:.4e}; top-1 {same[0]:.2%}, compressed-tensors {same[1]:.2%}"
    )
    assert abs(kl[0] - kl[1]) <= MOST_DIFFERENCE[scheme] * max(kl)
