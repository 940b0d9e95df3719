"""The settings of the stage that warms up a base model, and the key under which the result is cached."""

from __future__ import annotations

import hashlib
import json

from kapelle.algorithm import Algorithm
from kapelle.algorithms.sft import SFT
from kapelle.environment import Environment, Mixed, Teachable, offers
from kapelle.runtime.files import cache_folder
from kapelle.settings.feature import without_features
from kapelle.settings.schema import OptimizerConfig, RunConfig, TrainingConfig
from kapelle.setup.team_builder import build_algorithm, build_team
from kapelle.team import Team

FORMAT = 2
"""Version of the cache. Increase this number if a change of the code changes the warmed-up model for the same settings."""


def warmup_key(config: RunConfig) -> str:
    """Return a hash of all values on which the warmed-up model depends."""
    learner = config.train_engine.model_dump(mode="json")
    teachers = _teachers(config.environment)
    parts = {
        "format": FORMAT,
        "seed": config.seed,
        **{
            section: getattr(config, section).model_dump(
                mode="json", exclude={"timeout", "device", "quantization"}
            )
            for section in ("model", "environment", "workflow", "warmup")
        },
        "agents": [
            [agent.name, agent.system, agent.prompt, *agent.examples]
            for agent in stage_team(stage_of(config))[1].agents
        ],
        # Tasks of these sets are excluded from demonstrations.
        **(
            {"sets": {n: s.model_dump(mode="json") for n, s in config.evaluation.sets.items()}}
            if config.evaluation.sets
            else {}
        ),
        # A teacher's answers depend on its code.
        **({"teacher": ", ".join(teachers)} if teachers else {}),
        **({} if learner == {"name": "torch"} else {"train_engine": learner}),
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=10).hexdigest()


def _teachers(environment: Environment) -> list[str]:
    """Return the hashes of the code of all teachers, including those of the members of a mixture."""
    own = environment.teacher_hash() if offers(environment, Teachable) else None
    members = environment.members.values() if offers(environment, Mixed) else ()
    return [*([own] if own else []), *(each for member in members for each in _teachers(member))]


def warmup_is_cached(config: RunConfig) -> bool:
    """Return whether the warmed-up model for these settings is cached."""
    return (cache_folder() / "warmup" / warmup_key(config) / "config.json").is_file()


def stage_of(config: RunConfig) -> RunConfig:
    """Return the settings of the stage that warms up the base model of a run."""
    warmup = config.warmup
    assert warmup is not None, "a run without a warm-up has no such stage"
    optimizer = OptimizerConfig(
        lr=warmup.lr, betas=(0.9, 0.95), schedule=warmup.schedule, warmup_steps=min(20, warmup.steps - 1)
    )
    # One set of weights for all agents, and no critics.
    agents = config.team.agents
    if not isinstance(agents, int):
        alike = {"weights": None, "share_critic_with": None, "optimizer": None}
        agents = tuple(agent.model_copy(update=alike) for agent in agents)
    team = config.team.model_copy(
        update={
            "sharing": "shared",
            "agents": agents,
            "critic_sharing": None,
            "critic_model": None,
            "critic_train": "lora",
        }
    )
    update = {
        "algorithm": SFT(),
        "optimizer": optimizer,
        "training": TrainingConfig(steps=warmup.steps),
        "warmup": None,
    }
    return without_features(config).model_copy(update={**update, "team": team})


def stage_team(config: RunConfig) -> tuple[Algorithm, Team]:
    """Return the algorithm and the team of the settings of a stage."""
    algorithm = build_algorithm(config)
    return algorithm, build_team(config, algorithm)
