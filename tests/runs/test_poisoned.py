"""Weights that are not finite are never saved, published, or loaded from a checkpoint."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.observers import Reported
from tests.support.resumed import trained
from tests.support.tiny import same_bits, sections
from torch import Tensor

from kapelle.errors import ModelError, NumericsError
from kapelle.models.checksums import write_checksums
from kapelle.runs import checkpoint
from kapelle.runs.reader import read_metrics
from kapelle.training.trainer import Trainer

STEPS = 4


def settings(non_finite: str = "stop", keep: int = 9, **over: Any) -> dict[str, Any]:
    training = {"steps": STEPS, "tasks_per_step": 2, "non_finite": non_finite, "max_failed_share": 1.0}
    return sections(training=training, checkpoint={"every": 1, "keep": keep}, **over)


def states(run: Path) -> dict[str, Any]:
    """Return the state in each checkpoint, without the one of step 0."""
    folders = checkpoint.list_checkpoints(run / "checkpoints")
    folders = [folder for folder in folders if folder.name != "00000000"]
    return {folder.name: checkpoint.load(folder)["train"] for folder in folders}


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    return [tensor for each in inner for tensor in tensors(each)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(settings(), tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.slow
def test_a_rate_that_breaks_the_weights_stops_the_run(tmp_path: Path) -> None:
    run, lr = tmp_path / "run", 1e38
    for resume in (False, True):
        with (
            Trainer(**settings(optimizer={"lr": lr}), run_dir=run, resume=resume) as trainer,
            pytest.raises(NumericsError, match="agent_0"),
        ):
            trainer.train()
        assert states(run) == {}


Breaks = Callable[[str, float], None]


@pytest.fixture
def breaks(monkeypatch: pytest.MonkeyPatch) -> Breaks:
    """Break the first policy's weights or moments in the third step, from inside the optimiser."""

    def spoil_step(part: str, value: float) -> None:
        taken, right = 0, torch.optim.AdamW.step

        def step(self: torch.optim.AdamW, *rest: Any, **named: Any) -> Any:
            nonlocal taken
            taken += 1
            found = right(self, *rest, **named)
            if taken == 5:  # two learners: the first of the third step
                first = self.param_groups[0]["params"][-1]
                broken = first.data if part == "weights" else self.state[first][part]
                broken.view(-1)[-1] = value
            return found

        monkeypatch.setattr(torch.optim.AdamW, "step", step)

    return spoil_step


PLACES = pytest.mark.parametrize("part", ["weights", "exp_avg_sq"])
VALUES = pytest.mark.parametrize("value", [math.nan, 1e38])


@pytest.mark.sample(3)
@pytest.mark.slow
@PLACES
@VALUES
def test_a_step_with_infinite_numbers_leaves_finite_checkpoints_to_resume_from(
    part: str,
    value: float,
    undisturbed: Path,
    tmp_path: Path,
    breaks: Breaks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    breaks(part, value)
    with (
        Trainer(**settings(), run_dir=run) as trainer,
        pytest.raises(NumericsError, match=f"broke its weights: .*{part}.*runs rollback"),
    ):
        trainer.train()
    monkeypatch.undo()
    found = states(run)
    assert list(found) == ["00000001", "00000002"]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(found))
    with Trainer(**settings(), run_dir=run, resume=True) as trainer:
        assert trainer.train().steps == STEPS
    assert same_bits(states(run), states(undisturbed))
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]


@pytest.mark.sample(3)
@pytest.mark.slow
@PLACES
@VALUES
def test_skip_undoes_only_the_step_of_that_policy(
    part: str, value: float, undisturbed: Path, tmp_path: Path, breaks: Breaks
) -> None:
    run = tmp_path / "run"
    breaks(part, value)
    with Trainer(**settings("skip"), run_dir=run) as trainer:
        assert trainer.train().steps == STEPS
    found, right = states(run), states(undisturbed)
    before, after = (found[step]["learners"] for step in ("00000002", "00000003"))
    assert same_bits(after["agent_0"], before["agent_0"])
    assert same_bits(after["agent_1"], right["00000003"]["learners"]["agent_1"])
    assert [after[name]["steps"] for name in ("agent_0", "agent_1")] == [2, 3]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(found))
    rows = read_metrics(run)
    assert ["undone/agent_0" in row for row in rows] == [False, False, True, False]
    assert [row["skipped/agent_0"] for row in rows] == [0.0, 0.0, 1.0, 0.0]
    assert [row["skipped/agent_1"] for row in rows] == [0.0] * 4
    # The learner continues from there.
    assert not same_bits(found["00000004"]["learners"]["agent_0"], before["agent_0"])


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("learner", ["critic", "verifier"])
@pytest.mark.parametrize("non_finite", ["stop", "skip"])
def test_critics_and_verifiers_are_checked_like_policies(
    learner: str, non_finite: str, tmp_path: Path
) -> None:
    algorithm = {"name": "ippo", "group_size": 2}
    if learner == "verifier":
        algorithm = {"name": "verifier", "data": "recorded", "group_size": 4}
    over: dict[str, Any] = {"algorithm": algorithm, "optimizer": {"lr": 1e-2, "critic_lr": 1e38}}
    over["environment"] = {"name": "tests.support.copies:Copies"}
    if learner == "verifier":
        over["team"] = {"sharing": "frozen", "agents": 2, "sampling": {"max_tokens": 4}}
    run = tmp_path / "run"
    with Trainer(**settings(non_finite, **over), run_dir=run) as trainer:
        if non_finite == "stop":
            with pytest.raises(NumericsError, match=f"of '.*{learner}.*broke its weights"):
                trainer.train()
            assert states(run) == {}
            return
        trainer.train()
    assert all(
        any(name.startswith("undone/") and learner in name for name in row) for row in read_metrics(run)
    )
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(states(run)))


def _weight(state: dict[str, Any]) -> Tensor:
    learner = next(iter(state["train"]["learners"].values()))
    return next(iter(learner["weights"].values()))  # type: ignore[no-any-return]


def _moment(state: dict[str, Any]) -> Tensor:
    learner = next(iter(state["train"]["learners"].values()))
    return next(iter(learner["optimizer"].values()))["exp_avg_sq"]  # type: ignore[no-any-return]


POISONS: dict[str, tuple[Callable[[dict[str, Any]], Tensor], float, str]] = {
    "nan weight": (_weight, math.nan, "1 of the .* are not finite"),
    "infinite weight": (_weight, math.inf, "1 of the .* are not finite"),
    "great weight": (_weight, -1e38, "reaches 1e.38, whose square is not finite"),
    "nan moment": (_moment, math.nan, "1 of the .* are not finite"),
    "negative second moment": (_moment, -1e-3, "falls to -0.001, though it is a mean of squares"),
}


def spoil(run: Path, step: int, poison: str) -> None:
    """Replace the checkpoint of a step by a complete one with an invalid number, as older versions wrote."""
    where, value, _ = POISONS[poison]
    right = run / "checkpoints" / f"{step:08d}"
    state = checkpoint.load(right)
    where(state).view(-1)[0] = value
    shutil.rmtree(right)
    assert checkpoint.save(run / "checkpoints", step, state) == right


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("poison", POISONS)
def test_a_checkpoint_with_infinite_numbers_is_not_used(
    poison: str, undisturbed: Path, tmp_path: Path
) -> None:
    run, new_messages = tmp_path / "run", Reported("checkpoint")
    shutil.copytree(undisturbed, run)
    spoil(run, 3, poison)
    spoil(run, 4, poison)
    # With one checkpoint kept, the poisoned ones must not count as it.
    with Trainer(**settings(keep=1), run_dir=run, resume=True, observer=new_messages) as trainer:
        assert trainer.done == 2
        trainer.train(1)
        names = [folder.name for folder in checkpoint.list_checkpoints(run / "checkpoints")]
        assert names == ["00000003-2", "00000004"]
        assert trainer.train().steps == STEPS
    assert len(new_messages.said) == 2
    for said in new_messages.said:
        assert re.search(f"is damaged: .*{POISONS[poison][2]}", said)
        assert f"kapelle runs rollback {run} --to 2" in said
    assert same_bits(states(run)["00000004-2"], states(undisturbed)["00000004"])
    assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4]


def test_weights_that_broke_between_steps_are_not_saved(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Trainer(**settings(), run_dir=run) as trainer:
        trainer.train(1)
        weights = trainer.engine.weights("agent_1")
        with torch.no_grad():
            next(iter(weights.values())).view(-1)[0] = math.nan
        with pytest.raises(NumericsError, match="step 1 was not written: 1 of the"):
            trainer.save()
    assert list(states(run)) == ["00000001"]


def test_no_policy_starts_from_infinite_weights(undisturbed: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "adapter"
    shutil.copytree(undisturbed / "checkpoints" / "00000004" / "policies" / "agent_0", folder)
    held = load_file(folder / "adapter_model.safetensors")
    next(iter(held.values())).view(-1)[0] = math.nan
    save_file(held, folder / "adapter_model.safetensors")
    write_checksums(folder)
    with pytest.raises(ModelError, match=r"Training cannot continue from the weights in .*: 1 of the"):
        Trainer(**settings(), start_from={"agent_0": folder})
