"""Where a file of the repository stands in the site, and links rewritten to lead there.

The pages under docs/ are read on a git host too, so their links are paths in the repository. In the site, pages
of docs/ keep their place; every other file that a page links to gets a page of its own under `files/`, so that nothing
leads out of the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")  # its text may begin on the line before
FENCE = re.compile(r"^\s*(```|~~~)")
OUTSIDE = re.compile(r"^[a-z][a-z+.-]*:")
LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".mjs": "js",
    ".proto": "protobuf",
    ".toml": "toml",
    ".json": "json",
}


def heading_anchor(text: str, separator: str = "-") -> str:
    """Return the anchor that a git host makes of a heading, so that one link serves both."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def place(target: str) -> str:
    """Return where a path of the repository stands in the site's sources."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if (ROOT / target).is_dir():
        return f"files/{target}/README.md"
    if target.endswith(".md"):
        return f"files/{target}"
    return f"files/{target}" if target.endswith(".svg") else f"files/{target}.md"


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a text with every line outside fenced code changed."""
    lines, fenced = [], False
    for line in text.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
            lines.append(line)
        else:
            lines.append(line if fenced else change(line))
    return "\n".join(lines)


def resolve(link: str, source: str) -> tuple[str, str] | None:
    """Return (path in the repository, anchor) of a link on a page, or None where it leads to another site or stays."""
    path, _, anchor = link.partition("#")
    if not path or OUTSIDE.match(link) or path.endswith(".ipynb"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), anchor


def rewritten(text: str, source: str) -> str:
    """Return a page's text with links that lead to the same things in the site.

    `source` is the page's path in the repository.
    """
    here = posixpath.dirname(place(source))

    def change(match: re.Match[str]) -> str:
        found = resolve(match[2], source)
        if found is None:
            return match[0]
        target, anchor = found
        link = posixpath.relpath(place(target), here or ".")
        return f"{match[1]}{link}{'#' + anchor if anchor else ''}{match[3]}"

    return outside_code(text, lambda line: LINK.sub(change, line))


def in_lists(text: str) -> str:
    """Return a text whose lists hold what they hold on a git host: MkDocs wants four spaces where two or three do there."""
    lines, listed = [], False
    for line in text.split("\n"):
        listed = bool(re.match(r"([-*]|\d+\.) ", line)) or (listed and line[:1] in {"", " "})
        lines.append(re.sub(r"^ {2,3}(?=\S)", "    ", line) if listed else line)
    return "\n".join(lines)


def linked(text: str, source: str) -> Iterator[str]:
    """Yield the paths in the repository that a page links to."""
    found: list[str] = []

    def note(line: str) -> str:
        found.extend(match[2] for match in LINK.finditer(line))
        return line

    outside_code(text, note)
    for link in found:
        target = resolve(link, source)
        if target is not None:
            yield target[0]


def outside_pages() -> dict[str, str]:
    """Return (path in the repository → text of its page) of everything outside docs/ that pages link to, at any distance."""
    pages: dict[str, str] = {}
    waiting = [
        f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in sorted((ROOT / "docs").rglob("*.md"))
    ]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        text = pages.get(source) or (ROOT / source).read_text(encoding="utf-8")
        for target in linked(text, source):
            if target in seen or target.startswith("docs/") or not (ROOT / target).exists():
                continue
            seen.add(target)
            pages[target] = page_of(target)
            if target.endswith(".md"):
                waiting.append(target)
    return pages


def page_of(target: str) -> str:
    """Return the Markdown of a page that shows a file, or what a folder holds."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(
            f"{each.name}/" if each.is_dir() else each.name
            for each in path.iterdir()
            if each.name[0] not in "._"
        )
        return f"# {target}\n\nIn the repository:\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix in {".md", ".svg"}:
        return text
    fence = "````" if "```" in text else "```"
    return f"# {target}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"
