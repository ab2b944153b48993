"""The ids of the pads of images."""

from minisgl.images import pad_ids

DIGEST = bytes(range(32))


def test_pads_are_negative_ids_that_depend_on_the_pixels_and_the_grid():
    pads = pad_ids(DIGEST, (4, 6), 4096)
    assert len(set(pads)) == len(pads)
    assert all(-(2**31) <= pad < -1 for pad in pads)
    assert pads[:6] == pad_ids(DIGEST, (4, 6), 6)
    for other in (pad_ids(DIGEST[::-1], (4, 6), 4096), pad_ids(DIGEST, (6, 4), 4096)):
        assert not {*other} & {*pads}
