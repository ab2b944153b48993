"""Settings from MINISGL_* environment variables, parsed and checked once."""

from minisgl.env.settings import EnvError, EnvSettings, read_env

__all__ = ["EnvError", "EnvSettings", "read_env"]
