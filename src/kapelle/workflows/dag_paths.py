"""What a workflow file's paths mean: functions before and after a turn, and classes that answer turns.

A path is looked for beside the workflow file, in the folders above it, and where kapelle runs, so that siiRL's own
files, which are written from the root of its repository, are found from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kapelle.errors import ConfigError
from kapelle.runtime.plugins import find_class

SIIRL_PROCESS = "examples/experimental/marft/config/process.py"
"""siiRL's own processing: two templates. They are built in for workflow files that are kept without it."""

ENVIRONMENTS = {"math_env.py:MathEnv": "math", "code_env.py:CodeEnv": "code"}
"""siiRL's own environment classes → the environment here that asks and pays the same."""

SIIRL_ENV = "siirl_env"
"""The environment that is answered by a class in siiRL's form."""


def find_file(path: str, where: str) -> str | None:
    """Return the whole path of a file that the workflow file `where` names, None where there is none."""
    named = Path(path).expanduser()
    if named.is_absolute():
        return str(named) if named.is_file() else None
    source = Path(where)
    above = list(source.resolve().parents) if source.is_file() else []
    found = next((folder / named for folder in (*above, Path.cwd()) if (folder / named).is_file()), None)
    return None if found is None else str(found.resolve())


def _need_file(path: str, key: str, where: str) -> str:
    found = find_file(path, where)
    if found is None:
        raise ConfigError(
            f"{where}: `{key}: {path}`: there is no such file beside it, in a folder above it, or where kapelle runs. "
            "Fix the path, or copy the file there."
        )
    return found


def with_processing(speech: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a node's keys with its `process_path` found; siiRL's own, where it is missing, as what is built in."""
    path = str(speech.get("process_path", ""))
    if not path.endswith(".py"):
        return dict(speech)
    if not path.endswith(SIIRL_PROCESS) or find_file(path, where) is not None:
        return {**speech, "process_path": _need_file(path, "process_path", where)}
    pre, post = speech.get("pre_process_kwargs") or {}, speech.get("post_process_kwargs") or {}
    left = {k: v for k, v in speech.items() if k not in {"process_path", "pre_process_kwargs"}}
    left["process_path"] = "kapelle.workflows.templates"
    left["post_process_kwargs"] = {"post_chat_template": post.get("post_chat_template", "")}
    return {**left, "prompt": pre.get("pre_chat_template", "${prompt}")}


def environment_of(path: str, where: str) -> dict[str, Any]:
    """Return the recipe's section for one `env_path`: a name, `module:Class` or `path/file.py:Class`.

    Raises ConfigError for a missing file or class, and for a class that is neither an environment of kapelle's nor in
    siiRL's form.
    """
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        built_in = ENVIRONMENTS.get(f"{Path(file).name}:{name}")
        if built_in is not None and _is_siirls_own(find_file(file, where)):
            return {"name": built_in}
        path = f"{_need_file(file, 'env_path', where)}:{name}"
    elif (
        not file or find_spec(file.partition(".")[0]) is None
    ):  # reported later, with what else is wrong with it
        return {"name": path}
    found = find_class("environment", path, {})
    if _has(found, "task", "start"):
        return {"name": path}
    if _has(found, "step"):
        return {"name": SIIRL_ENV, "env_path": path}
    raise ConfigError(
        f"{where}: `env_path: {path}` has neither `step(self, actions, ground_truth)`, as siiRL's environments, nor `task` "
        "and `start`, as kapelle's (docs/make_your_own.md). Add them to the class."
    )


def _is_siirls_own(file: str | None) -> bool:
    # Its graders are siiRL's; a class of the same name that grades by itself is somebody else's.
    return file is None or "siirl.utils.reward_score" in Path(file).read_text("utf-8", errors="replace")


def _has(found: type, *methods: str) -> bool:
    return all(callable(getattr(found, method, None)) for method in methods)


def answered_by(
    section: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], answer: str, at: str, where: str
) -> tuple[dict[str, Any], ...]:
    """Return nodes whose texts go to a class in siiRL's form: all that say `obs_with_env`, up to the answer.

    `at` is the node with the `env_path`. ConfigError unless it is the answering one, and is answered.
    """
    known = {str(node["id"]): node for node in nodes}
    if at != answer:
        raise ConfigError(
            f"{where}: `env_path` of node '{at}' answers turns, and node '{answer}' ends them. Write it on '{answer}'."
        )
    if not known[answer].get("obs_with_env", True):
        raise ConfigError(
            f"{where}: node '{answer}' has `env_path: {section['env_path']}` without `obs_with_env: true`, so that siiRL would "
            "never ask the class. Set it, or remove `env_path`."
        )
    return tuple({**node, "rewards_with_env": bool(node.get("obs_with_env", True))} for node in nodes)


def fitted(values: Mapping[str, Any], under: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections of a layer, or settings, as they fit over those of a recipe, `under`.

    A class in siiRL's form asks what the recipe's environment asks, and what is said of that is said of its `questions`.
    What is said of the order, the group or the reward is said of CORY's `base`. A recipe that has every turn scored goes
    on doing so.
    """
    made = dict(values)
    pairs = {key: (made.get(key), under.get(key)) for key in ("workflow", "environment", "algorithm")}
    for section, (over, below) in pairs.items():
        if isinstance(over, Mapping) and isinstance(below, Mapping):
            made[section] = _FITTING[section](over, below)
    return made


def _workflow(over: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    if over.get("name") != "dag" or "score_rounds" not in below:
        return over
    return {"score_rounds": below["score_rounds"], **over}


def _environment(over: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    answered = below.get("name") == SIIRL_ENV
    if over.get("name") == SIIRL_ENV and "questions" not in over:
        return {**over, "questions": deepcopy(below.get("questions") if answered else below)}
    if not answered or "name" in over:
        return over
    own = {key: value for key, value in over.items() if key in _SIIRL_ENV_KEYS}
    asked = {key: value for key, value in over.items() if key not in own}
    return {**own, "questions": {**own.get("questions", {}), **asked}} if asked else over


_SIIRL_ENV_KEYS = {"env_path", "questions", "rewards_with_env", "reward_range"}


def _algorithm(over: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    if "base" not in below or "name" in over:
        return over
    inner = {key: value for key, value in over.items() if key in {"order", "group_size", "team_reward"}}
    rest = {key: value for key, value in over.items() if key not in inner}
    if inner.get("team_reward") == "mean":  # both are paid the sum: the reward is shared
        del inner["team_reward"]
    return {**rest, "base": {**rest.get("base", {}), **inner}} if inner else rest


_FITTING = {"workflow": _workflow, "environment": _environment, "algorithm": _algorithm}
