from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kapelle.errors import ConfigError
from kapelle.workflows.graph import ancestors, check_graph, levels, mermaid, sinks

DIAMOND = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": []}


def test_a_diamond() -> None:
    check_graph(DIAMOND, "it")
    assert levels(DIAMOND) == [["a", "e"], ["b", "c"], ["d"]]
    assert ancestors(DIAMOND, "d") == ["a", "b", "c"]
    assert ancestors(DIAMOND, "a") == []
    assert sinks(DIAMOND) == ["d", "e"]


def test_invalid_graphs_raise_an_error_with_names() -> None:
    with pytest.raises(
        ConfigError, match=r"Node 'b' of it depends on the unknown node 'aa'. Did you mean 'a'"
    ):
        check_graph({"a": [], "b": ["aa"]}, "it")
    with pytest.raises(ConfigError, match="lists a dependency twice: a, a"):
        check_graph({"a": [], "b": ["a", "a"]}, "it")
    with pytest.raises(ConfigError, match=r"a <- a\."):
        check_graph({"a": ["a"]}, "it")
    with pytest.raises(ConfigError, match="<- d <- "):
        check_graph({"x": [], "a": ["b"], "b": ["x", "d"], "c": ["b"], "d": ["c"]}, "it")


@given(st.lists(st.sets(st.integers(0, 9), max_size=4), min_size=1, max_size=10))
def test_every_node_runs_once_and_after_what_it_waits_for(edges: list[set[int]]) -> None:
    graph = {str(k): [str(b) for b in sorted(before) if b < k] for k, before in enumerate(edges)}
    check_graph(graph, "it")
    done: list[str] = []
    for level in levels(graph):
        assert all(before in done for name in level for before in graph[name])
        done += level
    assert sorted(done) == sorted(graph)


def test_the_drawing() -> None:
    assert mermaid({"a": [], "b": ["a"]}, {"a": 'say "<x>"'}, answer="b") == (
        'flowchart TD\n    n0["say &quot;&lt;x&gt;&quot;"]\n    n1((("b")))\n    n0 --> n1'
    )
