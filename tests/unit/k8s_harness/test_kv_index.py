"""The script that rebuilds a prefix cache from the KV events of a pod."""

import json
import subprocess
import sys

import numpy as np
from k8s_harness.client import SCRIPTS

from minisgl.core.rows import Steps
from minisgl.kv_events.publisher import Publisher
from minisgl.kvcache.radix import RadixCache
from tests.unit.kv_events.machine import addresses, started


def test_the_script_reports_the_blocks_of_the_cache() -> None:
    publisher = Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@10.0.0.7:1919@minisgl-demo")
    reporter = started(publisher, 4, "minisgl-demo", 2, 100)
    cache = RadixCache(2, Steps(), [reporter])
    for first in range(5):
        tokens = np.array([first, *range(20, 31)], dtype=np.int32)
        cache.insert(tokens, np.arange(first * 6, first * 6 + 6, dtype=np.int32))
        reporter.flush()
    cache.evict(7)
    reporter.flush()
    argument = json.dumps({"replay": addresses(publisher)[1]})
    command = [sys.executable, str(SCRIPTS / "kv_index.py"), argument]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    totals = reporter.totals
    assert totals.removed > 0
    assert json.loads(done.stdout) == {
        "topic": "kv@10.0.0.7:1919@minisgl-demo",
        "batches": 6,
        "blocks": totals.blocks,
        "checksum": totals.checksum,
        "orphans": 0,
    }
