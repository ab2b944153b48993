"""A pod is deleted while it streams, and the scheduler of a pod is killed while it streams."""

import pytest
from k8s_harness.client import ClientPod, require_whole
from k8s_harness.kube import Kube
from k8s_harness.objects import Seen
from k8s_harness.release import NAME, Release
from k8s_harness.status import exit_of, is_ready, restarts
from k8s_harness.values import cpu
from k8s_harness.wait import recorded, wait_for

# Tokens per stream; all streams still run when the pod is deleted.
STREAMS = [1200 + 17 * n for n in range(8)]
# The server logs a line for each stream that is cut. Kubernetes keeps the last 2,048 bytes of the
# log as the termination message, and 20 such lines are longer than that.
KILLED_STREAMS = [1200] * 20
KILL = (
    "import os, pathlib, signal\n"
    "for folder in pathlib.Path('/proc').iterdir():\n"
    "    if folder.name.isdigit():\n"
    "        words = (folder / 'cmdline').read_bytes().split(b'\\0')\n"
    "        if b'scheduler' in words: os.kill(int(folder.name), signal.SIGKILL); print('killed')\n"
)


@pytest.fixture(scope="module")
def release(install, image) -> Release:
    return install(cpu(image)).wait_ready()


def test_pod_deleted_in_mid_stream_loses_nothing(
    release: Release, client: ClientPod, namespace: Kube
) -> None:
    """Clients do not retry. They get every token, finish reason "length", and no error."""
    pod = release.the_pod()
    with recorded(namespace, "Pod", release.selector) as recorder:
        with client.load(release.url, STREAMS) as load:
            load.wait_streaming()
            namespace.delete("Pod", pod)

            def draining(_: Seen) -> bool:
                return "draining open_requests=" in (namespace.logs(pod, NAME) or "")

            wait_for(namespace, "Pod", draining, "the drain", name=pod)
            assert f"draining open_requests={len(STREAMS)}" in (namespace.logs(pod, NAME) or "")
            assert load.ended() == [], "a stream ended before the deletion of the pod"
            ended = load.stop()
        require_whole(ended, len(STREAMS))
        seen = recorder.wait(lambda seen: pod in seen.gone, "the old pod's end")
    end = exit_of(seen.gone[pod], NAME)
    assert end is not None
    assert end.code == 0
    assert end.left_s >= 0, "the grace period was over before the server had ended"


def test_killed_scheduler_restarts_and_the_termination_message_has_the_cause(
    release: Release, client: ClientPod, namespace: Kube
) -> None:
    """The launcher writes the cause after the lines of the streams that it cuts."""
    pod = release.wait_ready().the_pod()
    with client.load(release.url, KILLED_STREAMS) as load:
        load.wait_streaming()
        status, output = namespace.execute(pod, "python3", "-c", KILL)
        assert (status, output.strip()) == (0, "killed")
        cut = load.stop()
    assert len(cut) == len(KILLED_STREAMS)
    assert all(call["error"] for call in cut), (
        "a stream of a killed scheduler ended without an error"
    )

    def restarted(seen: Seen) -> bool:
        return restarts(seen.objects[pod]) == 1 and is_ready(seen.objects[pod])

    wait_for(namespace, "Pod", restarted, "the second start", name=pod)
    (status_of,) = namespace.need("Pod", pod)["status"]["containerStatuses"]
    end = status_of["lastState"]["terminated"]
    assert end["exitCode"] == 1
    causes = [line for line in end["message"].splitlines() if "was killed by SIGKILL" in line]
    assert any("scheduler" in line for line in causes), end["message"]
    assert release.wait_endpoints(bool) == [pod]
    with client.load(release.url, [50, 60]) as load:
        require_whole(load.stop(), 2)
