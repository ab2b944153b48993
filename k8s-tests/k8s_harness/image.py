"""Builds, saves and pushes the image of the server."""

from pathlib import Path

from k8s_harness.settings import Settings, SettingsError
from k8s_harness.shell import Run

__all__ = ["build", "push", "require_tag", "save"]

BUILD_TIMEOUT_S = 3000
COPY_TIMEOUT_S = 900


def require_tag(settings: Settings, root: Path) -> None:
    """Raises SettingsError if the tests build the image and its tag differs from that of
    --image.
    """
    tag, built = settings.image.rpartition(":")[2], made_tag(root)
    if not settings.skip_build and tag != built:
        raise SettingsError(
            f"`make image-cpu` gives the image the tag {built}, not {tag}: change --image, or pass "
            "--skip-build if the image exists"
        )


def build(settings: Settings, root: Path, run: Run) -> None:
    """Runs `make image-cpu`, unless --skip-build is given."""
    if settings.skip_build:
        return
    repository = settings.image.rpartition(":")[0]
    run("make", "-C", str(root), "image-cpu", f"IMAGE={repository}", timeout_s=BUILD_TIMEOUT_S)


def made_tag(root: Path) -> str:
    """The tag that `make image-cpu` gives the image: the version of the package."""
    text = (root / "minisgl" / "__init__.py").read_text()
    version = text.partition('__version__ = "')[2].partition('"')[0]
    return f"{version}-cpu"


def save(image: str, folder: Path, run: Run) -> Path:
    """Writes the image to an archive that containerd can import, and returns its path."""
    archive = folder / "image.tar"
    run("docker", "save", "--output", str(archive), image, timeout_s=COPY_TIMEOUT_S)
    return archive


def push(image: str, registry: str, run: Run) -> str:
    """Pushes the image and returns the name that nodes pull."""
    name = image.rpartition("/")[2]
    there = f"{registry.rstrip('/')}/{name}"
    run("docker", "tag", image, there)
    run("docker", "push", there, timeout_s=COPY_TIMEOUT_S)
    return there
