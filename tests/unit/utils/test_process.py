"""What the kernel tells of processes."""

import os
import subprocess
import sys

from minisgl.utils import process_age_s


def test_a_child_is_younger_than_its_parent() -> None:
    code = "import os; from minisgl.utils import process_age_s as age; print(age(os.getpid()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 <= float(done.stdout) < process_age_s(os.getpid()) + 1
