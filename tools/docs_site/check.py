"""Check a built site: every link and anchor leads somewhere, and nothing is loaded from another server.

    python -m tools.docs_site.check build/site

Prints each fault as `page: what` and exits with 1 if there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {
    ("script", "src"),
    ("img", "src"),
    ("link", "href"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
}
"""What a browser fetches without being asked."""


class Page(HTMLParser):
    """What one page links to, loads and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element names."""
        given = {key: value or "" for key, value in attrs}
        self.anchors |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        for key, value in given.items():
            # A canonical address and the like is told, not loaded.
            if (tag, key) in LOADS and given.get("rel") not in {"canonical", "prev", "next", "alternate"}:
                self.loads.append(value)


@cache
def page_at(path: Path) -> Page:
    """Return one page, read once."""
    return Page(path.read_text(encoding="utf-8"))


def faults(page: Path, site: Path) -> Iterator[str]:
    """Yield what is wrong with one page."""
    found = page_at(page)
    for address in found.loads:
        if urlsplit(address).scheme in {"http", "https"} or address.startswith("//"):
            yield f"loads {address} from another server"
    for address in [*found.links, *found.loads]:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if target.is_dir():
            target /= "index.html"
        if not target.is_file() or not target.is_relative_to(site.resolve()):
            yield f"leads to {address}, which does not exist"
        elif (
            parts.fragment
            and target.suffix == ".html"
            and unquote(parts.fragment) not in page_at(target).anchors
        ):
            yield f"leads to {address}, whose place does not exist"


def main(folder: str) -> int:
    """Check every page of a site; return the exit code."""
    site = Path(folder)
    pages = sorted(site.rglob("*.html"))
    # The page for addresses that do not exist names its files from the top of a server.
    wrong = [
        f"{page.relative_to(site)}: {fault}"
        for page in pages
        if page.name != "404.html"
        for fault in faults(page.resolve(), site)
    ]
    print(
        "\n".join(wrong)
        if wrong
        else f"{len(pages)} pages: every link leads somewhere, nothing is loaded from elsewhere"
    )
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
