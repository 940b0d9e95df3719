"""Functions for directed graphs of named nodes: checks, the order of execution, ancestors and drawings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from kapelle.errors import ConfigError, did_you_mean

Graph = Mapping[str, Sequence[str]]
"""Mapping from each node to the nodes that must run before it, in the order of their definition."""


def check_graph(graph: Graph, where: str) -> None:
    """Raise ConfigError if the graph has an unknown or repeated dependency or a cycle."""
    for name, before in graph.items():
        for other in before:
            if other not in graph:
                raise ConfigError(
                    f"Node '{name}' of {where} depends on the unknown node '{other}'.{did_you_mean(other, graph)}"
                )
        if len(set(before)) < len(before):
            raise ConfigError(
                f"Node '{name}' of {where} lists a dependency twice: {', '.join(before)}. Remove the duplicate."
            )
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise ConfigError(
            f"The nodes of {where} depend on one another in a cycle: {' <- '.join(reversed(error.args[1]))}. Remove one of "
            "these dependencies."
        ) from None


def levels(graph: Graph) -> list[list[str]]:
    """Return the nodes in layers. Each node is in the first layer that comes after the layers of all its dependencies."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    layers = []
    while sorter.is_active():
        ready = set(sorter.get_ready())
        sorter.done(*ready)
        layers.append([name for name in graph if name in ready])
    return layers


def ancestors(graph: Graph, name: str) -> list[str]:
    """Return every node on which a node depends, directly or indirectly, in the order of their definition."""
    found: set[str] = set()
    todo = list(graph[name])
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(graph[node])
    return [other for other in graph if other in found]


def sinks(graph: Graph) -> list[str]:
    """Return the nodes on which no other node depends."""
    needed = {before for names in graph.values() for before in names}
    return [name for name in graph if name not in needed]


def mermaid(graph: Graph, labels: Mapping[str, str], answer: str | None = None) -> str:
    """Return the graph as a Mermaid flowchart, in which the node `answer` has a double border."""
    place = {name: f"n{k}" for k, name in enumerate(graph)}
    lines = ["flowchart TD"]
    for name in graph:
        label = labels.get(name, name)
        for sign, entity in (("&", "&amp;"), ('"', "&quot;"), ("<", "&lt;"), (">", "&gt;")):
            label = label.replace(sign, entity)  # Mermaid accepts HTML entities inside quotes
        shape = ('((("', '")))') if name == answer else ('["', '"]')
        lines.append(f"    {place[name]}{shape[0]}{label}{shape[1]}")
    lines.extend(
        f"    {place[before]} --> {place[name]}" for name, names in graph.items() for before in names
    )
    return "\n".join(lines)
