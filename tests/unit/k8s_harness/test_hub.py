"""The substitute for the hub serves the hub's own client."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from k8s_harness.client import SCRIPTS

from minisgl.demo import model_path

FETCH = (
    "import sys\n"
    "from minisgl.settings.hub import resolve_model\n"
    "print(resolve_model('owner/demo', None))\n"
)


def test_a_model_is_downloaded_once_and_then_cached(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPTS / "hub.py", "0"]
    hub = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert hub.stdout is not None
    url = f"http://127.0.0.1:{hub.stdout.readline().strip()}"
    offline = {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    environment = {**os.environ, **offline, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
    try:
        for _ in range(2):
            fetch = [sys.executable, "-c", FETCH]
            done = subprocess.run(fetch, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip().splitlines()[-1])
        assert folder.is_relative_to(tmp_path)
        wanted = (model_path() / "model.safetensors").read_bytes()
        assert (folder / "model.safetensors").read_bytes() == wanted
        with urllib.request.urlopen(f"{url}/fetched") as answer:
            fetched = json.loads(answer.read())
        assert fetched.count("model.safetensors") == 1
        assert len(fetched) == len(set(fetched))
    finally:
        hub.kill()
        hub.communicate()
