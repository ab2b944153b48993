"""Reading the JSON files of a model folder."""

import json
from pathlib import Path
from typing import Any

from minisgl.core.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in this file of a model folder. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except RecursionError:
        raise ConfigError(
            f"{path} cannot be read: its values are nested too deeply; restore the file"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return content
