"""Directed graphs by name: in which order they run, what stands before what, and how they are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kapelle.errors import ConfigError, did_you_mean

Graph = Mapping[str, Sequence[str]]
"""Node → the nodes that must be done before it, in the order in which they were written."""


def check_graph(graph: Graph, where: str) -> None:
    """Raise ConfigError for a dependency that does not exist, or dependencies that go in a circle."""
    for name, before in graph.items():
        for other in before:
            if other not in graph:
                raise ConfigError(
                    f"Node '{name}' of {where} depends on the unknown node '{other}'.{did_you_mean(other, graph)}"
                )
        if len(set(before)) < len(before):
            raise ConfigError(f"Node '{name}' of {where} names a dependency twice: {', '.join(before)}.")
    # What is left when all nodes are taken away that wait for no other one has a circle.
    waiting = {name: set(before) for name, before in graph.items()}
    while ready := [name for name, before in waiting.items() if not before]:
        for name in ready:
            del waiting[name]
        for others in waiting.values():
            others.difference_update(ready)
    if waiting:
        path = [next(iter(waiting))]
        while (after := next(name for name in graph[path[-1]] if name in waiting)) not in path:
            path.append(after)
        circle = [*path[path.index(after) :], after]
        raise ConfigError(
            f"The nodes of {where} wait for one another in a circle: {' <- '.join(circle)}. Remove one of these "
            "dependencies."
        )


def levels(graph: Graph) -> list[list[str]]:
    """Return the nodes in layers, each after all that it depends on; a layer's nodes wait for none of it."""
    depth: dict[str, int] = {}
    todo = list(graph)
    while todo:
        ready = [name for name in todo if all(before in depth for before in graph[name])]
        assert ready, "the graph was checked: it has no circle"
        for name in ready:
            depth[name] = 1 + max((depth[before] for before in graph[name]), default=-1)
        todo = [name for name in todo if name not in depth]
    return [[name for name in graph if depth[name] == k] for k in range(max(depth.values(), default=-1) + 1)]


def ancestors(graph: Graph, name: str) -> list[str]:
    """Return every node that a node has to wait for, directly or not, in the order they were written."""
    found: set[str] = set()
    todo = list(graph[name])
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo.extend(graph[one])
    return [other for other in graph if other in found]


def sinks(graph: Graph) -> list[str]:
    """Return the nodes that no other waits for."""
    needed = {before for names in graph.values() for before in names}
    return [name for name in graph if name not in needed]


def mermaid(graph: Graph, labels: Mapping[str, str], answer: str | None = None) -> str:
    """Return the graph as a Mermaid flowchart; `answer` has a double edge."""
    place = {name: f"n{k}" for k, name in enumerate(graph)}
    lines = ["flowchart TD"]
    for name in graph:
        label = labels.get(name, name)
        for sign, written in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
            label = label.replace(sign, written)  # Mermaid takes HTML's named characters inside quotes
        shape = ('((("', '")))') if name == answer else ('["', '"]')
        lines.append(f"    {place[name]}{shape[0]}{label}{shape[1]}")
    lines.extend(
        f"    {place[before]} --> {place[name]}" for name, names in graph.items() for before in names
    )
    return "\n".join(lines)
