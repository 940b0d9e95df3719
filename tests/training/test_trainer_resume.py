"""A killed run continues as if nothing had happened: weights, optimisers, generators, rows, bitwise."""

from __future__ import annotations

import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.episode_lines import lines_in
from tests.support.killed_runs import STEPS, Death, start, trainer
from tests.support.tiny import same_bits

from kapelle.errors import KapelleError
from kapelle.runs import checkpoint
from kapelle.runs.reader import read_evaluations, read_latest, read_metrics, read_status


def rows(run: Path) -> list[dict[str, float]]:
    """The metrics, clocks aside."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(run)]


def remains(run: Path) -> dict[str, Any]:
    """Everything that a run leaves behind and that does not tell the time."""
    latest = read_latest(run)
    assert latest is not None
    state = checkpoint.load(latest)
    positions = state["loop"].pop("positions")
    return {
        "state": state,
        "evaluation rows": positions["evaluations.jsonl"],
        "metrics": rows(run),
        "evaluations": read_evaluations(run),
        "episodes": lines_in(run),
        "traces": {path.name: path.read_bytes() for path in sorted((run / "traces").iterdir())},
        "policies": {
            path.relative_to(latest).as_posix(): path.read_bytes()
            for path in sorted((latest / "policies").rglob("*"))
            if path.is_file()
        },
        "config": (run / "config.yaml").read_bytes(),
    }


def recorded(run: Path) -> dict[str, bytes]:
    """All rows, episodes and traces, metrics without their clocks; not what the machine was doing."""
    files = (path for path in run.rglob("*.jsonl") if path.name != "system.jsonl")
    found = {path.relative_to(run).as_posix(): path.read_bytes() for path in files}
    return found | {"metrics.jsonl": repr(rows(run)).encode()}


class Undisturbed(dict[str, dict[str, Any]]):
    """Method → what it leaves behind when no one kills it; it runs when it is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, method: str) -> dict[str, Any]:
        run = self._folder / method
        assert start(method, run) == 0
        assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
        self[method] = remains(run)
        return self[method]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def assert_same(run: Path, expected: dict[str, Any]) -> None:
    found = remains(run)
    for part, value in expected.items():
        assert same_bits(found[part], value), part


def kill(method: str, run: Path, death: Death, *, resume: bool = False) -> None:
    assert start(method, run, resume=resume, death=death) == -death.number


@pytest.mark.slow
class TestKilled:
    @pytest.mark.sample(11)
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("method", "death"),
        [
            ("grpo", Death("between updates", 9)),
            ("grpo", Death("metrics recorded", 3)),
            ("grpo", Death("episodes recorded", 5)),
            ("grpo", Death("evaluation recorded", 2)),
            ("ppo", Death("between updates", 33)),
            ("ppo", Death("after a step, nothing recorded", 4)),
            ("ppo", Death("positions taken", 2)),
            ("whole", Death("between updates", 7)),
            ("whole", Death("metrics recorded", 5)),
            ("waiting", Death("between updates", 9)),
            ("waiting", Death("episodes recorded", 5)),
        ],
    )
    def test_at_any_place_of_a_step(
        self, method: str, death: Death, undisturbed: Undisturbed, tmp_path: Path
    ) -> None:
        run = tmp_path / "run"
        kill(method, run, death)
        assert read_status(run).state == "killed"
        assert start(method, run, resume=True) == 0
        assert_same(run, undisturbed[method])

    @pytest.mark.sample(7)
    @pytest.mark.parametrize(
        "place",
        [
            "state written",
            "policies written",
            "before the seal",
            "sealed, not renamed",
            "renamed, not pointed at",
            "before pruning",
            "in the middle of pruning",
        ],
    )
    def test_at_any_place_of_a_save(self, place: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
        run = tmp_path / "run"
        kill("grpo", run, Death(place, 2 if place != "in the middle of pruning" else 1))
        assert start("grpo", run, resume=True) == 0
        assert_same(run, undisturbed["grpo"])
        assert [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []

    def test_between_the_last_save_and_what_names_it(self, undisturbed: Undisturbed, tmp_path: Path) -> None:
        run = tmp_path / "run"
        kill("grpo", run, Death("renamed, not pointed at", 1 + STEPS // 2))
        newest = run / "checkpoints" / f"{STEPS:08d}"
        assert (run / "latest").read_text() != f"checkpoints/{newest.name}\n"
        assert read_latest(run) == newest
        assert start("grpo", run, resume=True) == 0
        assert (run / "latest").read_text() == f"checkpoints/{newest.name}\n"
        assert_same(run, undisturbed["grpo"])

    @pytest.mark.long
    def test_before_the_first_checkpoint(self, undisturbed: Undisturbed, tmp_path: Path) -> None:
        run = tmp_path / "run"
        kill("grpo", run, Death("metrics recorded", 1))
        assert start("grpo", run, resume=True) == 0
        assert_same(run, undisturbed["grpo"])

    @pytest.mark.long
    @pytest.mark.parametrize("method", ["grpo", "ppo"])
    def test_again_and_again_at_random(self, method: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
        run = tmp_path / "run"
        draw = random.Random(method)
        places = ["between updates", "episodes recorded", "before the seal", "metrics recorded"]
        kill(method, run, Death(draw.choice(places), 2))
        for _ in range(2):
            code = start(method, run, resume=True, death=Death(draw.choice(places), draw.randint(1, 2)))
            assert code == -signal.SIGKILL
        assert start(method, run, resume=True) == 0
        assert_same(run, undisturbed[method])

    def test_a_damaged_checkpoint_and_a_torn_row_are_passed_over(
        self, undisturbed: Undisturbed, tmp_path: Path
    ) -> None:
        run = tmp_path / "run"
        kill("grpo", run, Death("metrics recorded", 5))
        newest = checkpoint.list_checkpoints(run / "checkpoints")[-1]
        weights = newest / "train.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
        torn = run / "metrics.jsonl"
        torn.write_bytes(torn.read_bytes() + b'{"step": 6, "half of a r')
        assert start("grpo", run, resume=True) == 0
        assert_same(run, undisturbed["grpo"])


class TestLost:
    @pytest.mark.slow
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("how", ["removed", "damaged"])
    def test_a_run_whose_checkpoints_are_lost_is_left_as_it_is(self, how: str, tmp_path: Path) -> None:
        run = tmp_path / "run"
        kill("grpo", run, Death("metrics recorded", 5))
        for folder in checkpoint.list_checkpoints(run / "checkpoints"):
            if how == "removed":
                shutil.rmtree(folder)
            else:
                (folder / "manifest.json").write_bytes(b"{}")
        before = recorded(run)
        assert before["metrics.jsonl"]
        with pytest.raises(KapelleError, match=r"Restore") as refused:
            trainer("grpo", run, resume=True)
        assert str(run) in str(refused.value)
        assert recorded(run) == before


class TestGoingOn:
    @pytest.mark.long
    @pytest.mark.slow
    def test_more_steps_keep_what_was_measured_at_the_former_end(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        assert start("grpo", run) == 0
        before = recorded(run)
        with trainer("grpo", run, resume=True, training={"steps": STEPS + 1, "tasks_per_step": 2}) as longer:
            longer.train()
        assert [row["step"] for row in read_evaluations(run)] == [0, 2, 4, STEPS, STEPS + 1]
        after = recorded(run)
        assert after["evaluations.jsonl"].startswith(before["evaluations.jsonl"])
        assert {name for name in before if name.startswith("episodes")} <= {*after}
        # An end that is reached once more is measured once.
        assert start("grpo", tmp_path / "twice") == 0
        assert start("grpo", tmp_path / "twice", resume=True) == 0
        assert recorded(tmp_path / "twice") == before


@pytest.mark.slow
class TestAsked:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(
        self, number: int, code: int, undisturbed: Undisturbed, tmp_path: Path
    ) -> None:
        run = tmp_path / "run"
        assert start("grpo", run, death=Death("between updates", 9, number)) == code
        assert read_status(run).state == "interrupted"
        latest = read_latest(run)
        assert latest is not None
        # The step that was running ends and is saved, whatever `checkpoint.every` says.
        assert latest.name == f"{rows(run)[-1]['step']:08d}"
        assert start("grpo", run, resume=True) == 0
        assert_same(run, undisturbed["grpo"])

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("method", "death", "steps"),
        [
            ("grpo", Death("in a rollout", 40), 2),
            ("grpo", Death("in an update", 5), 2),
            ("ppo", Death("in a rollout", 50), 2),
            ("ppo", Death("between updates", 15), 1),
            ("whole", Death("in an update", 4), 1),
            ("grpo", Death("in an evaluation", 1), 0),
            ("grpo", Death("in an evaluation", 2), 2),
            ("grpo", Death("in an evaluation", 3), 4),
        ],
    )
    def test_a_step_ends_first_and_an_evaluation_is_made_later(
        self,
        method: str,
        death: Death,
        steps: int,
        undisturbed: Undisturbed,
        tmp_path: Path,
    ) -> None:
        run = tmp_path / "run"
        assert start(method, run, death=replace(death, number=signal.SIGTERM)) == 143
        assert read_status(run).state == "interrupted"
        latest = read_latest(run)
        assert latest is not None
        done = int(latest.name[:8])
        assert [row["step"] for row in rows(run)] == list(range(1, done + 1))
        assert done == steps
        assert start(method, run, resume=True) == 0
        assert_same(run, undisturbed[method])

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("place", ["in a rollout", "in an update", "episodes recorded"])
    def test_a_second_ctrl_c_costs_the_steps_since_the_last_checkpoint(
        self, place: str, undisturbed: Undisturbed, tmp_path: Path
    ) -> None:
        run = tmp_path / "run"
        times = {"in a rollout": 90, "in an update": 7, "episodes recorded": 5}[place]
        assert start("grpo", run, death=Death(place, times, signal.SIGINT, again=True)) == 130
        latest = read_latest(run)
        assert latest is not None
        assert latest.name == "00000002"
        assert start("grpo", run, resume=True) == 0
        assert_same(run, undisturbed["grpo"])
