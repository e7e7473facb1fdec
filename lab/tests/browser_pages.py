"""Pages in a browser: opened with an ear for complaints, served, and looked at by axe-core."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Request


@contextmanager
def opened(
    browser: Browser, url: str, width: int = 1200, colours: Any = "light", home: str = ""
) -> Iterator[Page]:
    """The page; an error in the browser fails the test, and so does a request that leaves `home`.

    By default nothing but the page itself may be asked for.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=colours,
        permissions=["clipboard-read", "clipboard-write"],
    )  # fmt: skip
    page, wrong = context.new_page(), []

    def asked(request: Request) -> None:
        if not request.url.startswith((home or url, "data:", "blob:", "about:")):
            wrong.append(request.url)

    def failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # by leaving the page
            wrong.append(f"{request.failure}: {request.url}")

    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", asked)
    page.on("requestfailed", failed)
    page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
    page.goto(url)
    yield page
    context.close()
    assert wrong == []


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the files in a folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def violations(page: Page, *impacts: str) -> list[tuple[str, list[str]]]:
    """What axe-core finds on the page, of these impacts or of all; contrast is among it."""
    found = Axe().run(page).response["violations"]
    return [
        (one["id"], [node["html"][:200] for node in one["nodes"]])
        for one in found
        if not impacts or one["impact"] in impacts
    ]


def unfold(page: Page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
