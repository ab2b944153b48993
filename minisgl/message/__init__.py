"""Typed wire messages (`wire.X`) and the queues that carry them between processes."""

from minisgl.message import wire
from minisgl.message.queues import AsyncReceiver, Receiver, Sender, endpoint

__all__ = ["AsyncReceiver", "Receiver", "Sender", "endpoint", "wire"]
