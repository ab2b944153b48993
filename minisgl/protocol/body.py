"""`RequestBody`: the base of all objects in the bodies of requests."""

import msgspec


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of the objects in which an unknown field is an error."""
