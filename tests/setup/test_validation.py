"""Settings that exclude each other are errors before a model loads."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kapelle.errors import ConfigError
from kapelle.settings.checks import RunToCheck
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import resolve
from kapelle.setup.team_builder import build_team
from kapelle.setup.validation import check_run

PLAIN: dict[str, Any] = {
    "environment": {"name": "arithmetic"},
    "workflow": {"name": "parallel"},
    "algorithm": {"name": "grpo"},
    "team": {"agents": 2},
}
PENNIES = {"name": "matrix", "game": "matching_pennies"}
CALLS: dict[str, Any] = {
    "team": {"agents": [{"name": "planner"}, {"name": "search"}, {"name": "code", "weights": "frozen"}]},
    "workflow": {"name": "router", "handovers": 4},
}


def checked(**sections: Any) -> RunConfig:
    config = resolve({**PLAIN, **sections})
    algorithm = cast("Any", config.algorithm).build()
    check_run(RunToCheck(config, algorithm, build_team(config, algorithm)))
    return config


@pytest.mark.parametrize(
    ("sections", "mending"),
    [
        ({"algorithm": {"name": "happo"}, "team": {"agents": 2, "sharing": "shared"}}, "Set `team.sharing: lora`"),
        (
            {"algorithm": {"name": "grpo", "order": {"name": "sequential"}}, "team": {"agents": 2, "sharing": "shared"}},
            "Set `team.sharing: lora`",
        ),
        ({"algorithm": {"name": "qmix", "team_reward": "individual"}}, "set `mean`, `sum`"),
        *(
            ({"algorithm": {"name": name, "group_size": 1}}, "greater than or equal to 2")
            for name in ("grpo", "rloo", "opo", "magrpo", "dr_mas", "at_grpo")
        ),
        ({"algorithm": {"name": "ppo"}}, "Set `algorithm.name: ippo`"),
        ({"algorithm": {"name": "cory", "base": {"name": "grpo"}}, "team": {"agents": 3}}, "Define a pioneer and an observer"),
        ({"algorithm": {"name": "magrpo", "joint": "cross"}}, "joint: cross"),
        ({"algorithm": {"name": "m_grpo"}, "team": {"agents": 1}}, r"set `algorithm\.name: grpo`"),
        (
            {"algorithm": {"name": "m_grpo", "levels": [["planner"], ["serach"]]}, **CALLS},
            r"`algorithm\.levels` refers to the unknown agent 'serach'\. Did you mean 'search'\?",
        ),
        ({"algorithm": {"name": "m_grpo", "levels": [["planner"], ["search"]]}, **CALLS}, "'code'"),
        (
            {"algorithm": {"name": "m_grpo", "compare": "main", "levels": [["code"], ["search", "planner"]]}, **CALLS},
            "compare: main",
        ),
        ({"algorithm": {"name": "grpo", "loss": {"kind": "sapo", "clip_high": 0.28}}}, "clip_high"),
        ({"environment": PENNIES, "algorithm": {"name": "grpo"}}, r"Set `algorithm\.team_reward: individual`"),
        ({"environment": PENNIES, "algorithm": {"name": "mappo", "team_reward": "sum"}}, "gives all agents the same reward"),
    ],
)  # fmt: skip
def test_a_wrong_combination_is_an_error_with_a_fix(sections: dict[str, Any], mending: str) -> None:
    with pytest.raises(ConfigError, match=mending):
        checked(**sections)


def test_games_of_opponents_are_played_for_ones_own_reward() -> None:
    checked(environment=PENNIES, algorithm={"name": "grpo", "team_reward": "individual"})
    checked(environment=PENNIES, algorithm={"name": "mars"})
    checked(environment=PENNIES, algorithm={"name": "rae"})
