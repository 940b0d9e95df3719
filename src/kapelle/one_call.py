"""Functions for two common tasks: `train` trains agents on a data set, and `blame` finds the turns that made episodes fail.

    run = kapelle.train("Qwen/Qwen3-0.6B", "train.jsonl", reward=exact, agents=["planner", "coder"], eval_dataset="test.jsonl")
    print(run)
    run.trainer.evaluate()

The function `train` creates a `Trainer` and runs the training. The settings, checks and results of `train` are the same as those of
`Trainer`. The run is saved in a new directory, such as `runs/train-20260101-120000`, unless `run_dir` specifies one or is None.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kapelle.algorithm import algorithm_class
from kapelle.environments.judged import Ranking, Rubric
from kapelle.environments.rewarded import (
    Reward,
    Rewarded,
    RowsInMemory,
    name_of,
    rows_in_memory,
)
from kapelle.environments.tools.contract import ToolSettings
from kapelle.environments.tools.functions import Functions as ToolFunctions
from kapelle.errors import ConfigError, DataError, did_you_mean, raise_all
from kapelle.rollout.evaluation.blame import check_repeatable
from kapelle.runs.blamed import Blame
from kapelle.runs.named_checkpoint import split_run
from kapelle.runs.reader import read_config
from kapelle.runs.writer import new_folder
from kapelle.runtime.plugins import IN_MEMORY
from kapelle.runtime.ranks import launched_rank
from kapelle.settings.alias_conversions import BY_EPOCHS
from kapelle.settings.aliases import ARGUMENTS
from kapelle.settings.base import AlgorithmSettings, Settings, WorkflowSettings
from kapelle.settings.messages import in_python, made, unknown_keywords
from kapelle.settings.schema import AgentConfig
from kapelle.setup.model_loading import name_model
from kapelle.setup.recipe import derived, from_keywords
from kapelle.training.blaming import blame_team, check_blame
from kapelle.training.console import Lines, Watch
from kapelle.training.observer import Observer
from kapelle.training.provenance import config_of_run
from kapelle.training.trainer import Metrics, Trainer

if TYPE_CHECKING:
    from kapelle.models.language_model import LanguageModel
    from kapelle.training.trainer import Summary

Dataset = str | Path | Iterable[Mapping[str, Any]]
"""A data set: its name on the Hugging Face hub (`owner/name`), the path of a file or folder, or the rows themselves."""
Function = Callable[..., Any] | str | Rubric | Ranking
"""The reward of an episode: a function, its import path (`module:function`) or a judge."""
Functions = Function | Sequence[Function]
Tool = Callable[..., Any] | str | ToolSettings | Mapping[str, Any]
"""A tool for agents: a function, its import path, or the settings of a tool, such as `{"tool": "calculator"}`."""
EXAMPLES = {"team": "lora", "training": "tasks_per_step", "evaluation": "problems"}
"""Mapping from each section that `train` extends to the name of one of its settings, which error messages show as an example."""
CONVERTED = {
    "DataFrame": "Give its rows: {0}.to_dict('records') for pandas, {0}.to_dicts() for polars.",
    "DatasetDict": "Give one of its splits, such as {0}['train'].",
    "IterableDatasetDict": "Give one of its splits, such as {0}['train'].",
    "function": "Give the rows that it returns: {0}().",
    "dict": "Give a list of rows, each a dict. To convert a dict `d` of columns, use [dict(zip(d, row)) for row in zip(*d.values())].",
}
"""Mapping from the type of an object that is not a data set to a message that explains how to convert the object."""


class RunDir(Enum):
    """Default value of the argument `run_dir`."""

    NEW = "runs/NAME-DATE"
    """Create a new folder in `runs`. The name of the folder consists of the run's `name` (or the name of the data set) and the start time
    of the run."""


TEAM = "team"
"""Key of the functions that reward every agent, in a mapping from agents to reward functions."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of `train`; `print` shows a summary of the run.

    Close the trainer after use, or use this object as a context manager.
    """

    summary: Summary
    trainer: Trainer
    """The trainer, which is still open. Continue with `trainer.train(50)`, `trainer.evaluate()` or `trainer.save_policies(folder)`."""

    def __str__(self) -> str:
        """Return the summary."""
        return str(self.summary)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.trainer.__exit__(kind, error, trace)


ARGUMENT_OF = {
    "model.path": "model",
    "environment.path": "dataset",
    "environment.eval_path": "eval_dataset",
    "environment.test_share": "eval_dataset",
    "environment.train": "dataset",
    "environment.test": "eval_dataset",
    "environment.max_unusable": "max_unusable",
    "environment.rewards": "reward",
    "environment.success": "success",
    "environment.tools": "tools",
    "environment.max_turns": "max_tool_calling_iterations",
    "environment.question_field": "question_field",
    "environment.rendered_prompts": "rendered_prompts",
    "environment.config": "dataset_config",
    "team.agents": "agents",
    "algorithm.name": "algorithm",
    "workflow.name": "workflow",
    "training.steps": "steps",
    "training.tasks_per_step": "tasks_per_step",
}
"""Mapping from each setting to the argument of `train` that sets it. Error messages and the recorded origins of settings refer to these
arguments."""


@in_python(ARGUMENT_OF)
def train(
    model: str | LanguageModel,
    dataset: Dataset = (),
    reward: Functions | Mapping[str, Functions] = (),
    agents: int | Sequence[str | Mapping[str, Any] | AgentConfig] | Mapping[str, str] | None = None,
    *,
    eval_dataset: Dataset | float | None = None,
    reward_weights: Sequence[float] | None = None,
    success: float | Callable[..., Any] | str | None = None,
    tools: Sequence[Tool] = (),
    question_field: str | None = None,
    rendered_prompts: bool = False,
    dataset_config: str | None = None,
    max_unusable: float | None = None,
    steps: int | None = None,
    tasks_per_step: int | None = None,
    algorithm: str | AlgorithmSettings = "grpo",
    workflow: str | WorkflowSettings | None = None,
    run_dir: str | Path | RunDir | None = RunDir.NEW,
    resume: bool = False,
    observer: Observer | None = None,
    metrics: Metrics | None = None,
    **sections: Any,
) -> Trained:
    """Train a team of agents on the questions of a data set with reward functions, and return the run.

    The argument `reward` is a function or a list of functions; the reward of the team is their sum, weighted by `reward_weights`. To
    reward agents differently, give a mapping from agent names to functions, where the key `team` stands for all agents. The
    parameters of reward functions are described in `environments.rewarded`. The argument `success` is the minimum reward of a solved
    episode, or a function with the same parameters that returns a Boolean or a number in [0, 1]. The argument `agents` is the number
    of agents, a list of their names, or a mapping from names to prompts; the default is the agents in `team`, or one agent. Several
    agents act one after another (workflow `chain`) unless a `workflow` is given. The argument `tools` lists typed functions or
    settings of tools, which agents can call before they answer (workflow `tool_use`). The argument `eval_dataset` contains rows for
    evaluation, or is the share of rows to hold out; without this argument, nothing is evaluated. The run consists of `steps` training
    steps with `tasks_per_step` questions each. The argument `question_field` is the name of the column with the questions; set
    `rendered_prompts` if this column contains prompts to which a chat template was already applied. The argument `dataset_config` is
    the name of a configuration of a data set on the hub. Training raises an error if the share of unusable rows is greater than
    `max_unusable` (default 1 %). The run is saved in the folder `run_dir`; the default is a new folder in `runs`, whose path is
    printed. If `run_dir` is None, nothing is saved, and arguments that need a run directory (`resume`, `trackers`, `checkpoint`,
    `episodes`) raise an error. The arguments in `sections` are sections of `Trainer` (`team=`, `optimizer=`, `training=` and so on).
    These arguments can also be settings with their names in TRL, verl or CoMLRL, such as `learning_rate=`, `num_generations=` or
    `epochs=` (docs/coming_from/names.md). Raises the same errors as `Trainer`.
    """
    own: dict[str, Any] = {**sections}
    theirs = {ours: name for name, ours in ARGUMENTS.items() if name in own}
    observer = observer or Watch(Lines(sys.stdout))
    dataset, reward, agents, run_dir = _renamed(
        own, observer, dataset=dataset, reward=reward, agents=agents, run_dir=run_dir
    )
    unknown = unknown_keywords(train, "kapelle.train", own)
    own = {word: value for word, value in own.items() if word not in unknown}
    if any(
        isinstance(each, tuple) and not each for each in (dataset, reward)
    ):  # a misspelt word may refer to them
        raise_all([*unknown.values()])
    if "environment" in own:
        raise ConfigError("`kapelle.train` builds the environment from its data set. For other environments, use `kapelle.Trainer`.")  # fmt: skip
    _check_run_dir(run_dir, resume, own)
    rounds = own.pop("max_tool_calling_iterations", None)
    optional = {
        "question_field": question_field,
        "rendered_prompts": rendered_prompts or None,
        "config": dataset_config,
        "max_unusable": max_unusable,
        # The answer after the last calls is also a turn.
        "max_turns": rounds + 1 if type(rounds) is int else rounds,
    }
    environment = _environment(dataset, eval_dataset, reward, reward_weights, success, tools, optional)
    team = _plain("team", own)
    if agents is None:
        agents = team.pop("agents", 1)
    elif team.pop("agents", agents) != agents:
        raise ConfigError("`agents` and `team={'agents': …}` differ. Remove one of them.")
    names, team["agents"] = _seats(agents)
    # The origin of these values in the run's record is the keyword that gave them, or the value that they follow from.
    origin = {setting: f"argument {theirs.get(word, word)}" for setting, word in ARGUMENT_OF.items()}
    origin["environment.name"] = "kapelle.train"
    if algorithm is None:
        raise ConfigError(
            "`algorithm` is None. Give the name of an algorithm, such as 'grpo', or its settings."
        )
    section: Any = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    if isinstance(reward, Mapping):
        _check_rewarded(reward, names)
        section = _keeping(section)
        origin["algorithm.team_reward"] = "rewards by agent"
    if algorithm == "grpo":
        origin["algorithm.name"] = "default"
    if agents == 1:
        origin["team.agents"] = "default"
    training = _training(own, {"steps": steps, "tasks_per_step": tasks_per_step}, origin)
    evaluation = _evaluation(own, eval_dataset, origin)
    if workflow is None:
        workflow = "tool_use" if environment.tools else "solo" if len(names) == 1 else "chain"
        origin["workflow.name"] = "number of agents"
    own |= {
        "model": model,
        "team": team,
        "environment": environment,
        "algorithm": section,
        "training": training,
        "evaluation": evaluation,
        "workflow": {"name": workflow} if isinstance(workflow, str) else workflow,
    }
    if unknown:  # raise them together with the other errors
        from_keywords(name_model(own, {}), lambda _: unknown, derived(origin))
    with ExitStack() as failing:
        kept = ""
        if isinstance(run_dir, RunDir):
            run_dir = failing.enter_context(new_folder(_named(own.get("name", own.get("run_name")), dataset)))
            kept = f"the run is saved in {run_dir}"
        trainer = Trainer(
            run_dir=run_dir, resume=resume, observer=observer, metrics=metrics, origin=origin, **own
        )
        failing.push(trainer)
        if kept:
            trainer.observer.phase("files", kept)
        if isinstance(eval_dataset, int | float):
            trained, held = (environment.size(split) for split in ("train", "test"))
            trainer.observer.phase("data", f"{trained} rows to train on, {held} held out: about {eval_dataset:.0%} of the distinct questions, by a hash of each")  # fmt: skip
        if len(environment.rewards) > 1:
            trainer.observer.phase("rewards", environment.in_words())
        summary = trainer.train()
        failing.pop_all()
    trainer.close_at_exit()  # releases the run directory if the caller forgets to
    return Trained(summary, trainer)


def _check_rewarded(reward: Mapping[str, Functions], names: Sequence[str]) -> None:
    """Raise ConfigError unless a mapping of reward functions contains every agent of the team and no unknown agent."""
    for agent in reward:
        if agent not in (TEAM, *names):
            raise ConfigError(
                f"`reward` contains the unknown agent '{agent}'.{did_you_mean(agent, [*names, TEAM])}"
            )
    for name in names:
        if name not in reward and TEAM not in reward:
            raise ConfigError(
                f"`reward` has no function for '{name}'. Add one for this agent, or for '{TEAM}'."
            )


def _training(
    own: dict[str, Any], amounts: Mapping[str, int | None], origin: dict[str, str]
) -> dict[str, Any]:
    """Return the settings of the section `training`, including the values that were given as arguments of `train`."""
    training = _plain("training", own)
    passes = next((name for name in BY_EPOCHS if name in own), None)
    if amounts["steps"] is not None and passes is not None:
        raise ConfigError(f"`steps` and `{passes}` both set the length of the run. Remove one of them.")
    for word, amount in amounts.items():
        if isinstance(amount, bool):
            raise ConfigError(f"`{word}` is {amount}. Give a whole number.")
        if amount is None:
            del origin[f"training.{word}"]
            continue
        if training.get(word, amount) != amount:
            raise ConfigError(
                f"`{word}` is {amount}, but `training` contains `{{'{word}': {training[word]}}}`. Remove one of them."
            )
        training[word] = amount
    return training


def _evaluation(
    own: dict[str, Any], eval_dataset: Dataset | float | None, origin: dict[str, str]
) -> dict[str, Any]:
    """Return the settings of the section `evaluation`. Without `eval_dataset`, evaluation is turned off."""
    evaluation = _plain("evaluation", own)
    if eval_dataset is not None:
        return evaluation
    if evaluation.get("every") and not evaluation.get("sets"):
        raise ConfigError(
            f"`evaluation={{'every': {evaluation['every']}}}` needs unseen rows. Give `eval_dataset`: rows, or a share such as 0.1."
        )
    origin["environment.eval_path"] = "no eval_dataset"
    if "before_and_after" not in evaluation:
        evaluation["before_and_after"] = False
        origin["evaluation.before_and_after"] = "no eval_dataset"
    return evaluation


def _keeping(algorithm: Any) -> Any:
    """Return the algorithm's settings, changed so that each agent keeps its own reward unless the settings contain `team_reward`."""
    if isinstance(algorithm, Settings):
        kind, given = type(algorithm), {*algorithm.model_fields_set}
    elif isinstance(algorithm, Mapping) and isinstance(algorithm.get("name"), str):
        kind, given = algorithm_class(algorithm["name"]), {*algorithm}
    else:
        return algorithm  # raises an error when the section is built
    if "team_reward" in given or "team_reward" not in getattr(kind, "model_fields", {}):
        return algorithm
    own = {"team_reward": "individual"}
    return algorithm.model_copy(update=own) if isinstance(algorithm, Settings) else {**algorithm, **own}


def _check_run_dir(run_dir: str | Path | RunDir | None, resume: bool, sections: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument needs a run directory but `run_dir` is None, or if `run_dir` must be given but is not."""
    if not isinstance(resume, bool):
        raise ConfigError(f"`resume` is {resume!r}. Give True to continue the run in `run_dir`.")
    if resume and not isinstance(run_dir, str | Path):
        raise ConfigError('`resume` continues a run. Give its directory: `run_dir="runs/…"`.')
    needing = [name for name in ("trackers", "checkpoint", "episodes") if sections.get(name)]
    if run_dir is None and needing:
        raise ConfigError(
            f"`{needing[0]}` needs a run directory, but `run_dir` is None. Remove one of the two."
        )
    if isinstance(run_dir, RunDir) and launched_rank() is not None:
        raise ConfigError('Several processes train this run. Give its directory: `run_dir="runs/mine"`.')


def _named(name: object, dataset: Dataset) -> str:
    """Return the name of the run's new folder: the `name` of the run, or else the name of its data set."""
    if isinstance(name, str) and name:
        return name
    return Path(dataset).stem if isinstance(dataset, str | Path) else "run"


def _renamed(own: dict[str, Any], observer: Observer, **given: Any) -> Iterator[Any]:
    """Return the given arguments, with values that `own` contains under the names of TRL.

    These names are removed from `own`.
    """
    for name, ours in ARGUMENTS.items():
        if name not in own:
            continue
        value = given[ours]
        if not (value is None or isinstance(value, RunDir) or (isinstance(value, tuple) and not value)):
            raise ConfigError(f"`{name}` is read as `{ours}`, but both are given. Remove one of them.")
        given[ours] = own.pop(name)
        observer.phase("recipe", f"{name} is read as {ours}")
    return iter(given.values())


def _environment(
    dataset: Dataset,
    eval_dataset: Dataset | float | None,
    reward: Functions | Mapping[str, Functions],
    weights: Sequence[float] | None,
    success: float | Callable[..., Any] | str | None,
    tools: Sequence[Tool],
    others: Mapping[str, Any],
) -> Rewarded:
    functions: dict[str, Callable[..., Any]] = {}
    rewards = _rewards(reward, weights, functions)
    question_field, config = others["question_field"], others["config"]
    if question_field is not None and not isinstance(question_field, str):
        raise ConfigError(
            f"`question_field` is {question_field!r:.40}. Give the name of a column as a string."
        )
    is_number = isinstance(success, int | float) and not isinstance(success, bool) and math.isfinite(success)
    if not (
        success is None or is_number or callable(success) or (isinstance(success, str) and ":" in success)
    ):
        raise ConfigError(
            f"`success` is {success!r:.40}. Give a function, `module:function`, or a finite number, which is the minimum reward of a solved episode."
        )
    path, train = _where(dataset, "dataset")
    if config is not None and (path == IN_MEMORY or Path(path).exists()):
        raise ConfigError("`dataset_config` applies only to a data set on the hub. Remove it.")
    share: dict[str, float] = {}
    test_path, test = "none", ()
    if isinstance(eval_dataset, int | float):
        if not 0.0 < eval_dataset < 1.0:
            raise ConfigError(
                f"`eval_dataset` is {eval_dataset}. Give a share between 0 and 1, rows, or None."
            )
        test_path, share = "share", {"test_share": float(eval_dataset)}
    elif eval_dataset is not None:
        test_path, test = _where(eval_dataset, "eval_dataset")
    by_function = success if callable(success) or isinstance(success, str) else None
    optional = {
        "success": success if by_function is None else _target(by_function, functions),
        "tools": _tools(tools) or None,
        **others,
    }
    values = {
        "path": path,
        "eval_path": test_path,
        "rewards": rewards,
        **{key: value for key, value in optional.items() if value is not None},
        **share,
    }
    return made(Rewarded, values, "environment").holding(
        RowsInMemory(train, test, functions, ("`dataset`", "`eval_dataset`"))
    )


def _where(dataset: Dataset, what: str) -> tuple[str, tuple[Any, ...]]:
    if isinstance(dataset, str | Path):
        place = Path(dataset)
        # A path that can only be a file must exist; `owner/name` is looked up on the hub later.
        if not place.exists() and (place.suffix or len(place.parts) != 2):
            raise DataError(
                f"`{what}` is '{place}', but {place.absolute()} does not exist. Give an existing file, `owner/name` of a data "
                "set on the Hugging Face hub, or a list of rows."
            )
        return str(dataset), ()
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping) or kind in CONVERTED or not isinstance(dataset, Iterable):
        how = CONVERTED.get(
            kind, "Give `owner/name` on the Hugging Face hub, a file, or a list of rows, each a dict."
        )
        raise ConfigError(f"`{what}` is {kind}. {how.format(what)}")
    return IN_MEMORY, rows_in_memory(dataset, what)


def _rewards(
    reward: Functions | Mapping[str, Functions],
    weights: Sequence[float] | None,
    functions: dict[str, Callable[..., Any]],
) -> list[Reward | Rubric | Ranking]:
    """Return the settings of every reward function and judge. Functions without an import path are added to `functions`."""
    if isinstance(reward, Mapping):
        if weights is not None:
            raise ConfigError(
                "`reward_weights` apply only to a list of functions. Apply weights inside each agent's function."
            )
        pairs = [
            (None if agent == TEAM else agent, each) for agent, own in reward.items() for each in _listed(own)
        ]
    else:
        pairs = [(None, each) for each in _listed(reward)]
    if not pairs:
        raise ConfigError("`reward` has no function. Give a function that returns a number for an episode.")
    for _, each in pairs:
        if isinstance(each, str) and ":" not in each:
            raise ConfigError(
                f"`reward` is the string '{each}'. Give a function as `module:function` or `file.py:function`."
            )
        if not isinstance(each, str | Rubric | Ranking) and not callable(each):
            raise ConfigError(
                f"`reward` is {each!r:.40}. Give a function that returns a number for an episode, a kapelle.Rubric or a kapelle.Ranking."
            )
        if isinstance(each, Rubric | Ranking) and each.agent is not None:
            raise ConfigError(
                f"A judge in `reward` sets the agent '{each.agent}'. Use the agent as the key instead: `reward={{'{each.agent}': …}}`."
            )
    if weights is not None and not all(
        isinstance(weight, int | float) and not isinstance(weight, bool) and math.isfinite(weight)
        for weight in _listed(weights)
    ):
        raise ConfigError(
            f"`reward_weights` is {weights!r}. Give one finite number for each reward function."
        )
    given = [None] * len(pairs) if weights is None else _listed(weights)
    if len(given) != len(pairs):
        raise ConfigError(
            f"There are {len(given)} `reward_weights` for {len(pairs)} reward functions. Give one weight for each function."
        )
    found: list[Reward | Rubric | Ranking] = []
    for (agent, each), weight in zip(pairs, given, strict=True):
        changes: dict[str, Any] = {} if agent is None else {"agent": agent}
        if isinstance(each, Rubric | Ranking):
            changes |= {} if weight is None else {"weight": each.weight * weight}
            found.append(each.model_copy(update=changes))
        else:
            changes |= {} if weight is None else {"weight": weight}
            found.append(Reward(function=_target(each, functions), **changes))
    return found


def _tools(tools: Any) -> list[Any]:
    """Return the entries of the setting `tools`.

    All functions are combined in one entry, and the settings of other tools are kept unchanged.
    """
    entries, named = [], []
    held: dict[str, Callable[..., Any]] = {}
    for each in _listed(tools):
        if callable(each) or isinstance(each, str):
            named.append(_target(each, held))
        else:
            entries.append(each)
    return [*entries, ToolFunctions(functions=tuple(named)).holding(held)] if named else entries


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]


def _target(function: Callable[..., Any] | str, functions: dict[str, Callable[..., Any]]) -> str:
    if isinstance(function, str):
        return function
    named = name_of(function)
    if named is not None:
        return named
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    plain = getattr(inner, "__name__", "").strip("<>") or type(inner).__name__
    same = [name for name, known in functions.items() if known is function]
    numbered = (f"{plain}_{k}" for k in range(2, len(functions) + 3))
    name = next(name for name in (*same[:1], plain, *numbered) if same or name not in functions)
    functions[name] = function
    return f"{IN_MEMORY}:{name}"


def _seats(agents: Any) -> tuple[list[str], int | list[Any]]:
    """Return the names of the agents in order, and the value of the setting `team.agents`."""
    if isinstance(agents, int) and not isinstance(agents, bool):
        return [f"agent_{k}" for k in range(agents)], agents
    if isinstance(agents, str):
        raise ConfigError(f"`agents` is the string '{agents}'. Give a list of names: `agents=['{agents}']`.")
    if not isinstance(agents, Mapping | Sequence) or any(
        not isinstance(agent, str | Mapping | AgentConfig) for agent in agents
    ):
        raise ConfigError(
            f"`agents` is {agents!r}. Give a number of agents, their names, or prompts by name."
        )
    if isinstance(agents, Mapping):
        configs: list[Any] = [{"name": name, "prompt": prompt} for name, prompt in agents.items()]
    else:
        configs = [{"name": agent} if isinstance(agent, str) else agent for agent in agents]
    if not configs:
        raise ConfigError("`agents` is empty. Give at least one agent.")
    return [
        str(config.name if isinstance(config, AgentConfig) else config.get("name")) for config in configs
    ], configs


def _plain(name: str, sections: dict[str, Any]) -> dict[str, Any]:
    """Remove a section from `sections` and return its settings as a new dict."""
    section = sections.pop(name, {})
    if not isinstance(section, Mapping | Settings):
        raise ConfigError(
            f"`{name}` is {section!r}, but it is a section. Give its settings by name, such as {name}={{'{EXAMPLES[name]}': …}}."
        )
    return section.model_dump(exclude_unset=True) if isinstance(section, Settings) else dict(section)


@in_python()
def blame(
    run: str | Path,
    *settings: str,
    episodes: int = 50,
    samples: int = 8,
    split: str = "eval",
    seed: int | None = None,
    observer: Observer | None = None,
) -> Blame:
    """Find the turns that made episodes of a run fail, by comparing the estimated success before and after each turn.

    The argument `run` is the directory of a run, optionally with a checkpoint (`RUN`, `RUN@best`, `RUN@12`). At most `episodes`
    failed episodes, and the same number of solved episodes, are continued `samples` times from each of their moments. By default,
    these are the episodes that the run recorded when it evaluated the checkpoint. New episodes are rolled out if there are no
    recorded episodes, if `settings` such as `evaluation.problems=100` are given, or if the split is `train`. The argument `seed` is
    the seed of the continuations; the default is the seed of the run. The result is saved in the folder `blame` of the run, so that
    another call can continue an interrupted one. Raises the errors of `errors.py`.
    """
    check_blame(episodes, samples, split)
    folder, _ = split_run(str(run))
    read_config(folder)  # raises if there is no run
    check_repeatable(config_of_run(folder, settings).environment)
    options: dict[str, Any] = {} if observer is None else {"observer": observer}
    with Trainer.from_run(run, *settings, **options) as trainer:
        return blame_team(trainer, folder, settings, episodes, samples, split, seed)
