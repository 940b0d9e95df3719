"""Reads and writes the file `team.yaml` of an exported team.

With this file and the folders next to it, the team can be served, evaluated and used in chats.

    format: 1
    step: 50                                   number of updates of the weights
    policies:                                  policies as used for sampling; their weights are in the folders next to the file
      planner: {folder: ./planner, form: peft, rank: 16, base: ./base, agents: [planner]}
    settings: {name: …, model: {path: ./base}, team: …, workflow: …, environment: …, …}      sections of a recipe

A path that begins with `./` is relative to the file, so that the folder can be moved or uploaded to a hub. The team
acts as in the run, with the same prompts, sampling, workflow and environment. Settings that concern training or a
specific machine (such as warm-up, opponents, optimiser and devices) are excluded.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kapelle.errors import ConfigError, DataError
from kapelle.runs.model_card import Exported
from kapelle.settings.overlays import parse_yaml
from kapelle.settings.schema import RunConfig
from kapelle.settings.weights import OwnModel, PastAdapter
from kapelle.setup.recipe import lay_over
from kapelle.setup.team_builder import agent_configs
from kapelle.team import Team

TEAM_FILE = "team.yaml"
FORMAT = 1
KEPT = (
    "name",
    "seed",
    "model",
    "team",
    "environment",
    "workflow",
    "algorithm",
    "episode",
    "grader",
    "evaluation",
)
"""The sections of a run's settings that the team needs to act. The section `engine` is also included if the engine is `local`."""


@dataclass(frozen=True, slots=True)
class TeamFile:
    """The content of a `team.yaml`."""

    config: RunConfig
    step: int
    """The number of updates of the weights."""
    adapters: Mapping[str, Path]
    """Mapping from a policy to the folder of its adapter, which belongs to a base model in `config`. Policies that are whole
    models have no entry, because these models are base models in `config`."""


def is_team(folder: Path) -> bool:
    """Return whether a folder holds an exported team."""
    return (folder / TEAM_FILE).is_file()


def read_team(folder: Path, settings: Sequence[str] = ()) -> TeamFile:
    """Read the `team.yaml` of a folder and merge `settings` over the settings of the team.

    Raises DataError for an unknown format, and ConfigError for an invalid setting.
    """
    file = folder / TEAM_FILE
    values, step, policies = _read(file)
    for section in _models_in(values):
        key = "path" if "path" in section else "model"
        section[key] = str(folder / section[key])
    adapters = {name: folder / each["folder"] for name, each in policies.items() if each["form"] == "peft"}
    return TeamFile(lay_over([(str(file), values)], settings).config, step, adapters)


def _read(file: Path) -> tuple[dict[str, Any], int, dict[str, dict[str, Any]]]:
    """Return the settings, the step and the policies in a `team.yaml`. Raises DataError for an unknown format."""
    try:
        found = parse_yaml(file.read_text("utf-8"))
        if found["format"] != FORMAT:
            raise DataError(
                f"{file} has the format {found['format']!r}, but this version of kapelle reads only {FORMAT}. "
                "Export the run again, or "
                "upgrade kapelle."
            )
        policies = {name: {"folder": str(each["folder"]), **each} for name, each in found["policies"].items()}
        return dict(found["settings"]), int(found["step"]), policies
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file} is not a team file written by `kapelle export` ({type(error).__name__}: {error}). Export "
            "the run again."
        ) from None


def _models_in(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every section that contains a model path relative to the file, so that the caller can change the paths in place."""
    agents = values.get("team", {}).get("agents")
    weights = [agent.get("weights") for agent in agents] if isinstance(agents, list) else []
    sections = [values.get("model"), *weights]
    return [
        each
        for each in sections
        if isinstance(each, dict) and str(each.get("path", each.get("model", ""))).startswith("./")
    ]


def write_team(
    out: Path,
    config: RunConfig,
    team: Team,
    step: int,
    exported: Sequence[Exported],
    bases: Mapping[str, Path],
    unpublished: Collection[str],
) -> str | None:
    """Write `team.yaml` into an export and return None. If the export is not a whole team, write nothing and return the reason.

    The argument `bases` contains the folders of base models that were written with the adapters. The argument
    `unpublished` contains the base models that exist nowhere else.
    """
    folder_of = {each.policy: f"./{each.folder}" for each in exported}
    form_of = {each.policy: each.form for each in exported}
    excluded = [name for name in team.trained if name not in folder_of]
    if excluded:
        return f"the weights of {', '.join(excluded)} are missing"
    whole = [name for name in folder_of if form_of[name] != "peft"]
    roles = []
    for role in agent_configs(config.team):
        names = team.policies_of(role.name)
        policy = team.policies[names[0]]
        if isinstance(role.weights, PastAdapter):
            return f"{role.name} uses the adapter {role.weights.past}, which is outside the export"
        if len(names) > 1 and names[0] in whole:
            return f"{role.name} has different weights in each turn, which only adapters support. Export adapters"
        if names[0] in whole:
            model = OwnModel(model=folder_of[names[0]], train="none")
            roles.append(role.model_copy(update={"weights": model, "lora": None, "optimizer": None}))
            continue
        if policy.endpoint is None and policy.base in unpublished:
            if policy.base not in bases:
                return f"{role.name} uses a base model that only this run has. Export adapters"
            if isinstance(role.weights, OwnModel):
                own = OwnModel(model=f"./{bases[policy.base].name}", train=role.weights.train)
                roles.append(role.model_copy(update={"weights": own}))
                continue
        roles.append(role)

    # The path of the team's base model is needed even if every agent has its own model.
    path = config.model.path
    if "base" in bases:
        path = f"./{bases['base'].name}"
    elif whole and ("base" in unpublished or all(name in whole for name in team.policies)):
        path = folder_of[whole[0]]
    values = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": path, "device": None}),
            "team": config.team.model_copy(update={"agents": tuple(roles), "critic_device": None}),
        }
    ).model_dump(mode="json")
    own_engine = ("engine",) if values["engine"]["name"] == "local" else ()
    policies = {
        each.policy: {
            "folder": folder_of[each.policy],
            "form": "peft" if each.form == "peft" else "hf",
            **_adapter(team, each.policy, each.form, bases),
            "agents": list(team.agents_of(each.policy)),
        }
        for each in exported
    }
    content = {
        "format": FORMAT,
        "step": step,
        "policies": policies,
        "settings": {key: values[key] for key in (*KEPT, *own_engine)},
    }
    (out / TEAM_FILE).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True), "utf-8")
    return None


def _adapter(team: Team, name: str, form: str, bases: Mapping[str, Path]) -> dict[str, Any]:
    policy = team.policies[name]
    if form != "peft" or policy.lora is None:
        return {}
    base = bases.get(policy.base)
    return {"rank": policy.lora.rank, "base": team.bases[policy.base] if base is None else f"./{base.name}"}


VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The allowed values of vLLM's option `--max-lora-rank`."""


def vllm_commands(folder: Path, port: int = 8000) -> list[str]:
    """Return the commands with which vLLM serves the agents of a team under their names.

    There is one command for each base model, with consecutive ports from `port`.
    Adapters on the same base model are served by the same process. These servers do not provide the team's prompts,
    turns and rewards, for which `kapelle serve policy` is needed.
    """
    values, _, policies = _read(folder / TEAM_FILE)
    dtype = values["model"]["dtype"]
    commands: list[str] = []
    served: dict[str, list[dict[str, Any]]] = {}
    for each in policies.values():
        served.setdefault(each.get("base", each["folder"]), []).append(each)
    for number, (base, sharing) in enumerate(served.items()):
        words = ["vllm", "serve", _place(folder, base), "--port", str(port + number), "--dtype", dtype]
        adapters = [each for each in sharing if each["form"] == "peft"]
        if adapters:
            rank = max(each["rank"] for each in adapters)
            room = next((each for each in VLLM_RANKS if each >= rank), None)
            if room is None:
                raise ConfigError(
                    f"vLLM supports adapters up to rank {VLLM_RANKS[-1]}, but this team has an adapter of "
                    f"rank {rank}. Export whole models: "
                    "`kapelle export RUN --merge`."
                )
            names = [
                f"{agent}={_place(folder, each['folder'])}" for each in adapters for agent in each["agents"]
            ]
            words += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(len(adapters))]
            words += ["--lora-modules", *names]
        else:
            words += ["--served-model-name", *(agent for each in sharing for agent in each["agents"])]
        commands.append(shlex.join(words))
    return commands


def _place(folder: Path, named: str) -> str:
    return str(folder / named) if named.startswith("./") else named
