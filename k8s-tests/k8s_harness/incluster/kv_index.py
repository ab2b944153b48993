"""Rebuilds the prefix cache of one replica from its KV events, with the classes of the image.

argv[1]: JSON {"replay": address}. stdout: one JSON line {"topic", "blocks", "checksum", "orphans",
"batches"} about the whole stream so far.
"""

import json
import sys

import msgspec
import zmq

from minisgl.events import BlockIndex
from minisgl.message.kv_events import EventBatch

TIMEOUT_MS = 60_000


def main() -> None:
    index, topic, batches = BlockIndex(), "", 0
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(json.loads(sys.argv[1])["replay"])
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    while True:
        _, name, _, payload = socket.recv_multipart()
        if not payload:
            break
        topic, batches = name.decode(), batches + 1
        for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
            index.apply(event)
    facts = {"blocks": index.blocks, "checksum": index.checksum, "orphans": index.orphans}
    print(json.dumps({"topic": topic, "batches": batches, **facts}), flush=True)


if __name__ == "__main__":
    main()
