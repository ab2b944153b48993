"""The tables of benchmarks: aligned headings, numbers and texts."""

from minisgl.benchmark.text_table import TextTable, named_rows


def test_headings_numbers_and_texts_of_a_column_end_at_the_same_place() -> None:
    table = TextTable({"kernel": "<8", "µs": ">9,.1f", "share": ">6.0%"})
    assert table.head == "kernel          µs  share"
    assert table.row("matmul", 1234.56, 0.5) == "matmul     1,234.6    50%"
    assert table.row("all", "-", 1) == "all              -   100%"


def test_a_named_row_without_a_figure_leaves_its_place_empty() -> None:
    head, first, second = named_rows("steps", [{"name": "a", "ms": 1.0}, {"name": "b", "GB": 2.5}])
    assert head == f"{'steps':<48} {'ms':>9} {'GB':>9}"
    assert first == f"{'a':<48} {1.0:>9.2f}"
    assert second == f"{'b':<48} {'':>9} {2.5:>9.2f}"
