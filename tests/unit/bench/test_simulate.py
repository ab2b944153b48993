"""The scheduler in simulated time, with the step costs of an 8B model on one H200."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bench.simulate import main, simulate
from minisgl.benchmark.client import Answer
from minisgl.benchmark.latency import summarise
from minisgl.benchmark.trace import Load, Turn
from minisgl.benchmark.virtual_engine import DEFAULT_COST, EngineSettings, VirtualEngine, read_cost
from minisgl.benchmark.workload import make_workload
from minisgl.core import ConfigError, SchedulerConfig, StepWork
from minisgl.core.batch import Batch, PendingStep
from tests.unit.scheduler.offline import run_offline

COST = read_cost(DEFAULT_COST)


def run(load: Load, concurrency: int = 1, **config: object) -> list[Answer]:
    engine = EngineSettings(COST, num_pages=20_000, rows=256, max_seq_len=16_384).engine()
    settings = SchedulerConfig(**config)  # type: ignore[arg-type]
    return simulate(load, engine, COST, settings, concurrency)


def load_of(*requests: tuple[float, int, int]) -> Load:
    """Requests of (arrival, prompt tokens, output tokens), no two prompts alike."""
    prompts = [
        np.random.default_rng(index).integers(0, 10_000, length, dtype=np.int32)
        for index, (_, length, _) in enumerate(requests)
    ]
    return Load(prompts, [most for *_, most in requests], [at for at, *_ in requests])


def test_long_prompts_hardly_slow_down_streams(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The policy has two aims.

    The p99 of the gaps is at most 2.5 times their p50. Prefill beside streams has at least 0.54 of
    its speed without streams. (For 0.65, a step with a chunk would have to take 2.9 times a
    decode-only step: bench/notebook/2026-11-22-throughput.md.)

    64 streams have about 1,024 tokens of context, and a prompt of 8,192 tokens arrives every
    second. Without streams, the client measured 0.206 s for this prompt.
    """
    row = (
        "--beside 64 820 2000 --rate 1 --arrival uniform --requests 4 --prompt-tokens 8192 8192 "
        "--output-tokens 1 1"
    )
    assert main(row.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    gaps = found["beside"]["itl_s"]
    assert gaps["p99"] <= 2.5 * gaps["p50"]
    assert 0.206 / found["ttft_s"]["max"] >= 0.54


@pytest.mark.parametrize(("side", "tokens"), [(16, 0), (5000, 24336)])
def test_an_image_that_no_server_takes_is_refused(side: int, tokens: int) -> None:
    """Regression: an image without tokens, or with more than the buffer has room for, ended the
    simulation with an error of the scheduler."""
    with pytest.raises(ConfigError, match=f"has {tokens} tokens; give a SIDE of 32 to 2367"):
        main(["--images", f"{side}", "5", "--requests", "1"])


def test_a_lower_slowdown_bounds_the_gaps_of_streams_beside_images(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The median step of the 64 streams takes 4.7 ms, an image of 256 tokens 10 ms to encode."""
    row = (
        "--beside 64 128 400 --rate 5 --arrival uniform --requests 5 --prompt-tokens 6 6 "
        "--output-tokens 2 2 --images 512 10"
    )
    ratios, first_tokens = [], []
    for flags in ("", "--target-step-ms 1 --max-slowdown 1.5"):
        assert main(f"{row} {flags}".split()) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        ratios.append(found["itl_p99_ratio"])
        first_tokens.append(found["ttft_s"]["p50"])
    assert ratios[1] < 1.55 < 2.2 < ratios[0]
    assert first_tokens[0] < first_tokens[1]


def test_streams_that_end_before_the_load_make_the_run_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Regression: the number of such streams could not be written as JSON."""
    row = "--beside 2 100 50 --rate 2 --requests 4 --output-tokens 8 8"
    assert main(row.split()) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["failed"], found["beside"]["failed"]) == (2, 2)


def test_a_request_that_arrives_during_a_step_is_in_the_next_step() -> None:
    """On average the request waits half a decode step and 2 ms.

    When the scheduler launched the next step earlier, the request waited one and a half steps.
    """
    late = [(3.0 + 0.0937 * index, 128, 1) for index in range(20)]
    answers = run(load_of(*[(0.0, 800, 600)] * 64, *late))[64:]
    keys = 64 * 1200  # contexts of 1,090 to 1,340 at that time
    works = StepWork(64, keys), StepWork(192, keys, 128 * 64)
    decode_s, own_s = map(COST.predict_s, works)
    waits_s = [answer.outputs_s[0] - answer.sent_s - own_s for answer in answers]
    assert np.mean(waits_s) < decode_s


class SlowHost(VirtualEngine):
    """Each launch takes the host 6 ms, like a step without a CUDA graph."""

    def launch(self, batch: Batch) -> PendingStep:
        self.now_s += 0.006
        return super().launch(batch)


def test_the_device_does_not_wait_for_slow_launches() -> None:
    """Regression: each launch began 2 ms before a step ended, so a token took 25 % more time."""
    engine = SlowHost(EngineSettings(COST, num_pages=20_000, rows=512, max_seq_len=16_384))
    load = load_of(*[(0.0, 800, 100)] * 300)
    answers = simulate(load, engine, COST, SchedulerConfig(), concurrency=1)
    assert max(answer.outputs_s[-1] for answer in answers) < 1.02 * engine.busy_s


@pytest.mark.parametrize("cold", [False, True], ids=["cached", "cold"])
def test_prompts_with_a_shared_prefix_hardly_slow_down_streams(cold: bool) -> None:
    """A shared prefix, cached or computed for the first prompt, is not part of the queue.

    Regression: the prefix counted once for each of the 20 prompts, as a queue of 4 s, and the
    streams had gaps of 86 ms.
    """
    streams = load_of(*[(0.0, 820, 800)] * 64)
    [shared] = load_of((0.0, 8192, 1)).prompts
    own = load_of(*[(0.0, 200, 1)] * 20).prompts
    late = [np.concatenate([shared, prompt]) for prompt in own]
    times = [*streams.arrivals_s, 3.0 if cold else 1.0, *[3.0] * 19]  # type: ignore[misc]
    answers = run(Load([*streams.prompts, *late], streams.max_tokens + [1] * 20, times))
    assert {answer.cached_tokens for answer in answers[65:]} == {8192}
    gaps_s = [np.diff([at for at in answer.outputs_s if at > 2.5]) for answer in answers[:64]]
    assert max(map(np.max, gaps_s)) < 0.025


def test_chunks_are_whole_while_no_request_decodes() -> None:
    [answer] = run(load_of((1.0, 8192, 3)))
    expected_s = COST.predict_s(StepWork(8192, 0, 8192 * 8193 // 2))
    assert answer.sent_s == 1.0
    assert abs(answer.outputs_s[0] - 1.0 - expected_s) < 1e-3
    assert (answer.prompt_tokens, answer.output_tokens, len(answer.outputs_s)) == (8192, 3, 3)


def test_a_closed_loop_sends_a_request_when_another_ends() -> None:
    load = Load(load_of(*[(0.0, 100, 5)] * 4).prompts, [5] * 4, None)
    answers = run(load, concurrency=2)
    ends = sorted(answer.outputs_s[-1] for answer in answers)
    assert sorted(answer.sent_s for answer in answers) == [0.0, 0.0, *ends[:2]]


def test_a_turn_begins_after_the_tools_have_answered() -> None:
    load = load_of((0.0, 100, 5), (0.0, 100, 5))
    first, second = run(load._replace(turns=[Turn(), Turn((0,), 2.5)]))
    assert second.sent_s == first.outputs_s[-1] + 2.5


def test_a_trace_with_turns_has_first_tokens_by_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {"timestamp": 0, "id": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    second = {"timestamp": 9, "id": 1, "after": [0], "gap_ms": 50, "output_length": 1}
    second |= {"input_length": 1024, "hash_ids": [1, 2]}
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, (first, second))))
    assert main(["--trace", str(tmp_path / "trace.jsonl"), "--num-pages", "200"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["ttft_s_by_turn"]) == {"turn 1", "turn 2"}


def test_a_window_has_the_answers_that_end_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Requests of one step each at 0, 1, 2 and 3 s. The run ends before the last one."""
    request = {"input_length": 9, "output_length": 1, "hash_ids": [1]}
    lines = [json.dumps(request | {"timestamp": 1000 * n}) for n in range(4)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    assert main(["--trace", str(tmp_path / "trace.jsonl"), "--window-s", "0.5", "2.5"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["requests"], found["requests_per_s"]) == (2, 1.0)


def test_the_end_of_a_session_keeps_the_prefixes_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool has room for two prompts. The third one takes that of the session that has ended."""
    request = {"input_length": 512, "output_length": 1}
    lines = [
        json.dumps(
            request | {"timestamp": 1000 * n, "session": block, "end": n == 1, "hash_ids": [block]}
        )
        for n, block in enumerate([1, 2, 3, 1])
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    cached = []
    for flags in ([], ["--end-sessions"]):
        options = ["--trace", str(tmp_path / "trace.jsonl"), "--num-pages", "70", *flags]
        assert main(options) == 0
        cached.append(json.loads(capsys.readouterr().out.splitlines()[-1])["cached_tokens"])
    assert cached[0] < cached[1] == 496


def test_cached_tokens_are_not_computed_again() -> None:
    load = load_of((0.0, 1600, 1))
    twice = Load(load.prompts * 2, [1, 1], [0.0, 5.0])
    assert summarise(run(twice))["cached_tokens"] == 1584
    assert summarise(run(twice, cache_type="naive"))["cached_tokens"] == 0


def test_a_trace_of_a_model_with_recurrent_states_hits_the_whole_blocks_before_the_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"timestamp": 9e3 * own, "input_length": 1300, "output_length": 9, "hash_ids": [1, 2, own]}
        for own in (3, 4)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    row = f"--trace {path} --requests 2 --max-output 2 --snapshot-pages 100"
    assert main(row.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["cached_tokens"], found["output_tokens"]) == (1024, 4)


@cache
def readme_requests() -> Sequence[tuple[int, int]]:
    workload = make_workload()
    lengths = workload.prompt_lengths.tolist()
    return tuple(zip(lengths, workload.max_tokens, strict=True))


def test_even_steps_make_the_readme_workload_faster() -> None:
    """Offline: 12.87 s instead of 13.49 s. Both take the 1,024 steps of the longest answer."""
    first = run_offline(readme_requests(), even=False)
    even = run_offline(readme_requests(), even=True)
    assert len(even.sizes) == len(first.sizes) == max(most for _, most in readme_requests())
    assert even.seconds <= 0.96 * first.seconds
    load = load_of(*((0.0, *request) for request in sorted(readme_requests(), key=lambda r: -r[1])))
    answers = run(Load(load.prompts, load.max_tokens, None), 256, target_step_ms=None)
    last_s = max(answer.outputs_s[-1] for answer in answers)
    assert last_s == pytest.approx(even.seconds, rel=1e-3), "the command simulates the same"


def test_even_steps_change_nothing_when_all_answers_have_the_same_length() -> None:
    requests = [(length, 512) for length, _ in readme_requests()]
    first, even = (run_offline(requests, even=is_even) for is_even in (False, True))
    assert even.sizes == first.sizes
    assert even.seconds == pytest.approx(first.seconds, rel=1e-3)


def test_a_logged_cost_can_be_read() -> None:
    hybrid, head = read_cost("1,2,3,4:5"), read_cost("1,2,0,3,4:5")
    assert (hybrid.per_decode_req_s, head.per_draft_s) == (3e-9, 3e-9)
    for cost in (COST, hybrid, head):
        assert read_cost(str(cost)) == cost
    wrong_order = "1,2,5:1,3:4", "1,2,3:4,5:1"
    no_times = "1,nan,1:1", "1,2,1:inf", "1,2,1:-1", "1,2,0:1"
    for text in ("1,2", "1,2,x:3", "1,2,3", "", *wrong_order, *no_times):
        with pytest.raises(ConfigError, match="does not have the form KEY_NS"):
            read_cost(text)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("--beside 2 8 8 --concurrency 4", "together with --rate or --trace"),
        ("--beside 2 50000 8 --rate 1", "--beside: 50000 prompt tokens .* exceed the 40960"),
    ],
)
def test_background_streams_that_cannot_be_simulated_are_refused(row: str, text: str) -> None:
    """Regression: --concurrency was ignored, and all requests of the load arrived at once."""
    with pytest.raises(ConfigError, match=text):
        main([*row.split(), "--requests", "4"])


def test_an_overload_of_a_later_priority_hardly_delays_the_first_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The engine serves 14 requests of this size per second; 56 of the later priority arrive."""
    size = "--prompt-tokens 2000 2000 --output-tokens 200 200"
    assert main(f"--requests 40 --rate 4 {size} --low 56 2000 200".split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ttft_p99_ratio"] <= 1.2


@pytest.mark.parametrize("flags", ["", "--rate 2 --flood 9 9 9"])
def test_low_needs_arrival_times_and_excludes_the_flood(flags: str) -> None:
    with pytest.raises(ConfigError):
        main(f"--requests 2 --low 5 9 9 {flags}".split())


def test_a_step_takes_the_time_of_its_copies_of_states() -> None:
    """The end of the prompt is saved: 10 pages of 150 GB, at 1.5 TB/s."""
    load = load_of((0.0, 1600, 9))
    busy_s = []
    for page_bytes in (0, 150 * 10**9):
        sizes = EngineSettings(COST, 20_000, 256, 16_384, snapshot_pages=10, page_bytes=page_bytes)
        engine = sizes.engine()
        simulate(load, engine, COST, SchedulerConfig(), concurrency=1)
        busy_s.append(engine.busy_s)
    assert busy_s[1] - busy_s[0] == pytest.approx(1.0)
