"""The MINISGL_* variables: a closed table, so that a typing error is seen and not ignored.

Kubernetes injects MINISGL_PORT, MINISGL_PORT_1919_TCP, MINISGL_SERVICE_HOST and the like next to a
Service named minisgl; those are never settings and are passed over in silence.
"""

import logging
from collections.abc import Mapping

import msgspec

from minisgl.core import ConfigError

logger = logging.getLogger(__name__)

_PREFIX = "MINISGL_"
_INJECTED = ("MINISGL_PORT", "MINISGL_SERVICE_")


class EnvSettings(msgspec.Struct, frozen=True):
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
    """Parse all MINISGL_* variables. Unknown ones warn; a bad value raises ConfigError."""
    known = {f"{_PREFIX}{field.upper()}": field for field in EnvSettings.__struct_fields__}
    values: dict[str, str] = {}
    for name, text in environ.items():
        if name in known:
            # An empty switch is off; an empty key is left to be refused, so that it opens nothing.
            is_switch = getattr(EnvSettings(), known[name]) is False
            values[known[name]] = "0" if is_switch and not text.strip() else text.strip()
        elif name.startswith(_PREFIX) and not name.startswith(_INJECTED):
            logger.warning(
                "unknown environment variable ignored name=%s known=%s", name, ",".join(known)
            )
    try:
        return msgspec.convert(values, EnvSettings, strict=False)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        shown = values[field][:40]
        raise ConfigError(f"{_PREFIX}{field.upper()} must be 1 or 0, not {shown!r}") from None
