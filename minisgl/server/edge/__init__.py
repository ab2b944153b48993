"""The way of a request to its handler: the connection, and the checks around the application.

The modules refuse a request that is not valid HTTP, has no valid key, comes from a foreign web page
or exceeds a limit, and answer the probes.
"""

__all__: list[str] = []
