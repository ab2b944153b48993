"""The file of step times: later starts read it, and replace it if it does not fit the engine."""

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from minisgl.core import EngineConfig, StepCost
from minisgl.distributed.comm import Communicator, SingleCommunicator
from minisgl.engine import DEFAULT_EXTENSIONS
from minisgl.engine.calibration import StepTimes, StepTimesFile, Subject, file_for, step_cost
from minisgl.models.quantization import UNQUANTIZED
from minisgl.quantization import with_quantizations
from tests.unit.distributed.ranks import run_ranks
from tests.unit.engine.virtual_engine import VirtualEngine

CPU = torch.device("cpu")
FEW_LAUNCHES = 50  # a calibration has more, a check has fewer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    (folder / "model.safetensors").write_bytes(bytes(8))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "step-times"


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "minisgl.engine.calibration")
    return caplog


def subject(model: Path, chunk: int = 8192, **settings: object) -> Subject:
    config = EngineConfig(model_path=str(model), **settings)  # type: ignore[arg-type]
    return Subject.of(config, CPU, chunk)


def start(
    file: StepTimesFile | None, speed: float = 1.0, comm: Communicator | None = None
) -> tuple[StepCost, int]:
    """Return the step cost of a virtual engine, and the number of steps that the engine ran."""
    engine = VirtualEngine(lambda tokens, launch: 1 / speed)
    comm = comm or SingleCommunicator()
    cost = step_cost(engine, comm, 8192, 50_000, False, file, lambda: engine.now_ns)
    return cost, engine.launches


def test_the_second_start_reads_the_cost_of_the_first(
    model: Path, folder: Path, log: pytest.LogCaptureFixture
) -> None:
    file = StepTimesFile(folder, subject(model))
    first, launches = start(file)
    assert launches > FEW_LAUNCHES
    assert f"later starts read the step times: {file.path}" in log.text
    assert [path.name for path in folder.iterdir()] == [file.path.name], "no temporary file"
    log.clear()
    again, launches = start(StepTimesFile(folder, subject(model)))
    assert again == first
    assert 0 < launches < FEW_LAUNCHES, "three steps are timed again"
    assert log.messages == [f"the step times are those of an earlier start: {file.path}"]


@pytest.mark.parametrize("speed", [0.6, 1.6])
def test_steps_of_another_duration_are_measured_again(
    speed: float, model: Path, folder: Path, log: pytest.LogCaptureFixture
) -> None:
    """A power limit or another program on the GPU changes the steps, and no version shows it."""
    file = StepTimesFile(folder, subject(model))
    first, _ = start(file)
    changed, launches = start(file, speed)
    assert launches > FEW_LAUNCHES
    assert changed.predict_s(512, 0, 0) == pytest.approx(first.predict_s(512, 0, 0) / speed)
    assert f"{file.path}: steps now differ by a factor of 1.6" in log.text
    assert start(file, speed) == (changed, start(file, speed)[1]), "the file was replaced"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "truncated"),
        (b"{}", "missing required field `subject`"),
        (b"\xff", "malformed"),
        (None, "Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_replaced(
    content: bytes | None, says: str, model: Path, folder: Path, log: pytest.LogCaptureFixture
) -> None:
    file = StepTimesFile(folder, subject(model))
    folder.mkdir(parents=True)
    if content is None:
        file.path.mkdir()
    else:
        file.path.write_bytes(content)
    _, launches = start(file)
    assert launches > FEW_LAUNCHES
    assert f"the step times are measured again: {file.path}: " in log.text
    assert says in log.text
    if content is not None:
        assert start(file)[1] < FEW_LAUNCHES


@pytest.mark.parametrize(
    "change",
    [
        {"timings": ()},
        {"timings": ((1, 1, 0, 0.1),)},
        {"timings": ((1, 1, 0, 0.0), (2, 1, 1, 0.1))},
        {"timings": ((0, 1, 0, 0.1), (2, 1, 1, 0.1))},
        {"timings": ((1, 1, 0, "0.1"), (2, 1, 1, 0.1))},
        {"note": "an unknown field"},
    ],
)
def test_values_out_of_range_are_refused(
    change: dict[str, object], model: Path, folder: Path, log: pytest.LogCaptureFixture
) -> None:
    file = StepTimesFile(folder, subject(model))
    start(file)
    content = msgspec.json.decode(file.path.read_bytes())
    file.path.write_bytes(msgspec.json.encode(content | change))
    assert file.read() == ()
    assert f"the step times are measured again: {file.path}: " in log.messages[-1]


@pytest.mark.parametrize("name", ["sources", "torch", "triton", "driver"])
def test_other_versions_are_measured_again(
    name: str, model: Path, folder: Path, log: pytest.LogCaptureFixture
) -> None:
    file = StepTimesFile(folder, subject(model))
    start(file)
    content = msgspec.json.decode(file.path.read_bytes(), type=StepTimes)
    changed = msgspec.structs.replace(content, versions=content.versions | {name: "0"})
    file.path.write_bytes(msgspec.json.encode(changed))
    assert file.read() == ()
    assert log.messages[-1].endswith(f"{file.path}: other versions of {name}")


def test_each_model_and_each_setting_has_a_file_of_its_own(model: Path, folder: Path) -> None:
    found = [
        subject(model),
        subject(model, chunk=4096),
        subject(model, kv_cache_dtype="fp8"),
        subject(model, page_size=32),
        subject(model, quantization="fp8"),
        subject(model, tp_size=2),
        subject(model, max_running_reqs=64),
    ]
    (model / "hf_quant_config.json").write_text("{}")
    found.append(subject(model))
    (model / "config.json").write_text('{"hidden_size": 128}')
    found.append(subject(model))
    (model / "model.safetensors").write_bytes(bytes(16))
    found.append(subject(model))
    assert len({StepTimesFile(folder, each).path for each in found}) == len(found)
    moved = model.rename(model.with_name("moved"))
    assert subject(moved, kernel_cache="/srv/kernels") == found[-1], "folders have no effect"


def test_a_renamed_file_of_another_model_is_refused(
    model: Path, folder: Path, log: pytest.LogCaptureFixture
) -> None:
    other = StepTimesFile(folder, subject(model, page_size=32))
    start(other)
    file = StepTimesFile(folder, subject(model))
    other.path.rename(file.path)
    assert file.read() == ()
    assert "another model, other settings or another device" in log.messages[-1]


def test_a_folder_that_cannot_be_written_does_not_stop_the_start(
    model: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    file = StepTimesFile(tmp_path / "cache" / "step-times", subject(model))
    assert start(file)[1] > FEW_LAUNCHES
    assert "each start measures the step times, because they are not kept" in log.messages[-1]


def test_code_of_other_packages_is_timed_at_each_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(model_path=str(model))
    own = file_for(config, CPU, 8192, with_quantizations(), ())
    assert own is not None
    assert own.path.parent == tmp_path / "minisgl" / "step-times"
    added = replace(DEFAULT_EXTENSIONS, quantizations={"own": lambda settings: UNQUANTIZED})
    assert file_for(config, CPU, 8192, added, ()) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert file_for(config, CPU, 8192, DEFAULT_EXTENSIONS, ()) is None


def _rank(comm: Communicator, model: str, folders: list[str]) -> list[tuple[StepCost, int]]:
    """Start once for each folder. The number of the rank replaces "RANK" in the folder's name."""
    described = subject(Path(model))
    places = [Path(folder.replace("RANK", str(comm.tp.rank))) for folder in folders]
    return [start(StepTimesFile(place, described), comm=comm) for place in places]


def test_ranks_use_a_file_only_if_all_have_read_it(model: Path, tmp_path: Path) -> None:
    """If ranks decided differently, they would run different steps, and collectives would hang."""
    folders = [str(tmp_path / "common"), str(tmp_path / "own-RANK")]
    found = []
    for name in ("first", "second"):
        (place := tmp_path / name).mkdir()
        one, other = run_ranks(2, place, _rank, str(model), folders)
        assert one == other
        found.append([launches < FEW_LAUNCHES for _, launches in one])
    assert found == [[False, False], [True, False]]
