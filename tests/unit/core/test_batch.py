import numpy as np

from minisgl.core.batch import Batch, Int32Array, PageUpdates, StateCopies


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def batch_with(states: StateCopies | None) -> Batch:
    updates = PageUpdates(ids(), ids(), ids())
    samples = np.ones(1, dtype=np.bool_)
    return Batch(1, 1, ids(0), ids(5), ids(1), samples, ids(), updates, {}, states=states)


def test_the_plan_hash_covers_the_copies_of_states() -> None:
    pages = ids(3, 4)[None]
    save = StateCopies(ids(0), pages, ids(), pages[:0])
    elsewhere = save._replace(save_pages=ids(3, 5)[None])
    hashes = {batch_with(states).plan_hash() for states in (None, save, elsewhere)}
    assert len(hashes) == 3
