"""A process delivers its last messages before it ends."""

import subprocess
import sys
from pathlib import Path

from minisgl.message.messages import Shutdown
from minisgl.message.queues import Receiver, endpoint
from minisgl.utils.process import write_socket_key
from tests.patience import patience

LAST_MESSAGE = """
import sys
from minisgl.message.messages import Shutdown
from minisgl.message.queues import Sender, close_queues

lasting, brief = Sender(sys.argv[1], linger_ms=600_000), Sender(sys.argv[2])
lasting.send(Shutdown())
brief.send(Shutdown())
print("sent", flush=True)
close_queues()
"""


def test_close_queues_delivers_the_messages_of_senders_with_a_linger_time(tmp_path: Path) -> None:
    """The receiver binds its address only after the last call of the sending process."""
    write_socket_key(tmp_path)
    address = endpoint(str(tmp_path), "last")
    command = [sys.executable, "-c", LAST_MESSAGE, address, endpoint(str(tmp_path), "absent")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"sent\n"
            receiver = Receiver(address, Shutdown)
            assert receiver.poll(patience())
            assert list(receiver.drain()) == [Shutdown()]
            receiver.close()
            assert child.wait(patience()) == 0
        finally:
            child.kill()
