"""Check that every internal link of the Markdown documentation leads to a file or heading that exists.

Reads the files that git tracks; links to other sites are left alone. Prints each dead link as
`file:line: link` and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)")  # its text may begin on the line before
FENCE = re.compile(r"^\s*(```|~~~)")
OWN = re.compile(r'<a id="([^"]+)">')
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) outside fenced code, where brackets are no links."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchors(text: str) -> set[str]:
    """Return a document's own anchors (`<a id="…">`), and those that a renderer makes of its headings."""
    found = set()
    for _, line in prose_lines(text):
        found |= set(OWN.findall(line))
        heading = HEADING.match(line)
        if heading:
            words = re.sub(r"[^\w\- ]", "", heading.group(1).lower())
            found.add(words.replace(" ", "-"))
    return found


def dead_links(document: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, link) for each internal link of a document that leads nowhere."""
    for number, line in prose_lines(document.read_text(encoding="utf-8")):
        for link in LINK.findall(line):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = document.parent / path if path else document
            if not target.exists() or (
                anchor
                and target.suffix == ".md"
                and anchor not in anchors(target.read_text(encoding="utf-8"))
            ):
                yield number, link


def main() -> int:
    """Check all tracked Markdown files; return the exit code."""
    listing = subprocess.run(["git", "ls-files", "*.md"], capture_output=True, text=True, check=True)
    documents = [Path(name) for name in listing.stdout.splitlines() if Path(name).exists()]
    dead = [f"{document}:{number}: {link}" for document in documents for number, link in dead_links(document)]
    print("\n".join(dead) if dead else f"{len(documents)} documents: every internal link leads somewhere")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
