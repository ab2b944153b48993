"""`WireMessage`: the base of the messages between processes."""

import msgspec


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages: immutable, tagged with its class name, refusing unknown fields."""
