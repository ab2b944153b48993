"""One pod that is deleted in mid-stream, and one whose scheduler is killed."""

import pytest
from k8s_harness.client import ClientPod, require_whole
from k8s_harness.kube import Kube
from k8s_harness.objects import Seen
from k8s_harness.release import NAME, Release
from k8s_harness.status import exit_of, is_ready, restarts
from k8s_harness.values import cpu
from k8s_harness.wait import recorded, wait_for

STREAMS = [1200 + 17 * n for n in range(8)]  # long enough to be running when the pod is asked to go
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
    """Clients do not retry, and get every token, the right reason, and no error."""
    pod = release.the_pod()
    with recorded(namespace, "Pod", release.selector) as recorder:
        with client.load(release.url, STREAMS) as load:
            load.wait_streaming()
            namespace.delete("Pod", pod)

            def draining(_: Seen) -> bool:
                return "draining open_requests=" in (namespace.logs(pod, NAME) or "")

            wait_for(namespace, "Pod", draining, "the drain", name=pod)
            assert f"draining open_requests={len(STREAMS)}" in (namespace.logs(pod, NAME) or "")
            assert load.ended() == [], "a stream had ended before the pod was asked to go"
            ended = load.stop()
        require_whole(ended, len(STREAMS))
        seen = recorder.wait(lambda seen: pod in seen.gone, "the old pod's end")
    end = exit_of(seen.gone[pod], NAME)
    assert end is not None
    assert end.code == 0
    assert end.left_s >= 0, "SIGKILL came first"


def test_killed_scheduler_is_started_anew_and_serves_again(
    release: Release, client: ClientPod, namespace: Kube
) -> None:
    pod = release.wait_ready().the_pod()
    with client.load(release.url, [2000]) as load:
        load.wait_streaming()
        status, output = namespace.execute(pod, "python3", "-c", KILL)
        assert (status, output.strip()) == (0, "killed")
        (cut,) = load.stop()
    assert cut["error"], "the stream of a dead scheduler does not end as if it were whole"

    def again(seen: Seen) -> bool:
        return restarts(seen.objects[pod]) == 1 and is_ready(seen.objects[pod])

    wait_for(namespace, "Pod", again, "the second start", name=pod)
    (status_of,) = namespace.need("Pod", pod)["status"]["containerStatuses"]
    end = status_of["lastState"]["terminated"]
    assert end["exitCode"] == 1
    assert "scheduler" in end["message"], "the termination message names what died"
    assert release.wait_endpoints(bool) == [pod]
    with client.load(release.url, [50, 60]) as load:
        require_whole(load.stop(), 2)
