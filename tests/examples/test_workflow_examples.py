"""The examples of workflows and environments run, and what they show is true."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from kapelle.workflows import BUILTIN

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, int], list[str]]:
    monkeypatch.setenv("KAPELLE_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def lines(name: str, steps: int) -> list[str]:
        runpy.run_path(str(EXAMPLES / name))["main"](steps)
        return capsys.readouterr().out.splitlines()

    return lines


@pytest.mark.slow
def test_a_workflow_of_ones_own_asks_the_third_only_when_two_differ(
    run: Callable[[str, int], list[str]],
) -> None:
    shown = run("own_workflow.py", 2)
    assert len(shown) == 2
    shares = [int(line.rpartition(" ")[2].rstrip("%")) for line in shown]
    assert all(0 <= share < 100 for share in shares)


@pytest.mark.long
@pytest.mark.slow
def test_parts_of_a_mixture_are_told_apart(run: Callable[[str, int], list[str]]) -> None:
    shown = run("debate_on_a_mixture.py", 2)
    assert len(shown) == 2
    assert all("success/chains" in line and "success/sums" in line for line in shown)


@pytest.mark.slow
def test_siirls_train_cycle_lets_agents_take_turns(run: Callable[[str, int], list[str]]) -> None:
    shown = run("siirl_workflow.py", 4)
    assert shown[:4] == [
        "flowchart TD",
        '    n0["rollout_reasoner: reasoner"]',
        '    n1((("rollout_actor: actor")))',
        "    n0 --> n1",
    ]
    assert [line.split("trains ")[1] for line in shown[4:]] == ["reasoner", "reasoner", "actor", "actor"]


def test_every_workflow_is_shown_and_ends_with_the_right_answer(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLES / "every_workflow.py"))
    shown = {*found["SHOWN"], "external"}  # an outside program's has examples of its own
    assert shown == set(BUILTIN), (
        f"new: {sorted(set(BUILTIN) - shown)}, gone: {sorted(shown - set(BUILTIN))}. Add a line to SHOWN of examples/every_workflow.py "
        "for each new workflow: the workflow, and what each agent says in its turns."
    )
    found["main"]()
    said = capsys.readouterr().out
    assert said.count("success 1.0") == len(found["SHOWN"]) - 2  # one of two in `parallel`, none in a game
    assert "rewards: ann 1, bob -1" in said
