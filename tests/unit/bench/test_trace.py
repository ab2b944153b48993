"""Synthetic traces of agents: the fields that a replay needs, and their statistics."""

from pathlib import Path

import pytest

from bench.trace import main
from minisgl.benchmark.trace import read_trace, replay


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["--live", "8", "--minutes", "20", "--ramp-s", "60", "--seed", "3"]) == 0
    path = tmp_path / "agents.jsonl"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def test_a_replay_waits_for_the_turns_and_sub_agents_before_each_request(trace: Path) -> None:
    requests = read_trace(trace)
    assert len({request.session for request in requests}) >= 8
    assert any(request.agent for request in requests)
    load = replay(requests, length_scale=0.02)  # refuses a request that waits for an unknown one
    assert load.turns is not None
    assert max(len(turn.after) for turn in load.turns) > 1
    assert max(turn.number for turn in load.turns) > 10


def test_most_prompt_tokens_are_in_earlier_prompts(trace: Path) -> None:
    seen: set[int] = set()
    known = total = 0
    for request in read_trace(trace):
        known += sum(block in seen for block in request.hash_ids)
        total += len(request.hash_ids)
        seen.update(request.hash_ids)
    assert known / total > 0.8


def test_a_trace_follows_from_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in ("1", "1", "2"):
        main(["--live", "2", "--minutes", "5", "--ramp-s", "1", "--seed", seed])
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]
