"""Every block of README and of the site runs, in reading order, in an empty folder for each page, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT, Reader, blocks_of, site_pages

FAST = ("README.md", "docs/tutorials/1-your-table.md")
PAGES = [path for path in ("README.md", *(str(page.relative_to(ROOT)) for page in site_pages())) if blocks_of(ROOT / path)]


@pytest.mark.parametrize("page", [pytest.param(page, marks=() if page in FAST else pytest.mark.slow) for page in PAGES])
@pytest.mark.timeout(600)
def test_the_blocks_of_a_page_run_as_they_stand(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Reader(tmp_path).follow(ROOT / page)
