"""The files of the web pages: which are served, what they load, and how much they weigh."""

import re
from pathlib import Path

import pytest

from minisgl.server.pages import DOCS, PLAYGROUND, WebPage

FOLDER = PLAYGROUND.files["/"].parent
OWN_SCRIPTS = [path for path in FOLDER.glob("*.js") if path.name != "marked.esm.js"]


def loaded_by(page: WebPage, path: str) -> set[str]:
    """The URLs in the attributes of the document at this path, as paths of the server."""
    text = page.files[path].read_text(encoding="utf-8")
    tags = re.findall(r"<(?:link|script)\b[^>]*>", text)
    found = {m for tag in tags for m in re.findall(r'(?:src|href)="([^"]*)"', tag)}
    return {f"/{url}" for url in found if url != "data:,"}


def test_docs_page_loads_exactly_its_own_files() -> None:
    assert loaded_by(DOCS, "/docs") == DOCS.files.keys() - {"/docs"}


def test_playground_loads_exactly_its_own_files() -> None:
    imported = {
        f"/playground/{name}"
        for script in OWN_SCRIPTS
        for name in re.findall(r'^(?:import|\}) .*from "\./([^"]+)";$', script.read_text(), re.M)
    }
    assert loaded_by(PLAYGROUND, "/") | imported == PLAYGROUND.files.keys() - {"/"}


def test_every_file_of_the_playground_is_served_or_documents_it() -> None:
    served = {path.name for path in PLAYGROUND.files.values()}
    present = {path.name for path in FOLDER.iterdir()}
    assert present - served == {"README.md", "marked.LICENSE.txt"}
    assert served <= present


def test_playground_weighs_at_most_150_kb() -> None:
    assert sum(path.stat().st_size for path in PLAYGROUND.files.values()) <= 150_000


def test_readme_names_the_version_of_the_vendored_library() -> None:
    version = re.search(r"marked v([\d.]+)", (FOLDER / "marked.esm.js").read_text())
    assert version is not None
    assert f"version {version[1]}" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("script", OWN_SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_no_html_and_run_no_text(script: Path) -> None:
    parsers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser"
    assert re.findall(rf"{parsers}|\beval\(|new Function", script.read_text()) == []


def test_nothing_moves_by_itself() -> None:
    assert re.findall(r"animation|transition|@keyframes", (FOLDER / "style.css").read_text()) == []
    html = PLAYGROUND.files["/"].read_text()
    assert re.findall(r"<style|style=|\bon[a-z]+=|<script(?! type=\"module\" src)", html) == []
