"""What was taken from others is what they published, and everything is shipped."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATIC = ROOT / "src" / "kapelle" / "viewer" / "static"
VENDORED = json.loads((STATIC / "VENDORED.json").read_text())
OWN = [path for path in sorted(STATIC.glob("*.js")) if path.name not in {each["file"] for each in VENDORED}]


@pytest.mark.parametrize("each", VENDORED, ids=lambda each: each["file"])
def test_a_vendored_file_is_the_published_one(each: dict[str, str]) -> None:
    assert hashlib.sha256((STATIC / each["file"]).read_bytes()).hexdigest() == each["sha256"]
    assert each["license"] == "MIT"
    assert re.fullmatch(r"\d+\.\d+\.\d+", each["version"])


def test_the_wheel_holds_all_of_it() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "kapelle"
    ]
    assert {"viewer/static/*", "viewer/templates/*"} <= set(packed)
    assert not [
        path for path in (*STATIC.iterdir(), *(STATIC.parent / "templates").iterdir()) if path.is_dir()
    ]


@pytest.mark.parametrize("script", OWN, ids=lambda path: path.name)
def test_scripts_set_text_and_never_markup(script: Path) -> None:
    found = re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTMLUnsafe|\.srcdoc",
        script.read_text(),
    )
    assert found == []


@pytest.mark.parametrize(
    "page", sorted((STATIC.parent / "templates").glob("*.html")), ids=lambda path: path.name
)
def test_templates_hold_nothing_inline_and_nothing_unescaped(page: Path) -> None:
    text = page.read_text()
    if page.name == "export.html":  # holds everything in itself, under a policy of hashes
        text = re.sub(r"<(style|script)>\{\{ \1 \}\}</\1>", "", text)
    assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:|\|\s*safe|autoescape false", text)
    assert not re.search(r"<script(?![^>]*\b(?:src=|type=\"application/json\"))", text)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
