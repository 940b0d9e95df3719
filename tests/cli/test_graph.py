"""`kapelle validate --graph` draws any workflow."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Kapelle


def test_a_recipes_workflow_is_drawn(kapelle: Kapelle) -> None:
    said = kapelle("validate", "--graph", "demo")
    assert said.code == 0, said.err
    assert said.out == 'flowchart TD\n    n0["reasoner"]\n    n1((("actor")))\n    n0 --> n1\n'


@pytest.mark.parametrize(
    ("settings", "edges"),
    [
        (["workflow.name=vote"], {"n0 --> n2", "n1 --> n2"}),
        (["workflow.name=debate"], {"n0 --> n1", "n1 --> n0", "n0 --> n2", "n1 --> n2"}),
        (["workflow.name=summary", "workflow.layers=2"], {"n0 --> n1", "n1 --> n2"}),
        (["workflow.name=router", "workflow.handovers=2"], {"n0 --> n1", "n1 --> n0"}),
    ],
)
def test_edges_show_which_agent_reads_which(kapelle: Kapelle, settings: list[str], edges: set[str]) -> None:
    said = kapelle("validate", "--graph", "demo", *settings)
    assert said.code == 0, said.err
    assert {line.strip() for line in said.out.splitlines() if "-->" in line} == edges


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ("{id: x, agent: a, dependencies: [x]}", "in a cycle: x <- x"),
        ("{id: x, agent: a, colour: red}", "unknown key `colour`"),
    ],
)
def test_a_wrong_workflow_file_is_one_line(kapelle: Kapelle, nodes: str, says: str) -> None:
    Path("flow.yaml").write_text(f"nodes: [{nodes}]")
    said = kapelle("validate", "--graph", "flow.yaml")
    assert said.code == 2
    assert says in said.err
    assert said.err.count("\n") == 1
