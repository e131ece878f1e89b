"""The dashboard and the report in a real browser. Pictures of the pages stay in the tests' temporary folder."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.errors import CoterieError
from coterie_deploy.cli import app as cli
from coterie_server.record.follow import Follower
from tests.browser.browsing import LAPTOP, PHONE, Browser, browser_in, why_no_browser
from tests.commands import wait_for
from tests.small_runs import make_run, write_experiment

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(why_no_browser() is not None, reason=f"NO PAGE WAS LOOKED AT: {why_no_browser()}"),
]

COTERIE = [sys.executable, "-m", "coterie"]
SECOND = "again <b>bold</b> & 'quoted'"
# A link with a delay makes a round take some 40 ms, so that there is something to watch.
SLOW = ("--set", "stop.rounds=100000", "--set", "stop.residual=1e-300", "--set", "federation.links.direct=100Mbit/20ms")
PAPER = 700  # pixels between the margins of A4
VIEWS = [(LAPTOP, False), (LAPTOP, True), (PHONE, False), (PHONE, True)]


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with finished runs, one that is damaged, and one with a name that wants to be markup."""
    here = tmp_path_factory.mktemp("small")
    runs = here / "runs"
    make_run(here, runs / "first")
    make_run(here, runs / "sweep" / "larger penalty", "--set", "method.penalty=0.2")
    shutil.copytree(runs / "first", runs / SECOND)
    (runs / "damaged").mkdir()
    (runs / "damaged/run.db").write_text("this is not a database, whatever its name may say")
    return runs


@pytest.fixture(scope="module")
def under_way(top: Path) -> Iterator[Path]:
    """A run that goes on for as long as the tests look."""
    experiment = write_experiment(top.parent)
    command = [*COTERIE, "run", str(experiment), "--hosts", "2", "--quiet", "--output", str(top / "live"), *SLOW]
    with subprocess.Popen(command, cwd=top.parent, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            wait_for(lambda: newest_stage(top / "live") == "pdmm")
            yield top / "live"
        finally:
            process.terminate()
            process.communicate(timeout=40)


def newest_stage(folder: Path) -> str | None:
    with contextlib.suppress(CoterieError):
        watched = Follower(folder)
        watched.update()
        return watched.stage.name if watched.stage is not None else None
    return None


@pytest.fixture(scope="module")
def address(top: Path) -> Iterator[str]:
    """A dashboard of that folder."""
    command = [*COTERIE, "dashboard", str(top), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        try:
            assert found is not None
            yield found[0]
        finally:
            process.terminate()
            _, err = process.communicate(timeout=40)
    assert err == ""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser_in(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def browser(chromium: Browser, address: str) -> Iterator[Browser]:
    """A browser whose pages have nothing to complain of, and ask nobody but the dashboard."""
    chromium.size(LAPTOP)
    chromium.complaints()
    chromium.asked()
    yield chromium
    assert chromium.complaints() == []
    assert chromium.asked() - {address.rstrip("/"), "data:", "blob:", "about:", "chrome:"} == set()


def drawn(browser: Browser, n_charts: int) -> None:
    """Waits until there are so many charts, each with something in it."""
    browser.wait(lambda: len(browser.n_marks()) >= n_charts and all(browser.n_marks()), f"{n_charts} charts")


def test_the_list_is_found_sorted_and_filtered(browser: Browser, address: str) -> None:
    browser.open(address)
    names = "#runs tbody td.name > :first-child"
    browser.wait(lambda: len(browser.texts(names)) >= 4, "the list")
    assert {"first", SECOND, "sweep/larger penalty", "damaged"} <= set(browser.texts(names))
    assert browser.all("#runs b") == [], "a name is text"
    assert "file is not a database" in browser.one("#runs").text
    browser.one("#runs th[data-key=run] button").click()
    assert browser.texts(names) == sorted(browser.texts(names), key=str.lower)
    browser.one("#runs th[data-key=run] button").click()
    assert browser.texts(names) == sorted(browser.texts(names), key=str.lower, reverse=True)
    browser.one("#filter").send_keys("SWEEP pdmm")
    assert browser.texts(names) == ["sweep/larger penalty"]
    browser.one("#filter").send_keys(" nonsense")
    assert browser.one("#empty").text == "No run is like that."


def test_a_finished_run_has_curves_and_gives_its_ledger_away(browser: Browser, address: str, top: Path) -> None:
    browser.open(address)
    browser.wait(lambda: [link for link in browser.all("#runs a") if link.text == SECOND], "the link")[0].click()
    drawn(browser, 6)
    assert browser.one("#name").text == SECOND
    assert browser.one("#status").text == "finished"
    assert browser.texts("#charts h3")[0] == "Objective against round"
    browser.wait(lambda: [label for label in browser.all("#figures label") if label.text == "primal residual"], "the figure")[0].click()
    browser.wait(lambda: browser.texts("#charts h3")[0] == "Primal residual against round", "another figure")
    drawn(browser, 6)
    assert len(browser.all("#events tbody tr")) >= 3
    assert browser.texts("#stage-list tbody td:first-child") == ["local", "global", "pdmm"]
    next(link for link in browser.all("#downloads a") if link.text == "Ledger as CSV").click()
    taken = browser.folder / "again-b-bold-b-quoted-ledger.csv"
    browser.wait(taken.exists, "the download")
    with taken.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with sqlite3.connect(top / "first/run.db") as connection:
        (n_rows, n_bytes) = connection.execute("SELECT COUNT(*), SUM(message_bytes) FROM ledger").fetchone()
    connection.close()
    assert (len(rows), sum(int(row["message_bytes"]) for row in rows)) == (n_rows, n_bytes)


def test_a_run_under_way_moves_while_one_looks(browser: Browser, address: str, under_way: Path) -> None:
    browser.open(f"{address}run?name=live")
    browser.wait(lambda: browser.one("#status").text == "running" and browser.one("#stage-name").text == "pdmm", "the run to start")
    drawn(browser, 6)
    assert "of at most 100,000" in browser.one("#stage-count").text
    before = browser.one("#stage-count").text
    line = browser.run("return document.querySelector('.chart svg .mark-line path').getAttribute('d')")
    browser.wait(lambda: browser.one("#stage-count").text != before, "another round")
    browser.wait(lambda: browser.run("return document.querySelector('.chart svg .mark-line path')?.getAttribute('d')") != line, "the curve")
    assert "2 of 2 hosts here" in browser.one("#members-note").text
    browser.wait(lambda: "rounds/s" in browser.one("#pace").text, "a rate, which is told once it is sound")
    assert browser.texts("#members .here")[0].startswith("here since")
    browser.open(address)
    browser.wait(lambda: any("running" in row.text for row in browser.all("#runs tr")), "the list to say that it runs")


def test_two_runs_are_compared(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.wait(lambda: len(browser.all("#runs td input")) >= 4, "the list")
    compare = browser.one("#compare")
    assert compare.get_attribute("aria-disabled") == "true"
    for name in ("first", "sweep/larger penalty"):
        next(box for box in browser.all("#runs td input") if box.get_attribute("aria-label") == f"Compare {name}").click()
    browser.one("#compare").click()
    drawn(browser, 3)
    assert browser.texts("#costs tbody a") == ["first", "sweep/larger penalty"]
    assert browser.run("return document.querySelectorAll('.chart svg')[0].querySelectorAll('.mark-line path').length") == 2


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_pages_fit_into_a_window_light_and_dark(browser: Browser, address: str, under_way: Path, width: int, dark: bool) -> None:
    pages = {"list": "", "run": "run?name=first", "live": "run?name=live", "compare": "compare?name=first&name=sweep%2Flarger+penalty"}
    browser.size(width, dark=dark)
    colour = "return getComputedStyle(document.body).backgroundColor"
    for name, page in pages.items():
        browser.open(f"{address}{page}")
        if name == "list":
            browser.wait(lambda: len(browser.all("#runs tbody tr")) >= 4, "the list")
        else:
            drawn(browser, 3)
        print(browser.picture(f"{name}-{width}-{'dark' if dark else 'light'}"))
        assert not browser.is_wider_than_its_window()
        assert (browser.run(colour) == "rgb(20, 24, 30)") is dark


@pytest.mark.parametrize(("width", "dark"), VIEWS)
def test_the_report_is_a_page_by_itself(chromium: Browser, top: Path, tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "report.html"
    assert cli._run(["report", str(top / "first"), str(top / "sweep/larger penalty"), "--output", str(page)]) == 0
    chromium.size(width, dark=dark)
    chromium.complaints()
    chromium.asked()
    chromium.open(page.as_uri())
    chromium.wait(lambda: chromium.n_marks() and all(chromium.n_marks()), "charts")
    print(chromium.picture(f"report-{width}-{'dark' if dark else 'light'}"))
    assert not chromium.is_wider_than_its_window()
    assert chromium.complaints() == []
    assert chromium.asked() <= {"file://", "data:"}


@pytest.mark.parametrize("width", [LAPTOP, PHONE])
def test_no_table_of_the_report_is_cut_off_on_screen_or_in_print(chromium: Browser, top: Path, tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    assert cli._run(["report", str(top / "first"), "--output", str(page)]) == 0
    chromium.size(width)
    chromium.open(page.as_uri())
    tables = "[...document.querySelectorAll('.card.apart .scroll')]"
    assert len(chromium.run(f"return {tables}.map(String)")) >= 4
    assert chromium.run(f"return {tables}.filter((one) => one.scrollHeight > one.clientHeight + 1).length") == 0, "each row is seen"
    reach = "one.scrollWidth <= one.clientWidth || getComputedStyle(one).overflowX === 'auto'"
    assert chromium.run(f"return {tables}.every((one) => {reach})"), "a column that has no room is reached by scrolling"
    chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        chromium.size(PAPER)
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        cut = "one.scrollWidth > one.clientWidth + 1 || one.scrollHeight > one.clientHeight + 1"
        assert chromium.run(f"return {tables}.filter((one) => {cut}).map((one) => one.ariaLabel)") == [], "paper does not scroll"
        print(chromium.picture(f"print-{width}"))
    finally:
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_paper_has_the_charts_of_all_tabs(chromium: Browser, top: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert cli._run(["report", str(top / "first"), "--output", str(page)]) == 0
    chromium.size(PAPER)
    chromium.open(page.as_uri())
    panels = "[...document.querySelectorAll('#progress [data-tab]')]"
    assert chromium.run(f"return {panels}.map((one) => one.clientHeight > 0)") == [True, *[False] * 4], "one tab is seen on screen"
    drawn = f"return {panels}.every((panel) => [...panel.querySelectorAll('.chart')].every((one) => one.querySelector('svg path')))"
    chromium.wait(lambda: chromium.run(drawn), "charts of tabs that nobody has looked at")
    chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        high = f"return {panels}.map((panel) => panel.clientHeight > 200 && getComputedStyle(panel).visibility === 'visible')"
        assert chromium.run(high) == [True] * 5
        assert chromium.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        print(chromium.picture("print-tabs"))
    finally:
        chromium.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_page_of_a_run_that_does_not_exist_leads_back(chromium: Browser, address: str) -> None:
    chromium.open(f"{address}run?name=nobody")
    assert "There is no run 'nobody'" in chromium.one("main").text
    chromium.one("main a").click()
    chromium.wait(lambda: len(chromium.all("#runs tbody tr")) >= 3, "the list")
    chromium.complaints()  # the browser's own on the 404


def test_a_run_that_is_gone_and_a_server_that_is_gone_are_said(chromium: Browser, address: str, top: Path) -> None:
    shutil.copytree(top / "first", top / "short")
    chromium.open(f"{address}run?name=short")
    drawn(chromium, 6)
    shutil.rmtree(top / "short")
    chromium.run("document.dispatchEvent(new Event('visibilitychange'))")
    chromium.wait(lambda: "short" in chromium.one("#problem").text, "the page to say so")
    chromium.driver.execute_cdp_cmd("Network.enable", {})
    everything_lost = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    chromium.driver.execute_cdp_cmd("Network.emulateNetworkConditions", everything_lost)
    chromium.run("document.dispatchEvent(new Event('visibilitychange'))")
    chromium.wait(lambda: "does not answer" in chromium.one("#problem").text, "the page to say so")
    chromium.driver.execute_cdp_cmd("Network.emulateNetworkConditions", {**everything_lost, "offline": False})
    assert os.listdir(top)
