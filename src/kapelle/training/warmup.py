"""Supervised warm-up of a base model on scripted demonstrations of the roles, cached by content.

A tiny model made here can do nothing at first. Before reinforcement learning it is shown what each role
says, by the environment's script with its stated flaws, so that it can do the task somewhat and there is
something left to learn. This is the same SFT that the `sft` algorithm runs; its result depends on the
settings alone and is kept under a hash of them, with hashes of its files, which are checked whenever it is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kapelle.algorithms.sft import SFT
from kapelle.engines.train.batch import Sample
from kapelle.engines.train.protocol import Objective
from kapelle.engines.train.torch.engine import TorchTrainEngine, UpdateLimits
from kapelle.environments.bounded_worlds import task_of
from kapelle.errors import CheckpointError, ModelError
from kapelle.models.language_model import LanguageModel, copy_language_model
from kapelle.models.sealed import seal, verify_folder
from kapelle.models.weights import save_model, shapes_of
from kapelle.rollout.play import Play, rollout
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import OptimizerConfig, RunConfig, WarmupConfig
from kapelle.setup.model_loading import load_models, teacher
from kapelle.setup.team_builder import build_team
from kapelle.team import Team
from kapelle.training.collate import policy_sample

FORMAT = 2
"""Raised when the same settings would give another warmed-up model than before."""

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Called with step, steps and metrics."""


def cache_folder() -> Path:
    """Return where warmed-up models are kept: `$KAPELLE_CACHE`, else `~/.cache/kapelle`."""
    named = os.environ.get("KAPELLE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "kapelle"


def warmup_key(config: RunConfig) -> str:
    """Return a hash of everything that the warmed-up model depends on."""
    parts = {
        "format": FORMAT,
        "seed": config.seed,
        **{
            section: getattr(config, section).model_dump(mode="json", exclude={"timeout"})
            for section in ("model", "environment", "workflow", "warmup")
        },
        "agents": [
            [agent.name, agent.system, agent.prompt]
            for agent in build_team(_shared_without_critics(config), SFT().build()).agents
        ],
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=10).hexdigest()


def _shared_without_critics(config: RunConfig) -> RunConfig:
    """Return the same run with one set of weights for all agents, whatever judges them later."""
    agents = config.team.agents
    if not isinstance(agents, int):
        agents = tuple(a.model_copy(update={"weights": None, "share_critic_with": None}) for a in agents)
    update = {"sharing": "shared", "agents": agents, "critic_sharing": None}
    return config.model_copy(update={"team": config.team.model_copy(update=update)})


def warmup_is_cached(config: RunConfig) -> bool:
    """Return whether the warmed-up model of these settings lies ready."""
    return (cache_folder() / "warmup" / warmup_key(config) / "config.json").is_file()


def warmed_up(
    config: RunConfig,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
    hold: dict[str, LanguageModel] | None = None,
) -> Path:
    """Return the folder of the warmed-up model, making it unless it is cached.

    One that is not what it was when it was made is thrown away and made anew, and `say` hears of it. Where the disk has
    no room for it any more, `hold` takes the model itself, by that folder's path, and `say` hears of that, too; without
    `hold` that is a CheckpointError.
    """
    assert config.warmup is not None
    folder = cache_folder() / "warmup" / warmup_key(config)
    if (folder / "config.json").is_file() and _is_sound(folder, say):
        return folder
    beside = _beside(folder)
    try:
        with _kept_in(folder.parent):  # before the work, so that it is not lost
            beside.mkdir(parents=True)
        model = _train(config, config.warmup, progress)
        try:
            with _kept_in(folder.parent):
                save_model(beside, model)
                _rename(beside, folder)
        except CheckpointError as error:
            if hold is None:
                raise
            say(f"{error} This run goes on all the same, and the next one warms up anew.")
            hold[str(folder)] = copy_language_model(model, str(folder))
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def warmed_bases(
    config: RunConfig,
    team: Team,
    progress: Progress,
    say: Callable[[str, str], None],
    hold: dict[str, LanguageModel] | None = None,
) -> Mapping[str, str]:
    """Return the path of every base of a team, with the warmed-up model in place of the one that is to be warmed up.

    `say` hears of it as of a phase of the run; `hold` takes a model that the cache has no room for. Without a warm-up the
    bases are the team's own.
    """
    if config.warmup is None:
        return team.bases
    cached = warmup_is_cached(config)
    say("warm-up", "cached" if cached else "teaching the tiny model its roles from scripts")
    folder = str(warmed_up(config, progress, lambda said: say("warm-up", said), hold))
    return {base: folder if path == config.model.path else path for base, path in team.bases.items()}


def _is_sound(folder: Path, say: Callable[[str], None]) -> bool:
    """Look whether a cached model is what it was when it was made; one that is not is out of the way afterwards."""
    try:
        if not verify_folder(folder):
            shapes_of(folder)  # which refuses one that is cut off
            say("nothing says whether the cached one is what it was; it is used, and checked from now on")
            with suppress(OSError):  # a cache that can only be read is as good as before
                seal(folder)
    except ModelError as error:
        say(f"the cached one is thrown away and made anew: {error}")
        aside = _beside(folder)
        with _kept_in(folder.parent), suppress(FileNotFoundError):  # another process has just done the same
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        return False
    return True


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:  # another process was faster; its model is the same
        if not (folder / "config.json").is_file():
            raise


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(
            f"The warmed-up model cannot be kept in {folder}: {reason}. Free some space there, or set KAPELLE_CACHE "
            "to a folder that can be written."
        ) from error


def _train(config: RunConfig, settings: WarmupConfig, progress: Progress | None) -> LanguageModel:
    config = _shared_without_critics(config)
    algorithm = SFT().build()
    team = build_team(config, algorithm)
    models = load_models(team, config.model, {})
    samples = demonstrations(config, team, models, settings.demonstrations)
    engine = TorchTrainEngine(
        models,
        list(team.policies.values()),
        [],
        OptimizerConfig(
            lr=settings.lr,
            betas=(0.9, 0.95),
            schedule=settings.schedule,
            warmup_steps=min(20, settings.steps),
        ),
        UpdateLimits(total_steps=settings.steps),
        config.seed,
    )
    objective = Objective(algorithm.policy_loss, parity=False)
    draw = random.Random(derive_seed(config.seed, "warmup"))
    for step in range(settings.steps):
        batch = draw.sample(samples, min(settings.batch, len(samples)))
        metrics = engine.update(batch, objective)
        if progress is not None:
            progress(step + 1, settings.steps, metrics)
    return models[team.policies["shared"].base]


def demonstrations(
    config: RunConfig, team: Team, models: Mapping[str, LanguageModel], count: int
) -> list[Sample]:
    """Return every turn of `count` scripted episodes on training tasks, as samples."""
    environment = config.environment
    workflow, speaks = config.workflow, teacher(config, team, models)
    play = Play(team, environment, workflow, speaks, patience=config.patience)
    size = environment.size("train")
    indices = range(count) if size is None else [k % size for k in range(count)]
    tasks = [task_of(environment, "train", index) for index in indices]
    groups = run_async(lambda: rollout(play, tasks, 1, derive_seed(config.seed, "demonstrations")))
    return [
        policy_sample(turn, team, turn.policy, {})
        for group in groups
        for episode in group.valid
        for turn in episode.turns
    ]
