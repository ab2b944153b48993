"""The latencies of answers with given times."""

import pytest

from minisgl.benchmark.client import Answer
from minisgl.benchmark.latency import describe, latencies, summarise, table
from minisgl.benchmark.plot import plot_latencies


def answer(sent_s: float, *outputs_s: float, tokens: int = 0, **fields: object) -> Answer:
    count = tokens or len(outputs_s)
    return Answer(sent_s, list(outputs_s), output_tokens=count, **fields)  # type: ignore[arg-type]


def test_latencies_of_one_answer() -> None:
    found = latencies([answer(10.0, 10.5, 10.6, 10.9)])
    assert found.ttft_s.tolist() == pytest.approx([0.5])
    assert found.itl_s.tolist() == pytest.approx([0.1, 0.3])
    assert found.e2e_s.tolist() == pytest.approx([0.9])
    assert found.tpot_s.tolist() == pytest.approx([0.2])


def test_tpot_counts_tokens_and_not_events() -> None:
    found = latencies([answer(0.0, 1.0, 2.0, tokens=11)])
    assert found.tpot_s.tolist() == pytest.approx([0.1])
    assert len(found.itl_s) == 1


def test_answers_of_one_token_have_no_tpot_and_no_gap() -> None:
    found = latencies([answer(0.0, 1.0)])
    assert (len(found.ttft_s), len(found.tpot_s), len(found.itl_s)) == (1, 0, 0)


def test_failed_and_empty_answers_give_no_samples() -> None:
    found = latencies([answer(0.0, 1.0, error="HTTP 503"), answer(0.0)])
    assert len(found.ttft_s) == 0


def test_percentiles_are_interpolated_between_samples() -> None:
    found = describe(latencies([answer(0.0, float(i)) for i in range(101)]).ttft_s)
    assert (found["p50"], found["p90"], found["p99"], found["max"]) == (50, 90, 99, 100)
    assert describe(latencies([]).ttft_s) == {}


def test_a_run_lasts_from_the_first_request_to_the_last_output() -> None:
    answers = [
        answer(1.0, 2.0, 3.0, prompt_tokens=60, cached_tokens=15),
        answer(2.0, 4.0, 5.0, prompt_tokens=40),
        answer(0.0, error="HTTP 503: busy"),
    ]
    found = summarise(answers)
    assert found["seconds"] == 5.0
    assert (found["requests"], found["failed"]) == (3, 1)
    assert found["output_tokens_per_s"] == pytest.approx(4 / 5)
    assert found["prefix_hit_ratio"] == pytest.approx(0.15)


def test_table_and_plot_have_every_metric_even_without_samples() -> None:
    for answers in ([answer(0.0, 0.25, 0.5)], []):
        lines = table(summarise(answers)).splitlines()
        assert [line.split()[0] for line in lines] == ["ms", "TTFT", "ITL", "TPOT", "E2E"]
        assert plot_latencies(latencies(answers)).count("<path") == 4
    assert "250.00" in table(summarise([answer(0.0, 0.25, 0.5)]))
