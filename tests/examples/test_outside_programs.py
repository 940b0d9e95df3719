"""Train external programs without changing them."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.serving import Watching
from tests.support.tiny import SIZE

from kapelle.training.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "environment.port=0",
    "evaluation.before_and_after=false",
    "training.steps=1",
    "algorithm.group_size=2",
    *(f"model.embedded.{key}={value}" for key, value in SIZE.items()),
)


@pytest.mark.slow
def test_program_that_uses_only_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    recipe = str(EXAMPLES / "outside_program.yaml")
    with Trainer.from_recipe(recipe, *SMALL, "training.tasks_per_step=1", observer=Watching()) as trainer:
        [step] = trainer.steps()
    for episode in step.groups[0].episodes:
        assert episode.error is None
        [turn] = episode.turns
        digits = sum(letter.isdigit() for letter in turn.text)
        assert episode.rewards == {"writer": digits / max(1, len(turn.text))}


@pytest.mark.slow
def test_model_names_select_three_agents() -> None:
    main: Any = runpy.run_path(str(EXAMPLES / "outside_team.py"))["main"]
    watching, played = Watching(), []
    with Trainer.from_recipe(str(EXAMPLES / "outside_team.yaml"), *SMALL, observer=watching) as trainer:
        player = threading.Thread(target=lambda: played.append(main(watching.url)), daemon=True)
        player.start()
        [step] = trainer.steps()
    player.join(60.0)
    episodes = [episode for group in step.groups for episode in group.episodes]
    assert [episode.error for episode in episodes] == [None] * 4
    assert played == [4]
    for episode in episodes:
        order = [turn.agent for turn in episode.turns]
        assert order[:3] == ["planner", "coder", "critic"]
        if len(order) > 3:
            first, second = episode.by("coder")
            assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert set(episode.rewards) == {"planner", "coder", "critic"}
    assert {turn.policy for episode in episodes for turn in episode.turns} == set(trainer.team.trained)


def test_program_fails_without_training() -> None:
    main: Any = runpy.run_path(str(EXAMPLES / "outside_team.py"))["main"]
    with socket.socket() as held:  # bound, without a listener
        held.bind(("127.0.0.1", 0))
        with pytest.raises(SystemExit, match="kapelle train"):
            main(f"http://127.0.0.1:{held.getsockname()[1]}/v1", "none", "0")
