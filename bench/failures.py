"""Failed requests of a benchmark that runs an engine in its own process.

A benchmark knows how many tokens it asked for. After a failure that number is wrong, and so is
every speed that is computed from it.
"""

from collections.abc import Collection

from minisgl.benchmark.outbox import workload_error
from minisgl.message.messages import StepOutput


def raise_failure(output: StepOutput, counted: Collection[str] = ()) -> None:
    """Raise ConfigError if a request of this output failed.

    counted: class names of errors that the benchmark reports as a part of its result.
    """
    for finished in output.finished:
        if finished.error is not None and finished.error_kind not in counted:
            raise workload_error(finished.error)
