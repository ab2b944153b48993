"""Resolve the name of a model, as the user gives it, to a local folder with a checkpoint.

The launcher calls `resolve_model` once, before it starts any worker, so that workers only read
local files. Nothing here loads torch.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from minisgl.core.errors import ConfigError

_GIB = 2**30
_CONFIG_FILES = ["*.json", "tokenizer*", "*.jinja", "vocab.*", "merges.txt"]
# Other formats of the same weights: original/, onnx/, gguf/ and Mistral's single file.
_OTHER_FORMATS = ["*/*", "consolidated*"]
_WEIGHTS = "*.safetensors"

# Checks the folder of a model before its weights are there. Raises ConfigError.
Check = Callable[[str], None]


def resolve_model(
    name: str,
    revision: str | None = None,
    weights: bool = True,
    check: Check = lambda folder: None,
) -> str:
    """Return the local folder of a model, given as a folder or as a Hugging Face hub id.

    weights: False accepts a folder without weights, and downloads only the configuration and the
    tokenizer. Random weights and `minisgl compile` need no more.
    check: called before weights are downloaded, with a folder that has the other files. It is also
    called for a folder without weights, so that a fault of the model is named first.

    A hub id is downloaded into the cache of huggingface_hub. The environment variables of that
    library (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, ...) keep their meaning.

    Raises ConfigError with one line if the model does not exist or cannot be used.
    """
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return _checked(path, name, weights, check)
        if path.exists():
            raise ConfigError(f"model {name} is a file; give the folder that holds config.json")
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise ConfigError(f"model folder {name} does not exist; give a folder or a hub id")
        if "/" not in name:
            raise ConfigError(
                f"there is no folder {name!r}, and a model of the Hugging Face hub has an owner, "
                "such as Qwen/Qwen3-8B; minisgl --help lists the commands"
            )
        folder = _download(name, revision, weights, check)
        return _checked(folder, name, weights, check)
    except PermissionError as error:
        folder = _forbidden_folder(Path(error.filename or name).absolute())
        raise ConfigError(
            f"model {name}: user {os.geteuid()} has no permission for the folder {folder}; this "
            "user needs read and execute permission for a model folder, and also write permission "
            "for the download cache (HF_HOME)"
        ) from None


def _checked(folder: Path, name: str, weights: bool, check: Check) -> str:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model {name} has no config.json; give a folder in Hugging Face's format"
        )
    if weights and not any(folder.glob(_WEIGHTS)):
        check(str(folder))
        other = sorted(path.name for path in folder.glob("*.bin"))
        found = f" (only {other[0]}, a format that can run code when read)" if other else ""
        raise ConfigError(
            f"model {name} has no *.safetensors file{found}; convert its weights to safetensors, "
            "or use random weights with --dummy-weight"
        )
    return str(folder)


def _forbidden_folder(path: Path) -> Path:
    """Return the folder that caused a permission error at `path`.

    The result is the outermost parent of `path` that this user may not enter. If that parent does
    not exist, the result is the folder in which the parent could not be created. If the user may
    enter every parent, the result is the direct parent of `path`, where the file could not be read
    or written.
    """
    for folder in reversed(path.parents):
        if not os.access(folder, os.X_OK, effective_ids=True):
            return folder if folder.exists() else folder.parent
    return path.parent


def _download(repo_id: str, revision: str | None, weights: bool, check: Check) -> Path:
    """Download configuration and tokenizer, check them and the disk, then download the weights."""
    from huggingface_hub import snapshot_download  # slow to import, not always needed

    from minisgl.utils.startup import Progress

    def fetch(revision: str | None, patterns: list[str]) -> Path:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_OTHER_FORMATS,
            tqdm_class=Progress,
        )
        return Path(folder)

    with _hub_errors(repo_id, revision):
        folder = fetch(revision, _CONFIG_FILES)
    if not weights:
        return folder
    commit = folder.name  # of the configuration: the branch may move before the weights are read
    if missing := _missing_bytes(repo_id, commit):
        check(str(folder))
        _check_disk(repo_id, folder, missing)
    with _hub_errors(repo_id, revision):
        return fetch(commit, [*_CONFIG_FILES, _WEIGHTS])


def _missing_bytes(repo_id: str, commit: str) -> int:
    """Return the bytes of weights that the cache lacks; 0 if the hub cannot be asked."""
    from huggingface_hub import errors, snapshot_download

    from minisgl.utils.startup import Progress

    try:
        with _hub_errors(repo_id, commit):
            files = snapshot_download(
                repo_id,
                revision=commit,
                allow_patterns=_WEIGHTS,
                ignore_patterns=_OTHER_FORMATS,
                tqdm_class=Progress,
                dry_run=True,
            )
    except errors.DryRunError:
        return 0  # The download succeeds if the cache is complete, and otherwise names the fault.
    return sum(file.file_size or 1 for file in files if file.will_download)


def _check_disk(repo_id: str, snapshot: Path, missing: int) -> None:
    """Raise ConfigError if the disk of the cache has no room for `missing` bytes of weights.

    snapshot: the folder of a commit in the cache, .../snapshots/COMMIT.
    """
    blobs = snapshot.parents[1] / "blobs"
    begun = sum(512 * path.stat().st_blocks for path in blobs.glob("*.incomplete"))
    free = shutil.disk_usage(snapshot).free
    if missing - begun > free:
        raise ConfigError(
            f"model {repo_id} has {missing / _GIB:.1f} GiB of weights to download, and the disk of "
            f"the cache {snapshot.parents[2]} has {free / _GIB:.1f} GiB free: free some space, or "
            "set HF_HOME to a folder on a larger disk"
        )


@contextlib.contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Convert the errors of huggingface_hub inside the block to ConfigErrors of one line.

    A DryRunError stays, and so does a PermissionError, for which `resolve_model` names the folder.
    """
    from huggingface_hub import errors

    try:
        yield
        return
    except errors.GatedRepoError:
        reason = "is gated: accept its terms on the hub and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision}"
    except errors.RepositoryNotFoundError:
        reason = "is neither a local folder nor on the hub (a private model needs HF_TOKEN)"
    except errors.HFValidationError:
        reason = "is neither a local folder nor a valid hub id (owner/name)"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = (
            "is not in the local cache, and the hub cannot be reached or is switched off; connect "
            "to the hub, or give a local folder"
        )
    except (errors.DryRunError, PermissionError):
        raise
    except (errors.RevisionResolutionError, errors.CorruptedCacheException, OSError) as error:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        reason = f"cannot be downloaded: {first_line}"
    raise ConfigError(f"model {repo_id} {reason}")
