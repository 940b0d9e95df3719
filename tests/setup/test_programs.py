"""A recipe that is only looked at starts none of the programs that it names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.conftest import call

from kapelle.environments.arithmetic import Arithmetic
from kapelle.environments.mixture import Mixture, Part
from kapelle.environments.tool_questions import Tools
from kapelle.environments.tools.calculator import Calculator
from kapelle.environments.tools.mcp import Mcp
from kapelle.setup.preparation import without_programs


def recipe(folder: Path) -> tuple[str, Path]:
    """A recipe with a server that leaves a file behind when it starts."""
    trace = folder / "started"
    command = [sys.executable, "-c", f"open({str(trace)!r}, 'w')"]
    (folder / "tools.yaml").write_text(
        "workflow: {name: tool_use}\nalgorithm: {name: grpo, group_size: 2}\nteam: {agents: 1}\n"
        "environment:\n  name: tools\n  questions: {name: arithmetic}\n"
        f"  tools: [{{tool: calculator}}, {{tool: mcp, command: {command!r}}}]\n"
    )
    return str(folder / "tools.yaml"), trace


@pytest.mark.parametrize("words", [("validate",), ("train", "--dry-run")])
def test_looking_at_a_recipe_starts_no_server(words: tuple[str, ...], tmp_path: Path) -> None:
    file, trace = recipe(tmp_path)
    said = call(*words, file)
    assert said.code == 0, said.err
    assert not trace.exists()
    if words == ("validate",):
        assert "--start" in said.out


def test_start_starts_the_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    file, trace = recipe(tmp_path)
    said = call("validate", file, "--start")
    assert said.code == 2
    assert "cannot be used" in said.err
    assert trace.exists()


def test_servers_are_found_inside_of_mixtures_and_nothing_else_changes() -> None:
    tools = Tools(
        questions=Arithmetic(digits=1),
        tools=(Calculator(), Mcp(command=("serve", "it")), Mcp(url="https://tools.example/mcp")),
    )
    plain = Tools(questions=Arithmetic(digits=1))
    mixed = Mixture(parts={"one": Part(environment=tools), "other": Part(environment=plain)})
    checked, excluded = without_programs(mixed)
    assert excluded == ["serve it", "https://tools.example/mcp"]
    assert checked == Mixture(parts={name: Part(environment=plain) for name in ("one", "other")})
    assert without_programs(checked)[0] is checked
