"""The chat page in a real browser."""

from __future__ import annotations

import os
import shutil

import pytest
from playwright.async_api import TimeoutError as NotSeen
from playwright.async_api import async_playwright

from kapelle.services.policy.service import PolicyServer

BROWSER = os.environ.get("KAPELLE_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
async def test_a_user_chats_with_the_team(server: PolicyServer) -> None:
    if BROWSER is None:
        pytest.skip(
            "NO BROWSER: the chat page is not tested. Install Debian's `chromium`, or name one in KAPELLE_BROWSER"
        )
    wrong: list[str] = []
    async with async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = await browser.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda answer: wrong.append(answer.text) if answer.type == "error" else None)
        await page.goto(server.url)
        await page.locator("textarea").fill("<img src=x onerror=alert(1)> hello")
        await page.locator("textarea").press("Enter")
        for speaker in ("you", "first", "second"):
            try:
                await page.get_by_text(speaker, exact=True).first.wait_for()
            except NotSeen:
                pytest.fail(f"nothing from {speaker} in a minute: {await page.inner_text('body')} {wrong}")
        assert await page.locator("img").count() == 0, "what is said is text"
        assert "<img src=x" in await page.inner_text("body")
        await browser.close()
    assert wrong == []
