"""Options and fixtures of the cluster tests.

One cluster and one image serve the whole run. Each module has a namespace. A failed test leaves the
events, objects and logs of its namespaces in the artifacts folder.
"""

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from k8s_harness import capabilities
from k8s_harness import image as images
from k8s_harness.client import ClientPod
from k8s_harness.dump import dump_namespace
from k8s_harness.helm import Helm, HelmMissing, find_helm
from k8s_harness.kube import ApiException, Kube
from k8s_harness.objects import Object
from k8s_harness.providers import ProviderError, provider_for
from k8s_harness.reach import reached
from k8s_harness.release import Release
from k8s_harness.settings import CPU_IMAGE, Settings, SettingsError
from k8s_harness.shell import CommandFailed, run
from k8s_harness.spaces import Spaces

from tests.hang_guard import HangGuard, HangLimits

HERE = Path(__file__).parent
ROOT = HERE.parent
# The cluster works outside the processes of a test. The time includes fixtures, which may build an
# image and load a model.
LIMITS = HangLimits(idle_s=1800.0, total_s=1800.0)
CAPABILITIES = ("gpu", "networkpolicy", "metrics", "loadbalancer")
VERSIONS = pytest.StashKey[str]()
SPACES = pytest.StashKey[Spaces]()
SETTINGS = pytest.StashKey[Settings]()

Install = Callable[[Object], Release]


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("k8s-tests").addoption
    add(
        "--provider",
        choices=("kind", "existing"),
        default="kind",
        help="create a kind cluster, or use an existing cluster",
    )
    add("--context", help="kubeconfig context of an existing cluster")
    add("--kubeconfig", help="kubeconfig file of an existing cluster; default: KUBECONFIG")
    add("--cluster-name", default="minisgl-k8s-tests", help="name of the kind cluster")
    add("--reuse", action="store_true", help="use the kind cluster if it exists, and keep it")
    add("--keep-on-failure", action="store_true", help="keep the namespaces of failed tests")
    add("--artifacts", type=Path, default=ROOT / "build" / "k8s-artifacts", help="folder for logs")
    add("--image", default=CPU_IMAGE, help="image of the server, REPOSITORY:TAG")
    add("--skip-build", action="store_true", help="do not build the image")
    add("--load-command", help="command with {image} or {archive} that loads the image")
    add("--registry", help="push the image to this registry")
    add("--gpu-image", help="image of the GPU build, for tests that need a GPU")
    add(
        "--reach",
        choices=("auto", "clusterip", "forward"),
        default="auto",
        help="access to Services",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in CAPABILITIES:
        config.addinivalue_line("markers", f"{name}: needs a cluster with this feature")
    names = Settings.__dataclass_fields__
    try:
        given = {name: config.getoption(f"--{name.replace('_', '-')}") for name in names}
        config.stash[SETTINGS] = Settings(**given)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from error
    if not config.pluginmanager.has_plugin(HangGuard.__name__):
        config.pluginmanager.register(HangGuard(lambda item: LIMITS), HangGuard.__name__)


def pytest_sessionstart(session: pytest.Session) -> None:
    keep = session.config.stash[SETTINGS].keep_on_failure
    session.config.stash[SPACES] = Spaces(lambda: session.testsfailed, keep)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Dumps the namespaces of a failed test at once, before they change."""
    report = yield
    if report.failed:
        folder = item.config.stash[SETTINGS].artifacts / re.sub(r"[^\w.-]+", "_", item.nodeid)
        for kube in item.config.stash[SPACES].live:
            report.sections.append(("artifacts", str(folder / kube.namespace)))
            try:
                dump_namespace(kube, folder / kube.namespace)
            except (ApiException, OSError) as error:  # report the failure of the test first
                report.sections.append(("artifacts are incomplete", str(error)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line(terminalreporter.config.stash.get(VERSIONS, "no cluster was used"))


@pytest.fixture(scope="session")
def settings(request: pytest.FixtureRequest) -> Settings:
    return request.config.stash[SETTINGS]


@pytest.fixture(scope="session")
def cluster(settings: Settings, request: pytest.FixtureRequest) -> Iterator[tuple[Kube, str]]:
    """The cluster, and the name of the image that its nodes can use."""
    with tempfile.TemporaryDirectory(prefix="minisgl-k8s-") as folder:
        provider = provider_for(settings, Path(folder), HERE / "kind.yaml", run)
        failed_before = request.session.testsfailed
        try:
            images.require_tag(settings, ROOT)
            access = provider.ensure()
            kube = Kube.connect(access)  # before the build, which takes minutes
            images.build(settings, ROOT, run)
            name = provider.load_image(settings.image)
            helm = find_helm(access, "default", run).version
            request.config.stash[VERSIONS] = f"Kubernetes {kube.version}, Helm {helm}, {name}"
            yield kube, name
        except (ProviderError, CommandFailed, SettingsError, HelmMissing) as error:
            pytest.exit(str(error), returncode=1)
        finally:
            provider.teardown(failed=request.session.testsfailed > failed_before)


@pytest.fixture(scope="session")
def image(cluster: tuple[Kube, str]) -> str:
    return cluster[1]


@pytest.fixture(scope="session")
def spaces(request: pytest.FixtureRequest) -> Spaces:
    return request.config.stash[SPACES]


@pytest.fixture(scope="module")
def namespace(
    cluster: tuple[Kube, str], spaces: Spaces, request: pytest.FixtureRequest
) -> Iterator[Kube]:
    word = request.path.stem.removeprefix("test_").replace("_", "-")
    with spaces.open(cluster[0], word) as kube:
        yield kube


@pytest.fixture
def empty(cluster: tuple[Kube, str], spaces: Spaces) -> Iterator[Kube]:
    """A namespace for a single test."""
    with spaces.open(cluster[0], "single") as kube:
        yield kube


@pytest.fixture(scope="module")
def helm(namespace: Kube) -> Helm:
    return find_helm(namespace.access, namespace.namespace, run)


@pytest.fixture(scope="module")
def install(namespace: Kube, helm: Helm) -> Install:
    """Installs the chart with the given values, without waiting."""
    return lambda values: Release(namespace, helm, values).install()


@pytest.fixture(scope="module")
def client(namespace: Kube, image: str) -> ClientPod:
    return ClientPod(namespace, image)


@pytest.fixture
def web(release: Release, settings: Settings) -> Iterator[httpx.Client]:
    """An HTTP client on this machine for the Service of the module's release."""
    with reached(release, settings.reach) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.fixture(scope="session")
def lacking(
    cluster: tuple[Kube, str], settings: Settings, spaces: Spaces
) -> Callable[[str], str | None]:
    """lacking(CAPABILITY) returns the missing part of the cluster, or None. Checks each once."""
    kube, name = cluster
    known: dict[str, str | None] = {}

    def check(capability: str) -> str | None:
        if capability == "gpu":
            return capabilities.gpu(kube, settings.gpu_image)
        if capability == "metrics":
            return capabilities.metrics(kube)
        with spaces.open(kube, "probe") as scratch:
            if capability == "loadbalancer":
                return capabilities.loadbalancer(scratch)
            return capabilities.networkpolicy(scratch, name)

    def ask(capability: str) -> str | None:
        if capability not in known:
            known[capability] = check(capability)
        return known[capability]

    return ask


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    """Skips a test whose marker names a capability that the cluster lacks."""
    for name in CAPABILITIES:
        needed = request.node.get_closest_marker(name) is not None
        if needed and (why := request.getfixturevalue("lacking")(name)):
            pytest.skip(f"{name}: {why}")
