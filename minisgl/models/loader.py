"""Fill a model from safetensors, or with seeded random values.

Each rank reads only the parts that it keeps, one tensor at a time, so that the peak above the
weights themselves is one slice.
"""

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from minisgl.core import ConfigError
from minisgl.core.hub import read_json
from minisgl.layers import Placement, Sharded

logger = logging.getLogger(__name__)

_DUMMY_STD = 0.02  # the initialisation range of most checkpoints; keeps activations finite
_STORED_DTYPES = ("F64", "F32", "BF16", "F16")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def materialise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give a model built on the meta device zeroed parameters; padding relies on the zeros."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            zeros = torch.zeros(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))


def fill_random(model: nn.Module, seed: int = 0) -> None:
    """Seeded values: norms 1, biases 0, everything else normal.

    Each tensor of the checkpoint is drawn whole and cut: any number of ranks holds one model.
    """
    parameters = dict(model.named_parameters())
    for placement in placements_of(model):
        target = parameters[placement.target].data
        if placement.source.endswith("norm.weight"):
            target.fill_(1.0)
        elif not placement.source.endswith(".bias"):
            generator = torch.Generator(target.device)
            generator.manual_seed(seed + zlib.crc32(placement.source.encode()))
            whole = target.new_empty(placement.shape)
            whole.normal_(0.0, _DUMMY_STD, generator=generator)
            part = _cut(placement, whole)
            _part(target, placement, part).copy_(part)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # sizing of the KV pool looks at what the device has left


def placements_of(model: nn.Module) -> list[Placement]:
    """Where every parameter of the model comes from."""
    found: list[Placement] = []
    for name, module in model.named_modules(remove_duplicate=True):
        if isinstance(module, Sharded):
            found.extend(module.placements(name))
    return found


def load_weights(model: nn.Module, folder: str, *, show_progress: bool) -> None:
    """Read this rank's part of every tensor into a materialised model, converting to its dtype.

    Raises ConfigError that names a missing or unknown tensor, one of another shape or type, a head
    that is not the embedding to which the config ties it, or an unreadable file.
    The progress bar shows on a terminal only; TQDM_DISABLE=1 switches it off there too.
    """
    files, placements = _tensor_files(Path(folder)), placements_of(model)
    by_file: dict[Path, list[Placement]] = defaultdict(list)
    for placement in placements:
        if placement.source not in files:
            raise ConfigError(f"checkpoint {folder} has no tensor {placement.source}")
        by_file[files[placement.source]].append(placement)
    expected = {placement.source for placement in placements}
    unknown = sorted(name for name in files if name not in expected and not _harmless(name))
    if unknown:
        raise ConfigError(
            f"checkpoint {folder} has {len(unknown)} tensors that the model does not use, "
            f"such as {unknown[0]}"
        )
    parameters = dict(model.named_parameters())
    quiet = None if show_progress else True
    with tqdm(total=len(placements), desc="loading weights", unit="tensor", disable=quiet) as bar:
        for path in sorted(by_file):
            for placement, value in _read(path, by_file[path]):
                _part(parameters[placement.target], placement, value).copy_(value)
                bar.update()
    if _HEAD in files and _HEAD not in expected:
        (embedding,) = (placement for placement in placements if placement.source == _EMBEDDING)
        _check_head(files[_HEAD], embedding, parameters[embedding.target])
    logger.info("weights loaded files=%d tensors=%d", len(by_file), len(expected))


def _harmless(name: str) -> bool:
    """Tensors that carry nothing: rotary tables, and the head's copy of tied embeddings.

    An untied model expects lm_head.weight, so it only gets here where the embeddings are tied.
    """
    return name.endswith("rotary_emb.inv_freq") or name == _HEAD


def _check_head(path: Path, embedding: Placement, parameter: Tensor) -> None:
    """A head that is stored beside tied embeddings must be their copy."""
    for placement, value in _read(path, [embedding._replace(source=_HEAD)]):
        target = _part(parameter, placement, value)
        if not torch.equal(target.cpu(), value.to(target.dtype)):  # KV gets a GPU's memory
            raise ConfigError(
                f"{_HEAD} differs from {_EMBEDDING}, to which tie_word_embeddings in config.json "
                "ties it: one of the two is wrong"
            )


def _part(parameter: Tensor, placement: Placement, value: Tensor) -> Tensor:
    """Where in a parameter the value goes."""
    target = parameter.data if placement.expert is None else parameter.data[placement.expert]
    if placement.dim is not None:
        target = target.narrow(placement.dim, placement.offset, value.shape[placement.dim])
    return target


def _read(path: Path, placements: list[Placement]) -> Iterator[tuple[Placement, Tensor]]:
    """This rank's slices of one file, skipping those that are all padding."""
    with _open(path) as handle:
        for placement in placements:
            try:
                view = handle.get_slice(placement.source)
            except SafetensorError:
                raise ConfigError(f"{path} has no tensor {placement.source}") from None
            shape = tuple(view.get_shape())
            if shape != placement.shape:
                raise ConfigError(
                    f"tensor {placement.source} has shape {list(shape)}, "
                    f"the config asks for {list(placement.shape)}"
                )
            if (dtype := view.get_dtype()) not in _STORED_DTYPES:
                raise ConfigError(
                    f"tensor {placement.source} is of type {dtype}, which is not supported; "
                    f"supported: {', '.join(_STORED_DTYPES)}"
                )
            if placement.dim is None or placement.begin < placement.end:
                yield placement, _cut(placement, view)


def _cut(placement: Placement, source: Any) -> Tensor:
    """The part of a source, a tensor or a slice of a file, that this rank holds."""
    cut = slice(None) if placement.dim is None else slice(placement.begin, placement.end)
    part: Tensor = source[:, cut] if placement.dim == 1 else source[cut]
    return part


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: from the index where there is one, else from the files."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _indexed_files(index)
    whole = folder / "model.safetensors"
    owners: dict[str, Path] = {}
    for path in [whole] if whole.exists() else sorted(folder.glob("*.safetensors")):
        with _open(path) as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                if name in owners:
                    raise ConfigError(f"tensor {name} is in {owners[name].name} and {path.name}")
                owners[name] = path
    if not owners:
        raise ConfigError(f"{folder} has no *.safetensors file")
    return owners


def _indexed_files(index: Path) -> dict[str, Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ConfigError(f"{index} is not a usable index: it has no weight_map")
    owners = {str(tensor): index.parent / str(name) for tensor, name in names.items()}
    for path in sorted(set(owners.values())):
        if path.parent != index.parent or not path.exists():
            raise ConfigError(f"{index.name} names {path.name}, which is not in {index.parent}")
    return owners
