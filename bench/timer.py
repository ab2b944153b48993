"""The time of GPU work without its launches: from CUDA graphs of many calls."""

import statistics
from collections.abc import Callable, Sequence

import torch

_CALLS = 32  # captured in one graph
_REPLAYS = 15


def graph_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of a call, in a graph of _CALLS calls that rotate over `calls`."""
    count = max(_CALLS, len(calls))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # which fills the inputs
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL calls CUDA in a thread of its own during a capture.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for number in range(count):
            calls[number % len(calls)]()
    graph.replay()
    seconds: list[float] = []
    for _ in range(_REPLAYS):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(seconds)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
