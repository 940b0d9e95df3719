from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kapelle.cli import main
from kapelle.cli.plan import DOES_NOT_FIT
from kapelle.planning import plan
from kapelle.planning.fitting import peak


def test_a_step_is_played_without_weights() -> None:
    work = plan("demo", "training.tasks_per_step=5").situation.work
    assert (work.tasks, work.group, work.played) == (5, 8, True)
    first, second = work.said
    assert (first.agent, second.agent, first.moment, second.moment) == ("reasoner", "actor", 0, 1)
    assert second.prompt > first.answer, "the second reads what the first said"


def test_what_fits_is_the_largest_that_fits() -> None:
    found = plan("demo", "model.device=cpu", gpu_memory=0.6)
    assert not found.fits
    assert found.limits is not None
    now = found.situation
    most = found.limits.microbatch_tokens
    assert (
        peak(replace(now, microbatch_tokens=most)) <= 0.6e9 < peak(replace(now, microbatch_tokens=most + 40))
    )
    assert found.limits.tasks_per_step < now.work.tasks
    assert [each.setting for each in found.advice] == ["training.gradient_checkpointing=true"]
    assert found.advice[-1].peak <= 0.6e9


def test_changes_help_as_planned() -> None:
    found = plan("demo", "model.device=cpu", "training.gradient_checkpointing=true", gpu_memory=0.6)
    assert found.fits
    assert found.advice == ()


def test_exit_codes_say_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "demo", "--gpu-memory", "80"]) == 0
    assert "cpu: " in capsys.readouterr().out
    assert main(["plan", "demo", "--gpu-memory", "0.5", "--json"]) == DOES_NOT_FIT
    row = json.loads(capsys.readouterr().out)
    assert not row["fits"]
    assert row["processes"][0]["peak"] == max(
        phase["total"] for phase in row["processes"][0]["phases"].values()
    )
    assert main(["plan", "demo", "--gpu-memory", "none"]) == 2


def test_a_second_process_has_weights_of_its_own() -> None:
    one, two = plan("demo"), plan("demo", "training.overlap=true", "training.max_staleness=1")
    assert [process.name for process in two.processes] == ["training", "sampling process"]
    sampling = two.processes[1].phases[0].kinds
    assert sampling["weights"] == one.processes[0].phases[0].kinds["weights"]
    assert sampling["optimiser"] == 0
    assert [phase.name for phase in two.processes[0].phases] == ["update", "evaluation"]


def test_rows_are_tasks_times_episodes() -> None:
    def keys(*settings: str) -> int:
        phases = {phase.name: phase for phase in plan("demo", *settings).processes[0].phases}
        return phases["sampling"].kinds["keys and values"]

    assert keys("training.tasks_per_step=8") == pytest.approx(2 * keys("training.tasks_per_step=4"), rel=0.01)
