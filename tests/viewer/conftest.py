"""Runs, a viewer of them on a free port, and a browser that looks at it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright
from tests.support.viewed_runs import write_run

from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer

BROWSER = os.environ.get("KAPELLE_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60_000
"""Milliseconds that a page may take on a machine where other things run."""


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three runs: two seeds of one recipe, and another algorithm."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "pair-0")
    write_run(folder / "pair-1", seed=1)
    write_run(folder / "other" / "pair-0", steps=5, algorithm="mappo", lr=0.01)
    return folder


@pytest.fixture(scope="package")
def site(runs: Path) -> Iterator[str]:
    """The address of a viewer of these runs."""
    with HttpServer(Binding(), viewer(Library([runs]), Binding())) as server:
        yield server.url


@pytest.fixture(scope="package")
def web(site: str) -> Iterator[httpx.Client]:
    """A client of the server with a run."""
    with httpx.Client(base_url=site, timeout=60.0) as made:
        yield made


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def browser() -> AsyncIterator[Browser]:
    """A headless Chromium."""
    if BROWSER is None:
        pytest.skip(
            "NO BROWSER: the viewer's pages are not tested. Install Debian's `chromium`, or name one in KAPELLE_BROWSER"
        )
    async with async_playwright() as tool:
        made = await tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        await made.close()


@pytest_asyncio.fixture(loop_scope="package")
async def page(browser: Browser, site: str) -> AsyncIterator[Page]:
    """A fresh page on which no script may fail and no policy be broken."""
    context = await browser.new_context(base_url=site, viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    made = await context.new_page()
    wrong: list[str] = []
    made.on("pageerror", lambda error: wrong.append(str(error)))
    made.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield made
    await context.close()
    assert wrong == []
