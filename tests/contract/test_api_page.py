"""The tables of docs/api.md agree with the code."""

from tests.contract.api_tables import PAGE, with_tables


def test_tables_of_the_page_are_those_of_the_code() -> None:
    """After a change of flags, parameters or errors: python -m tests.contract.api_tables."""
    page = PAGE.read_text()
    assert page.count("<!-- table: ") == page.count("<!-- end -->") == 6
    assert with_tables(page) == page
