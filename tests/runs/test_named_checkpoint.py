"""Which checkpoint of a run is the best, and that it stays while others go."""

from pathlib import Path

import pytest
from tests.support.five_steps import settings
from tests.support.run_folders import open_run
from tests.support.tiny import same_bits

from kapelle.cli import main
from kapelle.errors import CheckpointError, ConfigError
from kapelle.rollout.evaluation.evaluate import Evaluation
from kapelle.runs import checkpoint
from kapelle.runs.named_checkpoint import (
    best_checkpoint,
    named_checkpoint,
    resumed_run,
    split_run,
    values_of,
)
from kapelle.runs.rollback import roll_back
from kapelle.training.trainer import Trainer
from kapelle.types import Json

CONFIG = "checkpoint: {best: success, best_is: highest}\n"
SUCCESS = {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.9, 4: 0.3}


def row(success: float | None) -> dict[str, Json]:
    reward: dict[str, Json] = {} if success is None else {"solver": -success}
    return {"problems": 4, "success": success, "interval": None, "reward": reward}


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    with open_run(tmp_path / "run", config=CONFIG) as run:
        for step, success in SUCCESS.items():
            run.record_metrics(step + 1, {"loss": float(step)})
            run.record_evaluation(step, row(success))
            checkpoint.save(run.checkpoints, step, {"loop": {}})
    return run.path


def test_checkpoints_are_found_by_name(kept: Path, tmp_path: Path) -> None:
    assert split_run(f"{kept}@best") == (kept, "best")
    assert split_run(f"{kept}@12") == (kept, "12")
    assert split_run(f"{kept}@latest") == split_run(str(kept)) == (kept, None)
    (tmp_path / "me@home").mkdir()
    assert split_run(str(tmp_path / "me@home")) == (tmp_path / "me@home", None)
    with pytest.raises(ConfigError, match="Did you mean"):
        split_run(f"{kept}@bset")
    assert named_checkpoint(kept, None) is None
    assert named_checkpoint(kept, "3") == kept / "checkpoints" / "00000003"
    with pytest.raises(
        CheckpointError, match=r"step 7. The nearest of its 5 checkpoints are .*@2, .*@3, .*@4"
    ):
        named_checkpoint(kept, "7")
    assert named_checkpoint(kept, "best") == kept / "checkpoints" / "00000002"
    (kept / "config.yaml").write_text("name: other\n")
    with pytest.raises(ConfigError, match=r"Train with `checkpoint\.best: success`"):
        named_checkpoint(kept, "best")


def test_only_the_newest_checkpoint_can_be_resumed(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {resumed_run(f"{kept}{tag}") for tag in ("", "@latest", "@4")} == {kept}
    with pytest.raises(ConfigError, match=r"rollback \S+run --to 2`.*train RECIPE --start-from \S+@best"):
        resumed_run(f"{kept}@best")
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 9"):
        resumed_run(f"{kept}@9")
    assert resumed_run(str(tmp_path / "new")) == tmp_path / "new"
    for command in (["train", "--resume", f"{kept}@1"], ["train", "--resume", "--run-dir", f"{kept}@1"]):
        assert main(command) == 2
        assert "rollback" in capsys.readouterr().err


def test_the_best_is_the_earliest_complete_one_of_the_best_value(kept: Path) -> None:
    def best(metric: str, *, lowest: bool = False) -> str | None:
        found = best_checkpoint(kept, metric, lowest=lowest)
        return None if found is None else found.name

    assert best("success") == "00000002"
    assert best("success", lowest=True) == "00000000"
    assert best("reward/solver") == "00000000"
    assert best("loss") == "00000004"
    assert best("unheard") is None
    assert values_of(kept, "reward/solver")[2] == -0.9
    (kept / "checkpoints" / "00000002" / "state.json").write_bytes(b"{}")
    assert best("success") == "00000003"


def test_the_best_is_kept_while_others_are_deleted(kept: Path) -> None:
    with open_run(kept, resume=True, config=CONFIG) as run:
        best = best_checkpoint(kept, "success", lowest=False)
        run.prune(1, kept / "checkpoints" / "00000004", best)
    assert [folder.name for folder in checkpoint.list_checkpoints(kept / "checkpoints")] == [
        "00000002",
        "00000004",
    ]


@pytest.mark.slow
def test_a_run_saves_and_keeps_its_best_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 is the best; checkpoints are asked for after step 5 alone."""
    scores = {0: 0.0, 2: 0.75, 4: 0.5, 5: 0.25}
    real = Evaluation.row

    def scored(self: Evaluation) -> dict[str, Json]:
        return {**real(self), "success": scores[trainer.done]}

    monkeypatch.setattr(Evaluation, "row", scored)
    own = {**settings(), "checkpoint": {"every": 5, "keep": 1, "best": "success"}}
    run = tmp_path / "run"
    with Trainer(**own, run_dir=run) as trainer:
        trainer.train(4)
        there = [folder.name for folder in checkpoint.list_checkpoints(run / "checkpoints")]
        assert there == ["00000002", "00000004"]
        trainer.train()
    assert [folder.name for folder in checkpoint.list_checkpoints(run / "checkpoints")] == [
        "00000002",
        "00000005",
    ]
    with Trainer.from_run(f"{run}@best") as best, Trainer.from_run(run) as newest:
        assert (best.done, newest.done) == (2, 5)
        weights = [t.engine.weights(t.team.trained[0]) for t in (best, newest)]
        assert not same_bits(*({k: v.clone() for k, v in each.items()} for each in weights))
    roll_back(run, 2)
    assert named_checkpoint(run, "best") == run / "checkpoints" / "00000002"
