"""Tables of rows with names."""

from bench.named_rows import named_rows


def test_a_named_row_without_a_figure_leaves_its_place_empty() -> None:
    head, first, second = named_rows("steps", [{"name": "a", "ms": 1.0}, {"name": "b", "GB": 2.5}])
    assert head == f"{'steps':<48} {'ms':>9} {'GB':>9}"
    assert first == f"{'a':<48} {1.0:>9.2f}"
    assert second == f"{'b':<48} {'':>9} {2.5:>9.2f}"
