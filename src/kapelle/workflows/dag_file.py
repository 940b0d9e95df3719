"""Read files that define a whole workflow, in siiRL's YAML format (MARFT, arXiv:2504.16129) or in kapelle's version of it.

Such a file contains more than a workflow: it also defines which agents are trained and how often, which agents share a critic, how
rewards are shared, and the environment. The function `read_workflow` converts the file to sections of a recipe:

    workflow     The nodes with the role ROLLOUT (all nodes in kapelle's own format), `max_assistant_turns` and `use_all_traj`.
    team         One agent per agent group, which is frozen unless there is a training ACTOR node; `share_critic_with` and
                 `critic_model`.
    model        The value of `config.model.path` if it is the same for all agents; otherwise, each agent has its own model.
    algorithm    The settings `group_size` (from `rollout.n`), `order` (from `train_cycle`) and `team_reward` (from
                 `share_reward_in_agent`).
    environment  The environment that `env_path` specifies.

Settings that only affect speed are ignored, and their names are listed. Other settings without an equivalent raise a ConfigError that
contains their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kapelle.errors import ConfigError, did_you_mean
from kapelle.runtime.plugins import find_class
from kapelle.workflows.graph import check_graph, sinks

# -------- Paths in a workflow file: functions before and after a turn, and environment classes
#
# A path is looked up beside the workflow file, in the folders above it, and in the working directory. siiRL's own files have
# paths relative to the root of its repository, so this finds them from anywhere.

SIIRL_PROCESS = "examples/experimental/marft/config/process.py"
"""Path of siiRL's own processing file, which consists of two templates. A built-in copy replaces the file if it is missing."""

ENVIRONMENTS = {"math_env.py:MathEnv": "math", "code_env.py:CodeEnv": "code"}
"""Mapping from siiRL's own environment classes to the kapelle environments with the same questions and rewards."""

SIIRL_ENV = "siirl_env"
"""Name of the environment that wraps a class with siiRL's interface."""


def find_file(path: str, where: str) -> str | None:
    """Return the full path of a file that the workflow file `where` refers to, or None if the file does not exist."""
    relative = Path(path).expanduser()
    if relative.is_absolute():
        return str(relative) if relative.is_file() else None
    source = Path(where)
    above = list(source.resolve().parents) if source.is_file() else []
    for folder in (*above, Path.cwd()):
        if (folder / relative).is_file():
            return str((folder / relative).resolve())
    return None


def _need_file(path: str, key: str, where: str) -> str:
    found = find_file(path, where)
    if found is None:
        raise ConfigError(
            f"{where}: the file in `{key}: {path}` was not found beside this file, in its parent folders or in the working directory. "
            "Fix the path, or copy the file there."
        )
    return found


def with_processing(speech: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the keys of a node with the full `process_path`. If siiRL's own processing file is missing, the built-in copy is used."""
    path = str(speech.get("process_path", ""))
    if not path.endswith(".py"):
        return dict(speech)
    if not path.endswith(SIIRL_PROCESS) or find_file(path, where) is not None:
        return {**speech, "process_path": _need_file(path, "process_path", where)}
    pre, post = speech.get("pre_process_kwargs") or {}, speech.get("post_process_kwargs") or {}
    keys = {k: v for k, v in speech.items() if k not in {"process_path", "pre_process_kwargs"}}
    keys["process_path"] = "kapelle.workflows.dag_file"
    keys["post_process_kwargs"] = {"post_chat_template": post.get("post_chat_template", "")}
    return {**keys, "prompt": pre.get("pre_chat_template", "${prompt}")}


def environment_of(path: str, where: str) -> dict[str, Any]:
    """Return the environment section of a recipe for an `env_path`, which is a name, `module:Class` or `path/file.py:Class`.

    Raises ConfigError if the file or class is missing, or if the class has neither kapelle's nor siiRL's environment interface.
    """
    file, _, name = path.rpartition(":")
    if file.endswith(".py"):
        built_in = ENVIRONMENTS.get(f"{Path(file).name}:{name}")
        full = find_file(file, where)
        # siiRL's own graders are built in; a class of the same name that defines its own grader is a different class.
        if built_in is not None and (
            full is None or "siirl.utils.reward_score" in Path(full).read_text("utf-8", errors="replace")
        ):
            return {"name": built_in}
        path = f"{_need_file(file, 'env_path', where)}:{name}"
    elif not file or find_spec(file.partition(".")[0]) is None:
        return {"name": path}  # the recipe's checks report an unknown name
    found = find_class("environment", path, {})
    has = {method for method in ("task", "start", "step") if callable(getattr(found, method, None))}
    if has >= {"task", "start"}:
        return {"name": path}
    if "step" in has:
        return {"name": SIIRL_ENV, "env_path": path}
    raise ConfigError(
        f"{where}: `env_path: {path}` has neither `step(self, actions, ground_truth)`, as in siiRL, nor `task` and `start`, as in "
        "kapelle (docs/make_your_own.md). Add the methods of one of these forms to the class."
    )


def answered_by(
    section: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], answer: str, at: str, where: str
) -> tuple[dict[str, Any], ...]:
    """Return the nodes, where nodes with `obs_with_env` send their texts to an environment with siiRL's interface.

    The argument `at` is the name of the node with the `env_path`. Raises ConfigError unless this is the answering node and it has
    `obs_with_env`.
    """
    by_id = {str(node["id"]): node for node in nodes}
    if at != answer:
        raise ConfigError(
            f"{where}: node '{at}' has the `env_path`, but node '{answer}' gives the answer. Move `env_path` to '{answer}'."
        )
    if not by_id[answer].get("obs_with_env", True):
        raise ConfigError(
            f"{where}: node '{answer}' has `env_path: {section['env_path']}` without `obs_with_env: true`, so siiRL would never "
            "call the class. Set `obs_with_env: true`, or remove `env_path`."
        )
    return tuple({**node, "rewards_with_env": bool(node.get("obs_with_env", True))} for node in nodes)


_SIIRL_ENV_KEYS = {"env_path", "questions", "rewards_with_env", "reward_range"}


def fitted(values: Mapping[str, Any], under: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections of an overlay, or settings, adapted to the recipe sections `under` with which they will be merged.

    An environment with siiRL's interface uses the questions of the recipe's environment, whose settings become settings of
    `questions`. For CORY, the settings of the order, the group size and the team reward become settings of `base`. The setting
    `score_rounds` of the recipe's workflow is kept.
    """
    fit = {"workflow": _fitted_workflow, "environment": _fitted_environment, "algorithm": _fitted_algorithm}
    sections = dict(values)
    for key, adapt in fit.items():
        over, below = sections.get(key), under.get(key)
        if isinstance(over, Mapping) and isinstance(below, Mapping):
            sections[key] = adapt(over, below)
    return sections


def _fitted_workflow(over: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    if over.get("name") == "dag" and "score_rounds" in below:
        return {"score_rounds": below["score_rounds"], **over}
    return over


def _fitted_environment(over: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    is_siirl = below.get("name") == SIIRL_ENV
    if over.get("name") == SIIRL_ENV and "questions" not in over:
        return {**over, "questions": deepcopy(below.get("questions") if is_siirl else below)}
    own = {key: value for key, value in over.items() if key in _SIIRL_ENV_KEYS}
    inner = {key: value for key, value in over.items() if key not in own}
    if is_siirl and "name" not in over and inner:
        return {**own, "questions": {**own.get("questions", {}), **inner}}
    return over


def _fitted_algorithm(over: Mapping[str, Any], below: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = {key: value for key, value in over.items() if key in {"order", "group_size", "team_reward"}}
    if "base" not in below or "name" in over or not inner:
        return over
    rest = {key: value for key, value in over.items() if key not in inner}
    if inner.get("team_reward") == "mean":  # CORY already shares rewards, by summing them
        del inner["team_reward"]
    return {**rest, "base": {**rest.get("base", {}), **inner}} if inner else rest


_TOP = {"dag_id", "description", "nodes", "answer", "max_assistant_turns", "use_all_traj"}
_TOP |= {"share_reward_in_agent", "rewards_with_env"}
_SIIRL_NODE = {"node_id", "node_type", "node_role", "agent_group", "dependencies", "config", "agent_options"}
_SIIRL_NODE |= {"only_forward_compute"}
_SPEECH = {"obs_with_env", "process_path", "pre_process_kwargs", "post_process_kwargs", "rewards_with_env"}
_TRAINING = {"env_path", "train_cycle", "share_instance", "only_forward_compute"}
_OWN_NODE = {"id", "agent", "agent_group", "dependencies", "prompt"} | _SPEECH | _TRAINING
_ROLES = ("ROLLOUT", "REWARD", "ACTOR", "REFERENCE", "CRITIC", "ADVANTAGE")
_SCRIPT = {
    "rollout.multi_turn.max_assistant_turns": "max_assistant_turns",
    "rollout.multi_turn.use_all_traj": "use_all_traj",
    "rollout.agent.rewards_with_env": "rewards_with_env",
    "algorithm.share_reward_in_agent": "share_reward_in_agent",
}
"""Mapping from settings of siiRL's launch scripts in a node's `config` to the corresponding keys of a workflow file."""
_SPEED = re.compile(
    r".*(micro_batch_size_per_gpu|tensor_model_parallel_size|gpu_memory_utilization|offload|enforce_eager"
    r"|free_cache_engine|max_num_batched_tokens|max_num_seqs)"
)


@dataclass(frozen=True, slots=True)
class Read:
    """The contents of a workflow file."""

    sections: Mapping[str, Any]
    """The sections of a recipe to which the file was converted."""
    set_aside: Mapping[str, str] = field(default_factory=dict)
    """Mapping from each ignored key to the reason why it is ignored."""


def is_workflow_file(values: Mapping[str, Any]) -> bool:
    """Return whether a YAML mapping is a workflow file rather than a recipe."""
    return "nodes" in values


def read_workflow(values: Mapping[str, Any], where: str) -> Read:
    """Return the contents of a workflow file. Raises ConfigError, with the file name `where`, for settings without an equivalent."""
    nodes = values.get("nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, Mapping) for node in nodes):
        raise ConfigError(f"{where} has no list `nodes`. Add one with at least one node.")
    siirl = any("node_id" in node for node in nodes)
    known = _TOP | ({key for key in values if isinstance(values[key], Mapping)} if siirl else set())
    _check_known(values, known, where, "")
    _check_top(values, where)
    return _read_siirl(values, nodes, where) if siirl else _read_own(values, nodes, where)


def _check_top(values: Mapping[str, Any], where: str) -> None:
    for key in ("use_all_traj", "share_reward_in_agent", "rewards_with_env"):
        if not isinstance(values.get(key, True), bool):
            raise ConfigError(f"{where}: `{key}` is {values[key]!r}. Set it to true or false.")


def _check_known(given: Mapping[str, Any], known: set[str], where: str, node: str) -> None:
    for key in given:
        if key not in known:
            at = f"node '{node}' of {where}" if node else where
            raise ConfigError(f"{at} has the unknown key `{key}`.{did_you_mean(str(key), known)}")


@dataclass(slots=True)
class _Group:
    """One agent of a workflow file, which corresponds to an agent group of siiRL."""

    name: str
    trains: bool = True
    cycle: int | None = None
    critic: int | str | None = None
    model: str | None = None
    critic_model: str | None = None


def _read_own(values: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], where: str) -> Read:
    groups: dict[int | str, _Group] = {}
    turns = []
    environments: list[tuple[str, str]] = []
    for node in nodes:
        name = str(node.get("id", ""))
        if not name:
            raise ConfigError(f"A node of {where} has no `id`. Add one.")
        _check_known(node, _OWN_NODE, where, name)
        key = node.get("agent", node.get("agent_group"))
        if key is None or ("agent" in node and "agent_group" in node):
            raise ConfigError(
                f"Node '{name}' of {where} needs either `agent` or `agent_group`. Set one of them."
            )
        group = groups.setdefault(key, _Group(str(key) if isinstance(key, str) else f"agent_{key}"))
        _training_keys(group, node, where, name)
        if node.get("only_forward_compute"):
            group.trains = False
        environments += [(name, path) for path in _as_list(node.get("env_path"))]
        speech = {k: v for k, v in node.items() if k not in _TRAINING | {"agent", "agent_group"}}
        turns.append({**with_processing(speech, where), "agent": group.name})
    _check_consecutive([key for key in groups if isinstance(key, int)], where)
    return _assemble(values, groups, turns, environments, where, {})


def _read_siirl(values: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], where: str) -> Read:
    groups: dict[int | str, _Group] = {}
    turns: list[tuple[_Group, dict[str, Any]]] = []
    ignored: dict[str, str] = {}
    samples: set[int] = set()
    script: dict[str, Any] = {}
    environments: list[tuple[str, str]] = []
    roles = {str(node.get("node_id")): node.get("node_role") for node in nodes}
    check_graph({str(n.get("node_id")): _as_list(n.get("dependencies")) for n in nodes}, where)
    trained: set[int] = set()
    for node in nodes:
        name, options = str(node.get("node_id")), node.get("agent_options") or {}
        number = _checked_node(node, options, where, name)
        group = groups.setdefault(number, _Group(f"agent_{number}"))
        if "train_cycle" in options and node["node_role"] != "ACTOR":
            raise ConfigError(
                f"Node '{name}' of {where} has `train_cycle` and the role {node['node_role']}. siiRL would skip the node in some "
                "steps, but kapelle skips only updates. Move `train_cycle` to the node with the role ACTOR, or remove it."
            )
        _training_keys(group, options, where, name)
        config = node.get("config") or {}
        script |= {short: config[long] for long, short in _SCRIPT.items() if long in config}
        is_critic = node["node_role"] == "CRITIC"
        ignored |= _engine_keys(group, samples, config, where, name, is_critic=is_critic)
        environments += [(name, path) for path in _as_list(options.get("env_path"))]
        if node["node_role"] == "ACTOR" and not node.get("only_forward_compute"):
            trained.add(number)
        if node["node_role"] == "ROLLOUT":
            group.name = re.sub(r"\W", "_", name.removeprefix("rollout_").removesuffix("_rollout")) or name
            # The default is false in siiRL and true in kapelle.
            speech = {"obs_with_env": False, **{k: v for k, v in options.items() if k in _SPEECH}}
            before = [b for b in _as_list(node.get("dependencies")) if roles.get(b) == "ROLLOUT"]
            turns.append((group, {"id": name, "dependencies": before, **with_processing(speech, where)}))
    _check_consecutive([key for key in groups if isinstance(key, int)], where)
    for key, group in groups.items():
        group.trains = key in trained
    top = {**script, **values}
    _check_top(top, where)
    named = [{**turn, "agent": group.name} for group, turn in turns]
    read = _assemble(top, groups, named, environments, where, ignored)
    if len(samples) > 1:
        raise ConfigError(f"{where} has different values of `rollout.n`. Set one group size for all nodes.")
    if samples - {1}:
        algorithm = {**read.sections.get("algorithm", {}), "group_size": samples.pop()}
        return Read({**read.sections, "algorithm": algorithm}, ignored)
    return read


def _checked_node(node: Mapping[str, Any], options: Any, where: str, name: str) -> int:
    """Return the agent group of a siiRL node. Raises ConfigError if the node is invalid."""
    _check_known(node, _SIIRL_NODE, where, name)
    role = node.get("node_role")
    if role not in _ROLES:
        raise ConfigError(
            f"Node '{name}' of {where} has the role {role!r}, which kapelle does not support."
            f"{did_you_mean(str(role), _ROLES)} Remove the node, and use settings of the algorithm."
        )
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"`agent_options` of node '{name}' of {where} is not a mapping. Write `key: value`."
        )
    _check_known(options, _SPEECH | _TRAINING - {"only_forward_compute"}, where, name)
    number = node.get("agent_group", 0)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(f"Node '{name}' of {where} has agent_group {number!r}. Use a number of at least 0.")
    return number


def _training_keys(group: _Group, given: Mapping[str, Any], where: str, name: str) -> None:
    cycle, critic = given.get("train_cycle"), given.get("share_instance")
    if cycle is not None:
        if isinstance(cycle, bool) or not isinstance(cycle, int) or cycle < 1:
            raise ConfigError(
                f"Node '{name}' of {where}: `train_cycle` is {cycle!r}. Set it to a whole number of steps."
            )
        group.cycle = cycle
    if critic is not None:  # 0 is a valid group
        if isinstance(critic, bool) or not isinstance(critic, int | str):
            raise ConfigError(
                f"Node '{name}' of {where}: `share_instance` is {critic!r}. Set it to the name or the group of an agent."
            )
        group.critic = critic


def _engine_keys(
    group: _Group, samples: set[int], config: Mapping[str, Any], where: str, name: str, *, is_critic: bool
) -> dict[str, str]:
    """Read the model and the number of samples from the `config` of a node, and return the ignored keys with reasons."""
    ignored = {}
    for key, value in config.items():
        if key in _SCRIPT:
            continue
        if key == "critic.model.path" or (is_critic and key == "model.path"):
            if group.critic_model not in (None, str(value)):
                raise ConfigError(
                    f"{where} gives the critic of '{group.name}' two models, {group.critic_model} and {value}. Keep one of them."
                )
            group.critic_model = str(value)
        elif _SPEED.fullmatch(str(key)):
            ignored[f"config.{key}"] = "affects speed only"
        elif key == "rollout.n" and isinstance(value, int) and value >= 1:
            samples.add(value)
            if value == 1:
                ignored[f"config.{key}"] = "the recipe's group size is kept"
        elif key == "model.path" and group.model in (None, value):
            group.model = str(value)
        else:
            raise ConfigError(
                f"`config.{key}: {value}` of node '{name}' of {where} is not supported. Set its equivalent in the recipe "
                "(`model`, `team.sampling`, `optimizer`, `algorithm`) and remove it."
            )
    return ignored


def _assemble(
    values: Mapping[str, Any],
    groups: Mapping[int | str, _Group],
    nodes: Sequence[Mapping[str, Any]],
    environments: Sequence[tuple[str, str]],
    where: str,
    ignored: Mapping[str, str],
) -> Read:
    workflow: dict[str, Any] = {"name": "dag", "nodes": [dict(node) for node in nodes]}
    workflow |= {
        key: values[key] for key in ("answer", "max_assistant_turns", "use_all_traj") if key in values
    }
    ordered = [
        groups[key]
        for key in sorted(groups, key=lambda k: (isinstance(k, str), k if isinstance(k, int) else 0))
    ]
    sections: dict[str, Any] = {
        "workflow": workflow,
        "team": {"agents": [_agent(group, groups, where) for group in ordered]},
    }
    models = {group.model for group in ordered}
    if len(models) == 1 and None not in models:
        sections["model"] = {"path": ordered[0].model}
    critics = sorted({group.critic_model for group in ordered if group.critic_model is not None})
    if len(critics) > 1:
        raise ConfigError(
            f"{where} gives its critics different models, {critics[0]} and {critics[1]}. Use one model for all of them."
        )
    if critics:
        sections["team"]["critic_model"] = critics[0]
    algorithm: dict[str, Any] = {}
    training = [group for group in ordered if group.trains]
    cycles = {group.name: group.cycle for group in training if group.cycle is not None}
    if cycles:
        is_common = len(set(cycles.values())) == 1 and len(cycles) == len(training)
        interval = next(iter(cycles.values())) if is_common else cycles
        algorithm["order"] = {"name": "alternate", "interval": interval}
    if "share_reward_in_agent" in values:
        algorithm["team_reward"] = "mean" if values["share_reward_in_agent"] else "last"
    if algorithm:
        sections["algorithm"] = algorithm
    named: dict[str, dict[str, Any]] = {}
    for _, path in environments:
        section = environment_of(path, where)
        named[str(section.get("env_path", section["name"]))] = section
    if len(named) > 1:
        raise ConfigError(
            f"{where} sets two environments, {' and '.join(sorted(named)[:2])}. Keep one of them."
        )
    environment = next(iter(named.values()), {})
    if environment.get("name") == SIIRL_ENV:
        graph = {str(node["id"]): _as_list(node.get("dependencies")) for node in nodes}
        answer = values.get("answer") or sinks(graph)[-1]
        workflow["nodes"] = list(answered_by(environment, nodes, answer, environments[0][0], where))
        workflow["whole_texts"] = True
        if "rewards_with_env" in values:
            environment["rewards_with_env"] = values["rewards_with_env"]
    elif values.get("rewards_with_env") is False:
        ignored = {
            **ignored,
            "rewards_with_env": "the environment's grader is the reward function of the last answer",
        }
    if environment:
        sections["environment"] = environment
    return Read(sections, ignored)


def _agent(group: _Group, groups: Mapping[int | str, _Group], where: str) -> dict[str, Any]:
    agent: dict[str, Any] = {"name": group.name}
    if group.model is not None and len({each.model for each in groups.values()}) > 1:
        agent["weights"] = {"model": group.model, "train": "full" if group.trains else "none"}
    elif not group.trains:
        agent["weights"] = "frozen"
    if group.critic is not None:
        owner = groups.get(group.critic)
        if owner is None:
            known = [str(key) for key in groups]
            raise ConfigError(
                f"`share_instance: {group.critic}` in {where} does not name an agent.{did_you_mean(str(group.critic), known)}"
            )
        if owner is not group:
            agent["share_critic_with"] = owner.name
    return agent


def _check_consecutive(numbers: Sequence[int], where: str) -> None:
    if sorted(numbers) != list(range(len(numbers))):
        raise ConfigError(
            f"The agent groups of {where} are {', '.join(map(str, sorted(numbers)))}. Number them 0, 1, 2 and so on."
        )


def _as_list(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


# -------- siiRL's own `process.py`: an empty system message before a node's prompt, and the node's output
#
# `Node.prompt` is the template of the prompt.


def pre_process(prompt: str) -> list[dict[str, str]]:
    """Return the prompt after an empty system message, which prevents the default system message of a chat template."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]


def post_process(prompt: str, response: str, *, post_chat_template: str = "") -> str:
    """Return the prompt, the template and the response as one string."""
    return f"{prompt}{post_chat_template}{response}"
