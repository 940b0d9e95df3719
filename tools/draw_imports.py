"""Draw who imports whom: the rooms of `src/kapelle` by layer, as a Mermaid flowchart on standard output.

    python tools/draw_imports.py                    the rooms, with the number of imports on each arrow
    python tools/draw_imports.py --room training   the modules of one room
    python tools/draw_imports.py src/of/another/tree/kapelle

An arrow that a path of others says already is omitted unless `--all` asks for it. Any Markdown viewer that knows
Mermaid shows the picture; imports are read from the source, those inside functions too.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).parents[1] / "src" / "kapelle"


def modules_of(package: Path) -> dict[str, Path]:
    """Return every module of a package by its dotted name without the package's own."""
    found: dict[str, Path] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, package: str, known: Iterable[str]) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    inside = {name.removeprefix(f"{package}.") for name in names if name.startswith(f"{package}.")}
    return {home for name in inside if (home := _home(name, set(known)))}


def _home(name: str, known: set[str]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def edges_between(package: Path, room: str | None) -> Counter[tuple[str, str]]:
    """Return how many modules of one room (or within `room`, of one module) import another."""
    modules = modules_of(package)
    edges: Counter[tuple[str, str]] = Counter()
    for name, path in modules.items():
        for other in imports_of(path, package.name, modules):
            if room is None:
                one, two = name.partition(".")[0], other.partition(".")[0]
            elif name.startswith(f"{room}.") and other.startswith(f"{room}."):
                one, two = name.removeprefix(f"{room}."), other.removeprefix(f"{room}.")
            else:
                continue
            if one and one != two:
                edges[one, two] += 1
    return edges


def depth_of(edges: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return how many imports stand below each node, at the longest; a cycle raises ValueError."""
    below: dict[str, set[str]] = {}
    for one, two in edges:
        below.setdefault(one, set()).add(two)
        below.setdefault(two, set())
    depth: dict[str, int] = {}

    def reach(node: str, path: tuple[str, ...]) -> int:
        if node in path:
            raise ValueError(f"a cycle of imports: {' → '.join((*path, node))}")
        if node not in depth:
            depth[node] = max((1 + reach(other, (*path, node)) for other in below[node]), default=0)
        return depth[node]

    for node in below:
        reach(node, ())
    return depth


def needed(edges: Mapping[tuple[str, str], int]) -> list[tuple[str, str]]:
    """Return the edges that no longer path says already."""
    below: dict[str, set[str]] = {}
    for one, two in edges:
        below.setdefault(one, set()).add(two)

    def reaches(start: str, goal: str, without: tuple[str, str]) -> bool:
        waiting, seen = [start], set()
        while waiting:
            node = waiting.pop()
            for other in below.get(node, ()):
                if (node, other) != without and other not in seen:
                    if other == goal:
                        return True
                    seen.add(other)
                    waiting.append(other)
        return False

    return [edge for edge in sorted(edges) if not reaches(*edge, without=edge)]


def draw(edges: Counter[tuple[str, str]], everything: bool) -> str:
    """Return the Mermaid text: one row of boxes per depth, the highest first."""
    depth = depth_of(edges)
    lines = ["flowchart TD"]
    for level in range(max(depth.values(), default=0), -1, -1):
        nodes = sorted(node for node, own in depth.items() if own == level)
        lines += [
            f"    subgraph L{level} [ ]",
            *(f"        {_id(node)}[{node}]" for node in nodes),
            "    end",
        ]
    shown = sorted(edges) if everything else needed(edges)
    lines += [f"    {_id(one)} -->|{edges[one, two]}| {_id(two)}" for one, two in shown]
    return "\n".join(lines)


def _id(node: str) -> str:
    return "m_" + node.replace(".", "_")


def main() -> None:
    """Print the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", nargs="?", type=Path, default=HERE)
    parser.add_argument("--room", metavar="ROOM", help="the modules of one room instead of all rooms")
    parser.add_argument("--all", action="store_true", help="draw arrows that a path says already, too")
    chosen = parser.parse_args()
    edges = edges_between(chosen.package, chosen.room)
    print(draw(edges, chosen.all))
    depth = depth_of(edges)
    print(f"%% {len(depth)} boxes, {len(edges)} arrows, {max(depth.values(), default=0) + 1} levels")


if __name__ == "__main__":
    main()
