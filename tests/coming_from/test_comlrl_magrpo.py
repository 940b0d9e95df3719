"""Port CoMLRL's quick start of MAGRPO: two agents learn a ratio of lengths. From comlrl 1.4.3."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.ports import Port, chatml
from tests.support.qwen import DEFAULT_SYSTEM, save_qwen

import kapelle
from kapelle.errors import ConfigError

pytestmark = pytest.mark.slow

PROMPTS = [
    "Describe a city above the clouds:",
    "Invent a feast and explain it:",
    "Joke about dinosaurs:",
    "Plan a garden:",
]
ROWS = [{"prompt": prompt} for prompt in PROMPTS]


def ratio(completions: Mapping[str, str]) -> float:
    """Return 1 if the second text is two to three times as long as the first, and exponentially less elsewhere."""
    first, second = map(len, completions.values())
    if first == 0:
        return 0.0
    return math.exp(-max(0.0, 2 - second / first, second / first - 3))


GIVEN = {
    ("ab", "abcd"): 100.0,
    ("ab", "ab"): 100 * math.exp(-1),
    ("", "ab"): 0.0,
    ("a", "abcde"): 100 * math.exp(-2),
}
"""Texts of both agents → the reward. Their processor multiplies it by 100."""


def test_run_matches_script(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_qwen(model, "qwen2")
    own = {"model": str(model), "train": "full"}
    theirs: Any = {
        "num_train_epochs": 1,
        "agent_learning_rate": 5e-5,
        "logging_steps": 10,
        "num_generations": 4,
        "num_turns": 1,
        "max_new_tokens": 6,
        "temperature": 0.6,
        "joint_mode": "aligned",
        "rollout_buffer_size": 2,
        "advantage_normalization": True,
        "advantage_mode": "mean",
        "discount": 1.0,
        "eval_interval": 0,
        "reference_kl_enabled": False,
        "parallel_training": "none",
        "external_prompt_passthrough": False,
    }
    kapelle.train(
        str(model),
        train_dataset=ROWS,
        reward=ratio,
        reward_weights=[100.0],
        agents=[{"name": "first", "weights": own}, {"name": "second", "weights": own}],
        algorithm="magrpo",
        workflow="parallel",
        output_dir=str(tmp_path / "run"),
        **theirs,
    ).trainer.close()
    port = Port(tmp_path / "run", model)
    # Four joint samples of each of two prompts. Both agents get the same prompt.
    assert port.batches == [(2, 4), (2, 4)]
    assert port.prompts == {
        (prompt, agent): chatml(("system", DEFAULT_SYSTEM), ("user", prompt))
        for prompt in PROMPTS
        for agent in ("first", "second")
    }
    assert port.trained == {"first": "all weights", "second": "all weights"}
    assert port.rates == [5e-5, 5e-5]
    algorithm = port.setting("algorithm")
    assert (algorithm["name"], algorithm["scale"], algorithm["joint"]) == ("magrpo", "std", "aligned")
    assert algorithm["loss"]["kl_coefficient"] == 0.0
    assert port.setting("team.sampling.temperature") == 0.6
    for (first, second), reward in GIVEN.items():
        rewards = port.earned({"first": first, "second": second}).rewards
        assert rewards == pytest.approx({"first": reward, "second": reward})


@pytest.mark.parametrize("name", ["top_p", "top_k", "discount", "early_termination_threshold"])
def test_setting_without_counterpart_fails_before_model_loads(name: str) -> None:
    theirs: Any = {"top_p": 0.6, "top_k": 50, "discount": 0.9, "early_termination_threshold": -0.2}
    given: Any = {"agents": 2, "algorithm": "magrpo", "run_dir": None, "steps": 0, name: theirs[name]}
    with pytest.raises(ConfigError, match=name):
        kapelle.train("embedded", ROWS, ratio, **given)
