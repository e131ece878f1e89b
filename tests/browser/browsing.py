"""A headless Chromium that notes what it asks of whom and what its pages complain of. Nothing here is tested itself."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

DEADLINE_S = 30.0
PROGRAMS = ("chromium", "chromedriver")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --no-default-browser-check --disable-extensions --no-proxy-server"
)
PHONE, LAPTOP = 390, 1440


def why_no_browser() -> str | None:
    """Why no page can be looked at here."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed: tests/browser/chromium.sh installs them" if missing else None


class Browser:
    """One window. `folder` is where downloads and pictures go."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def open(self, address: str) -> None:
        self.driver.get(address)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return list(self.run(f"return [...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"))

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of `condition`; elements may be replaced while one looks at them."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(StaleElementReferenceException):
                if value := condition():
                    return value
            time.sleep(0.05)
        raise AssertionError(f"waited for {what}; the page says {self.one('body').text[:500]!r}, the browser {self.complaints()}")

    def size(self, width: int, *, dark: bool = False, height: int = 1000) -> None:
        """A window of this width, on a system that is light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, name: str) -> Path:
        """The whole page as a picture."""
        height = int(self.run("return document.documentElement.scrollHeight"))
        width = int(self.run("return document.documentElement.clientWidth"))
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 8000), "scale": 1}
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        path = self.folder / f"{name}.png"
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def is_wider_than_its_window(self) -> bool:
        return bool(self.run("return document.documentElement.scrollWidth > document.documentElement.clientWidth"))

    def n_marks(self) -> list[int]:
        """How many lines, bars and points each chart that is drawn has."""
        marks = ".mark-line path, .mark-rect path, .mark-symbol path"
        return list(self.run(f"return [...document.querySelectorAll('.chart svg')].map((one) => one.querySelectorAll('{marks}').length)"))

    def complaints(self) -> list[str]:
        """Errors on the console since one last asked, also what the pages' policy has forbidden."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def asked(self) -> set[str]:
        """Of whom something was asked since one last asked for this: scheme and host."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                address = message["params"]["request"]["url"]
                found.add("/".join(address.split("/")[:3]) if "//" in address else address.partition(":")[0] + ":")
        return found


@contextlib.contextmanager
def browser_in(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own while the block runs."""
    options = webdriver.ChromeOptions()
    for flag in _FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    options.add_experimental_option("prefs", {"download.default_directory": str(folder), "download.prompt_for_download": False})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver, folder)
    finally:
        driver.quit()
