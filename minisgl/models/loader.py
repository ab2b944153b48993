"""Fill a model from safetensors files, or with seeded random values.

Each rank reads only the parts that it keeps, one tensor at a time. The peak memory use is therefore
the size of the weights plus one slice.
"""

import logging
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.core.files import read_json
from minisgl.layers.linear import LinearMethod
from minisgl.layers.shards import Placement, Sharded
from minisgl.models.decoder import CausalLM
from minisgl.models.encoder import ENCODER_TENSORS
from minisgl.models.encoder_spec import encoder_name
from minisgl.models.text_part import TEXT_PREFIXES
from minisgl.moe.block import MoeBlock
from minisgl.moe.experts import ExpertsMethod
from minisgl.utils.startup import Progress

logger = logging.getLogger(__name__)

_DUMMY_STD = 0.02  # the initialisation range of most checkpoints; keeps activations finite
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DRAFTS = "mtp."  # the beginning of the names of a draft head's tensors
_ROTARY_TABLE = "rotary_emb.inv_freq"  # the ending of tensors that are computed and not loaded


def materialise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace the parameters of a model built on the meta device by zeros on `device`.

    Modules with chooses_dtypes, such as the methods of linears and experts, choose the dtypes of
    their parameters. All other parameters get `dtype`. Modules with `initial`, such as norms
    without weights, get parameters of this value. A parameter that two modules share stays shared.
    Padding stays zero, because the loader never writes it.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in allocated:
                chosen = getattr(module, "chooses_dtypes", False)
                stored = parameter.dtype if chosen else dtype
                first = getattr(module, "initial", 0.0)
                values = torch.full(parameter.shape, first, dtype=stored, device=device)
                allocated[parameter] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, allocated[parameter])


def fill_random(model: CausalLM, *, show_progress: bool = False) -> None:
    """Fill with seeded values: norms with 1, biases with 0, and all else from a normal
    distribution, unless the placement gives a constant. The biases of gpt-oss's experts are drawn
    too. Packed weights get random bits.

    Each tensor of the checkpoint is drawn whole and then cut, so that the model does not depend on
    the number of ranks.
    """
    parameters = dict(model.named_parameters())
    quiet = not show_progress
    for placement in Progress(placements_of(model), desc="drawing random weights", disable=quiet):
        _draw(parameters[placement.target], placement)
    _free_temporaries()


def _draw(target: Tensor, placement: Placement) -> None:
    """Draw one tensor of the checkpoint. No variable of the caller keeps it.

    The last one can have GiB. A GPU that still held it would fill it with later tensors.
    """
    if placement.target.endswith("norm.weight"):
        placement = placement._replace(constant=1.0)
    if placement.constant is not None or not placement.source.endswith(".bias"):
        _write(target, placement, _cut(placement, _random(placement, target)))


def _random(placement: Placement, target: Tensor) -> Tensor:
    """Return the whole source of a placement, with random values or its constant."""
    packed = {"U8": torch.uint8, "I32": torch.int32}.get(placement.stored[0])
    # torch draws no normal numbers in 8-bit types; copy_ converts them.
    dtype = packed or (target.dtype if target.dtype.itemsize > 1 else torch.float32)
    whole = target.new_empty(placement.shape, dtype=dtype)
    if placement.constant is not None:
        return whole.fill_(placement.constant)
    generator = torch.Generator(target.device)
    generator.manual_seed(zlib.crc32(placement.source.encode()))
    if packed is not None:
        info = torch.iinfo(packed)
        return whole.random_(info.min, info.max + 1, generator=generator)
    return whole.normal_(0.0, _DUMMY_STD, generator=generator)


def finish(model: nn.Module) -> None:
    """Let the methods arrange their loaded parameters. Raises ConfigError."""
    for module in model.modules():
        if isinstance(module, LinearMethod | ExpertsMethod | MoeBlock):
            module.finish()
    _free_temporaries()


def _free_temporaries() -> None:
    """Give the memory of conversions back to a GPU's driver.

    The engine sizes the KV pool by the memory that the device has left.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def placements_of(model: CausalLM) -> list[Placement]:
    """Return the placements of all parameters of the model, by the names of its checkpoint.

    If two modules share a parameter, the first of the two modules places it.
    """
    parameters, stored = dict(model.named_parameters()), model.config.stored_name
    return [
        placement._replace(source=stored(placement.source))
        for name, module in model.named_modules()
        if isinstance(module, Sharded)
        for placement in module.placements(name)
        if placement.target in parameters
    ]


def load_weights(
    model: CausalLM,
    folder: str,
    *,
    unused: tuple[str, ...] = (),
    show_progress: bool = False,
    headers_only: bool = False,
) -> None:
    """Read this rank's part of every tensor into a materialised model, in the parameters' dtypes.

    unused: endings of the names of tensors that the loader may ignore, and beginnings that end with
    a dot.
    headers_only: check files, names, shapes and types, and return without reading any value. The
    model may then be on the meta device.

    Raises ConfigError for an unreadable file, and for a tensor that is missing, that the model does
    not use, or that has another shape or type. Also raises it for a stored head that differs from
    the embedding although the config ties the two.
    """
    files, placements = _tensor_files(Path(folder)), placements_of(model)
    beside = [_DRAFTS]
    if any(placement.source.startswith(ENCODER_TENSORS) for placement in placements):
        beside += ENCODER_TENSORS
    stored = text_tensors(files, tuple(beside))
    by_file: dict[Path, list[Placement]] = defaultdict(list)
    for i, placement in enumerate(placements):
        if placement.source not in stored and placement.fused is not None:
            placements[i] = placement = placement.in_fused
        if placement.source not in stored:
            raise ConfigError(f"checkpoint {folder} has no tensor {placement.source}")
        source = stored[placement.source]
        by_file[files[source]].append(placement._replace(source=source))
    expected = {placement.source for placement in placements}
    surplus = sorted(stored.keys() - expected)
    # The head is unexpected only if it is a copy of tied embeddings, which is checked below.
    others, endings = [name for name in surplus if name != _HEAD], (*unused, _ROTARY_TABLE)
    beginnings = tuple(part for part in unused if part.endswith("."))
    others = [name for name in others if not name.startswith(beginnings)]
    if unknown := [name for name in others if not name.endswith(endings)]:
        raise ConfigError(
            f"checkpoint {folder} has {len(unknown)} tensors that the model does not use, "
            f"such as {unknown[0]}"
        )
    for path, placed in by_file.items():
        with _open(path) as handle:
            for placement in placed:
                _view(handle, path, placement)
    if headers_only:
        return
    parameters = dict(model.named_parameters())
    quiet = not show_progress
    with Progress(total=len(placements), desc="loading weights", disable=quiet) as bar:
        for path in sorted(by_file):
            for placement, value in _read(path, by_file[path]):
                _write(parameters[placement.target], placement, value)
                bar.update()
    if _HEAD in surplus:
        (embedding,) = (placement for placement in placements if placement.target == _EMBEDDING)
        head = embedding._replace(source=stored[_HEAD])
        _check_head(files[head.source], head, parameters[embedding.target])
    _free_temporaries()
    if surplus:
        logger.info("tensors not used count=%d such_as=%s", len(surplus), surplus[0])
    logger.info("weights loaded files=%d tensors=%d", len(by_file), len(expected))


def has_draft_head(folder: str) -> bool:
    """Return whether a checkpoint has the tensors of a draft head. Raises ConfigError.

    True for a folder without weights: they are not downloaded yet.
    """
    path = Path(folder)
    if not any(path.glob("*.safetensors*")):
        return True
    return any(name.startswith(_DRAFTS) for name in _tensor_files(path))


def text_tensors(names: Iterable[str], beside: tuple[str, ...] = (_DRAFTS,)) -> dict[str, str]:
    """Return the stored names of a checkpoint's tensors by the names that the model uses.

    A checkpoint with an image encoder stores the language model below a prefix. All other tensors
    of such a checkpoint, except those of the heads, belong to the encoder and are left out.

    beside: beginnings of names that are kept although they are not below the prefix.
    """
    stored = {name: name for name in names}
    for prefix, text in TEXT_PREFIXES:
        if any(name.startswith(prefix) for name in stored):
            found = {text + n.removeprefix(prefix): n for n in stored if n.startswith(prefix)}
            heads = [name for name in stored if name.endswith(_HEAD)]
            others = {encoder_name(n): n for n in stored if encoder_name(n).startswith(beside)}
            return found | others | dict(zip([_HEAD], heads, strict=False))
    return stored


def _check_head(path: Path, head: Placement, parameter: Tensor) -> None:
    """Check that a head stored beside tied embeddings equals them. Raises ConfigError.

    head: the placement of the embedding, with the head as its source.
    """
    for placement, value in _read(path, [head]):
        target = _part(parameter, placement, value)
        # Compare on the CPU, so that the check takes no GPU memory from the KV pool.
        if not torch.equal(target.cpu(), value.to(target.dtype)):
            raise ConfigError(
                f"{_HEAD} differs from {_EMBEDDING}, although tie_word_embeddings in config.json "
                "says that they are one tensor: correct the file or the setting"
            )


def _part(parameter: Tensor, placement: Placement, value: Tensor) -> Tensor:
    """Return the view of the parameter to which the value is copied."""
    target = parameter.data if placement.expert is None else parameter.data[placement.expert]
    along = placement.along if placement.along is not None else placement.dim or 0
    for dim, size in enumerate(value.shape):
        offset = placement.offset if dim == along else 0
        target = target.narrow(dim, offset, size)
    return target


def _write(parameter: Tensor, placement: Placement, value: Tensor) -> None:
    """Convert the value and copy it. A large value converts quickly on the parameter's device."""
    if placement.convert is not None:
        value = placement.convert(value.to(parameter.device))
    _part(parameter, placement, value).copy_(value)


def _read(path: Path, placements: list[Placement]) -> Iterator[tuple[Placement, Tensor]]:
    """Yield this rank's slices of one file. Placements that are all padding are left out."""
    with _open(path) as handle:
        for placement in placements:
            view = _view(handle, path, placement)
            if placement.dim is None or placement.begin < placement.end:
                whole = handle.get_tensor(placement.source) if placement.dim is None else view
                yield placement, _cut(placement, whole)


def _is_transposed(shape: tuple[int, ...], placement: Placement) -> bool:
    """Whether a tensor of fused experts has the transposed matrix of each, as Qwen3-VL-MoE."""
    fused, *matrix = placement.shape
    is_fused = placement.inside is not None and shape != placement.shape
    return is_fused and shape == (fused, *reversed(matrix))


def _fits(shape: tuple[int, ...], placement: Placement) -> bool:
    expected = placement.shape
    if _is_transposed(shape, placement):
        return True
    if placement.convert is not None:
        shape, expected = (tuple(n for n in one if n != 1) for one in (shape, expected))
    return shape == expected


def _view(handle: Any, path: Path, placement: Placement) -> Any:
    """Return the tensor of a placement in an open file, without its values. Raises ConfigError."""
    try:
        view = handle.get_slice(placement.source)
    except SafetensorError:
        raise ConfigError(f"{path} has no tensor {placement.source}") from None
    shape = tuple(view.get_shape())
    if not _fits(shape, placement):
        raise ConfigError(
            f"tensor {placement.source} has shape {list(shape)}, "
            f"the config asks for {list(placement.shape)}"
        )
    if (dtype := view.get_dtype()) not in placement.stored:
        raise ConfigError(
            f"tensor {placement.source} is of type {dtype}, which is not supported; "
            f"supported: {', '.join(placement.stored)}"
        )
    return view


def _cut(placement: Placement, source: Any) -> Tensor:
    """Return the part of a source that this rank holds. source: a tensor or a slice of a file."""
    if placement.dim is None:
        return source  # type: ignore[no-any-return]
    cut = slice(placement.begin, placement.end)
    if placement.inside is None:
        part: Tensor = source[(*[slice(None)] * placement.dim, cut)]
    elif _is_transposed(tuple(source.get_shape()), placement):
        part = source[(placement.inside, *[slice(None)] * (1 - placement.dim), cut)].t()
    else:
        part = source[(placement.inside, *[slice(None)] * placement.dim, cut)]
    if placement.order:
        groups = part.view(-1, len(placement.order), *part.shape[1:])
        part = groups[:, list(placement.order)].flatten(0, 1)
    return part


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, from the index if the folder has one, else from the files."""
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
