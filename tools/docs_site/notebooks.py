"""Tutorials: Markdown pages whose Python blocks are the cells of a notebook.

    python -m tools.docs_site.notebooks docs/tutorials/first_team.md first_team.ipynb     # the notebook, without outputs
    python -m tools.docs_site.notebooks                                                   # execute all of them
    python -m tools.docs_site.notebooks --write                                           # and show in the pages what they print

| in the page | in the notebook |
|---|---|
| prose | a cell of text |
| `pip install 'kapelle[EXTRA]'` in the prose | the extra of the first cell, which installs kapelle where the notebook is opened |
| a `python` block | a cell of code; one that begins with `# name.py` is written to that file |
| an `sh` block | a cell of shell commands |
| a `text` block right after either | nothing: it shows on a git host what was printed; the site shows what is printed |
| `<!-- check: assert … -->` | assertions about what was printed (`printed`) and computed; readers do not see them |
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
MOST_SECONDS = 300
"""Wall-clock seconds after which a cell is given up."""
PART = re.compile(
    r"^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?|^<!-- check: (?P<check>.*?) -->\n",
    re.MULTILINE | re.DOTALL,
)
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a tutorial."""

    kind: Literal["prose", "python", "sh", "check"]
    text: str


def parts(page: str) -> list[Part]:
    """Return the pieces of a page in order; what is shown as printed is omitted."""
    found: list[Part] = []
    at = 0
    for match in PART.finditer(page):
        found.append(Part("prose", page[at : match.start()].strip()))
        if match["check"]:
            found.append(Part("check", match["check"].strip()))
        else:
            found.append(Part("python" if match["kind"] == "python" else "sh", match["code"].rstrip()))
        at = match.end()
    found.append(Part("prose", page[at:].strip()))
    return [part for part in found if part.text]


def cells(pieces: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """Yield the cells of a notebook, in the form of nbformat 4."""
    for number, piece in enumerate(pieces):
        common = {"id": f"cell-{number}", "metadata": {}, "source": piece.text}
        if piece.kind == "prose":
            yield {"cell_type": "markdown", **common}
            continue
        source = piece.text
        if piece.kind == "sh":
            source = "\n".join(f"!{line}" for line in source.replace("\\\n", " ").splitlines())
        elif name := re.match(r"# ([\w/]+\.py)\n", source):
            source = f"%%writefile {name[1]}\n{source}"
        yield {"cell_type": "code", **common, "source": source, "execution_count": None, "outputs": []}


NEEDS = re.compile(r"pip install '(kapelle\[[\w,]+\])'")
"""What a page says of the extra that it needs."""


def needs(page: str) -> str:
    """Return what the first cell of a page installs."""
    found = NEEDS.search(page)
    return found[1] if found else "kapelle"


def notebook(page: str, *, checks: bool = False) -> dict[str, Any]:
    """Return a page as a notebook without outputs, whose first cell installs what it needs where it is opened (Colab).

    `checks` keeps the assertions in place of that cell: the page is then executed where kapelle is at hand.
    """
    pieces = [piece for piece in parts(page) if checks or piece.kind != "check"]
    if not checks:
        pieces.insert(0, Part("python", f"%pip install -q '{needs(page)}'"))
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": list(cells(pieces)),
    }


def executed(page: str) -> list[str]:
    """Execute a page and return what each of its Python and shell blocks has printed, in order.

    Only packages that the page's first cell would install can be imported. A check finds in `printed` what the block before it has
    printed. Raises RuntimeError with what went wrong.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    pieces = parts(page)
    made = nbformat.from_dict(notebook(page, checks=True))  # type: ignore[no-untyped-call, unused-ignore]
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            made,
            timeout=MOST_SECONDS,
            resources={"metadata": {"path": folder}},
            extra_arguments=[
                "--log-level=40"
            ],  # or it warns of its own socket, which listens to this machine alone
        )
        with client.setup_kernel(env=environment(page)):
            for number, (piece, cell) in enumerate(zip(pieces, made.cells, strict=True)):
                if piece.kind == "check":
                    cell.source = f"printed = {shown[-1]!r}\n{cell.source}"
                if piece.kind == "prose":
                    continue
                try:
                    client.execute_cell(cell, number)
                except CellExecutionError as error:
                    raise RuntimeError(f"{piece.text}\n\n{error}") from error
                if piece.kind != "check":
                    shown.append(_printed(cell.outputs, hide=cell.source.startswith("%%writefile")))
    return shown


def environment(page: str) -> dict[str, str]:
    """Return the variables of a process that executes a page, in which what its first cell does not install cannot be imported."""
    programs = str(Path(sys.executable).parent)
    there = installed("ipykernel", needs(page))
    hidden = [
        name for name, of in packages_distributions().items() if not there & {*map(canonicalize_name, of)}
    ]
    return {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tools/docs_site/bare"), str(ROOT / "src"), "."]),
        "HIDDEN_PACKAGES": ",".join(hidden),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
    }


def installed(*wanted: str) -> set[str]:
    """Return the distributions that pip would install for some requirements here, by name."""
    found: set[str] = set()
    waiting = [Requirement(each) for each in wanted]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        each = waiting.pop()
        name, extras = canonicalize_name(each.name), frozenset(each.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            inner = requires(name) or []
        except PackageNotFoundError:  # nothing here to hide
            continue
        found.add(name)
        waiting.extend(
            one
            for one in map(Requirement, inner)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        )
    return found


def _printed(outputs: Sequence[Any], *, hide: bool) -> str:
    """Return what a cell has printed and the text of its value; what goes to stderr is no part of it."""
    if hide:
        return ""
    texts = [
        each.text if each.output_type == "stream" else each.data.get("text/plain", "") + "\n"
        for each in outputs
        if each.output_type in {"execute_result", "display_data"}
        or (each.output_type == "stream" and each.name == "stdout")
    ]
    return ESCAPES.sub("", "".join(texts)).rstrip()


def shown_page(page: str, outputs: Sequence[str], *, checks: bool = False) -> str:
    """Return a page whose blocks are followed by what they have printed; `checks` keeps its assertions."""
    waiting = iter(outputs)

    def with_output(match: re.Match[str]) -> str:
        if match["check"]:
            return match[0] if checks else ""
        printed = next(waiting)
        block = f"```{match['kind']}\n{match['code']}```\n"
        return f"{block}\n```text\n{printed}\n```\n" if printed else block

    return PART.sub(with_output, page)


def pages() -> list[Path]:
    """Return the tutorials."""
    return sorted(path for path in TUTORIALS.glob("*.md") if path.name != "README.md")


def executed_pages() -> dict[str, list[str]]:
    """Execute every tutorial, two at a time; return (name → what its blocks printed)."""
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(lambda path: executed(path.read_text(encoding="utf-8")), pages())
        return {path.stem: shown for path, shown in zip(pages(), outputs, strict=True)}


def main(words: Sequence[str]) -> None:
    """Write one notebook, or execute some pages or all of them."""
    if len(words) == 2 and words[1].endswith(".ipynb"):
        page = Path(words[0]).read_text(encoding="utf-8")
        Path(words[1]).write_text(
            json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        return
    if words == ["--write"]:
        for name, outputs in executed_pages().items():
            path = TUTORIALS / f"{name}.md"
            path.write_text(
                shown_page(path.read_text(encoding="utf-8"), outputs, checks=True), encoding="utf-8"
            )
        return
    for path in map(Path, words) if words else pages():
        begun = time.perf_counter()
        text = path.read_text(encoding="utf-8")
        shown = shown_page(text, executed(text))
        print(
            shown if words else f"{path.name}: {len(shown.splitlines())} lines",
            f"{time.perf_counter() - begun:.1f} s",
            sep="\n",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
