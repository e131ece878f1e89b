"""The routes of the dashboard. They only read, and each run is read in a thread, so that one request does not wait for another's run."""

import functools
import hashlib
import ipaddress
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coterie import __version__
from coterie.errors import CoterieError
from coterie.extras import needed
from coterie_deploy.read.run_status import Watcher
from coterie_deploy.terminal.printable import printable
from coterie_deploy.view.dashboard import downloads
from coterie_deploy.view.dashboard.found import Runs
from coterie_deploy.view.dashboard.pictures import comparison_content, run_content
from coterie_deploy.view.pages import safe_json, text_of, themes, vega_script

MAX_COMPARED = 12
_HEADERS = {
    # Vega interprets its expressions (`ast`), so nothing has to be evaluated as code; it styles what it draws.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def application(top: Path, names: Sequence[str] = ()) -> Starlette:
    """The application for the runs below a folder; `names`: what it may be called beside localhost and addresses."""
    runs = Runs(top)
    pages = [Route(path, functools.partial(_page, runs, template)) for path, template in _PAGES.items()]
    asked = {"runs": _list, "run": _run, "compare": _compare}
    content = [Route(f"/api/{name}", functools.partial(answer, runs)) for name, answer in asked.items()]
    taken = [Route(f"/download/{name}", functools.partial(_download, runs, name)) for name in _DOWNLOADS]
    served = [Route(f"/static/{name}", functools.partial(_static, name)) for name in _STATIC]
    guard = Middleware(Guard, names=frozenset({"localhost", *(name.lower() for name in names)}))
    refusals: Mapping[Any, Any] = {CoterieError: _refuse, sqlite3.Error: _refuse, 404: _not_found}
    return Starlette(routes=[*pages, *content, *taken, *served], middleware=[guard], exception_handlers=refusals)


class Guard:
    """Adds the headers, and refuses other host names than this server's and addresses, against DNS rebinding by pages from elsewhere."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._app if self._is_asked(Headers(scope=scope).get("host", "")) else PlainTextResponse("unknown host", 400)
        await app(scope, receive, send_guarded)

    def _is_asked(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower()
        try:
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return name in self._names
        return True


# ---- pages

_PAGES = {"/": "list.html", "/run": "run.html", "/compare": "compare.html"}


@functools.cache
def _environment() -> Any:
    jinja2 = needed("jinja2", "dashboard")
    return jinja2.Environment(loader=jinja2.FunctionLoader(_own_text), autoescape=True, trim_blocks=True, lstrip_blocks=True)


def _own_text(name: str) -> str:
    return (files("coterie_deploy.view.dashboard") / name).read_text(encoding="utf-8")


def _page(runs: Runs, template: str, request: Request) -> Response:
    names = [printable(name) for name in request.query_params.getlist("name")]
    asked = [] if template == "list.html" else names or [""] * (template == "run.html")
    if (strange := next((name for name in asked if not runs.has(name)), None)) is not None:
        return _missing(f"There is no run {strange[:200]!r} below {printable(str(runs.top))}.")
    title = ", ".join(names)[:200] or "Runs"
    page = _environment().get_template(template)
    return HTMLResponse(page.render(title=title, version=__version__, names=names, themes=safe_json(themes())))


def _missing(sentence: str) -> Response:
    """A page with a sentence, and a link back to the list."""
    page = _environment().get_template("missing.html")
    return HTMLResponse(page.render(title="Not found", version=__version__, sentence=sentence), 404)


async def _not_found(request: Request, error: Exception) -> Response:
    """Scripts and downloads get a sentence, people a page."""
    said = str(getattr(error, "detail", "not found"))
    if request.url.path.startswith(("/api/", "/static/", "/download/")):
        return PlainTextResponse(said, 404)
    return _missing(f"There is no page {printable(request.url.path[:200])!r} here.")


# ---- content


def _list(runs: Runs, request: Request) -> Response:
    return _content(request, {"folder": str(runs.top), "is_there": runs.top.is_dir(), "runs": [asdict(entry) for entry in runs.entries()]})


def _run(runs: Runs, request: Request) -> Response:
    asked = request.query_params
    return _content(request, run_content(_named(runs, asked.get("name", "")), asked.get("stage"), asked.get("figure")))


def _compare(runs: Runs, request: Request) -> Response:
    names = list(dict.fromkeys(request.query_params.getlist("name")))
    if not 1 <= len(names) <= MAX_COMPARED:
        raise HTTPException(400, f"{len(names)} runs are to be compared, want 1 to {MAX_COMPARED}")
    chosen = {name: _named(runs, name) for name in names}
    return _content(request, comparison_content(chosen, request.query_params.get("figure")))


def _named(runs: Runs, name: str) -> Watcher:
    watched = runs.watched(name)
    if watched is None:
        raise HTTPException(404, f"there is no run {printable(name[:200])!r} here")
    return watched


def _content(request: Request, content: Mapping[str, Any]) -> Response:
    return _cached(request, safe_json(content).encode("utf-8", "backslashreplace"), "application/json")


async def _refuse(_request: Request, error: Exception) -> Response:
    """One sentence for a run that cannot be read, or is gone."""
    return PlainTextResponse(printable(" ".join(str(error).split())), 503)


# ---- downloads


def _download(runs: Runs, what: str, request: Request) -> Response:
    folder = _named(runs, request.query_params.get("name", "")).folder
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", request.query_params["name"]).strip("-.") or "run"
    return _DOWNLOADS[what](folder, f"{stem}-{what}")


def _as_attachment(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}


def _file(make: Callable[[Path], Path], media_type: str, folder: Path, name: str) -> Response:
    path = make(folder)
    return FileResponse(path, media_type=media_type, headers=_as_attachment(name), background=BackgroundTask(path.unlink, missing_ok=True))


_DOWNLOADS: Mapping[str, Callable[[Path, str], Response]] = {
    "ledger.csv": functools.partial(_file, functools.partial(downloads.ledger_of, form="csv"), "text/csv"),
    "ledger.jsonl": functools.partial(_file, functools.partial(downloads.ledger_of, form="jsonl"), "application/jsonl"),
    "run.db": functools.partial(_file, downloads.copy_of, "application/vnd.sqlite3"),
    "report.html": lambda folder, name: HTMLResponse(downloads.report_of_run(folder), headers=_as_attachment(name)),
}


# ---- files

_SCRIPTS = ("charts.js", "dashboard.js", "list.js", "run.js", "compare.js")
_STATIC: Mapping[str, tuple[Callable[[], str], str]] = {
    "vega.js": (vega_script, "text/javascript"),
    "style.css": (functools.partial(text_of, "style.css"), "text/css"),
    "dashboard.css": (functools.partial(_own_text, "dashboard.css"), "text/css"),
    **{name: (functools.partial(_own_text, name), "text/javascript") for name in _SCRIPTS},
}


def _static(name: str, request: Request) -> Response:
    text, media_type = _STATIC[name]
    return _cached(request, text().encode(), media_type)


def _cached(request: Request, body: bytes, media_type: str) -> Response:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)
