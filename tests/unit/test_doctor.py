"""`minisgl doctor`: real runs, and the checks of machines that the tests do not have."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from minisgl import doctor
from tests.patience import patience

NAMES = [
    *("driver", "torch", "GPU", "FlashInfer", "compilers", "memory lock", "host memory"),
    *("shared memory", "socket folder", "model cache", "kernel cache", "hub"),
]


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of a server that answers every request with an error, as a hub may."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "minisgl", "doctor", *words]
    return subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=patience()
    )


def states(done: "subprocess.CompletedProcess[str]") -> dict[str, str]:
    return {check["name"]: check["state"] for check in json.loads(done.stdout)}


def test_each_check_is_one_line_and_a_sound_machine_gives_0(hub: str, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = run(**settings)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line[9:27].strip() for line in lines] == NAMES
    assert lines[-1] == f"ok       hub               {hub} answers"


def test_folder_that_cannot_be_written_fails_and_a_silent_hub_is_a_warning() -> None:
    done = run("--json", HF_HOME="/proc/none", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    found = states(done)
    assert (found["model cache"], found["hub"], found["torch"]) == ("failed", "warning", "ok")
    assert "set HF_HOME" in done.stdout


def test_missing_torch_and_a_broken_driver_are_lines_and_no_tracebacks(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    places = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run("--json", PATH=path, PYTHONPATH=places, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = {check["name"]: check["found"] for check in json.loads(done.stdout)}
    assert found["torch"] == "libcudart.so is missing"
    assert found["driver"] == "NVIDIA-SMI has failed"
    assert states(done)["GPU"] == "failed"
    assert states(done)["hub"] == "ok", "the hub is not asked with HF_HUB_OFFLINE"


@pytest.mark.parametrize(
    ("c_compiler", "nvcc", "kernels", "state"),
    [
        ("/usr/bin/gcc", "/usr/bin/nvcc", None, "ok"),
        ("/usr/bin/gcc", None, None, "warning"),
        (None, None, None, "failed"),
        (None, None, "/kernels", "warning"),
    ],
)
def test_gpu_needs_compilers_or_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch,
    c_compiler: str | None,
    nvcc: str | None,
    kernels: str | None,
    state: str,
) -> None:
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    monkeypatch.setattr(doctor, "find_c_compiler", lambda: c_compiler)
    monkeypatch.setattr(doctor, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    if kernels is not None:
        monkeypatch.setenv("MINISGL_KERNEL_CACHE", kernels)
    check = doctor._compilers()
    assert check.state == state
    assert bool(check.remedy) == (state != "ok")


def test_small_limits_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (65536, 65536))
    assert doctor._memory_lock().state == "warning"
    usage = doctor.shutil.disk_usage("/")._replace(total=64 * 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert "--shm-size" in doctor._shared_memory().remedy


def test_folder_below_a_private_folder_of_another_user_fails_with_a_remedy(tmp_path: Path) -> None:
    """The container's user has no access to /root, if HOME is still /root."""
    tmp_path.chmod(0)
    program = (
        "import os, sys; from minisgl import doctor; os.geteuid() or os.setuid(65534);"
        "check = doctor._writable('model cache', sys.argv[1], 'HF_HOME');"
        "print(check.state, check.found, check.remedy)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "hub")]
    done = subprocess.run(command, capture_output=True, text=True)
    tmp_path.chmod(0o700)
    assert done.stdout.startswith("failed "), done.stderr
    assert "Permission denied set HF_HOME" in done.stdout


def test_driver_without_an_answer_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert doctor._driver().state == "failed"


@pytest.mark.parametrize(
    ("capability", "state", "said"),
    [
        ((9, 0), "ok", ""),
        ((8, 0), "warning", "compiled for, never run"),
        ((13, 0), "warning", "not tried"),
        ((7, 5), "warning", ""),
    ],
)
def test_gpu_on_which_minisgl_never_ran_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], state: str, said: str
) -> None:
    major, minor = capability
    gpu = SimpleNamespace(name="NVIDIA GPU", total_memory=2**35, major=major, minor=minor)
    monkeypatch.setattr(doctor, "_has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    check = doctor._gpu()
    assert check.state == state
    assert said in check.found
    assert bool(check.remedy) == (state != "ok")


@pytest.mark.parametrize(
    ("script", "state", "said"),
    [
        ("echo '5, 16'", "ok", " GB free for --host-cache-gb, PCIe 5 x16"),
        ("exit 9", "warning", "non-zero exit status 9."),
    ],
    ids=["link", "nvidia-smi fails"],
)
def test_the_line_of_host_memory_has_the_link_of_the_gpu(
    script: str, state: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = doctor._host_memory()
    assert found.state == state
    assert found.found.endswith(said)
