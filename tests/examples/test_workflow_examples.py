"""Run the examples of workflows and check what they print."""

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
def test_own_workflow(
    run: Callable[[str, int], list[str]],
) -> None:
    shown = run("own_workflow.py", 2)
    assert len(shown) == 2
    shares = [int(line.rpartition(" ")[2].rstrip("%")) for line in shown]
    assert all(0 <= share < 100 for share in shares)


@pytest.mark.long
@pytest.mark.slow
def test_mixture_reports_parts(run: Callable[[str, int], list[str]]) -> None:
    shown = run("debate_on_a_mixture.py", 2)
    assert len(shown) == 2
    assert all("success/chains" in line and "success/sums" in line for line in shown)


@pytest.mark.long
@pytest.mark.slow
def test_siirl_train_cycle(run: Callable[[str, int], list[str]]) -> None:
    shown = run("siirl_workflow.py", 4)
    assert shown[:4] == [
        "flowchart TD",
        '    n0["rollout_reasoner: reasoner"]',
        '    n1((("rollout_actor: actor")))',
        "    n0 --> n1",
    ]
    assert [line.split("trains ")[1] for line in shown[4:]] == ["reasoner", "reasoner", "actor", "actor"]


def test_every_workflow(capsys: pytest.CaptureFixture[str]) -> None:
    found = runpy.run_path(str(EXAMPLES / "every_workflow.py"))
    shown = {*found["SHOWN"], "external"}  # `external` has its own examples
    assert shown == set(BUILTIN), "Add each new workflow to SHOWN of examples/every_workflow.py."
    found["main"]()
    output = capsys.readouterr().out
    assert output.count("success 1.0") == len(found["SHOWN"]) - 2  # one of two in `parallel`, none in a game
    assert "rewards: ann 1, bob -1" in output
