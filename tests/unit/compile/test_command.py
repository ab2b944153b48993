"""`minisgl compile` without a GPU: the errors that it reports. tests/gpu shows that it works."""

import sys
from pathlib import Path

import pytest

from minisgl.__main__ import main
from minisgl.build.cache import check_kernel_cache
from minisgl.compile.manifest import filling
from minisgl.utils.supervise import CONFIG_EXIT


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "9.0"], "needs --kernel-cache"),
        (["--kernel-cache", "x"], "this machine has no GPU: name an architecture"),
        (
            ["--kernel-cache", "x", "--arch", "8.0", "--kv-cache-dtype", "fp8"],
            "kv_cache_dtype fp8 needs --arch 8.9 or later, not 8.0",
        ),
        (["--model", "/nowhere"], "model folder /nowhere does not exist"),
    ],
)
def test_a_wrong_command_is_reported_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == CONFIG_EXIT
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("minisgl: error: ")]
    assert message in line


def test_a_folder_keeps_its_manifest_when_nothing_can_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with filling(tmp_path, [90], []):
        pass
    flags = ["--attn", "torch", "--arch", "9.0", "--kernel-cache", str(tmp_path)]
    assert main(["compile", *flags]) == CONFIG_EXIT
    assert "triton is not installed" in capsys.readouterr().err
    assert check_kernel_cache(tmp_path, 90, []) is None


@pytest.mark.parametrize("arch", ["9", "9.0a", "90"])
def test_a_malformed_architecture_is_a_usage_error(arch: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compile", "--arch", arch])
    assert ended.value.code == 2
