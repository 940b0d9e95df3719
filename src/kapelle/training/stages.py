"""Train in stages: several consecutive runs, each of which continues from the weights of earlier runs.

    <run>/
      stages.yaml     all stages, resolved; training with this file repeats them
      lock            held during training, as in every run directory
      01-sft/         the run directory of the first stage
      02-ppo/         …

The settings of a stage are those of the recipe with the sections of the stage as an overlay. The trained policies of a stage
start from the newest weights that an earlier stage saved under the same name. The values `algorithm.verifier: stage:NAME` and
`reward_model.path: stage:NAME` refer to the verifier of the stage NAME.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from kapelle.algorithm import Algorithm, row_of
from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.errors import ConfigError, RunDirectoryError, did_you_mean
from kapelle.models.adapters import named
from kapelle.models.outline import read_outline
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runs.lock import LEFT_BEHIND, RunLock
from kapelle.runs.named_checkpoint import check_start, check_verifier, policy_folder, weights_of
from kapelle.runs.reader import is_run, planned_steps, read_latest, read_status
from kapelle.runtime.files import PARTIAL, replace_file, step_of, writing
from kapelle.settings.schema import EVERYONE, RunConfig
from kapelle.setup.feature import plans_of
from kapelle.setup.preparation import PreparedRun
from kapelle.setup.recipe import Recipe, load_stages
from kapelle.setup.team_builder import build_team
from kapelle.team import Policy, Team

FILE = "stages.yaml"
FROM_STAGE = "stage:"
"""The prefix of values of `algorithm.verifier` and `reward_model.path` that refer to a stage."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage, which is one of several consecutive runs."""

    number: int
    """The number of the stage, starting from 1."""
    name: str
    recipe: Recipe

    @property
    def folder(self) -> str:
        """The name of the stage's run directory inside the folder of all stages."""
        return f"{self.number:02d}-{self.name}"


@dataclass(frozen=True, slots=True)
class Start:
    """The inputs with which a stage starts after the earlier stages are finished."""

    config: RunConfig
    run_dir: Path
    start_from: Mapping[str, Path]
    """Mapping from policies to the folders of the weights from which they start."""

    @property
    def resume(self) -> bool:
        """Whether the stage was started before and is resumed."""
        return is_run(self.run_dir)


def read_stages(
    name: str, overlays: Sequence[str] = (), settings: Sequence[str] = (), *, real: bool = False
) -> tuple[Stage, ...]:
    """Return the stages of a recipe, or an empty tuple if the recipe describes a single run.

    Raises the same errors as `load_stages`.
    """
    found = load_stages(name, overlays, settings, real=real)
    return tuple(Stage(number, each, recipe) for number, (each, recipe) in enumerate(found, start=1))


def open_stages(run_dir: Path, stages: Sequence[Stage], *, resume: bool) -> RunLock:
    """Create and lock the folder of all stages, and write `stages.yaml`.

    Raises RunDirectoryError if the folder already contains stages (unless `resume` is true) or other files. The caller keeps
    the lock until the last stage is finished, because a stage locks only its own folder.
    """
    file = run_dir / FILE
    if file.is_file() and not resume:
        raise RunDirectoryError(
            f"{run_dir} already contains stages. Continue with `kapelle train --resume {shlex.quote(str(run_dir))}`, or choose another --run-dir."
        )
    left = {f".{FILE}{PARTIAL}", *LEFT_BEHIND}  # of a run that was killed at its start
    if run_dir.is_dir() and not file.is_file() and {entry.name for entry in run_dir.iterdir()} - left:
        raise RunDirectoryError(f"{run_dir} is not empty and contains no stages. Choose another --run-dir.")
    with writing(file), ExitStack() as held:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = RunLock(run_dir / "lock")
        held.callback(lock.release)
        if file.is_file() and not resume:
            raise RunDirectoryError(f"{run_dir} is now in use by other stages. Choose another --run-dir.")
        if not file.is_file():
            replace_file(file, stages_yaml(stages).encode())
        held.pop_all()
    return lock


def stages_yaml(stages: Sequence[Stage]) -> str:
    """Return all settings of all stages as a recipe in YAML."""
    rows = [
        {"name": stage.name, **stage.recipe.config.model_dump(mode="json", exclude={"name"})}
        for stage in stages
    ]
    whole = {"name": stages[0].recipe.config.name, "stages": rows}
    return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)


def is_done(stage: Stage, run_dir: Path) -> bool:
    """Return whether a stage has finished all steps and its last checkpoint is intact or all its checkpoints were removed.

    If the last checkpoint of a stage is damaged, the stage continues from an earlier checkpoint, so that the next stage
    starts from the correct weights.
    """
    folder = run_dir / stage.folder
    if not is_run(folder):
        return False
    try:
        status, steps = read_status(folder), planned_steps(folder, stage.recipe.config)
    except RunDirectoryError:  # damaged: the stage continues from its last checkpoint
        return False
    if status.state != "finished" or status.step < steps:
        return False
    if not list_checkpoints(folder / "checkpoints"):
        return True
    kept = read_latest(folder)
    return kept is not None and (step_of(kept) or 0) >= steps


def start_of(stage: Stage, stages: Sequence[Stage], run_dir: Path) -> Start:
    """Return the inputs with which a stage starts. Raises RunDirectoryError if an earlier stage has no intact checkpoint."""
    earlier = [each for each in stages if each.number < stage.number]
    kept: dict[str, Path] = {}
    for each in earlier:
        newest = read_latest(run_dir / each.folder)
        if newest is None:
            raise RunDirectoryError(
                f"The stage in {run_dir / each.folder} has no complete checkpoint. Remove that folder and resume."
            )
        kept[each.name] = newest
    config = _with_verifier(stage, earlier, kept)
    # The last stage that trained a policy counts.
    weights: dict[str, Path] = {}
    for checkpoint in kept.values():
        team = _team(config)
        # Other learners start from the team's weights.
        for policy in (name for name in team.trained if not team.policies[name].learns_for):
            if (folder := policy_folder(checkpoint, policy)).is_dir():
                weights[policy] = folder
    return Start(config, run_dir / stage.folder, weights)


@contextmanager
def checkable(stages: Sequence[Stage]) -> Iterator[list[RunConfig]]:
    """Yield the settings of every stage in a form that can be checked before the first stage is trained.

    In place of a verifier that is not trained yet, the settings name a folder that describes the shape of its adapter.
    """
    with TemporaryDirectory() as place:
        shapes: dict[str, Path] = {}
        configs = []
        for stage in stages:
            configs.append(_with_verifier(stage, stages[: stage.number - 1], shapes))
            shapes[stage.name] = Path(place) / stage.folder
            lora = stage.recipe.config.team.critic_lora
            shape = {
                "peft_type": "LORA",
                "r": lora.rank,
                "lora_alpha": lora.alpha,
                "lora_dropout": lora.dropout,
                "target_modules": list(lora.targets),
            }
            (shapes[stage.name] / "verifier").mkdir(parents=True)
            (shapes[stage.name] / "verifier" / "adapter_config.json").write_text(json.dumps(shape), "utf-8")
        _check_hand_over([stage.name for stage in stages], configs)
        yield configs


def _check_hand_over(names: Sequence[str], configs: Sequence[RunConfig]) -> None:
    """Raise ConfigError if a stage uses the weights of an earlier stage with settings other than those with which they were trained."""
    kept: dict[str, tuple[str, RunConfig, Policy]] = {}
    for name, config in zip(names, configs, strict=True):
        team = _team(config)
        for policy in (team.policies[each] for each in team.trained):
            if policy.name in kept:
                before, then, was = kept[policy.name]
                there, here = _made_of(then, was), _made_of(config, policy)
                differs = "; ".join(
                    f"{key} is {there[key]} there and {here.get(key)} here"
                    for key in there
                    if there[key] != here.get(key)
                )
                if differs:
                    raise ConfigError(
                        f"Stage '{name}' continues from the weights of '{policy.name}' that stage '{before}' saves, but "
                        f"uses them with other settings: {differs}. Use the same settings in both stages."
                    )
            kept[policy.name] = (name, config, policy)


def _made_of(config: RunConfig, policy: Policy) -> dict[str, object]:
    """Return the settings that determine the meaning of the saved tensors of a policy."""
    path = _team(config).bases[policy.base]
    lora = policy.lora
    found: dict[str, object] = {"model": path, "trains": "all weights" if lora is None else "an adapter"}
    if path == "embedded":
        found["model.embedded"] = config.model.embedded.model_dump(exclude={"context"})
    if lora is not None:
        targets = named(read_outline(path, config.model.embedded).layers, lora).targets
        found |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": sorted(targets)}
        made = [plan.made_base(config, path) for plan in plans_of(config)]
        found["what made the base"] = ", ".join(filter(None, made)) or "nothing"
    return found


def _with_verifier(stage: Stage, earlier: Sequence[Stage], folders: Mapping[str, Path]) -> RunConfig:
    """Return the settings of a stage with every `stage:NAME` replaced by the folder of the verifier of that stage."""
    config = stage.recipe.config
    model = config.reward_model
    scored = _algorithm(config).need(VerifierScores)
    rewarding = [] if scored is None else [*scored.folders.values()]
    judges = rewarding if model is None else [model.path]
    key = "algorithm.verifier" if model is None else "reward_model.path"
    if not any(judge.startswith(FROM_STAGE) for judge in judges):
        return config
    critics = {each.name: _algorithm(each.recipe.config).critic for each in earlier}
    names = [name for name, critic in critics.items() if critic is not None and critic.everyone]
    for k, judge in enumerate(judges):
        if judge.startswith(FROM_STAGE):
            wanted = judge.removeprefix(FROM_STAGE)
            if wanted not in names:
                raise ConfigError(
                    f"`{key}` of stage '{stage.name}' is '{judge}', but no earlier stage of that name trains a "
                    f"verifier.{did_you_mean(wanted, names)}"
                )
            judges[k] = str((folders[wanted] / "verifier").resolve())
    if model is not None:
        return config.model_copy(update={"reward_model": model.model_copy(update={"path": judges[0]})})
    algorithm = config.algorithm.model_copy(
        update={"verifier": judges[0] if len(judges) == 1 else tuple(judges)}
    )
    return config.model_copy(update={"algorithm": algorithm})


def _team(config: RunConfig) -> Team:
    return build_team(config, _algorithm(config))


def _algorithm(config: RunConfig) -> Algorithm:
    return row_of(config.algorithm.name, config.algorithm.build)


# -------- The weights that training starts from: `start_from` of a recipe, by agent, as folders by policy
#
# start_from: runs/mine                                    every trained policy, from the run's newest checkpoint
# start_from: {"*": runs/mine@best, critic: adapters/c}    the same, but one agent from its own PEFT folder or model


def check_weights(
    prepared: PreparedRun,
    given: str | Mapping[str, str | Path] | None = None,
    run_dir: str | Path | None = None,
    *,
    staged: bool = False,
) -> dict[str, Path]:
    """Check the folders from which policies start and the verifiers, and return the result of `start_folders`.

    Raises the first error that is found. No weights are loaded. If the run is one of several stages (`staged`), its verifier
    is not checked, because it may not be trained yet.
    """
    folders = start_folders(prepared.config.start_from, given, prepared.team, run_dir)
    verifier = None if staged else prepared.algorithm.need(VerifierScores)
    judges = {} if verifier is None else verifier.folders
    check_start(folders, prepared.team, prepared.outlines, judges)
    if verifier is not None and verifier.least_auc is not None:
        for folder in judges.values():
            check_verifier(Path(folder), verifier.least_auc)
    return folders


def start_folders(
    settings: Mapping[str, str],
    given: str | Mapping[str, str | Path] | None,
    team: Team,
    run_dir: str | Path | None,
) -> dict[str, Path]:
    """Return the folder from which each trained policy starts. For a run with checkpoints, return only folders `given` as paths.

    Raises ConfigError for an agent that is not trained and for a source that is not a run, adapter or model. Raises
    CheckpointError for a run without an intact checkpoint.
    """
    also = {EVERYONE: given} if isinstance(given, str) else dict(given or {})
    folders = {policy: folder for policy, folder in also.items() if isinstance(folder, Path)}
    named = {**settings, **{agent: source for agent, source in also.items() if isinstance(source, str)}}
    if run_dir is not None and list_checkpoints(Path(run_dir) / "checkpoints"):
        return folders
    own_weights = [policy for policy in team.trained if not team.policies[policy].learns_for]
    wanted = dict.fromkeys(own_weights, named[EVERYONE]) if EVERYONE in named else {}
    for agent, source in named.items():
        if agent == EVERYONE:
            continue
        own = team.turns_of.get(agent) or (team.policy_of.get(agent, agent),)
        found = [policy for policy in team.trained if policy in own]
        if not found:
            agents = [name for name, policy in team.policy_of.items() if policy in team.trained]
            known = [*agents, *team.trained]
            raise ConfigError(
                f"`start_from` names '{agent}', which is not an agent that this team trains.{did_you_mean(agent, known)}"
            )
        wanted |= dict.fromkeys(found, source)
    found_in = {
        policy: weights_of(policy, source, "start_from") for policy, source in wanted.items()
    } | folders
    beside = {policy: team.policies[policy].learns_for for policy in team.trained}
    return {policy: found_in[origin] for policy, origin in beside.items() if origin in found_in} | found_in
