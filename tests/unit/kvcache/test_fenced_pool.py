"""An id has at most one owner, and no id is allocated while a step in flight may use it."""

import numpy as np
import pytest

from minisgl.core import InvariantBroken
from minisgl.core.rows import Steps
from minisgl.kvcache.fenced_pool import FencedPool
from tests.unit.scheduler.integrity import check_pool


def test_a_fenced_page_waits_for_its_step() -> None:
    pool = FencedPool(2, Steps())
    pages = pool.allocate(2)
    pool.release(pages, fence=3)
    assert (pool.num_free, pool.num_quarantined) == (0, 2)
    pool.steps.resolved = 2
    pool.resolve()
    assert pool.num_free == 0
    pool.steps.resolved = 3
    pool.resolve()
    assert (pool.num_free, pool.num_quarantined) == (2, 0)
    check_pool(pool)


def test_a_page_of_a_completed_step_is_free_at_once() -> None:
    pool = FencedPool(1, Steps())
    pages = pool.allocate(1)
    pool.steps.resolved = 5
    pool.resolve()
    pool.release(pages, fence=5)
    assert pool.num_free == 1


def test_pools_of_one_scheduler_wait_for_its_steps_while_they_have_fenced_ids() -> None:
    steps = Steps()
    busy, idle = FencedPool(2, steps), FencedPool(1, steps)
    first, second = busy.allocate(2)[:, None]
    busy.release(first, fence=3)
    busy.release(second, fence=4)
    assert [*steps.waiting] == [busy]
    steps.resolved = 3
    busy.resolve()
    assert [*steps.waiting] == [busy]
    assert busy.num_free == 1
    idle.release(idle.allocate(1), fence=3)
    assert idle.num_free == 1, "the step has completed for all pools"
    steps.resolved = 4
    busy.resolve()
    assert not steps.waiting


def test_an_allocation_reclaims_the_ids_that_it_lacks() -> None:
    pool = FencedPool(3, Steps(), reclaim=lambda missing: pool.release(cached[:missing], fence=0))
    cached = pool.allocate(2)
    assert sorted(pool.allocate(2)) == [int(cached[0]), 2]
    assert pool.num_free == 0


def test_a_second_release_is_a_bug() -> None:
    pool = FencedPool(2, Steps())
    pages = pool.allocate(1)
    pool.release(pages, fence=0)
    with pytest.raises(InvariantBroken, match="twice"):
        pool.release(pages, fence=0)


def test_allocating_more_than_is_free_is_a_bug() -> None:
    with pytest.raises(InvariantBroken, match="2 ids needed, 1 free"):
        FencedPool(1, Steps()).allocate(2)


def test_check_pool_finds_a_lost_page() -> None:
    pool = FencedPool(3, Steps())
    pool.allocate(1)
    pool.allocated[np.array([2])] = True
    with pytest.raises(AssertionError):
        check_pool(pool)
