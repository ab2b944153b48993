"""A client pod in the namespace of the server, with the same image.

Load from inside the cluster goes through the Service to all pods; a port-forward uses only one pod.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from k8s_harness.kube import Kube
from k8s_harness.objects import Object, Seen
from k8s_harness.status import is_ready
from k8s_harness.wait import wait_for

__all__ = ["ClientPod", "Load", "faults", "require_whole", "script_pod", "start_scripts"]

SCRIPTS = Path(__file__).parent / "incluster"
CLIENT = "client"
SLEEP = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); signal.pause()"
DEADLINE_S = 300.0
Event = dict[str, Any]


def script_pod(name: str, image: str, command: list[str], port: int | None = None) -> Object:
    """A pod that runs Python with the scripts at /scripts, under Pod Security "restricted"."""
    container: Object = {
        "name": name,
        "image": image,
        "command": ["python3", *command],
        "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if port is not None:
        container["readinessProbe"] = {"tcpSocket": {"port": port}, "periodSeconds": 1}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "containers": [container],
            "volumes": [{"name": "scripts", "configMap": {"name": "scripts"}}],
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        },
    }


def start_scripts(kube: Kube, *pods: Object) -> None:
    """Creates the ConfigMap of the scripts and these pods, and waits until the pods are ready."""
    if kube.get("ConfigMap", "scripts") is None:
        data = {path.name: path.read_text() for path in SCRIPTS.glob("*.py")}
        meta = {"name": "scripts"}
        kube.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data})
    for pod in pods:
        kube.create(pod)
        name = pod["metadata"]["name"]

        def ready(seen: Seen, name: str = name) -> bool:
            return name in seen.objects and is_ready(seen.objects[name])

        wait_for(kube, "Pod", ready, f"pod {name}", name=name, pods=f"app={name}")


class ClientPod:
    """Runs Python code and load from inside the namespace."""

    def __init__(self, kube: Kube, image: str) -> None:
        self.kube = kube
        start_scripts(kube, script_pod(CLIENT, image, ["-c", SLEEP]))

    def python(self, code: str) -> str:
        """Runs the code in the client pod and returns its output."""
        status, output = self.kube.execute(CLIENT, "python3", "-c", code)
        assert status == 0, output
        return output.strip()

    @contextmanager
    def load(
        self,
        url: str,
        tokens: list[int],
        *,
        repeat: bool = False,
        key: str | None = None,
        priority: int = 0,
    ) -> Iterator["Load"]:
        """Starts one stream for each number in `tokens`.

        Every second stream keeps its connection. With `repeat`, each stream starts again when it
        has ended, until `stop`; the end of the block calls `stop` too.
        """
        streams = [{"tokens": n, "keep_alive": bool(i % 2)} for i, n in enumerate(tokens)]
        config: Event = {"url": url, "key": key, "repeat": repeat, "streams": streams}
        config |= {"priority": priority}
        words = ("python3", "/scripts/streams.py", json.dumps(config))
        load = Load(self.kube.start(CLIENT, *words), len(streams))
        try:
            yield load
        finally:
            load.stop()


class Load:
    """Streams that run in the client pod, and the events that they have reported."""

    def __init__(self, session: Any, streams: int) -> None:
        self._session = session
        self._streams = streams
        self._heard = threading.Condition()
        self._events: list[Event] = []
        self._said = ""
        self._stopping = False
        self._over = False
        self._thread = threading.Thread(target=self._pump, name="load", daemon=True)
        self._thread.start()

    def ended(self) -> list[Event]:
        with self._heard:
            return [e for e in self._events if e["event"] == "end"]

    def wait(self, enough: Callable[[list[Event]], bool], goal: str) -> None:
        """Waits until `enough` is true of the events.

        Raises AssertionError if the client ends first, or after DEADLINE_S.
        """
        with self._heard:
            self._heard.wait_for(lambda: enough(self._events) or self._over, DEADLINE_S)
            assert enough(self._events), f"{goal} did not arrive: {self._said or self._events[-3:]}"

    def wait_streaming(self) -> None:
        """Waits until every stream has its first text."""

        def all_started(events: list[Event]) -> bool:
            return len({e["worker"] for e in events if e["event"] == "first"}) == self._streams

        self.wait(all_started, "the first texts")

    def wait_more(self, calls: int) -> None:
        """Waits until `calls` more calls have ended."""
        goal = len(self.ended()) + calls
        self.wait(lambda events: sum(e["event"] == "end" for e in events) >= goal, "more calls")

    def stop(self) -> list[Event]:
        """Starts no new call, waits for the running ones, and returns all calls that have ended."""
        self._stopping = True
        self._thread.join(DEADLINE_S)
        with self._heard:
            is_whole = bool(self._events) and self._events[-1]["event"] == "over"
            assert is_whole, f"the client did not end: {self._said or self._events[-3:]}"
        return self.ended()

    def _pump(self) -> None:
        session, rest, is_told = self._session, "", False
        while is_open := session.is_open():
            session.update(timeout=0.2)
            rest = self._lines(rest + (session.read_stdout() if session.peek_stdout() else ""))
            self._said += session.read_stderr() if session.peek_stderr() else ""
            if self._stopping and not is_told and is_open:
                session.write_stdin("stop\n")
                is_told = True
        with self._heard:
            self._over = True
            self._heard.notify_all()

    def _lines(self, text: str) -> str:
        """Stores the events of all complete lines and returns the incomplete rest."""
        *whole, rest = text.split("\n")
        with self._heard:
            self._events += [json.loads(line) for line in whole]
            self._heard.notify_all()
        return rest


def require_whole(calls: list[Event], count: int | None = None) -> None:
    """Raises AssertionError if a call is incomplete, or if there are not `count` calls."""
    wrong = faults(calls)
    assert not wrong, f"{len(wrong)} of {len(calls)} calls failed: {json.dumps(wrong, indent=1)}"
    assert count in (None, len(calls)), f"{len(calls)} calls ended, {count} were expected"


def faults(calls: list[Event]) -> list[Event]:
    """The incomplete calls. A complete call has status 200, every token, "length" and [DONE]."""
    return [
        call
        for call in calls
        if call["error"] is not None
        or call["status"] != 200
        or not call["done"]
        or call["finish"] != "length"
        or not call["tokens"] == call["usage"] == call["asked"]
    ]
