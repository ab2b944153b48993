"""A draft head: its drafts are those of transformers' MtpModel, and they change no token."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from minisgl.core import ConfigError, EngineConfig, SamplingParams
from minisgl.distributed.comm import SingleCommunicator
from minisgl.drafts import HeadDrafts, with_head, with_ngrams
from minisgl.engine import Extensions, StepTensors
from minisgl.engine.step import GraphStep
from minisgl.engine.step_tensors import Logits
from minisgl.kvcache import states
from minisgl.models.config import draft_method
from minisgl.quantization import with_quantizations
from tests.parity import rank_cases
from tests.parity.driver import Driver, Work, make_engine
from tests.parity.hybrid_models import BASE, Heads, save
from tests.parity.models import transformers_greedy
from tests.parity.rank_cases import RankCase, run_on
from tests.parity.test_hybrid_engine import texts
from tests.parity.test_scheduler_parity import Case, prove, run
from tests.process.tiny_model import build_tiny_model
from tests.unit.engine.emulated_graphs import emulate_decode_graphs
from tests.unit.scheduler.drafts import ChangingDrafts
from tests.unit.structured.grammars import Run, random_tasks, run_tasks

PROMPT = [(7 * i + 3) % 151 for i in range(37)]


def written(driver: Driver, row: int, first: int, count: int) -> list[int]:
    pool = driver.engine._launcher.runner.token_pool
    ids: list[int] = pool[row, first : first + count].tolist()
    return ids


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_drafts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The prompt is in chunks. The second decode step forwards three of the drafts."""
    heads = Heads(*save(name, tmp_path))
    engine = make_engine(
        heads.path, drafts=ChangingDrafts(7, head=True), page_size=16, speculative="mtp"
    )
    driver, tokens = Driver(engine), list(PROMPT)
    for start, end in ((0, 16), (16, 21), (21, len(PROMPT))):
        result = driver.step(Work(2, start, tokens[start:end], end == len(PROMPT)))
    tokens.append(int(result.tokens[0, 0]))
    for forwarded in (0, 3, 1):
        result = driver.step(Work(2, len(tokens) - 1, drafts=forwarded), drafts=7)
        count = int(result.counts[0])
        tokens += result.tokens[0, :count].tolist()
        assert written(driver, 2, len(tokens), 7) == heads.drafts(tokens, 7)


def test_an_fp8_model_drafts_with_a_copy_of_its_head_in_fp8(heads: Heads) -> None:
    """A copy that prefers one token changes all drafts, and no token."""
    lengths = ChangingDrafts(3, head=True)
    tokens = []
    for favourite in (None, 7):
        settings = {"quantization": "fp8", "page_size": 16, "speculative": "mtp"}
        engine = make_engine(heads.path, drafts=lengths, **settings)
        model = engine._launcher.runner.model
        assert model.mtp is not None
        assert model.mtp.vocabulary is not None
        y = torch.randn(5, model.config.hidden_size)
        wanted = model.lm_head.logits(y)
        assert (model.mtp.logits(y, model.lm_head) - wanted).abs().max() < 0.1 * wanted.abs().max()
        if favourite is not None:
            model.mtp.vocabulary.scales.zero_()
            model.mtp.vocabulary.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
            model.mtp.vocabulary.bias.data[favourite] = 1e6
        driver = Driver(engine)
        ids = [int(driver.step(Work(2, 0, PROMPT)).tokens[0, 0])]
        for _ in range(4):
            result = driver.step(Work(2, len(PROMPT) + len(ids) - 1), drafts=3)
            ids.append(int(result.tokens[0, 0]))
        if favourite is not None:
            assert written(driver, 2, len(PROMPT) + len(ids), 3) == [favourite] * 3
        tokens.append(ids)
    assert tokens[0] == tokens[1]


TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.4, top_p=0.95, min_p=0.01, seed=3, max_tokens=TOKENS, ignore_eos=True
)
MIXED = [
    GREEDY,
    DRAWN,
    SamplingParams(
        temperature=0.8, frequency_penalty=0.7, seed=5, max_tokens=TOKENS, ignore_eos=True
    ),
    SamplingParams(temperature=0.5, seed=1, logprobs=2, prompt_logprobs=1, max_tokens=9),
]
PLAIN = Case(8192, "naive", overlap=False, crowded=False, page_size=16)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return Heads(*save("qwen3_5", tmp_path_factory.mktemp("heads")), agrees=True)


@pytest.fixture(autouse=True)
def few_tokens_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts of these tests are shorter than those whose states a server saves."""
    monkeypatch.setattr(states, "MIN_NEW_TOKENS", 16)


KINDS = {"greedy": [GREEDY], "drawn": [DRAWN], "mixed": MIXED}


@cache
def without_drafts(path: str, kind: str) -> list[list[int]]:
    return run(path, PLAIN, KINDS[kind], texts=texts())[0]


CASES = [
    Case(16, "naive", overlap=False, crowded=False, page_size=16, speculative="mtp"),
    Case(32, "radix", overlap=True, crowded=False, page_size=16, speculative="mtp"),
    Case(64, "naive", overlap=True, crowded=True, page_size=16, speculative="mtp"),
    Case(64, "radix", overlap=True, crowded=False, page_size=16, speculative="mtp"),
]


@pytest.mark.parametrize(
    ("case", "kind", "by_graph"),
    [
        (CASES[0], "drawn", False),
        (CASES[1], "greedy", False),
        (CASES[2], "greedy", False),
        (CASES[3], "mixed", True),
    ],
    ids=str,
)
def test_drafts_change_no_token(
    case: Case, kind: str, by_graph: bool, heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after hits and preemption, the drafts are those of transformers."""
    found, drafts = list[tuple[list[int], list[int]]](), ChangingDrafts(7, head=True)
    after = HeadDrafts.after

    def record(self: HeadDrafts, x: StepTensors, out: Logits, tokens: torch.Tensor) -> None:
        after(self, x, out, tokens)
        runner, count = self._runner, x.batch.next_drafts
        for row in x.batch.rows[: x.batch.num_decode].tolist():
            newest = int(runner.drafts.cached[row]) + 1
            ids = runner.token_pool[row, : newest + count].tolist()
            found.append((ids[:newest], ids[newest:]))

    expected = without_drafts(heads.path, kind) * case.waves
    picked = emulate_decode_graphs(monkeypatch) if by_graph else []
    monkeypatch.setattr(HeadDrafts, "after", record)
    outputs, scheduler, recorder = run(heads.path, case, KINDS[kind], drafts, texts=texts())
    assert outputs == expected
    assert by_graph == any(isinstance(step, GraphStep) for _, step in picked)
    if kind != "mixed":
        prove(case, scheduler, recorder)
        assert {batch.width for batch in recorder.batches} == {1, 2, 4, 8}
        assert 0.1 * drafts.drafted < drafts.agreed < drafts.drafted
    if kind == "greedy":
        made = [(ids, made) for ids, made in found[-120::6] if made]
        assert len(made) > 5
        for ids, drafted in made:
            assert drafted == heads.drafts(ids, len(drafted))


def test_two_ranks_give_the_tokens_of_transformers(heads: Heads, tmp_path: Path) -> None:
    case = RankCase(
        "heads",
        16,
        "naive",
        overlap=True,
        crowded=False,
        aborts=False,
        page_size=16,
        drafts=True,
        engine={"speculative": "mtp"},
    )
    (first,), (second,) = run_on(2, [case], {"heads": heads.path}, tmp_path)
    assert first == second
    rank_cases.prove(case, first)
    for prompt, tokens in zip(rank_cases.prompts(), first.tokens, strict=True):
        assert tokens == transformers_greedy(heads.path, prompt, len(tokens), guess=tokens)


def test_constraints_give_the_same_answers_without_drafts(tmp_path: Path) -> None:
    path = str(build_tiny_model(tmp_path))
    plain = transformers.AutoConfig.from_pretrained(path)
    sizes = BASE | {"vocab_size": plain.vocab_size, "eos_token_id": plain.eos_token_id}
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(path)
    Heads(model, path, agrees=True)
    tasks = random_tasks(5, 3)  # every third request is free: most of its drafts are accepted
    plain = Run(engine={"page_size": 16}, free=True)
    drafting = replace(plain, engine={"page_size": 16, "speculative": "mtp"}, drafts=True)
    first, second = (run_tasks(SingleCommunicator(), "", path, r, tasks) for r in (plain, drafting))
    assert second.tokens == first.tokens
    assert sum(second.totals.drafts.accepted) > 0


def test_a_model_without_a_draft_head_is_refused(heads: Heads, tmp_path: Path) -> None:
    path = save("qwen3_5", tmp_path)[1]
    with pytest.raises(ConfigError, match="mtp needs a model with a draft head"):
        make_engine(path, drafts=ChangingDrafts(7, head=True), page_size=16, speculative="mtp")
    found = [
        draft_method(EngineConfig(model_path=p, speculative="auto")) for p in (path, heads.path)
    ]
    assert found == ["ngram", "mtp"]


def test_weights_without_the_tensors_of_a_described_head_are_refused(tmp_path: Path) -> None:
    path = save("qwen3_5", tmp_path)[1]
    file = Path(path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mtp_num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"no tensors mtp\.\*; use speculative ngram or auto"):
        draft_method(EngineConfig(model_path=path, speculative="mtp"))
    assert draft_method(EngineConfig(model_path=path, speculative="auto")) == "ngram"


@pytest.mark.parametrize(
    ("added", "speculative", "message"),
    [
        (None, "ngram", "speculative is ngram, but the extensions have no draft_lengths"),
        (with_ngrams, "mtp", "speculative is mtp, but no stage of the extensions runs"),
        (with_head, "ngram", "run a draft head, but the engine has loaded none"),
    ],
)
def test_extensions_of_another_draft_method_are_refused(
    added: Callable[..., Extensions] | None, speculative: str, message: str, heads: Heads
) -> None:
    extensions = with_quantizations()
    if added is not None:
        extensions = added(lambda rows: ChangingDrafts(7), extensions)
    with pytest.raises(ConfigError, match=message):
        make_engine(heads.path, extensions=extensions, page_size=16, speculative=speculative)
