"""The dashboard's routes: what they say of runs, also of those that cannot be read, and to whom they say it."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from coterie.record.ledger import Row
from coterie_deploy.cli import app as cli
from coterie_deploy.view.dashboard import found
from coterie_deploy.view.dashboard.app import application
from coterie_server.record.rundb import RunDatabase
from tests.small_runs import make_run

OTHERS = ("cumulative", "traffic", "scopes")  # charts beside those of a figure
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return make_run(tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("runs") / "done")


def filled(folder: Path, finished: Path) -> Path:
    """A folder with the finished run, twice, and with files that are none."""
    shutil.copytree(finished, folder / "done")
    shutil.copytree(finished, folder / "sweep" / HOSTILE)
    (folder / "damaged").mkdir()
    (folder / "damaged/run.db").write_text("this is not a database, whatever its name may say")
    (folder / "older").mkdir()
    with sqlite3.connect(folder / "older/run.db") as connection:
        connection.executescript("CREATE TABLE run (key, value); CREATE TABLE decisions (seq);")
    connection.close()
    return folder


@pytest.fixture
def top(finished: Path, tmp_path: Path) -> Path:
    """A folder of runs that a test may change."""
    return filled(tmp_path, finished)


@pytest.fixture(scope="module")
def client(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Of a dashboard over runs that no test changes."""
    with TestClient(application(filled(tmp_path_factory.mktemp("top"), finished)), base_url="http://localhost:8700") as made:
        yield made


def client_of(top: Path) -> TestClient:
    return TestClient(application(top), base_url="http://localhost")


def runs_of(client: TestClient) -> dict[str, dict[str, Any]]:
    return {run["run"]: run for run in client.get("/api/runs").json()["runs"]}


# ---- what is shown


def test_the_list_has_all_runs_also_those_that_cannot_be_read(client: TestClient) -> None:
    runs = runs_of(client)
    assert list(runs) == ["damaged", "done", "older", f"sweep/{HOSTILE}"]
    done = runs["done"]
    assert (done["name"], done["status"], done["method"], done["users"], done["stage"]) == ("small", "finished", "pdmm", 3, "pdmm")
    assert (done["problem"], done["rounds"] > 40, done["wire_bytes"] > 1000, done["started"] > 1e9) == ("", True, True, True)
    assert runs["damaged"]["problem"] == "file is not a database"
    assert "was written by an older version of coterie" in runs["older"]["problem"]


def test_a_run_has_curves_traffic_members_events_and_stages(client: TestClient) -> None:
    run = client.get("/api/run", params={"name": "done"}).json()
    assert (run["status"], run["stage"], run["figure"], run["is_under_way"]) == ("finished", "pdmm", "objective", False)
    assert [chart["key"] for chart in run["charts"]] == ["objective-round", "objective-bytes", "objective-seconds", *OTHERS, "graph"]
    assert len(run["charts"][0]["spec"]["data"]["values"]) > 30
    assert [stage[0] for stage in run["stages"]] == ["local", "global", "pdmm"]
    assert run["members"][0][:2] == ["host-1", 3]
    assert run["events"][0][2] == "the run has finished"
    assert run["up"] == sum(sent[3] for sent in run["sent"] if sent[1] == "up") > 0
    other = client.get("/api/run", params={"name": "done", "stage": "global", "figure": "gap"}).json()
    assert (other["stage"], other["figure"], other["charts"][0]["key"]) == ("global", "gap", "gap-round")
    nonsense = client.get("/api/run", params={"name": "done", "stage": "nowhere", "figure": "nothing"}).json()
    assert (nonsense["stage"], nonsense["figure"]) == ("pdmm", "objective")


def test_a_run_whose_models_are_damaged_has_everything_but_their_picture(top: Path) -> None:
    (top / "done/models/pdmm.npz").write_bytes(b"no models")
    run = client_of(top).get("/api/run", params={"name": "done"}).json()
    assert [chart["key"] for chart in run["charts"]][-len(OTHERS) :] == [*OTHERS]


def test_a_run_that_goes_on_is_read_on(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    client, database = client_of(tmp_path), RunDatabase(tmp_path / "live/run.db")
    database.put("status", "running")
    database.stage(0, "pdmm", "pdmm", 0, "", 0.0)
    for number in range(3):
        database.figures(0, number, {"objective": 1.0 / (number + 1)})
    database.flush()
    assert runs_of(client)["live"]["rounds"] == 2
    first = client.get("/api/run", params={"name": "live"})
    assert (first.json()["newest"][2], first.json()["status"]) == (2, "stopped")
    database.figures(0, 3, {"objective": 0.25})
    database.flush()
    second = client.get("/api/run", params={"name": "live"})
    assert (second.json()["newest"][2], second.json()["latest"]["objective"]) == (3, 0.25)
    assert second.headers["etag"] != first.headers["etag"]
    assert client.get("/api/run", params={"name": "live"}, headers={"If-None-Match": second.headers["etag"]}).status_code == 304
    assert runs_of(client)["live"]["rounds"] == 3
    database.close()


def test_the_bytes_of_a_run_that_is_resumed_are_those_of_what_is_useful(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    client, database = client_of(tmp_path), RunDatabase(tmp_path / "live/run.db")
    rows = [Row(seq, 1, 0, "up", "evaluation.Scores", 0, 6, 48, 95, 1) for seq in range(1, 4)]

    def bytes_after(**facts: str) -> int:
        for key, value in {"status": "running", **facts}.items():
            database.put(key, value)
        database.flush()
        return int(runs_of(client)["live"]["wire_bytes"])

    database.book("host-1", (0, 1), [(rows[0], None)], True)
    assert bytes_after(attempt="1") == 100
    database.book("host-1", (0, 1), [(row, None) for row in rows[1:]], True)
    assert bytes_after(attempt="1") == 300
    database.rewind(1, 0, 0)
    database.event("resume", "resumed", attempt=2)
    assert bytes_after(attempt="2") == 100
    database.book("host-1", (0, 1), [(rows[1], None)], True)
    assert bytes_after(attempt="2") == 200
    database.close()


def test_runs_are_compared_in_one_chart_each(client: TestClient) -> None:
    names = ["done", f"sweep/{HOSTILE}"]
    content = client.get("/api/compare", params={"name": names, "figure": "objective"}).json()
    assert [run["run"] for run in content["runs"]] == names
    assert content["runs"][0]["stage_up"] > 0
    assert [chart["key"] for chart in content["charts"]] == ["objective-round", "objective-bytes", "objective-seconds"]
    assert {value["name"] for value in content["charts"][0]["spec"]["data"]["values"]} == set(names)
    assert client.get("/api/compare").status_code == 400
    assert client.get("/api/compare", params={"name": [str(number) for number in range(13)]}).status_code == 400
    assert client.get("/api/compare", params={"name": ["done", "nobody"]}).status_code == 404


def test_one_folder_can_be_a_run_itself_and_what_is_inside_a_run_or_behind_a_link_is_none(finished: Path, tmp_path: Path) -> None:
    assert found.find_runs(finished) == {".": finished}
    (tmp_path / "link").symlink_to(finished)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/run.db").touch()
    deep = tmp_path / "/".join("abcdefgh")
    deep.mkdir(parents=True)
    (deep / "run.db").touch()
    assert found.find_runs(tmp_path) == {}
    assert found.find_runs(tmp_path / "nowhere") == {}


def test_a_name_that_is_no_text_can_be_shown_and_asked_for(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, Path(f"{tmp_path}/bad-\udcff\x1b"))
    client = client_of(tmp_path)
    (name,) = runs_of(client)
    assert name == "bad-\\xff\\x1b"
    assert client.get("/api/run", params={"name": name}).json()["name"] == "small"


# ---- what can go wrong


def test_a_run_that_is_damaged_or_gone_is_one_sentence(top: Path) -> None:
    client = client_of(top)
    answer = client.get("/api/run", params={"name": "damaged"})
    assert (answer.status_code, answer.text) == (503, f"the run database {top}/damaged/run.db is damaged: file is not a database")
    assert client.get("/api/run", params={"name": "older"}).status_code == 503
    assert client.get("/api/run", params={"name": "done"}).status_code == 200
    shutil.rmtree(top / "done")
    answer = client.get("/api/run", params={"name": "done"})
    assert (answer.status_code, answer.text) == (503, f"{top}/done is not a run folder: it does not exist")
    assert "it does not exist" in runs_of(client)["done"]["problem"]
    for path in ("run.db", "report.html", "ledger.csv", "ledger.jsonl"):
        answer = client.get(f"/download/{path}", params={"name": "done"})
        assert (answer.status_code, answer.text) == (503, f"{top}/done is not a run folder: it does not exist")


def test_a_folder_of_runs_that_is_gone_is_an_empty_list(tmp_path: Path) -> None:
    client = client_of(tmp_path / "gone")
    assert client.get("/api/runs").json() == {"folder": f"{tmp_path}/gone", "is_there": False, "runs": []}


@pytest.mark.parametrize("name", ["", "nobody", "../done", "/etc", "done/../done", "done/", "sweep", "%2e%2e/done", "done\x00"])
@pytest.mark.parametrize("path", ["/api/run", "/download/run.db", "/download/ledger.csv", "/download/report.html"])
def test_only_what_was_found_can_be_asked_for(client: TestClient, name: str, path: str) -> None:
    answer = client.get(path, params={"name": name})
    assert (answer.status_code, answer.text[:15]) == (404, "there is no run")


def test_the_page_of_an_unknown_run_says_so_with_a_link_back(top: Path) -> None:
    client = client_of(top)
    for path, name in (("/run", "nobody"), ("/run", ""), ("/compare", "nobody"), ("/run", "<b>x</b>")):
        answer = client.get(path, params={"name": name})
        assert answer.status_code == 404
        assert f"There is no run {name!r} below {top}." in html.unescape(answer.text)
        assert '<a href="/">All runs</a>' in answer.text
        assert "<b>" not in answer.text
    assert client.get("/run", params={"name": "done"}).status_code == 200
    assert client.get("/compare").status_code == 200
    answer = client.get("/nowhere")
    assert (answer.status_code, "There is no page" in answer.text) == (404, True)
    assert client.get("/static/nothing.js").text == "Not Found"


def test_a_run_that_has_just_begun_has_a_page(top: Path) -> None:
    client = client_of(top)
    assert "fresh" not in runs_of(client)
    time.sleep(0.25)
    shutil.copytree(top / "done", top / "fresh")
    assert client.get("/run", params={"name": "fresh"}).status_code == 200
    shutil.rmtree(top / "fresh")


def test_nothing_can_be_changed(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/api/run", params={"name": "done"}).status_code == 405
        assert client.request(method, "/").status_code == 405


# ---- to whom it is said


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8700", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b"])
def test_who_asks_for_another_host_gets_nothing(client: TestClient, host: str) -> None:
    answer = client.get("/api/runs", headers={"Host": host})
    assert (answer.status_code, answer.text) == (400, "unknown host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8700", "127.0.0.1:8700", "[::1]:8700", "10.0.0.7"])
def test_who_asks_by_an_address_or_as_localhost_gets_an_answer(client: TestClient, host: str) -> None:
    assert client.get("/api/runs", headers={"Host": host}).status_code == 200


def test_other_names_are_told_at_the_start(tmp_path: Path) -> None:
    client = TestClient(application(tmp_path, ["Lab-Server"]), base_url="http://lab-server:8700")
    assert client.get("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/run?name=done", "/nowhere", "/api/runs", "/static/style.css", "/download/ledger.csv?name=done"])
def test_every_answer_has_the_headers_that_keep_others_out(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_names_are_text_in_pages_and_content_and_no_script_is_in_a_page(client: TestClient) -> None:
    for path in ("/run", "/compare"):
        page = client.get(path, params={"name": f"sweep/{HOSTILE}"}).text
        assert HOSTILE not in page
        assert "onerror=alert(1)&gt;" in page or path == "/compare"
        assert not re.search(r"<script(?! src=\"static/| type=\"application/json\")", page)
        assert not re.search(r"\son\w+=\"|style=\"", page)
    assert "<" not in client.get("/api/runs").text


def test_what_is_served_needs_nobody_else(client: TestClient) -> None:
    for path in ("/", "/run?name=done", "/compare?name=done"):
        page = client.get(path).text
        assert "//" not in re.sub(r'"\$schema": ?"[^"]*"', "", page).replace("<!DOCTYPE html>", "")
        for link in re.findall(
            r'(?:src|href)="(static/[^"]+)"', page.replace("static/vega.js", "static/charts.js")
        ):  # which takes long to put together
            answer = client.get(f"/{link}")
            assert answer.status_code == 200
            assert client.get(f"/{link}", headers={"If-None-Match": answer.headers["etag"]}).status_code == 304


# ---- downloads


def test_the_ledger_goes_out_row_by_row(client: TestClient, finished: Path) -> None:
    with sqlite3.connect(finished / "run.db") as connection:
        wanted = connection.execute("SELECT seq, link, message_bytes, useful FROM ledger ORDER BY rowid").fetchall()
    connection.close()
    answer = client.get("/download/ledger.csv", params={"name": f"sweep/{HOSTILE}"})
    assert answer.headers["content-disposition"] == 'attachment; filename="sweep-img-src-x-onerror-alert-1-ledger.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [(int(row["seq"]), row["link"], int(row["message_bytes"]), int(row["useful"])) for row in rows] == wanted
    assert {row["stage"] for row in rows} == {"local", "global", "pdmm", ""}
    lines = client.get("/download/ledger.jsonl", params={"name": "done"}).text.splitlines()
    assert [(row["seq"], row["link"], row["message_bytes"], row["useful"]) for row in map(json.loads, lines)] == wanted


def test_the_database_goes_out_as_a_copy_also_while_it_is_written(top: Path, tmp_path: Path) -> None:
    client, database = client_of(top), RunDatabase(top / "done/run.db")
    database.put("late", "yes")  # in the file beside, which the copy is to have too
    answer = client.get("/download/run.db", params={"name": "done"})
    database.close()
    (tmp_path / "copy.db").write_bytes(answer.content)
    with sqlite3.connect(tmp_path / "copy.db") as connection:
        assert connection.execute("SELECT value FROM run WHERE key = 'late'").fetchone() == ("yes",)
    connection.close()


def test_the_report_goes_out_as_a_file(client: TestClient) -> None:
    answer = client.get("/download/report.html", params={"name": "done"})
    assert answer.headers["content-disposition"] == 'attachment; filename="done-report.html"'
    assert "<!DOCTYPE html>" in answer.text
    assert len(answer.text) > 100_000


# ---- the server


def test_nobody_waits_for_a_run_that_takes_long_to_read(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> dict[str, object]:
        begun.set()
        assert go_on.wait(10)
        return {}

    monkeypatch.setattr("coterie_deploy.view.dashboard.app.run_content", slow)
    with client_of(top) as client:
        asking = threading.Thread(target=client.get, args=("/api/run?name=done",))
        asking.start()
        assert begun.wait(10)
        assert client.get("/").status_code == 200
        assert len(client.get("/api/runs").json()["runs"]) == 4
        go_on.set()
        asking.join()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nowhere"], 2, "nowhere is no folder, want one with run folders in or below it"),
        ([".", "--listen", "8700"], 2, "the address to listen on is '8700', want HOST:PORT"),
        ([".", "--listen", "0.0.0.0:8700"], 2, "would let anyone who reaches it read the runs: allow it with --insecure"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    arguments: list[str], code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._run(["dashboard", *arguments]) == code
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli._run(["dashboard", str(tmp_path), "--listen", address]) == 3
    assert f"error: cannot listen on {address}: Address already in use" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_it_cleanly(top: Path) -> None:
    command = [sys.executable, "-m", "coterie", "dashboard", str(top), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        assert len(httpx.get(f"{address[0]}api/runs", timeout=20, trust_env=False).json()["runs"]) == 4
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (143, "")
        assert time.monotonic() - begin < 10
