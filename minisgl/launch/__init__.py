"""The launcher of all processes, and the main of every child process.

This module imports nothing, because each child imports it before it knows its role.
"""

__all__: list[str] = []
