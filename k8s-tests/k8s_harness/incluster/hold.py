"""Holds the start of the scheduler, as sitecustomize.py of a server's Python.

Python runs this module at the start of each process. The scheduler waits until the file of the
variable HELD_UNTIL exists, at most LIMIT_S. All other processes go on, so the server listens.
"""

import os
import sys
import time

LIMIT_S = 120.0

end_s = time.monotonic() + LIMIT_S
while "scheduler" in sys.orig_argv and time.monotonic() < end_s:
    if os.path.exists(os.environ["HELD_UNTIL"]):
        break
    time.sleep(0.05)
