"""Completes the configuration of an engine with the folder of its model."""

from collections.abc import Callable
from functools import partial

import msgspec

from minisgl.core import EngineConfig
from minisgl.demo import model_path
from minisgl.settings.child import check_before_weights
from minisgl.settings.hub import Check, resolve_model

# Returns the folder of a model, as resolve_model does.
FindModel = Callable[[str, str | None, bool, Check], str]


def with_model(
    config: EngineConfig,
    model: str | None,
    revision: str | None,
    weights: bool,
    find_model: FindModel = resolve_model,
) -> EngineConfig:
    """Return the configuration with the folder of a model.

    config: checked before weights are downloaded. model: as for resolve_model; None: the embedded
    demo model. weights: False for commands that need none. --dummy-weight needs none either.
    Raises ConfigError.
    """
    if model is None:
        folder = str(model_path())
    else:
        check = partial(check_before_weights, config)
        folder = find_model(model, revision, weights and not config.dummy_weight, check)
    return msgspec.structs.replace(config, model_path=folder)
