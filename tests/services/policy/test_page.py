"""The chat page."""

from __future__ import annotations

import re

import httpx
import pytest

from kapelle.services.policy.service import PAGE_FILES as FILES
from kapelle.services.policy.service import PolicyServer


def test_the_page_has_no_inline_code_and_loads_nothing_foreign(
    server: PolicyServer, web: httpx.Client
) -> None:
    page = web.get(f"{server.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", page.text)
    named = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert sorted(f"/{name}" for name in named) == sorted(FILES.keys() - {"/"})
    for text in (page.text, *(web.get(f"{server.url}/{name}").text for name in named)):
        assert "//" not in re.sub(r"(?m)^// .*$", "", text), "no address of anybody else"


@pytest.mark.parametrize("path", FILES)
def test_its_policy_lets_it_call_itself_alone(server: PolicyServer, web: httpx.Client, path: str) -> None:
    headers = web.get(f"{server.url}{path}").headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_shows_answers_as_text(server: PolicyServer, web: httpx.Client) -> None:
    script = web.get(f"{server.url}/chat.js").text
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\.href|setAttribute", script
    )
