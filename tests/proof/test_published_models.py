"""Published weights: answers, log-probabilities and rounding errors beside those of transformers.

`pytest -m proof -s tests/proof/test_published_models.py` prints the figures of
bench/notebook/2026-11-27-quality.md.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from minisgl import LLM
from minisgl.llm.results import Completion, Logprob
from tests.patience import patience
from tests.proof.published import MODELS, Published, model_folder, prompt_ids, prompts, text_of

pytestmark = pytest.mark.proof

ANSWER_TOKENS = 128
TIE = 1e-4  # nats; two tokens whose log-probabilities differ by less have no order in float32
MOST_DIFFERENCE = 1e-3  # of a log-probability in float32, nats


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.name)
def folder(request: pytest.FixtureRequest) -> Path:
    published: Published = request.param
    return model_folder(published)


def load(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def ids_of_transformers(tokenizer: Any, row: dict) -> list[int]:
    if "messages" in row and tokenizer.chat_template is not None:
        return tokenizer.apply_chat_template(
            row["messages"], add_generation_prompt=True, return_dict=False
        )
    return tokenizer(text_of(row))["input_ids"]


def test_answers_equal_those_of_transformers(folder: Path) -> None:
    """Chunks of 256 tokens beside decoding requests, float32."""
    rows = prompts()
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_seq_len": 1024,
        "num_pages": 1024,
        "prefill_budget_tokens": 256,
    }
    with LLM(str(folder), **settings) as llm:
        has_chats = llm.tokenizer.info.chat_template is not None
        ids = [prompt_ids(llm.tokenizer, row) for row in rows]
        greedy = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "progress": False}
        answers = llm.generate(ids, ignore_eos=True, logprobs=5, prompt_logprobs=0, **greedy)
        chats = [row["messages"] for row in rows if "messages" in row and has_chats]
        replies = llm.chat(chats, **greedy) if chats else []
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    assert ids == [ids_of_transformers(tokenizer, row) for row in rows]
    equal = ties = 0
    most = 0.0
    for row, prompt, answer in zip(rows, ids, answers, strict=True):
        assert len(answer.token_ids) == ANSWER_TOKENS
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        gaps, difference = compare(model, prompt, answer)
        assert gaps.max() <= TIE, f"another token in the answer to {row}"
        equal += int(gaps.max() == 0)
        ties += int((gaps > 0).sum())
        most = max(most, difference)
    print(
        f"\n{folder.name}: {equal} of {len(rows)} answers equal, {ties} ties within {TIE:g} among "
        f"{len(rows) * ANSWER_TOKENS} tokens; largest difference of a log-probability {most:.1e}"
    )
    assert most <= MOST_DIFFERENCE
    for chat, reply in zip(chats, replies, strict=True):
        assert reply.text == reply_of_transformers(model, tokenizer, chat)


def compare(model: Any, prompt: list[int], answer: Completion) -> tuple[Tensor, float]:
    """Return each answer token's distance from transformers' most likely token [tokens], in nats.

    Also the largest difference of a log-probability: of prompt tokens, answer tokens, and the most
    likely tokens beside them.
    """
    ids = torch.tensor([*prompt, *answer.token_ids])
    with torch.inference_mode():
        expected = model(ids[None, :-1]).logits[0].log_softmax(-1)
    chosen = expected.gather(1, ids[1:, None])[:, 0]
    tokens = answer.prompt_logprobs + answer.logprobs
    assert [each.token_id for each in tokens] == ids[1:].tolist()
    differences = chosen - torch.tensor([each.logprob for each in tokens])
    top = expected[len(prompt) - 1 :].gather(1, tops(answer.logprobs, "token_id").long())
    other = top - tops(answer.logprobs, "logprob")
    gaps = (expected.amax(1) - chosen)[len(prompt) - 1 :]
    return gaps, max(float(differences.abs().max()), float(other.abs().max()))


def tops(tokens: list[Logprob], field: str) -> Tensor:
    return torch.tensor([[getattr(top, field) for top in token.top] for token in tokens])


def reply_of_transformers(model: Any, tokenizer: Any, chat: list[dict]) -> str:
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        found = model.generate(**ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    answer = found[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def test_minisgl_check_passes(folder: Path) -> None:
    command = [sys.executable, "-m", "minisgl", "check", str(folder), "--device", "cpu", "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(1200), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    print(f"\n{folder.name}: minisgl check took {time.perf_counter() - start:.0f} s: {report}")
    assert report["agreement"] == 1
