"""The image of the server: built, saved, pushed."""

from pathlib import Path

from k8s_harness.settings import Settings, SettingsError
from k8s_harness.shell import Run

__all__ = ["build", "push", "save"]

BUILD_TIMEOUT_S = 3000
COPY_TIMEOUT_S = 900


def build(settings: Settings, root: Path, run: Run) -> None:
    """`make image-cpu`, unless --skip-build."""
    if settings.skip_build:
        return
    repository, _, tag = settings.image.rpartition(":")
    built = made_tag(root)
    if tag != built:
        raise SettingsError(f"`make image-cpu` gives the tag {built}: --skip-build for {tag}")
    run("make", "-C", str(root), "image-cpu", f"IMAGE={repository}", timeout_s=BUILD_TIMEOUT_S)


def made_tag(root: Path) -> str:
    """The tag that `make image-cpu` gives: the package's version."""
    text = (root / "minisgl" / "__init__.py").read_text()
    version = text.partition('__version__ = "')[2].partition('"')[0]
    return f"{version}-cpu"


def save(image: str, folder: Path, run: Run) -> Path:
    """The image as an archive that containerd can import."""
    archive = folder / "image.tar"
    run("docker", "save", "--output", str(archive), image, timeout_s=COPY_TIMEOUT_S)
    return archive


def push(image: str, registry: str, run: Run) -> str:
    """Push `image` and return the name by which nodes pull it."""
    name = image.rpartition("/")[2]
    there = f"{registry.rstrip('/')}/{name}"
    run("docker", "tag", image, there)
    run("docker", "push", there, timeout_s=COPY_TIMEOUT_S)
    return there
