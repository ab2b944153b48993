"""The tables of benchmarks: aligned headings, numbers and texts."""

from minisgl.benchmark.text_table import TextTable


def test_headings_numbers_and_texts_of_a_column_end_at_the_same_place() -> None:
    table = TextTable({"kernel": "<8", "µs": ">9,.1f", "share": ">6.0%"})
    assert table.head == "kernel          µs  share"
    assert table.row("matmul", 1234.56, 0.5) == "matmul     1,234.6    50%"
    assert table.row("all", "-", 1) == "all              -   100%"
