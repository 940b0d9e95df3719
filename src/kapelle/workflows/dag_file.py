"""Whole workflow files: siiRL's YAML (MARFT, 2504.16129), or the same form written for kapelle.

Such a file says more than a workflow: who trains and how often, whose critic is shared, how the reward is
shared, and which environment. `sections` turns it into the sections of a recipe, to be laid over one:

    workflow   nodes with role ROLLOUT (all nodes, in kapelle's own form), `max_assistant_turns`, `use_all_traj`
    team       one agent for each group; frozen without a training ACTOR node; `share_critic_with`; `critic_model`
    model      `config.model.path`, if all agents have one; else each gets its own
    algorithm  `group_size` from `rollout.n`, `order` from `train_cycle`, `team_reward` from `share_reward_in_agent`
    environment  from `env_path`

What decides how fast a run is, not what it does, is set aside and listed; whatever else cannot be said here is
refused by its name.
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

# -------- What a workflow file's paths mean: functions before and after a turn, and classes that answer turns
#
# A path is looked for beside the workflow file, in the folders above it, and where kapelle runs, so that siiRL's own
# files, which are written from the root of its repository, are found from anywhere.

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
    left["process_path"] = "kapelle.workflows.dag_file"
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
        whole = find_file(file, where)
        # siiRL's own graders are built in; a class of the same name that grades by itself is somebody else's.
        if built_in is not None and (
            whole is None or "siirl.utils.reward_score" in Path(whole).read_text("utf-8", errors="replace")
        ):
            return {"name": built_in}
        path = f"{_need_file(file, 'env_path', where)}:{name}"
    elif (
        not file or find_spec(file.partition(".")[0]) is None
    ):  # reported later, with what else is wrong with it
        return {"name": path}
    found = find_class("environment", path, {})
    has = {each for each in ("task", "start", "step") if callable(getattr(found, each, None))}
    if has >= {"task", "start"}:
        return {"name": path}
    if "step" in has:
        return {"name": SIIRL_ENV, "env_path": path}
    raise ConfigError(
        f"{where}: `env_path: {path}` has neither `step(self, actions, ground_truth)`, as siiRL's environments, nor `task` "
        "and `start`, as kapelle's (docs/make_your_own.md). Add them to the class."
    )


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


_SIIRL_ENV_KEYS = {"env_path", "questions", "rewards_with_env", "reward_range"}


def fitted(values: Mapping[str, Any], under: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections of a layer, or settings, as they fit over those of a recipe, `under`.

    A class in siiRL's form asks what the recipe's environment asks, and what is said of that is said of its `questions`.
    What is said of the order, the group or the reward is said of CORY's `base`. A recipe that has every turn scored goes
    on doing so.
    """
    made = dict(values)
    layers = {key: (made.get(key), under.get(key)) for key in ("workflow", "environment", "algorithm")}
    both = {
        key: (over, below)
        for key, (over, below) in layers.items()
        if isinstance(over, Mapping) and isinstance(below, Mapping)
    }
    if "workflow" in both:
        over, below = both["workflow"]
        if over.get("name") == "dag" and "score_rounds" in below:
            made["workflow"] = {"score_rounds": below["score_rounds"], **over}
    if "environment" in both:
        over, below = both["environment"]
        answered = below.get("name") == SIIRL_ENV
        own = {key: value for key, value in over.items() if key in _SIIRL_ENV_KEYS}
        asked = {key: value for key, value in over.items() if key not in own}
        if over.get("name") == SIIRL_ENV and "questions" not in over:
            questions = below.get("questions") if answered else below
            made["environment"] = {**over, "questions": deepcopy(questions)}
        elif answered and "name" not in over and asked:
            made["environment"] = {**own, "questions": {**own.get("questions", {}), **asked}}
    if "algorithm" in both:
        over, below = both["algorithm"]
        inner = {key: value for key, value in over.items() if key in {"order", "group_size", "team_reward"}}
        rest = {key: value for key, value in over.items() if key not in inner}
        if "base" in below and "name" not in over and inner:
            if inner.get("team_reward") == "mean":  # both are paid the sum: the reward is shared
                del inner["team_reward"]
            made["algorithm"] = {**rest, "base": {**rest.get("base", {}), **inner}} if inner else rest
    return made


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
"""What siiRL's launch scripts set, where a node's `config` sets it → the key of the file here."""
_SPEED = re.compile(
    r".*(micro_batch_size_per_gpu|tensor_model_parallel_size|gpu_memory_utilization|offload|enforce_eager"
    r"|free_cache_engine|max_num_batched_tokens|max_num_seqs)"
)


@dataclass(frozen=True, slots=True)
class Read:
    """What a workflow file means here."""

    sections: Mapping[str, Any]
    """Sections of a recipe."""
    set_aside: Mapping[str, str] = field(default_factory=dict)
    """Key → why it is not needed."""


def is_workflow_file(values: Mapping[str, Any]) -> bool:
    """Return whether a YAML mapping is a workflow file and not a recipe."""
    return "nodes" in values


def read_workflow(values: Mapping[str, Any], where: str) -> Read:
    """Return what a workflow file means; ConfigError, naming `where`, for what cannot be expressed here."""
    nodes = values.get("nodes")
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, Mapping) for node in nodes):
        raise ConfigError(f"{where} has no list of `nodes`. Give it one node at least.")
    siirl = any("node_id" in node for node in nodes)
    known = _TOP | ({key for key in values if isinstance(values[key], Mapping)} if siirl else set())
    _refuse_unknown(values, known, where, "")
    _check_top(values, where)
    return _read_siirl(values, nodes, where) if siirl else _read_own(values, nodes, where)


def _check_top(values: Mapping[str, Any], where: str) -> None:
    for key in ("use_all_traj", "share_reward_in_agent", "rewards_with_env"):
        if not isinstance(values.get(key, True), bool):
            raise ConfigError(f"{where}: `{key}` is {values[key]!r}. Write true or false.")


def _refuse_unknown(given: Mapping[str, Any], known: set[str], where: str, node: str) -> None:
    for key in given:
        if key not in known:
            at = f"node '{node}' of {where}" if node else where
            raise ConfigError(f"{at} has `{key}`, which means nothing here.{did_you_mean(str(key), known)}")


@dataclass(slots=True)
class _Group:
    """One agent as a file describes it."""

    name: str
    trains: bool = True
    cycle: int | None = None
    critic: int | str | None = None
    model: str | None = None
    critic_model: str | None = None


def _read_own(values: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], where: str) -> Read:
    groups: dict[int | str, _Group] = {}
    spoken = []
    environments: list[tuple[str, str]] = []
    for node in nodes:
        name = str(node.get("id", ""))
        if not name:
            raise ConfigError(f"A node of {where} has no `id`. Give it one.")
        _refuse_unknown(node, _OWN_NODE, where, name)
        who = node.get("agent", node.get("agent_group"))
        if who is None or ("agent" in node and "agent_group" in node):
            raise ConfigError(
                f"Node '{name}' of {where} names its agent by `agent` or `agent_group`: one of both."
            )
        group = groups.setdefault(who, _Group(str(who) if isinstance(who, str) else f"agent_{who}"))
        _training_keys(group, node, where, name)
        if node.get("only_forward_compute"):
            group.trains = False
        environments += [(name, path) for path in _as_list(node.get("env_path"))]
        speech = {k: v for k, v in node.items() if k not in _TRAINING | {"agent", "agent_group"}}
        spoken.append({**with_processing(speech, where), "agent": group.name})
    _check_consecutive([who for who in groups if isinstance(who, int)], where)
    return _assemble(values, groups, spoken, environments, where, {})


def _read_siirl(values: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], where: str) -> Read:
    groups: dict[int | str, _Group] = {}
    spoken: list[dict[str, Any]] = []
    aside: dict[str, str] = {}
    samples: set[int] = set()
    said: dict[str, Any] = {}
    environments: list[tuple[str, str]] = []
    roles = {str(node.get("node_id")): node.get("node_role") for node in nodes}
    check_graph({str(n.get("node_id")): _as_list(n.get("dependencies")) for n in nodes}, where)
    learning: set[int] = set()
    for node in nodes:
        name, options = str(node.get("node_id")), node.get("agent_options") or {}
        number = _checked_node(node, options, where, name)
        group = groups.setdefault(number, _Group(f"agent_{number}"))
        if "train_cycle" in options and node["node_role"] != "ACTOR":
            raise ConfigError(
                f"Node '{name}' of {where} has `train_cycle` and the role {node['node_role']}: in siiRL the node would be left out of some "
                "steps, and here only updates are. Write it on the node with the role ACTOR that trains, or remove it."
            )
        _training_keys(group, options, where, name)
        config = node.get("config") or {}
        said |= {short: config[long] for long, short in _SCRIPT.items() if long in config}
        judges = node["node_role"] == "CRITIC"
        aside |= _engine_keys(group, samples, config, where, name, judges=judges)
        environments += [(name, path) for path in _as_list(options.get("env_path"))]
        if node["node_role"] == "ACTOR" and not node.get("only_forward_compute"):
            learning.add(number)
        if node["node_role"] == "ROLLOUT":
            group.name = re.sub(r"\W", "_", name.removeprefix("rollout_").removesuffix("_rollout")) or name
            # siiRL's default is false, kapelle's is true.
            speech = {"obs_with_env": False, **{k: v for k, v in options.items() if k in _SPEECH}}
            before = [b for b in _as_list(node.get("dependencies")) if roles.get(b) == "ROLLOUT"]
            speech = with_processing(speech, where)
            spoken.append({"id": name, "group": number, "dependencies": before, **speech})
    _check_consecutive([who for who in groups if isinstance(who, int)], where)
    for key, group in groups.items():
        group.trains = key in learning
    named = [
        {**{k: v for k, v in s.items() if k != "group"}, "agent": groups[s["group"]].name} for s in spoken
    ]
    _check_top({**said, **values}, where)
    read = _assemble({**said, **values}, groups, named, environments, where, aside)
    if len(samples) > 1:
        raise ConfigError(
            f"{where} gives nodes different `rollout.n`s. A group has one size: write the same."
        )
    if samples - {1}:
        algorithm = {**read.sections.get("algorithm", {}), "group_size": samples.pop()}
        return Read({**read.sections, "algorithm": algorithm}, aside)
    return read


def _checked_node(node: Mapping[str, Any], options: Any, where: str, name: str) -> int:
    _refuse_unknown(node, _SIIRL_NODE, where, name)
    role = node.get("node_role")
    if role not in _ROLES:
        raise ConfigError(
            f"Node '{name}' of {where} has the role {role!r}, which kapelle has no node for."
            f"{did_you_mean(str(role), _ROLES)} Remove the node; what it did is a setting of the algorithm."
        )
    if not isinstance(options, Mapping):
        raise ConfigError(f"`agent_options` of node '{name}' of {where} is no mapping. Write key: value.")
    _refuse_unknown(options, _SPEECH | _TRAINING - {"only_forward_compute"}, where, name)
    number = node.get("agent_group", 0)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ConfigError(f"Node '{name}' of {where} has agent_group {number!r}. Groups are numbers from 0.")
    return number


def _training_keys(group: _Group, given: Mapping[str, Any], where: str, name: str) -> None:
    cycle, critic = given.get("train_cycle"), given.get("share_instance")
    if cycle is not None:
        if isinstance(cycle, bool) or not isinstance(cycle, int) or cycle < 1:
            raise ConfigError(
                f"Node '{name}' of {where}: `train_cycle` is {cycle!r}. Write a number of steps."
            )
        group.cycle = cycle
    if critic is not None:  # the group number 0 is a group
        if isinstance(critic, bool) or not isinstance(critic, int | str):
            raise ConfigError(
                f"Node '{name}' of {where}: `share_instance` is {critic!r}. Name an agent or its group."
            )
        group.critic = critic


def _engine_keys(
    group: _Group, samples: set[int], config: Mapping[str, Any], where: str, name: str, *, judges: bool
) -> dict[str, str]:
    """Take the model and the number of samples from a node's `config`; return what is set aside.

    A node that `judges` names the critic's model.
    """
    aside = {}
    for key, value in config.items():
        if key in _SCRIPT:
            continue
        if key == "critic.model.path" or (judges and key == "model.path"):
            if group.critic_model not in (None, str(value)):
                raise ConfigError(
                    f"{where} gives the critic of '{group.name}' two models, {group.critic_model} and {value}. Name one."
                )
            group.critic_model = str(value)
            continue
        if _SPEED.fullmatch(str(key)):
            aside[f"config.{key}"] = "decides how fast, not what"
        elif key == "rollout.n" and isinstance(value, int) and value >= 1:
            samples.add(value)
            if value == 1:
                aside[f"config.{key}"] = "the recipe's group size stays"
        elif key == "model.path" and group.model in (None, value):
            group.model = str(value)
        else:
            raise ConfigError(
                f"`config.{key}: {value}` of node '{name}' of {where} cannot be followed here. Set what it does in the "
                "recipe (`model`, `team.sampling`, `optimizer`, `algorithm`) and remove it."
            )
    return aside


def _assemble(
    values: Mapping[str, Any],
    groups: Mapping[int | str, _Group],
    nodes: Sequence[Mapping[str, Any]],
    environments: Sequence[tuple[str, str]],
    where: str,
    aside: Mapping[str, str],
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
            f"{where} gives its critics different models, {critics[0]} and {critics[1]}. Here all stand on one (`team.critic_model`): "
            "name the same."
        )
    if critics:
        sections["team"]["critic_model"] = critics[0]
    algorithm: dict[str, Any] = {}
    training = [group for group in ordered if group.trains]
    cycles = {group.name: group.cycle for group in training if group.cycle is not None}
    if cycles:
        alike = len(set(cycles.values())) == 1 and len(cycles) == len(training)
        interval = next(iter(cycles.values())) if alike else cycles
        algorithm["order"] = {"name": "alternate", "interval": interval}
    if "share_reward_in_agent" in values:
        algorithm["team_reward"] = "mean" if values["share_reward_in_agent"] else "last"
    if algorithm:
        sections["algorithm"] = algorithm
    # The one environment that nodes name.
    named: dict[str, dict[str, Any]] = {}
    for _, path in environments:
        section = environment_of(path, where)
        named[str(section.get("env_path", section["name"]))] = section
    if len(named) > 1:
        one, other = sorted(named)[:2]
        raise ConfigError(f"{where} names two environments, {one} and {other}. An episode has one world.")
    environment = next(iter(named.values()), {})
    if environment.get("name") == SIIRL_ENV:
        graph = {str(node["id"]): _as_list(node.get("dependencies")) for node in nodes}
        answer = values.get("answer") or sinks(graph)[-1]
        workflow["nodes"] = list(answered_by(environment, nodes, answer, environments[0][0], where))
        workflow["whole_texts"] = True
        if "rewards_with_env" in values:
            environment["rewards_with_env"] = values["rewards_with_env"]
    elif values.get("rewards_with_env") is False:
        aside = {
            **aside,
            "rewards_with_env": "the environment's grader is the reward function, and pays the last answer",
        }
    if environment:
        sections["environment"] = environment
    return Read(sections, aside)


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
                f"`share_instance: {group.critic}` in {where} names no agent.{did_you_mean(str(group.critic), known)}"
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


# -------- What siiRL's own `process.py` does: an empty system message before what a node reads, and what it hands on
#
# The template of what a node reads is `Node.prompt`.


def pre_process(prompt: str) -> list[dict[str, str]]:
    """Return the conversation that the node reads: an empty system message keeps templates from writing their own."""
    return [{"role": "system", "content": ""}, {"role": "user", "content": prompt}]


def post_process(prompt: str, response: str, *, post_chat_template: str = "") -> str:
    """Return prompt, template and response as one text."""
    return f"{prompt}{post_chat_template}{response}"
