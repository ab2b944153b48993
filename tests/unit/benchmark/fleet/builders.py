"""Small fleets in which all steps take the same time."""

from collections.abc import Sequence

import numpy as np

from minisgl.benchmark.fleet.fleet import Fleet, FleetPlan, FleetResult
from minisgl.benchmark.fleet.routers import RequestRouter, RoundRobin
from minisgl.benchmark.trace import Load
from minisgl.benchmark.virtual_engine import EngineSettings, read_cost
from minisgl.core.batch import Int32Array

STEP_S = 0.010
HOST_S = 0.0003  # the simulated engine adds it to each step
STILL = FleetPlan(replicas=1, front_end_s=0.0, start_s=10.0, drain_s=60.0, settle_s=5.0)


def settings(num_pages: int = 1000, rows: int = 8, step_s: float = STEP_S) -> EngineSettings:
    cost = read_cost(f"0,0,1:{step_s * 1e3},100000:{step_s * 1e3}")
    return EngineSettings(cost, num_pages, rows, 4096)


def prompt(seed: int, length: int = 64) -> Int32Array:
    return np.random.default_rng(seed).integers(0, 10_000, length, dtype=np.int32)


def load_of(*requests: tuple[float, Int32Array, int]) -> Load:
    """Requests of (arrival, prompt, output tokens), in the order of arrival."""
    times_s, prompts, tokens = map(list, zip(*requests, strict=True))
    return Load(prompts, tokens, times_s)  # type: ignore[arg-type]


def run(
    load: Load,
    plan: FleetPlan,
    router: RequestRouter | None = None,
    sizes: Sequence[int] = (1000, 8),
    step_s: float = STEP_S,
) -> FleetResult:
    """sizes: pages and rows of a replica."""
    assert load.arrivals_s is not None
    fleet = Fleet(load, load.arrivals_s, settings(*sizes, step_s), plan)
    return fleet.run(router or RoundRobin())
