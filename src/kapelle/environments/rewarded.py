"""Questions from the rows of a data set, with rewards from the user's own functions.

`kapelle.train` builds this environment from its arguments.

    environment:
      name: rewarded
      path: rows.jsonl
      rewards: [{function: "my_rewards:exact"}, {function: "my_rewards.py:short", agent: planner, weight: 0.1}]

Each row is a question. The functions receive the completions and the row, and compute rewards at the end of the episode. The reward
of an agent is the weighted sum of its own rewards and the rewards of the team. A function may return any number, so `success` is
undefined unless the setting `success` defines it. Judges can also compute rewards (`judged.py`): a rubric grades each episode, and
a ranking compares the episodes of a group.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from types import CodeType
from typing import Any, Literal

from pydantic import Field, FiniteFloat, PrivateAttr, field_validator

from kapelle.environment import (
    FAILED,
    REWARD_PREFIX,
    Answerable,
    InMemory,
    Outcome,
    QuestionCounts,
    RewardsEpisodes,
)
from kapelle.environments.base import BaseState
from kapelle.environments.data.conversations import QUESTIONS, question_in
from kapelle.environments.data.source import DataSource, DataWithQuestions, Splits, Words, usable
from kapelle.environments.grading.asking import AnyJudge, Asking, ModelJudge
from kapelle.environments.grading.judge import judge_attempts, judge_rubric
from kapelle.environments.grading.text.tool_call import NotCalls, beside_calls, parse_calls
from kapelle.environments.judged import Ranking, Rubric, UsesJudges, shown
from kapelle.environments.questions import require_agents
from kapelle.environments.tool_questions import AnyTool, OffersTools, ToolsState
from kapelle.environments.tools.functions import Functions
from kapelle.errors import AbsentData, ConfigError, DataError, EpisodeError, did_you_mean, need_known
from kapelle.functional.statistics import finite
from kapelle.models.adapters import base_and_adapter, read_lora
from kapelle.models.paths import check_model_path
from kapelle.runtime.files import replace_file
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import IN_MEMORY, find_object
from kapelle.runtime.row_files import DataRow, read_rows
from kapelle.settings.base import Settings
from kapelle.types import Episode, Json, Split, Task, Turn

# -------- Reward functions: their arguments, and what they return
#
# A function is called once for each episode and may take any of these arguments by name:
#
#     completion     last text of the agent that is rewarded; if the team is rewarded, its answer
#     completions    agent → its last text
#     question       question that the agents read
#     episode        the `kapelle.Episode`, with all its turns
#     agent          name of the agent that is rewarded; only if a function rewards one agent
#     …              any column of the row, by its name
#
# It returns a number, or None if it does not apply. It may be a coroutine.
#
# A function that takes `**` and `completions`, or `prompts` or `completion_ids`, is written for batches, like TRL's functions. It is
# called with a batch of one (lists of length 1) and returns such a list. `completions` are messages if the row's prompt is a
# conversation or agents have tools, else strings.
#
# A function that takes `solution_str` is written for verl: `solution_str` is the completion, and `ground_truth` is the row's
# `reward_model.ground_truth`.

VERL = "solution_str"
"""The name of the parameter that receives the completion in reward functions of verl."""
BATCHES = ("prompts", "completions", "completion_ids")
"""The parameters that a reward function for batches may have in addition to the columns of the rows (as lists)."""
GIVEN = ("completion", "completions", "question", "episode", "agent")
"""The parameters that a reward function may have in addition to the columns of the row."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function with the names of its parameters."""

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...]
    """The parameters without a default."""
    may_take: tuple[str, ...]
    """All named parameters of the function."""
    takes_all: bool
    """Whether the function accepts arbitrary keyword arguments (`**`)."""
    kind: str = "reward"
    """The kind of function in messages, which is `reward` or `success`."""

    @property
    def takes_batches(self) -> bool:
        """Whether the function is written for batches, as in TRL."""
        own = set(BATCHES) & set(self.may_take)
        alone = own == {"completions"}
        return bool(own) and (not alone or (self.takes_all and "completion" not in self.may_take))

    def check(self, columns: Collection[str], *, for_team: bool) -> None:
        """Raise ConfigError if a parameter has no value or two possible values."""
        given = BATCHES if self.takes_batches else GIVEN
        if VERL in self.may_take:
            columns = {*columns, VERL, "ground_truth"}
        what = f"The {self.kind} function `{self.name}` takes"
        for name in set(self.may_take) & set(given) & set(columns):
            raise ConfigError(
                f"{what} `{name}`, which is both a column of the data and an argument that kapelle passes. Rename the column."
            )
        if "agent" in self.needs and for_team:
            raise ConfigError(
                f"{what} `agent` but rewards the whole team. Name the agent that it rewards: `reward={{'NAME': {self.name}}}`."
            )
        known = [*given, "question", *columns]
        for name in self.needs:
            if name not in known:
                raise ConfigError(
                    f"{what} `{name}`, which is neither one of {', '.join(given)} nor a column of every row "
                    f"({', '.join(sorted(columns)) or 'there are no such columns'}).{did_you_mean(name, known)}"
                )

    async def __call__(self, given: Mapping[str, Any]) -> float | None:
        """Call the function for one episode and return its result.

        Raises EpisodeError, with file and line, if the function raises an exception or returns anything except a finite number or
        None.
        """
        own = {name: value for name, value in given.items() if self.takes_all or name in self.may_take}
        what = f"The {self.kind} function `{self.name}`"
        try:
            found = self.function(**own)
            if inspect.isawaitable(found):
                found = await found
        except Exception as error:
            raise EpisodeError(f"{what} raised {reason(error)}.{self._called_from(error)}") from error
        what += f" ({self.place})" if self.place else ""
        if self.takes_batches and hasattr(found, "__len__") and not isinstance(found, str):
            if len(found) != 1:
                raise EpisodeError(
                    f"{what} returned {len(found)} numbers for one completion. Return a list with one number."
                )
            found = next(iter(found))
        if VERL in self.may_take and isinstance(found, Mapping) and "score" in found:
            found = found["score"]
        if found is None:
            return None
        if isinstance(found, Sequence | Mapping) and not isinstance(found, str):
            how = (
                "Return a list with one number for each of `completions`."
                if self.takes_batches
                else "It is called once per episode: return one number. With `**kwargs` it takes and returns lists, as in TRL."
            )
            raise EpisodeError(f"{what} returned {type(found).__name__}. {how}")
        value = finite(found)
        if value is None:
            raise EpisodeError(f"{what} returned {str(found)[:40]!r}, not a finite number.")
        return value

    @property
    def place(self) -> str:
        """The file and line of the function's definition, such as `rewards.py, line 12`, or an empty string if it has no Python code."""
        code = _code_of(self.function)
        return "" if code is None else f"{Path(code.co_filename).name}, line {code.co_firstlineno}"

    def _called_from(self, error: Exception) -> str:
        """Return a sentence with the location of the failed call in the function's own file.

        If that file does not occur in the traceback, the sentence contains the location of the function's definition. The result is
        empty if the exception was raised in the function's own file.
        """
        code, frames = _code_of(self.function), traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
        if not own or own[-1] is frames[-1]:
            return "" if own or not self.place else f" It is defined in {self.place}."
        return f" The call is in {Path(own[-1].filename).name}, line {own[-1].lineno}."


def _code_of(function: Any) -> CodeType | None:
    """Return the code object of a function, method, `functools.partial` or callable object.

    Returns None if the function is not written in Python.
    """
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") and not inspect.ismethod(function):
        function = inspect.getattr_static(function, "__call__", None)
    found = getattr(function, "__code__", None)
    return found if isinstance(found, CodeType) else None


def read_function(name: str, function: Any, kind: str = "reward") -> RewardFunction:
    """Return a function with its parameters. Raises ConfigError if the function cannot be called with keyword arguments."""
    if not callable(function):
        raise ConfigError(
            f"The {kind} `{name}` is {type(function).__name__}, not a function that returns a number."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"The parameters of the {kind} function `{name}` cannot be read. Wrap it in `lambda completion: …`."
        ) from None
    for each in parameters:
        if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
            raise ConfigError(
                f"The {kind} function `{name}` takes `{each.name}` by position. Use keyword parameters: {', '.join(GIVEN)} or columns."
            )
    named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    needs = tuple(each.name for each in named if each.default is each.empty)
    takes_all = len(named) < len(parameters)
    return RewardFunction(name, function, needs, tuple(each.name for each in named), takes_all, kind)


# -------- Rows and functions that a program passes in memory


@dataclass(frozen=True, slots=True)
class RowsInMemory:
    """Rows and functions that a program has passed in memory."""

    train: tuple[DataRow, ...] = ()
    test: tuple[DataRow, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    called: tuple[str, str] = ("the rows in memory", "the test rows in memory")
    """The names of the train rows and the test rows in messages."""


def rows_in_memory(rows: Iterable[object], where: str) -> tuple[DataRow, ...]:
    """Return the rows that a program has passed. Raises DataError for the first row that is not a JSON mapping."""
    found = []
    for number, row in enumerate(rows, start=1):
        place = f"Row {number} of `{where}`"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{place} is {type(row).__name__}, not a mapping from columns to values. Write each row as {{'question': …}}."
            )
        for column, value in row.items():
            if not isinstance(column, str):
                raise DataError(
                    f"{place} has a column named {column!r}, which is not a string. Rename the column."
                )
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{place}: the column '{column}' cannot be written as JSON: {error}. Remove or convert it."
                ) from None
        found.append(DataRow(place, dict(row)))
    if not found:
        raise DataError(
            f"`{where}` has no rows. Give at least one, such as {{'question': '2+2', 'answer': '4'}}."
        )
    return tuple(found)


def name_of(function: Any) -> str | None:
    """Return `module:function` for a function that any process can import, or None for a function that exists only in this process."""
    module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not function:
        return None
    return f"{module.__name__}:{name}"


KEPT = "rows"
"""The folder inside a run directory for the rows that a program has passed in memory."""
MOST_KEPT = 64_000_000
"""The maximum number of characters of rows in memory that a run stores. Larger data sets should be in a file."""
GREATEST = 1e6
"""The maximum absolute return of an agent. A larger return is treated as a mistake."""
UNSCORED = "unscored"
"""The key in an episode's `info` that contains the reason why the episode has no reward."""
ALONE = "an episode that is alone in its group cannot be ranked"
DISAGREEMENT = "judge/disagreement"
"""The key in an episode's `info` that contains the difference between the verdicts in both orders (`grading.judge.Compared`)."""
_HELD_OUT = ("own", "share")


class Reward(Settings):
    """A reward function, with the agents that receive its reward."""

    function: str
    """The function, written as `module:function` or `path/file.py:function`."""
    agent: str | None = None
    """The agent that receives the reward. If null, every agent of the team receives it."""
    weight: FiniteFloat = 1.0
    """The factor by which the result of the function is multiplied."""


class Rewarded(DataWithQuestions, OffersTools, UsesJudges, Answerable, InMemory, RewardsEpisodes):
    """Questions from a data set. Functions and judges compute the rewards."""

    name: Literal["rewarded"] = "rewarded"
    rewards: tuple[Reward | Rubric | Ranking, ...] = Field(min_length=1)
    """The sources of rewards: functions (`{function: …}`, or only the name, as in `rewards: mine:exact`), judges that grade answers
    (`{rubric: …}`), and judges that compare the episodes of a group (`{rank: …}`)."""
    question_field: str | None = None
    """The column that contains the question, which is a string or a conversation. If null, the first of the columns `prompt`,
    `question`, `problem`, `messages` and `conversations` that the rows have is used. An answer at the end of a conversation is not
    part of the question."""
    success: FiniteFloat | str | None = None
    """The definition of success. With a number, an episode is successful if the mean reward of the rewarded agents is at least this
    number. With `module:function`, a function with the parameters of a reward function returns the success as a boolean or a number
    in [0, 1]. If null, success is undefined, and a team is evaluated by its returns."""
    tools: tuple[AnyTool, ...] = ()
    """The tools that agents can call before they answer. Each entry names its `tool`, as in the environment `tools`."""
    eval_path: str = "own"
    """The source of the test rows. `own`: the test split of the data set, or the fraction `test_share` of a single file. `share`: the
    fraction `test_share` of the train rows, even if the data set has a test split. `none`: all rows are used for training. Any
    other value is the location of a separate data set, with the same syntax as `path`."""
    _held: RowsInMemory = PrivateAttr(default_factory=RowsInMemory)

    @property
    def reward_range(self) -> tuple[float, float]:
        """A very large range of returns. A return outside this range is treated as a mistake."""
        return (-GREATEST, GREATEST)

    @field_validator("rewards", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """Convert an entry that is a string to an entry that has only a function."""
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list | tuple):
            return given
        return [{"function": each} if isinstance(each, str) else each for each in listed]

    # -------- Rows and functions in memory

    def holding(self, held: RowsInMemory) -> Rewarded:
        """Store rows and functions that are in memory, and return this environment."""
        self._held = held
        return self

    def keep(self, folder: Path) -> None:
        """Write the rows that are in memory to the folder of a run, if they have at most `MOST_KEPT` characters."""
        for name, rows in (("train", self._held.train), ("test", self._held.test)):
            text = "".join(f"{json.dumps(row.fields)}\n" for row in rows)
            if rows and len(text) <= MOST_KEPT:
                (folder / KEPT).mkdir(exist_ok=True)
                replace_file(folder / KEPT / f"{name}.jsonl", text.encode())

    def recall(self, folder: Path) -> None:
        """Read the rows that `keep` has written to the folder of a run."""
        train, test = (
            read_rows(file) if path == IN_MEMORY and (file := folder / KEPT / name).is_file() else ()
            for name, path in (("train.jsonl", self.path), ("test.jsonl", self.eval_path))
        )
        self._held = replace(self._held, train=train, test=test)

    @property
    def in_memory(self) -> Sequence[str]:
        """Descriptions of all rows, functions and tools that exist only in this process."""
        named = {each.function: "reward" for each in self.rewards if isinstance(each, Reward)}
        if isinstance(self.success, str):
            named.setdefault(self.success, "success")
        tools = [each for each in self.tools if isinstance(each, Functions)]
        return [
            *(["rows"] if IN_MEMORY in (self.path, self.eval_path) else []),
            *(
                f"the {kind} function `{name.partition(':')[2]}`"
                for name, kind in named.items()
                if name.startswith(f"{IN_MEMORY}:")
            ),
            *([] if self._ask is None else ["the judge"]),
            *(f"the tool `{name}`" for each in tools for name in each.held),
        ]

    # -------- The functions

    def _find(self, target: str, kind: str) -> RewardFunction:
        found = find_object(target, f"{kind} function", held=self._held.functions)
        return read_function(target.rpartition(":")[2], found, kind)

    @cached_property
    def _functions(self) -> tuple[RewardFunction | None, ...]:
        """The function of each reward, or None for a reward from a judge."""
        return tuple(
            self._find(each.function, "reward") if isinstance(each, Reward) else None for each in self.rewards
        )

    @cached_property
    def _success(self) -> RewardFunction | None:
        """The function that the setting `success` names, or None if it names no function."""
        return self._find(self.success, "success") if isinstance(self.success, str) else None

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The name of each reward in the `info` of an episode and in metrics.

        If functions of different modules have the same name, the name of the module is prepended. Labels that are still equal are
        numbered.
        """
        plain: list[tuple[str, str]] = []
        for each in self.rewards:
            module, name = "", "rubric" if isinstance(each, Rubric) else "rank"
            if isinstance(each, Reward):
                path, _, name = each.function.rpartition(":")
                module = Path(path).name.removesuffix(".py")
            plain.append((name if each.agent is None else f"{name}/{each.agent}", module))
        labels: list[str] = []
        for name, module in plain:
            ambiguous = any(same == name and other != module for same, other in plain)
            if ambiguous and module not in ("", IN_MEMORY):
                name = f"{module.rpartition('.')[2]}.{name}"  # noqa: PLW2901
            label, number = f"{REWARD_PREFIX}{name}", 1
            while label in labels:
                number += 1
                label = f"{REWARD_PREFIX}{name}_{number}"
            labels.append(label)
        return tuple(labels)

    def in_words(self) -> str:
        """Return a list of all rewards as a string: the name in metrics, the weight, and the location of the function's definition."""
        return ", ".join(
            f"{label.removeprefix(REWARD_PREFIX)}{'' if each.weight == 1.0 else f' × {each.weight:g}'}"
            f"{f' ({function.place})' if function is not None and function.place else ''}"
            for each, function, label in zip(self.rewards, self._functions, self.labels, strict=True)
        )

    def check(self, agents: Sequence[str]) -> None:
        """Read the rows and find the functions. Raises ConfigError if an agent or a parameter of a function is unknown."""
        self.check_tools()
        columns = self.columns - {"question"}  # a function that takes `question` receives the column
        if self._success is not None:
            self._success.check(columns, for_team=True)
        for each, function in zip(self.rewards, self._functions, strict=True):
            need_known("`environment.rewards`", "agent", each.agent, agents)
            if function is not None:
                function.check(columns, for_team=each.agent is None)
            if isinstance(each, Rubric | Ranking):
                need_known("`environment.rewards`", "column", each.reference, self.columns)
                if self._ask is None and isinstance(each.judge, ModelJudge):
                    base, adapter = base_and_adapter(each.judge.path)
                    check_model_path(base)
                    if adapter is not None:
                        read_lora(Path(adapter))
                else:
                    self.judge_of(each)

    # -------- The rows

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the data set of each split, or `none` for a missing split."""
        if self._own_split:
            return super().sources
        held_out = f"{self.test_share:.0%} of them, by a hash of the question"
        return {"train": self.path, "test": held_out if self.eval_path in _HELD_OUT else self.eval_path}

    @cached_property
    def columns(self) -> frozenset[str]:
        """The fields that all rows have in common."""
        rows = (*self.rows.train, *self.rows.test)
        return frozenset.intersection(*(frozenset(row.fields) for row in rows))

    @property
    def _own_split(self) -> bool:
        return self.eval_path == "own" and self.path != IN_MEMORY

    @cached_property
    def _read_rows(self) -> tuple[tuple[DataRow, ...], tuple[DataRow, ...], Mapping[str, str]]:
        contents: dict[str, str] = {}
        train = self._rows_at(self.path, "train", contents)
        separate = self.eval_path not in (*_HELD_OUT, "none")
        test = self._rows_at(self.eval_path, "test", contents) if separate else ()
        return train, test, contents

    def _rows_at(self, path: str, split: Split, contents: dict[str, str]) -> tuple[DataRow, ...]:
        if path != IN_MEMORY:
            return replace(self.source, path=path).whole(split, contents)
        rows = self._held.train if split == "train" else self._held.test
        if not rows:
            raise AbsentData(
                "The rows were in the memory of the program that started this run, and were too large to be stored with the run. "
                "Continue the run from that program, or write the rows to a file and set "
                f"`environment.{'path' if split == 'train' else 'eval_path'}`."
            )
        text = json.dumps([row.fields for row in rows], sort_keys=True)
        contents[f"{split} rows in memory"] = hashlib.sha256(text.encode()).hexdigest()
        return rows

    @cached_property
    def rows(self) -> Splits:
        """The usable rows of both splits. If `eval_path` is `none`, the test split is empty."""
        if self._own_split:
            return super().rows
        first, second, _ = self._read_rows
        key, setting, words = self._key()
        # The names of the rows of both splits in messages.
        train, test = self._held.called
        train = train if self.path == IN_MEMORY else self.path
        if self.eval_path == "none":
            found, skipped = usable(first, self._read, self.max_unusable, train)
            return Splits(found, (), 0, {"train": skipped})
        held_out = self.eval_path in _HELD_OUT
        test = test if self.eval_path == IN_MEMORY else train if held_out else self.eval_path
        source: DataSource = replace(self.source, test=self.eval_path, called=(train, test))
        other = None if held_out else second
        return source.apart(first, other, key, setting, words, self._read, self.max_unusable)

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each input and of the source code of each function."""
        read = dict(super().contents() if self._own_split else self._read_rows[2])
        named = [each.function if isinstance(each, Reward) else "" for each in self.rewards]
        for target, function in (*zip(named, self._functions, strict=True), (self.success, self._success)):
            if function is not None:
                with suppress(OSError, TypeError):  # a function without source code, such as a built-in
                    source = inspect.getsource(function.function)
                    read[str(target)] = hashlib.sha256(source.encode()).hexdigest()
        return read

    def _key(self) -> tuple[str, str, Words]:
        return self._question, "question_field", question_in

    @cached_property
    def _question(self) -> str:
        if self.question_field is not None:
            return self.question_field
        first = self.source.first_row() if self._own_split else next(iter(self._read_rows[0]), None)
        if first is None:
            raise DataError(
                f"The data set '{self.path}' is empty. Add rows, or set `environment.path` to another data set."
            )
        found = next((name for name in QUESTIONS if first.fields.get(name) is not None), None)
        if found is None:
            raise DataError(
                f"{first.place} has none of the columns {', '.join(QUESTIONS)}. Set `environment.question_field` to the column "
                f"with the question (available: {', '.join(first.fields) or 'none'})."
            )
        return found

    def remarks(self) -> Sequence[str]:
        """Return a message if several columns could contain the question, and warnings about rendered prompts."""
        others = [f"`{name}`" for name in QUESTIONS if name in self.columns and name != self._question]
        if self.question_field is not None or not others:
            return super().remarks()
        chosen = (
            f"the column `{self._question}` is used as the question, although rows also have {', '.join(others)} "
            "(set `question_field` to use another column)"
        )
        return (chosen, *super().remarks())

    # -------- Tasks and episodes

    def task(self, split: Split, index: int) -> Task:
        """Return the task at an index, whose question is the question of a row."""
        question = self.question_of(self.rows.of(split)[index])
        return question.task(f"{split}-{index}", rendered=self.rendered_prompts)

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RewardedState | ToolsState:
        """Start an episode and return its state."""
        state = RewardedState(task, agents)
        return self.around(state, agents) if self.tools else state

    def extract(self, text: str) -> str | None:
        """Return the whole text, or None if the text is empty. Votes and debates therefore compare whole texts."""
        return text.strip() or None

    # -------- Rewards

    async def reward_episode(self, episode: Episode, outcome: Outcome) -> Outcome:
        """Call every function and rubric, and add up the rewards of each agent.

        The episode fails if a function raises an exception or a judge returns no verdict for a rubric. Rankings are computed later,
        when all episodes of the group have ended.
        """
        row = self.rows.row_of(episode.task.id)
        texts, answer = last_texts(episode), answer_of(episode, outcome.info)
        question = {"question": episode.task.question}
        own_row = {**row.fields, **question} if self._question == "question" else {**question, **row.fields}
        given = {**own_row, "completion": answer, "completions": texts, "episode": episode}
        rewards: dict[str, float] = {}
        info: dict[str, Json] = dict(outcome.info)
        for each, function, label in zip(self.rewards, self._functions, self.labels, strict=True):
            if isinstance(each, Ranking) or (each.agent is not None and each.agent not in texts):
                continue  # an agent without a turn has no text
            text = answer if each.agent is None else texts[each.agent]
            if isinstance(each, Rubric):
                found: float | None = await self._graded(each, episode, text, row, label, info)
            else:
                assert function is not None, "a reward has a function"
                own = {} if each.agent is None else {"agent": each.agent, "completion": text}
                try:
                    found = await function(self._arguments(function, {**given, **own}, row))
                except EpisodeError as error:
                    raise EpisodeError(str(error), {label: FAILED}) from error
            info[label] = found
            if found is not None:
                for agent in texts if each.agent is None else (each.agent,):
                    rewards[agent] = rewards.get(agent, 0.0) + each.weight * found
        if not rewards:
            info[UNSCORED] = ALONE if self.compared else "no reward function applies to it"
        success = self._reached(rewards)
        if self._success is not None:
            success = await self._solved(self._success, given, row, info)
        return replace(outcome, rewards=rewards, success=success, info=info)

    async def _graded(
        self, rubric: Rubric, episode: Episode, text: Any, row: DataRow, label: str, info: dict[str, Json]
    ) -> float:
        """Return the grade of a text by a rubric, and add the scores of its criteria to `info`."""
        judge = self.judge_of(rubric)
        verdict = await judge_rubric(
            judge, episode.task.question, spoken_of(episode, text), rubric.criteria, _reference(rubric, row)
        )
        if verdict.grade.status == "ungraded":
            judge.ungraded += 1
            raise EpisodeError(
                f"`{label.removeprefix(REWARD_PREFIX)}`: {verdict.grade.explanation}", {label: FAILED}
            )
        info |= {f"{label}/{name}": score for name, score in verdict.criteria.items()}
        return verdict.grade.score

    async def _solved(
        self, function: RewardFunction, given: Mapping[str, Any], row: DataRow, info: Mapping[str, Json]
    ) -> float | None:
        """Return the result of the `success` function. If the same function also rewards the team, its result is reused."""
        for each, label in zip(self.rewards, self.labels, strict=True):
            if isinstance(each, Reward) and each.function == self.success and each.agent is None:
                found = info.get(label)
                break
        else:
            found = await function(self._arguments(function, given, row))
        if found is not None and not 0.0 <= found <= 1.0:
            raise EpisodeError(
                f"The success function `{function.name}` returned {found:g}. Return a boolean, or a share from 0 to 1."
            )
        return found

    def _arguments(
        self, function: RewardFunction, given: Mapping[str, Any], row: DataRow
    ) -> Mapping[str, Any]:
        """Return the values that are passed to a function as keyword arguments.

        For a function that is written for batches, each value is a list of length 1.
        """
        if VERL in function.may_take:
            model = row.fields.get("reward_model")
            truth = model.get("ground_truth") if isinstance(model, Mapping) else None
            return {"ground_truth": truth, **given, VERL: given["completion"]}
        if not function.takes_batches:
            return given
        episode, completion = given["episode"], given["completion"]
        own = episode.by(given.get("agent", episode.turns[-1].agent))
        turns = tuple(turn for turn in own if not turn.summary)
        prompt = row.fields.get(self._question, given["question"])
        if self.tools:
            completion = self._messages(turns)
        elif not isinstance(prompt, str):
            completion = [{"role": "assistant", "content": completion}]
        batch = {
            **row.fields,
            "question": given["question"],
            "prompts": prompt,
            "completions": completion,
            "completion_ids": [token for turn in turns for token in turn.completion_ids],
        }
        return {name: [value] for name, value in batch.items()}

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return the turns of an agent as chat messages, with the results of its tool calls between the turns."""
        found: list[dict[str, Any]] = []
        for turn in turns:
            if found:
                found += [{"role": each.role, "content": each.content} for each in turn.new_messages]
            message: dict[str, Any] = {"role": "assistant", "content": turn.text}
            with suppress(NotCalls):
                if calls := parse_calls(turn.text, (self.form,)):
                    named = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
                    message["content"] = beside_calls(turn.text, self.form)
                    message["tool_calls"] = [{"type": "function", "function": call} for call in named]
            found.append(message)
        return found

    def _reached(self, rewards: Mapping[str, float]) -> float | None:
        """Return 1.0 if the mean reward is at least the number `success`, and 0.0 otherwise.

        Returns None if there are no rewards or `success` is not a number.
        """
        if not rewards or not isinstance(self.success, float):
            return None
        # In floating point, weights of 0.7, 0.2 and 0.1 sum to slightly less than 1.
        return float(fmean(rewards.values()) >= self.success - 1e-9)

    @property
    def compared(self) -> Sequence[str]:
        """The settings of the rankings, which compare the episodes of a group."""
        return [
            f"`environment.rewards.{k}.rank`"
            for k, each in enumerate(self.rewards)
            if isinstance(each, Ranking)
        ]

    async def reward_group(self, episodes: Sequence[Episode]) -> Sequence[Outcome]:
        """Compare the episodes of a group by every ranking, and return their outcomes.

        Raises EpisodeError if a judge returns no verdict.

        A ranking with only one text to compare gives no reward.
        """
        rewards = [dict(episode.rewards) for episode in episodes]
        infos: list[dict[str, Json]] = [dict(episode.info) for episode in episodes]
        texts = [last_texts(episode) for episode in episodes]
        disagreements: list[list[float]] = [[] for _ in episodes]
        task = episodes[0].task
        for each, label in zip(self.rewards, self.labels, strict=True):
            if not isinstance(each, Ranking):
                continue
            part = [k for k, own in enumerate(texts) if each.agent is None or each.agent in own]
            for k in part:
                infos[k][label] = None
            if len(part) < 2:
                continue
            compared = [
                spoken_of(
                    episodes[k],
                    answer_of(episodes[k], infos[k]) if each.agent is None else texts[k][each.agent],
                )
                for k in part
            ]
            judge, reference = self.judge_of(each), _reference(each, self.rows.row_of(task.id))
            found = await judge_attempts(judge, task.question, compared, each.rank, reference)
            missed = next((grade for grade in found.grades if grade.status == "ungraded"), None)
            if missed is not None:
                judge.ungraded += 1
                raise EpisodeError(f"`{label.removeprefix(REWARD_PREFIX)}`: {missed.explanation}")
            for k, grade in zip(part, found.grades, strict=True):
                infos[k][label] = grade.score
                if found.disagreement is not None:
                    disagreements[k].append(found.disagreement)
                for agent in texts[k] if each.agent is None else (each.agent,):
                    rewards[k][agent] = rewards[k].get(agent, 0.0) + each.weight * grade.score
        for own, info, differing in zip(rewards, infos, disagreements, strict=True):
            if own:
                info.pop(UNSCORED, None)
            if differing:
                info[DISAGREEMENT] = fmean(differing)
        return [
            Outcome(
                own,
                self._reached(own) if isinstance(self.success, float) else episode.success,
                info,
                episode.truncated,
                episode.roles,
            )
            for episode, own, info in zip(episodes, rewards, infos, strict=True)
        ]

    def judge_of(self, reward: Rubric | Ranking) -> Asking:
        """Return the judge of a reward. Rewards with the same judge settings share one judge, including its budget."""
        return self._judges.of(reward.judge)

    @property
    def asked(self) -> Sequence[tuple[AnyJudge, QuestionCounts]]:
        """The judges, each with the number of its queries.

        A rubric needs one query per episode for all its criteria, and a ranking needs two queries per group.
        """
        return [
            (each.judge, QuestionCounts(episode=1) if isinstance(each, Rubric) else QuestionCounts(group=2))
            for each in self.rewards
            if isinstance(each, Rubric | Ranking)
        ]


def _reference(reward: Rubric | Ranking, row: DataRow) -> str | None:
    return None if reward.reference is None else shown(row.fields[reward.reference])


def last_texts(episode: Episode) -> dict[str, str]:
    """Return the last text of every agent that has had a turn, in team order."""
    last = {turn.agent: turn.text for turn in episode.turns}
    return {agent: last[agent] for agent in episode.agents if agent in last}


def answer_of(episode: Episode, info: Mapping[str, Json]) -> Any:
    """Return the text that the workflow has selected as the answer of the team, or the last text if there is no such text."""
    answer = info.get("answer")
    answer = episode.answer if answer is None else answer
    # Functions receive whole completions, including the reasoning, as in TRL.
    return next(
        (turn.text for turn in reversed(episode.turns) if turn.thoughts and turn.words == answer), answer
    )


def spoken_of(episode: Episode, text: Any) -> str:
    """Return the part of a completion that a judge reads, which excludes the reasoning."""
    return next((turn.words for turn in reversed(episode.turns) if turn.text == text), str(text))


class RewardedState(BaseState):
    """The state of an episode in which all agents read one question and answer it once."""

    _answer: str | None = None

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Store the answers. Raises EpisodeError if the question has already been answered or an agent is unknown."""
        if self.over:
            raise EpisodeError("The question has already been answered. This environment allows one step.")
        require_agents(actions, self.agents, "answered")
        self._answer, self.over = final, True
        return {}

    def outcome(self) -> Outcome:
        """Return an outcome that contains the answer of the team, if the workflow has selected one."""
        info = {} if self._answer is None else {"answer": self._answer}
        return Outcome(info=info, truncated=not self.over)
