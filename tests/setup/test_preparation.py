"""One preparation: whoever trains, validates or plays meets the same error, before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import call

from kapelle.errors import KapelleError
from kapelle.rollout.evaluation.playing import open_rollout_setup
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import DOUBT, prepare
from kapelle.setup.recipe import load_recipe
from kapelle.training.trainer import Trainer

SMALL = (
    "model.embedded.hidden=16",
    "model.embedded.layers=1",
    "model.embedded.intermediate=32",
    "model.embedded.heads=2",
    "model.embedded.kv_heads=1",
    "warmup=null",
)

LONG = "careful " * 100

OF_ANY_TEAM = {
    "a prompt of nobody's words": ("team.agents.1.prompt='{nobody}'", "ConfigError: The prompt of agent 'actor' uses {nobody}"),
    "a prompt beyond the context": (f"team.agents.0.system={LONG}", "ContextError: "),
    "a model that is not there": ("model.path=./nowhere", "AbsentModel: Model folder './nowhere' does not exist"),
}  # fmt: skip
OF_ONE_THAT_LEARNS = {
    "nobody learns": ("team.sharing=frozen", "ConfigError: No agent of this team is trained"),
    "a tracker that is not there": ("trackers=[{name: wandb}]", "AbsentPackage: The tracker 'wandb' is not installed"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def loading(*_: object) -> None:
        pytest.fail("a model is loaded")

    monkeypatch.setattr("kapelle.setup.model_loading.load_models", loading)


def error_of(act: Callable[[], Any]) -> str:
    with pytest.raises(KapelleError) as caught:
        act()
    return f"{type(caught.value).__name__}: {caught.value}"


def config_of(*settings: str) -> RunConfig:
    return load_recipe("demo", (), (*SMALL, *settings)).config


def fault_of(config: RunConfig, begins: str) -> str:
    """The error that whoever prepares or trains meets."""
    found = error_of(lambda: prepare(config))
    assert found.startswith(begins)
    assert error_of(lambda: Trainer(config, run_dir="never-made")) == found
    return found


@pytest.mark.parametrize(("setting", "begins"), OF_ANY_TEAM.values(), ids=OF_ANY_TEAM)
def test_training_validation_and_playing_raise_the_same_error(setting: str, begins: str) -> None:
    config = config_of(setting)
    found = fault_of(config, begins)
    assert error_of(lambda: open_rollout_setup(config)) == found
    said = call("validate", "demo", *SMALL, setting)
    assert (said.code, said.err.strip()) == (2, "kapelle: " + found.partition(": ")[2])


@pytest.mark.parametrize(("setting", "begins"), OF_ONE_THAT_LEARNS.values(), ids=OF_ONE_THAT_LEARNS)
def test_a_team_that_only_acts_skips_checks_of_training(setting: str, begins: str) -> None:
    config = config_of(setting)
    fault_of(config, begins)
    assert prepare(config, training=False).team.names == ("reasoner", "actor")


def test_a_team_that_only_acts_needs_no_user_code(tmp_path: Path) -> None:
    """A run with rewards from a script can be exported and chatted with; training or playing it is an error."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{k}", "answer": "{k}"}}\n' for k in range(20)), "utf-8")
    rewards = f"environment={{name: rewarded, path: {rows}, rewards: [{{function: 'gone.py:f'}}]}}"
    for function in (rewards, rewards.replace("gone.py", "in-memory")):
        config = config_of("workflow={name: chain}", function)
        absent: list[str] = []
        assert prepare(config, training=False, absent=absent).team.names == ("reasoner", "actor")
        assert any("`f`" in what or "gone.py" in what for what in absent), absent
        for act in (partial(prepare, config, training=False), partial(prepare, config, absent=[])):
            assert error_of(act).startswith("AbsentCode"), "to play it, and a dry run of training"


@pytest.mark.parametrize(("name", "told"), [("mappo", True), ("ippo", False), ("grpo", False)])
def test_a_central_critic_that_cannot_read_a_first_round_is_doubted(name: str, told: bool) -> None:
    """Two prompts of some dozen tokens and two answers of 100 fit their own models of 192 tokens, not one view."""
    new_messages: list[tuple[str, str]] = []
    config = config_of(
        f"algorithm={{name: {name}}}", "model.embedded.context=192", "team.sampling.max_tokens=100"
    )
    prepare(config, passed=lambda *told: new_messages.append(told))
    doubts = [words for what, words in new_messages if what == DOUBT]
    assert any("central critic reads the prompts and completions" in each for each in doubts) is told
    assert any("its model's context has 192" in each for each in doubts) is told
