"""Access to a Service from this machine: by ClusterIP if that is routed, else by port-forward."""

import contextlib
import http.client
import itertools
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from k8s_harness.kube import ApiException, Kube
from k8s_harness.release import NAME, Release

__all__ = ["reached"]

PORT = 1919
ROUTED_S = 2.0  # a routed ClusterIP answers much faster


@contextmanager
def reached(release: Release, how: str) -> Iterator[str]:
    """Yields a base URL. how: "clusterip", "forward", or "auto", which tries ClusterIP first."""
    address = release.kube.need("Service", NAME)["spec"]["clusterIP"]
    if how == "clusterip" or (how == "auto" and answers(address)):
        yield f"http://{address}:{PORT}"
        return
    with _Forwarder(release) as forwarder:
        threading.Thread(target=forwarder.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{forwarder.server_address[1]}"
        forwarder.shutdown()


def answers(address: str) -> bool:
    """Whether a minisgl server answers at the address. Other servers lack its build metric."""
    connection = http.client.HTTPConnection(address, PORT, timeout=ROUTED_S)
    try:
        connection.request("GET", "/metrics")
        return b"minisgl_build_info" in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _Forwarder(socketserver.ThreadingTCPServer):
    """A loopback port that forwards each connection to the next ready pod of the release."""

    daemon_threads = True

    def __init__(self, release: Release) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self._release = release
        self._turn = itertools.count()

    def open_pod(self) -> socket.socket:
        ready = self._release.ready_pods()
        if not ready:
            raise ConnectionRefusedError("no pod is ready")
        kube: Kube = self._release.kube
        opened: socket.socket = kube.forward(ready[next(self._turn) % len(ready)], PORT)
        return opened


class _Connection(socketserver.BaseRequestHandler):
    server: _Forwarder

    def handle(self) -> None:
        try:
            pod = self.server.open_pod()
        except (OSError, ApiException):
            return  # the client sees a closed connection
        back = threading.Thread(target=_copy, args=(pod, self.request), daemon=True)
        back.start()
        _copy(self.request, pod)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies until the source ends, then ends the sending half of the target."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
