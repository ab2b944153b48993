"""The settings of all processes: flags, their places, keys, and the model's folder.

`resolve` makes one `ServerConfig` from the command line, the environment and a file. The launcher
sends it to each child as a part of `ChildSpec`. Nothing here loads torch or an HTTP library.
"""

from minisgl.settings.config import Limits, ServerConfig

__all__ = ["Limits", "ServerConfig"]
