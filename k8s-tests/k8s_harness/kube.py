"""The Kubernetes API as plain JSON, over the connection of the official client.

Plain JSON lets the unit tests replay recorded responses.
"""

import copy
import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import kubernetes.client
import kubernetes.config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.stream import portforward, stream
from urllib3.exceptions import HTTPError

from k8s_harness.objects import Object, Seen
from k8s_harness.providers import Access, ProviderError

__all__ = ["ApiException", "Kube"]

_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_MERGE = "application/merge-patch+json"
_GONE = 410  # the version to watch from is too old, so the objects must be listed again
_TICK_S = 1


class _Resource(NamedTuple):
    root: str  # "/api/v1", "/apis/apps/v1"
    plural: str
    namespaced: bool
    verbs: tuple[str, ...]


class Kube:
    """A client of one cluster and one namespace. `within` returns a client of another namespace."""

    def __init__(self, access: Access, namespace: str = "default") -> None:
        self.access = access
        self.namespace = namespace
        self._api = self._client()

    @classmethod
    def connect(cls, access: Access) -> "Kube":
        """A client of an API server that answers. Raises ProviderError with a one-line reason."""
        try:
            kube = cls(access)
            kube._json("GET", "/version")
        except ConfigException as error:
            raise ProviderError(
                f"the kubeconfig has no usable context {access.context!r} ({error}): choose one "
                "that `kubectl config get-contexts` lists"
            ) from error
        except ApiException as error:
            raise ProviderError(
                f"the API server of context {access.context!r} refuses requests: {error.status} "
                f"{error.reason}"
            ) from error
        except HTTPError as error:
            raise ProviderError(
                f"the API server of context {access.context!r} does not answer: {error}"
            ) from error
        return kube

    def within(self, namespace: str) -> "Kube":
        other = copy.copy(self)
        other.namespace = namespace
        return other

    @cached_property
    def version(self) -> str:
        return str(self._json("GET", "/version")["gitVersion"])

    @cached_property
    def resources(self) -> dict[str, _Resource]:
        """The resources by "APIVERSION/KIND" and by KIND.

        KIND alone stands for the preferred version of the first API group that has this kind.
        """
        found: dict[str, _Resource] = {}
        for root in ("/api", "/apis"):
            for group in self._json("GET", root, accept=_DISCOVERY)["items"]:
                name = group["metadata"].get("name")
                for version in group["versions"]:
                    api = f"{name}/{version['version']}" if name else version["version"]
                    for r in version.get("resources", []):
                        namespaced = r["scope"] == "Namespaced"
                        kind = r["responseKind"]["kind"]
                        verbs = tuple(r["verbs"])
                        one = _Resource(f"{root}/{api}", r["resource"], namespaced, verbs)
                        found[f"{api}/{kind}"] = one
                        found.setdefault(kind, one)
        return found

    def serves(self, api_version: str, kind: str) -> bool:
        return f"{api_version}/{kind}" in self.resources

    def all(self, kind: str, selector: str = "", name: str = "") -> list[Object]:
        return self._list(kind, selector, name)[0]

    def get(self, kind: str, name: str) -> Object | None:
        """The object, or None if it does not exist."""
        try:
            found: Object = self._json("GET", self._path(kind, name))
        except ApiException as error:
            if error.status == 404:
                return None
            raise
        return found

    def need(self, kind: str, name: str) -> Object:
        found = self.get(kind, name)
        assert found is not None, f"no {kind} {name} in {self.namespace}"
        return found

    def create(self, body: Object) -> Object:
        made: Object = self._json("POST", self._path(body["kind"]), body=body)
        return made

    def patch(self, kind: str, name: str, body: Object, part: str = "") -> Object:
        """Sends a merge patch. part: a subresource, for example "scale"."""
        path = self._path(kind, name, part)
        patched: Object = self._json("PATCH", path, body=body, content_type=_MERGE)
        return patched

    def delete(self, kind: str, name: str, grace_s: int | None = None) -> None:
        """Starts the deletion of an object. A missing object is no error.

        grace_s: grace period in seconds; None: the object's own.
        """
        query = [] if grace_s is None else [("gracePeriodSeconds", str(grace_s))]
        try:
            self._json("DELETE", self._path(kind, name), query)
        except ApiException as error:
            if error.status != 404:
                raise

    def evict(self, pod: str) -> int:
        """Evicts the pod; returns 201, or 429 if a PodDisruptionBudget forbids it."""
        meta = {"name": pod, "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
        try:
            self._json("POST", self._path("Pod", pod, "eviction"), body=body)
        except ApiException as error:
            return int(error.status)
        return 201

    def everything(self) -> Iterator[tuple[str, Object]]:
        """Yields kind and object of every object in the namespace."""
        for kind, r in self.resources.items():
            if "/" not in kind and r.namespaced and "list" in r.verbs:
                for item in self.all(kind):
                    yield kind, item

    def follow(self, kind: str, selector: str = "", name: str = "") -> Iterator[Seen]:
        """Yields the current state at once, after each change and about once a second, forever."""
        seen = Seen()
        while True:
            items, version = self._list(kind, selector, name)
            seen.listed(items)
            yield seen
            while version:
                for event in self._watch(kind, selector, name, version):
                    item = event["object"]
                    if event["type"] == "ERROR":
                        if item.get("code") != _GONE:
                            raise ApiException(item.get("code"), item.get("message"))
                        version = ""
                        break
                    seen.changed(event["type"], item)
                    version = item["metadata"]["resourceVersion"]
                    yield seen
                else:
                    yield seen

    def logs(self, pod: str, container: str, previous: bool = False) -> str | None:
        """The log of a container, or None if there is none."""
        query = [("container", container), ("previous", str(previous).lower())]
        try:
            answer = self._call("GET", self._path("Pod", pod, "log"), query)
        except ApiException:
            return None
        return str(answer.read().decode(errors="replace"))

    def probe(self, pod: str, path: str) -> tuple[int, str]:
        """Sends a GET request to a pod through the API server. Returns status and text.

        The status is 0 if the pod does not answer. The API server does not forward an
        Authorization header.
        """
        try:
            answer = self._call("GET", self._path("Pod", f"{pod}:1919", "proxy") + path)
        except ApiException as error:
            # The API server's own error for a pod that does not answer lacks this header.
            is_ours = (error.headers or {}).get("x-request-id") is not None
            return int(error.status) if is_ours else 0, str(error.body)
        return answer.status, answer.read().decode()

    def execute(self, pod: str, *words: str) -> tuple[int, str]:
        """Runs a command in a pod. Returns its exit code and output."""
        session = self.start(pod, *words)
        session.run_forever(timeout=120)
        output = session.read_stdout() + session.read_stderr()
        return int(session.returncode), output

    def start(self, pod: str, *words: str) -> Any:
        """Starts a command with stdin in a pod. Returns a WSClient with its own connection."""
        core = kubernetes.client.CoreV1Api(self._client())
        return stream(
            core.connect_get_namespaced_pod_exec,
            pod,
            self.namespace,
            command=[*words],
            stdin=True,
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )

    def forward(self, pod: str, port: int) -> Any:
        """Opens a socket to a port of a pod."""
        core = kubernetes.client.CoreV1Api(self._client())
        opened = portforward(
            core.connect_get_namespaced_pod_portforward, pod, self.namespace, ports=str(port)
        )
        return opened.socket(port)

    def _client(self) -> Any:
        return kubernetes.config.new_client_from_config(
            config_file=self.access.kubeconfig, context=self.access.context
        )

    def _path(self, kind: str, name: str = "", part: str = "") -> str:
        r = self.resources[kind]
        folder = f"{r.root}/namespaces/{self.namespace}" if r.namespaced else r.root
        return "/".join(word for word in (folder, r.plural, name, part) if word)

    def _list(self, kind: str, selector: str, name: str) -> tuple[list[Object], str]:
        query = _query(selector, name)
        found = self._json("GET", self._path(kind), query)
        shared = {"kind": found["kind"].removesuffix("List"), "apiVersion": found["apiVersion"]}
        items = [{**shared, **item} for item in found["items"]]
        return items, found["metadata"]["resourceVersion"]

    def _watch(self, kind: str, selector: str, name: str, version: str) -> Iterator[Object]:
        query = [("watch", "true"), ("resourceVersion", version), ("timeoutSeconds", str(_TICK_S))]
        answer = self._call("GET", self._path(kind), query + _query(selector, name))
        for line in answer:
            yield json.loads(line)

    def _json(self, method: str, path: str, *rest: Any, **more: Any) -> Any:
        return json.loads(self._call(method, path, *rest, **more).read())

    def _call(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        accept: str = "application/json, */*",
    ) -> Any:
        headers = {"Accept": accept, "Content-Type": content_type}
        query = list(query or [])
        self._api.update_params_for_auth(headers, query, ["BearerToken"])
        return self._api.rest_client.request(
            method,
            self._api.configuration.host + path,
            query_params=query,
            headers=headers,
            body=body,
            _preload_content=False,
            _request_timeout=(10, 90),
        )


def _query(selector: str, name: str) -> list[tuple[str, str]]:
    query = [("labelSelector", selector)] if selector else []
    return [*query, ("fieldSelector", f"metadata.name={name}")] if name else query
