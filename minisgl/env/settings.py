"""The MINISGL_* variables: a closed table, so that a typing error is seen and not ignored.

Kubernetes injects MINISGL_PORT, MINISGL_PORT_1919_TCP, MINISGL_SERVICE_HOST and the like next to a
Service named minisgl; those are never settings and are passed over in silence.
"""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_PREFIX = "MINISGL_"
_INJECTED = ("MINISGL_PORT", "MINISGL_SERVICE_")
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})


class EnvError(ValueError):
    """A variable has a value that it cannot have; the message is one line."""


class EnvSettings(NamedTuple):
    """What the environment sets. One field per variable, named like it.

    disable_overlap_scheduling  plan step n+1 only after the result of step n is read.
    check_plans                 tensor-parallel ranks compare a hash of each plan and stop if one
                                differs; for debugging.
    api_key, admin_api_key      as the flags of these names, for those who keep keys in Secrets.
    kernel_cache                as the flag, for images that bring compiled kernels.
    commit                      of the source, for images; a checkout is asked itself.
    """

    disable_overlap_scheduling: bool = False
    check_plans: bool = False
    api_key: str | None = None
    admin_api_key: str | None = None
    kernel_cache: str | None = None
    commit: str | None = None


def read_env(environ: Mapping[str, str]) -> EnvSettings:
    """Parse all MINISGL_* variables. Unknown ones warn; a bad value raises EnvError."""
    known = {f"{_PREFIX}{field.upper()}": field for field in EnvSettings._fields}
    values: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(_PREFIX) or name.startswith(_INJECTED):
            continue
        field = known.get(name)
        if field is None:
            logger.warning(
                "unknown environment variable ignored name=%s known=%s", name, ",".join(known)
            )
            continue
        is_text = EnvSettings._field_defaults[field] is None
        values[field] = text if is_text else _parse_bool(name, text)
    return EnvSettings(**values)


def _parse_bool(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise EnvError(f"{name} must be 1 or 0, not {text[:40]!r}")
