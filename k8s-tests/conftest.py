"""Options, the cluster and its image once, a namespace for each module, and what failures leave."""

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

HERE = Path(__file__).parent
ROOT = HERE.parent
TEST_TIMEOUT_S = 1800  # fixtures included: an image may be built, a model loaded
CAPABILITIES = ("gpu", "networkpolicy", "metrics", "loadbalancer")
VERSIONS = pytest.StashKey[str]()
SPACES = pytest.StashKey[Spaces]()
SETTINGS = pytest.StashKey[Settings]()

Install = Callable[[Object], Release]


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("k8s-tests").addoption
    add("--provider", choices=("kind", "existing"), default="kind", help="whose cluster")
    add("--context", help="kubeconfig context of an existing cluster")
    add("--kubeconfig", help="kubeconfig file of an existing cluster; else KUBECONFIG")
    add("--cluster-name", default="minisgl-k8s-tests", help="name of kind's cluster")
    add("--reuse", action="store_true", help="take kind's cluster if it is there; leave it there")
    add("--keep-on-failure", action="store_true", help="leave what failed tests used")
    add("--artifacts", type=Path, default=ROOT / "build" / "k8s-artifacts", help="folder for logs")
    add("--image", default=CPU_IMAGE, help="image of the server, REPOSITORY:TAG")
    add("--skip-build", action="store_true", help="the image is there already")
    add("--load-command", help="loads into an existing cluster; {image}, {archive} are filled in")
    add("--registry", help="push the image there for an existing cluster")
    add("--gpu-image", help="image of the GPU build, for tests that need a GPU")
    add("--reach", choices=("auto", "clusterip", "forward"), default="auto", help="to Services")


def pytest_configure(config: pytest.Config) -> None:
    for name in CAPABILITIES:
        config.addinivalue_line("markers", f"{name}: needs a cluster that has it")
    names = Settings.__dataclass_fields__
    try:
        given = {name: config.getoption(f"--{name.replace('_', '-')}") for name in names}
        config.stash[SETTINGS] = Settings(**given)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_sessionstart(session: pytest.Session) -> None:
    keep = session.config.stash[SETTINGS].keep_on_failure
    session.config.stash[SPACES] = Spaces(lambda: session.testsfailed, keep)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failure is written down at once, while its namespace still is as it was."""
    report = yield
    if report.failed:
        folder = item.config.stash[SETTINGS].artifacts / re.sub(r"[^\w.-]+", "_", item.nodeid)
        for kube in item.config.stash[SPACES].live:
            report.sections.append(("artifacts", str(folder / kube.namespace)))
            try:
                dump_namespace(kube, folder / kube.namespace)
            except (ApiException, OSError) as error:  # the test's own failure is to be seen
                report.sections.append(("artifacts are not whole", str(error)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line(terminalreporter.config.stash.get(VERSIONS, "no cluster was used"))


@pytest.fixture(scope="session")
def settings(request: pytest.FixtureRequest) -> Settings:
    return request.config.stash[SETTINGS]


@pytest.fixture(scope="session")
def cluster(settings: Settings, request: pytest.FixtureRequest) -> Iterator[tuple[Kube, str]]:
    """The cluster with the image on it, and the image's name there."""
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
    """A namespace for one test alone."""
    with spaces.open(cluster[0], "single") as kube:
        yield kube


@pytest.fixture(scope="module")
def helm(namespace: Kube) -> Helm:
    return find_helm(namespace.access, namespace.namespace, run)


@pytest.fixture(scope="module")
def install(namespace: Kube, helm: Helm) -> Install:
    """Installs the chart with these values, and does not wait."""
    return lambda values: Release(namespace, helm, values).install()


@pytest.fixture(scope="module")
def client(namespace: Kube, image: str) -> ClientPod:
    return ClientPod(namespace, image)


@pytest.fixture
def web(release: Release, settings: Settings) -> Iterator[httpx.Client]:
    """HTTP from this machine to the Service of the module's release."""
    with reached(release, settings.reach) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield http


@pytest.fixture(scope="session")
def lacking(
    cluster: tuple[Kube, str], settings: Settings, spaces: Spaces
) -> Callable[[str], str | None]:
    """What the cluster lacks for a capability, found out once for each."""
    kube, name = cluster
    known: dict[str, str | None] = {}

    def probe(capability: str) -> str | None:
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
            known[capability] = probe(capability)
        return known[capability]

    return ask


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest) -> None:
    """Skips tests that are marked with what the cluster cannot do."""
    for name in CAPABILITIES:
        needed = request.node.get_closest_marker(name) is not None
        if needed and (why := request.getfixturevalue("lacking")(name)):
            pytest.skip(f"{name}: {why}")
