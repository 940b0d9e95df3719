"""Rows of a data set, paid by functions of yours; `kapelle.train` makes one of what it is given.

    environment:
      name: rewarded
      path: rows.jsonl
      rewards: [{function: "my_rewards:exact"}, {function: "my_rewards.py:short", agent: planner, weight: 0.1}]

Each row is a question. The functions see what was said and the row, and pay when the episode is over;
an agent earns the weighted sum of those that pay it and of those that pay the team. A function may pay anything, so that success
is undefined unless `success` says what is solved. Judges may pay too (`judged.py`): a rubric grades each episode, a ranking compares those of a group.
"""

from __future__ import annotations

import hashlib
import inspect
import json
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
    PAID_BY,
    Answerable,
    InMemory,
    Outcome,
    PaysEpisodes,
    QuestionCounts,
)
from kapelle.environments.base import BaseWorld
from kapelle.environments.data.conversations import QUESTIONS, question_in
from kapelle.environments.data.source import AskingData, DataSource, Splits, Words, usable
from kapelle.environments.grading.asking import AnyJudge, Asking, ModelJudge
from kapelle.environments.grading.judge import judge_attempts, judge_rubric
from kapelle.environments.grading.text.tool_call import NotCalls, beside_calls, parse_calls
from kapelle.environments.judged import AsksJudges, Ranking, Rubric, shown
from kapelle.environments.questions import need_seats
from kapelle.environments.recorded import split_of
from kapelle.environments.tool_questions import AnyTool, OffersTools, ToolsWorld
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

# -------- Plain functions that pay: which arguments they take, and what they return
#
# A function is called once for each episode, and takes any of these by name:
#
#     completion     text: the last one of the agent that is paid; for the team its answer
#     completions    agent → its last text
#     question       text that the agents read
#     episode        the `kapelle.Episode`, with all its turns
#     agent          name of the one that is paid; only where a function pays one agent
#     and any column of the row, by its name
#
# It returns a number, or None where it does not apply. It may be a coroutine.
#
# A function that takes `**` and `completions`, or `prompts` or `completion_ids`, is written for batches, as TRL's are. It is called
# with a batch of one, lists of length 1, and returns such a list. `completions` are then messages where the row's prompt is a
# conversation or agents have tools, else texts.

#
# A function that takes `solution_str` is written for verl: that is the completion, and `ground_truth` the row's `reward_model.ground_truth`.
VERL = "solution_str"
"""What verl calls the completion."""
BATCHES = ("prompts", "completions", "completion_ids")
"""What a function for batches may take besides lists of the row's columns."""
GIVEN = ("completion", "completions", "question", "episode", "agent")
"""What a function may take besides the columns of its row."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function and the names of what it takes."""

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...]
    """Parameters without a default."""
    may_take: tuple[str, ...]
    """All its parameters."""
    takes_all: bool
    """Whether it has `**` for whatever else there is."""
    kind: str = "reward"
    """What it says, in messages: the reward, or the success."""

    @property
    def takes_batches(self) -> bool:
        """Whether it is written for batches, as TRL's functions are."""
        theirs = set(BATCHES) & set(self.may_take)
        return bool(theirs - {"completions"}) or bool(
            theirs and self.takes_all and "completion" not in self.may_take
        )

    def check(self, columns: Collection[str], *, for_team: bool) -> None:
        """Raise ConfigError, naming the parameter, for one without a value."""
        given = BATCHES if self.takes_batches else GIVEN
        if VERL in self.may_take:
            columns = {*columns, VERL, "ground_truth"}
        for name in self.may_take:
            if name in given and name in columns:
                raise ConfigError(
                    f"The {self.kind} function `{self.name}` takes `{name}`, which is a column of the data and also what kapelle gives "
                    "it. Rename the column."
                )
        known = [*GIVEN[:-1], *([] if for_team else ["agent"]), *columns]
        if self.takes_batches:
            known = [*BATCHES, "question", *columns]
        for name in self.needs:
            if name == "agent" and for_team:
                raise ConfigError(
                    f"The {self.kind} function `{self.name}` takes `agent` and pays the whole team. Name its agent: "
                    f"`reward={{'NAME': {self.name}}}`."
                )
            if name not in known:
                raise ConfigError(
                    f"The {self.kind} function `{self.name}` takes `{name}`, which is neither one of {', '.join(given)} nor a column "
                    f"of every row ({', '.join(sorted(columns)) or 'there are none'}).{did_you_mean(name, known)}"
                )

    async def __call__(self, given: Mapping[str, Any]) -> float | None:
        """Return what it pays for one episode.

        EpisodeError if it raises, with the file and line, or returns anything but a finite number.
        """
        own = {name: value for name, value in given.items() if self.takes_all or name in self.may_take}
        try:
            found = self.function(**own)
            if inspect.isawaitable(found):
                found = await found
        except Exception as error:
            raise EpisodeError(
                f"The {self.kind} function `{self.name}` raised {reason(error)}.{self._on_the_way(error)}"
            ) from error
        if found is None:
            return None
        where = f" ({self.place})" if self.place else ""
        if self.takes_batches and hasattr(found, "__len__") and not isinstance(found, str):
            if len(found) != 1:
                raise EpisodeError(
                    f"The {self.kind} function `{self.name}`{where} returned {len(found)} numbers for one completion. Return a list with one "
                    "number for each of `completions`."
                )
            found = next(iter(found))
            if found is None:
                return None
        if VERL in self.may_take and isinstance(found, Mapping) and "score" in found:
            found = found["score"]
        if isinstance(found, Sequence | Mapping) and not isinstance(found, str):
            how = (
                "It is called once for each episode and returns one number. If it is written for batches, as TRL's functions are, add "
                "`**kwargs` to its parameters: it then takes and returns lists."
            )
            if self.takes_batches:
                how = "Return a list with one number for each of `completions`."
            raise EpisodeError(
                f"The {self.kind} function `{self.name}`{where} returned {type(found).__name__}. {how}"
            )
        value = finite(found)
        if value is None:
            raise EpisodeError(
                f"The {self.kind} function `{self.name}`{where} returned {str(found)[:40]!r}, not a finite number."
            )
        return value

    @property
    def place(self) -> str:
        """Where it is written, `rewards.py, line 12`; empty where Python does not know."""
        code = _code_of(self.function)
        return "" if code is None else f"{Path(code.co_filename).name}, line {code.co_firstlineno}"

    def _on_the_way(self, error: Exception) -> str:
        """Return the line of the function's own file from which it called what raised; empty where that is the line that raised."""
        code, frame = _code_of(self.function), error.__traceback__
        own, last = None, None
        while frame is not None:
            last = frame
            own = frame if code and frame.tb_frame.f_code.co_filename == code.co_filename else own
            frame = frame.tb_next
        if own is None or own is last:
            return "" if own or not self.place else f" It is written in {self.place}."
        return f" It got there from {Path(own.tb_frame.f_code.co_filename).name}, line {own.tb_lineno}."


def _code_of(function: Any) -> CodeType | None:
    """Return the code of a function, method, `functools.partial` or object that is called; None for one that has none in Python."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__") and not inspect.ismethod(function):
        function = inspect.getattr_static(function, "__call__", None)
    found = getattr(function, "__code__", None)
    return found if isinstance(found, CodeType) else None


def read_function(name: str, function: Any, kind: str = "reward") -> RewardFunction:
    """Return a function with its parameters; ConfigError if it cannot be called by keyword."""
    if not callable(function):
        raise ConfigError(
            f"The {kind} `{name}` is {type(function).__name__}, not a function that returns a number."
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(
            f"The {kind} function `{name}` does not say what it takes. Write `lambda completion: …` around it."
        ) from None
    needs: list[str] = []
    may_take: list[str] = []
    takes_all = False
    for each in parameters:
        if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
            raise ConfigError(
                f"The {kind} function `{name}` takes `{each.name}` by its place. Give it names: {', '.join(GIVEN)}, columns."
            )
        if each.kind is each.VAR_KEYWORD:
            takes_all = True
            continue
        may_take.append(each.name)
        if each.default is each.empty:
            needs.append(each.name)
    return RewardFunction(name, function, tuple(needs), tuple(may_take), takes_all, kind)


# -------- Rows and functions that a program passes instead of naming them: they live in its memory


@dataclass(frozen=True, slots=True)
class RowsInMemory:
    """What a program passed in memory."""

    train: tuple[DataRow, ...] = ()
    test: tuple[DataRow, ...] = ()
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    called: tuple[str, str] = ("the rows in memory", "the rows in memory to test on")
    """What messages call `train` and `test`."""


def rows_in_memory(rows: Iterable[object], where: str) -> tuple[DataRow, ...]:
    """Return rows that a program passed; DataError names the first that is not a JSON mapping."""
    found = []
    for number, row in enumerate(rows, start=1):
        place = f"Row {number} of `{where}`"
        if not isinstance(row, Mapping):
            raise DataError(
                f"{place} is {type(row).__name__}, not a mapping of column → value. Write {{'question': …}} for each."
            )
        for column, value in row.items():
            if not isinstance(column, str):
                raise DataError(f"{place} has a column named {column!r}, which is no text.")
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{place}: the column '{column}' has no form in JSON: {error}. Drop or change it."
                ) from None
        found.append(DataRow(place, dict(row)))
    if not found:
        raise DataError(
            f"`{where}` has no rows. Give at least one, such as {{'question': '2+2', 'answer': '4'}}."
        )
    return tuple(found)


def name_of(function: Any) -> str | None:
    """Return `module:function` for a function that any process can import; None for one that exists only in this process."""
    module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not function:
        return None
    return f"{module.__name__}:{name}"


KEPT = "rows"
"""Folder of a run with the rows that a program passed in memory."""
MOST_KEPT = 64_000_000
"""Characters of rows in memory that a run keeps; larger sets belong in a file."""
GREATEST = 1e6
"""Largest return of an agent; a larger one counts as a mistake."""
_HELD_OUT = ("own", "share")


class Reward(Settings):
    """One function and whom it pays."""

    function: str
    """`module:function` or `path/file.py:function`."""
    agent: str | None = None
    """Who is paid; null pays every agent of the team."""
    weight: FiniteFloat = 1.0
    """Factor of what the function returns."""


class Rewarded(AskingData, OffersTools, AsksJudges, Answerable, InMemory, PaysEpisodes):
    """Questions of a data set; functions and judges pay what was said."""

    name: Literal["rewarded"] = "rewarded"
    rewards: tuple[Reward | Rubric | Ranking, ...] = Field(min_length=1)
    """What pays: functions (`{function: …}`, or their place alone: `rewards: mine:exact`), judges that grade (`{rubric: …}`), judges that compare attempts (`{rank: …}`)."""
    question_field: str | None = None
    """Column of the question: text, or a conversation. null takes the first of `prompt`, `question`, `problem`, `messages` and
    `conversations` that the rows have. An answer at the end of a conversation is not part of the question."""
    success: FiniteFloat | str | None = None
    """When an episode is solved. A number: the least reward, in the mean over the agents that are paid. `module:function`, which takes
    what a reward function takes, returns it, as truth or a share in [0, 1]. null: there is no `success`, and returns tell how good
    a team is."""
    tools: tuple[AnyTool, ...] = ()
    """What agents can call before they answer; each entry says which `tool` it is, as in the environment `tools`."""
    eval_path: str = "own"
    """`own`: the data's test split, or `test_share` of a single file. `share`: `test_share` of the rows to train on, also where
    there is a test split. `none`: every row is trained on and nothing is evaluated. Otherwise another data set, like `path`."""
    _held: RowsInMemory = PrivateAttr(default_factory=RowsInMemory)

    @property
    def reward_range(self) -> tuple[float, float]:
        """A range so wide that no function leaves it on purpose."""
        return (-GREATEST, GREATEST)

    @field_validator("rewards", mode="before")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        """Take a text in place of an entry that has only a function."""
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list | tuple):
            return given
        return [{"function": each} if isinstance(each, str) else each for each in listed]

    @property
    def sources(self) -> Mapping[Split, str]:
        """The data set, or `none` for a missing split."""
        if self._own_split:
            return super().sources
        held = f"{self.test_share:.0%} of them, by a hash of the question"
        return {"train": self.path, "test": held if self.eval_path in _HELD_OUT else self.eval_path}

    def holding(self, held: RowsInMemory) -> Rewarded:
        """Take rows and functions in memory, and return this environment."""
        self._held = held
        return self

    def keep(self, folder: Path) -> None:
        """Write rows that a program passed into a run's folder, up to `MOST_KEPT` characters."""
        for name, rows in (("train", self._held.train), ("test", self._held.test)):
            text = "".join(f"{json.dumps(row.fields)}\n" for row in rows)
            if rows and len(text) <= MOST_KEPT:
                (folder / KEPT).mkdir(exist_ok=True)
                replace_file(folder / KEPT / f"{name}.jsonl", text.encode())

    def recall(self, folder: Path) -> None:
        """Read the rows that `keep` wrote into a run's folder."""
        train, test = (
            read_rows(file) if path == IN_MEMORY and (file := folder / KEPT / name).is_file() else ()
            for name, path in (("train.jsonl", self.path), ("test.jsonl", self.eval_path))
        )
        self._held = replace(self._held, train=train, test=test)

    @property
    def in_memory(self) -> Sequence[str]:
        """The parts that exist only in this process, in words."""
        rows = ["rows"] if IN_MEMORY in (self.path, self.eval_path) else []
        named = [("reward", each.function) for each in self.rewards if isinstance(each, Reward)]
        if isinstance(self.success, str) and ("reward", self.success) not in named:
            named.append(("success", self.success))
        functions = [
            f"the {kind} function `{name.partition(':')[2]}`"
            for kind, name in named
            if name.startswith(f"{IN_MEMORY}:")
        ]
        judge = [] if self._ask is None else ["the judge"]
        tools = [
            f"the tool `{name}`" for each in self.tools if isinstance(each, Functions) for name in each.held
        ]
        return [*rows, *functions, *judge, *tools]

    def check(self, agents: Sequence[str]) -> None:
        """Read the rows and find the functions; ConfigError for an unknown agent or parameter."""
        self.check_tools()
        columns = self.columns - {"question"}  # a function that takes it receives the column
        if self._solved is not None:
            self._solved.check(columns, for_team=True)
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

    @cached_property
    def columns(self) -> frozenset[str]:
        """The fields that all rows have."""
        rows = (*self.rows.train, *self.rows.test)
        return frozenset.intersection(*(frozenset(row.fields) for row in rows))

    @cached_property
    def _functions(self) -> tuple[RewardFunction | None, ...]:
        """The function of each reward; None where a judge pays."""
        functions: list[RewardFunction | None] = []
        for each in self.rewards:
            if not isinstance(each, Reward):
                functions.append(None)
                continue
            functions.append(self._found(each.function, "reward"))
        return tuple(functions)

    @cached_property
    def _solved(self) -> RewardFunction | None:
        """The function of `success`, if one is named."""
        return self._found(self.success, "success") if isinstance(self.success, str) else None

    def _found(self, target: str, kind: str) -> RewardFunction:
        found = find_object(target, f"{kind} function", held=self._held.functions)
        return read_function(target.rpartition(":")[2], found, kind)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Name of what each reward pays, in an episode's info and in metrics.

        Functions of one name have their module before it where that tells them apart; those still alike are numbered.
        """
        plain: list[tuple[str, str]] = []
        for each, function in zip(self.rewards, self._functions, strict=True):
            module = (
                Path(each.function.rpartition(":")[0]).name.removesuffix(".py")
                if isinstance(each, Reward)
                else ""
            )
            name = "rubric" if isinstance(each, Rubric) else "rank" if function is None else function.name
            whose = "" if each.agent is None else f"/{each.agent}"
            plain.append((f"{name}{whose}", module))
        labels: list[str] = []
        for name, module in plain:
            others = {other for same, other in plain if same == name} - {module}
            named = (
                f"{module.rpartition('.')[2]}.{name}" if others and module not in ("", IN_MEMORY) else name
            )
            numbered = (f"{named}_{k}" for k in range(2, len(plain) + 2))
            labels.append(
                next(label for found in (named, *numbered) if (label := f"{PAID_BY}{found}") not in labels)
            )
        return tuple(labels)

    def in_words(self) -> str:
        """Return every reward by the name that metrics have, with its weight and where a function is written."""
        return ", ".join(
            f"{label.removeprefix(PAID_BY)}{'' if each.weight == 1.0 else f' × {each.weight:g}'}"
            f"{f' ({function.place})' if function is not None and function.place else ''}"
            for each, function, label in zip(self.rewards, self._functions, self.labels, strict=True)
        )

    @property
    def _own_split(self) -> bool:
        return self.eval_path == "own" and self.path != IN_MEMORY

    @cached_property
    def _read_rows(self) -> tuple[tuple[DataRow, ...], tuple[DataRow, ...], Mapping[str, str]]:
        contents: dict[str, str] = {}
        train = self._rows_at(self.path, "train", contents)
        other = self.eval_path not in (*_HELD_OUT, "none")
        test = self._rows_at(self.eval_path, "test", contents) if other else ()
        return train, test, contents

    def _rows_at(self, path: str, split: Split, contents: dict[str, str]) -> tuple[DataRow, ...]:
        if path != IN_MEMORY:
            return DataSource(path, self.config, self.train, self.test, self.test_share).whole(
                split, contents
            )
        rows = self._held.train if split == "train" else self._held.test
        if not rows:
            raise AbsentData(
                "The rows were in the memory of the program that made this run, and too large to be kept with it. Continue there, or "
                f"write them to a file and set `environment.{'path' if split == 'train' else 'eval_path'}`."
            )
        contents[f"{split} rows in memory"] = hashlib.sha256(
            json.dumps([row.fields for row in rows], sort_keys=True).encode()
        ).hexdigest()
        return rows

    @cached_property
    def rows(self) -> Splits:
        """The usable rows of both splits; of the second none with `eval_path: none`."""
        if self._own_split:
            return super().rows
        first, second, _ = self._read_rows
        key, setting, words = self._key()
        if self.eval_path == "none":
            found = usable(first, self._read, self.max_unusable, self._called[0])
            return Splits(found.rows, (), 0, {"train": found.skipped})
        source = replace(self.source, test=self.eval_path, called=self._called)
        return source.apart(
            first,
            None if self.eval_path in _HELD_OUT else second,
            key,
            setting,
            words,
            self._read,
            self.max_unusable,
        )

    @property
    def _called(self) -> tuple[str, str]:
        """What messages call the rows to train on and those to test on."""
        train, test = self._held.called
        if self.path != IN_MEMORY:
            train = self.path
        if self.eval_path != IN_MEMORY:
            test = train if self.eval_path in _HELD_OUT else self.eval_path
        return train, test

    def contents(self) -> Mapping[str, str]:
        """Return what is read, and every function, each with a hash."""
        read = super().contents() if self._own_split else self._read_rows[2]
        hashes: dict[str, str] = {}
        named: list[tuple[str, RewardFunction]] = []
        for each, function in zip(self.rewards, self._functions, strict=True):
            if function is None or not isinstance(each, Reward):
                continue
            named.append((each.function, function))
        if isinstance(self.success, str) and self._solved is not None:
            named.append((self.success, self._solved))
        for target, function in named:
            with suppress(OSError, TypeError):  # where there is no source to read
                source = inspect.getsource(function.function)
                hashes[target] = hashlib.sha256(source.encode()).hexdigest()
        return {**read, **hashes}

    def _key(self) -> tuple[str, str, Words]:
        return self._question, "question_field", question_in

    @cached_property
    def _question(self) -> str:
        if self.question_field is not None:
            return self.question_field
        first = self.source.first_row() if self._own_split else next(iter(self._read_rows[0]), None)
        if first is None:
            raise DataError(f"The data set '{self.path}' is empty. Name another one, or add rows.")
        found = next((name for name in QUESTIONS if first.fields.get(name) is not None), None)
        if found is None:
            raise DataError(
                f"{first.place} has no column {', '.join(QUESTIONS)}. Name the one that asks "
                f"({', '.join(first.fields) or 'there are none'}): `environment.question_field`."
            )
        return found

    def remarks(self) -> Sequence[str]:
        """Return which column is the question where rows have several that could be, and prompts that are rendered already."""
        others = [name for name in QUESTIONS if name in self.columns and name != self._question]
        if self.question_field is not None or not others:
            return super().remarks()
        chosen = (
            f"the column `{self._question}` is the question, although rows have {', '.join(f'`{name}`' for name in others)} too "
            "(`question_field` names another column)"
        )
        return (chosen, *super().remarks())

    def task(self, split: Split, index: int) -> Task:
        """Return the question of a row."""
        return self.question_of(self.rows.of(split)[index]).task(
            f"{split}-{index}", rendered=self.rendered_prompts
        )

    def start(self, task: Task, agents: Sequence[str], seed: int) -> RewardedWorld | ToolsWorld:
        """Open the world of one question."""
        world = RewardedWorld(task, agents)
        return self.around(world, agents) if self.tools else world

    def extract(self, text: str) -> str | None:
        """Return the whole text, so that votes and debates compare texts; None for an empty one."""
        return text.strip() or None

    async def pay(self, episode: Episode, outcome: Outcome) -> Outcome:
        """Ask every function and rubric, and add up what each agent earns; one that raises fails the episode.

        Likewise a rubric whose judge gives no verdict. Rankings pay when the group is whole.
        """
        row = split_of(self.rows, episode.task.id)
        said = last_texts(episode)
        completion = answer_of(episode, outcome.info)
        given = {
            "question": episode.task.question,
            **row.fields,
            "completion": completion,
            "completions": said,
            "episode": episode,
        }
        if self._question == "question":
            given["question"] = episode.task.question
        earned: dict[str, float] = {}
        info: dict[str, Json] = dict(outcome.info)
        for each, function, label in zip(self.rewards, self._functions, self.labels, strict=True):
            if each.agent is not None and each.agent not in said:
                continue  # it had no turn that could be paid
            text = completion if each.agent is None else said[each.agent]
            if function is not None:
                own = {} if each.agent is None else {"agent": each.agent, "completion": text}
                try:
                    found = await function(self._given(function, {**given, **own}, row))
                except EpisodeError as error:
                    raise EpisodeError(str(error), {label: FAILED}) from error
            elif isinstance(each, Rubric):
                reference = None if each.reference is None else shown(row.fields[each.reference])
                ask, question = self.judge_of(each), episode.task.question
                verdict = await judge_rubric(
                    ask, question, spoken_of(episode, text), each.criteria, reference
                )
                if verdict.grade.status == "ungraded":
                    ask.ungraded += 1
                    raise EpisodeError(
                        f"`{label.removeprefix(PAID_BY)}`: {verdict.grade.explanation}", {label: FAILED}
                    )
                found = verdict.grade.score
                info |= {f"{label}/{name}": score for name, score in verdict.criteria.items()}
            else:
                continue
            info[label] = found
            if found is None:
                continue
            for agent in said if each.agent is None else (each.agent,):
                earned[agent] = earned.get(agent, 0.0) + each.weight * found
        if not earned:
            info[UNSCORED] = ALONE if self.compared else "no reward function said what this is worth"
        success = self._reached(earned)
        if self._solved is not None:
            # A function that also pays the team is not asked again.
            paid = [
                k
                for k, own in enumerate(self.rewards)
                if own == Reward(function=str(self.success), weight=own.weight)
            ]
            said_so = (
                info.get(self.labels[paid[0]])
                if paid
                else await self._solved(self._given(self._solved, given, row))
            )
            if said_so is not None and not 0.0 <= said_so <= 1.0:
                raise EpisodeError(
                    f"The success function `{self._solved.name}` returned {said_so:g}. Success is a truth, or a share from 0 to 1."
                )
            success = said_so
        return replace(outcome, rewards=earned, success=success, info=info)

    def _given(self, function: RewardFunction, given: Mapping[str, Any], row: DataRow) -> Mapping[str, Any]:
        """Return what a function takes: an episode's values by name, or the same as a batch of one."""
        if VERL in function.may_take:
            model = row.fields.get("reward_model")
            truth = model.get("ground_truth") if isinstance(model, Mapping) else None
            return {"ground_truth": truth, **given, VERL: given["completion"]}
        if not function.takes_batches:
            return given
        episode, text = given["episode"], given["completion"]
        turns = episode.by(given.get("agent", episode.turns[-1].agent))
        prompt = row.fields.get(self._question, given["question"])
        completion = text
        if self.tools:
            completion = self._messages(turns)
        elif not isinstance(prompt, str):
            completion = [{"role": "assistant", "content": text}]
        batch = {
            **row.fields,
            "question": given["question"],
            "prompts": prompt,
            "completions": completion,
            "completion_ids": [token for turn in turns for token in turn.completion_ids],
        }
        return {name: [value] for name, value in batch.items()}

    def _messages(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return an agent's turns, with the results of its calls between them, as messages of a chat."""
        found: list[dict[str, Any]] = []
        for turn in turns:
            if found:
                found += [{"role": each.role, "content": each.content} for each in turn.heard]
            said: dict[str, Any] = {"role": "assistant", "content": turn.text}
            with suppress(NotCalls):
                if calls := parse_calls(turn.text, (self.form,)):
                    named = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
                    said["content"] = beside_calls(turn.text, self.form)
                    said["tool_calls"] = [{"type": "function", "function": call} for call in named]
            found.append(said)
        return found

    def _reached(self, earned: Mapping[str, float]) -> float | None:
        """Return 1.0 where agents earned what `success` asks for, else 0.0; None where nobody was paid, or it is no number."""
        if not earned or not isinstance(self.success, float):
            return None
        # Weights of 0.7, 0.2 and 0.1 sum to a little less than 1.
        return float(fmean(earned.values()) >= self.success - 1e-9)

    @property
    def compared(self) -> Sequence[str]:
        """The rankings."""
        return [
            f"`environment.rewards.{k}.rank`"
            for k, each in enumerate(self.rewards)
            if isinstance(each, Ranking)
        ]

    async def pay_group(self, episodes: Sequence[Episode]) -> Sequence[Outcome]:
        """Let every ranking compare the episodes; EpisodeError where its judge gives no verdict.

        Where only one has a text that is compared, there is nothing to compare it with, and the ranking pays it nothing.
        """
        earned = [dict(episode.rewards) for episode in episodes]
        infos: list[dict[str, Json]] = [dict(episode.info) for episode in episodes]
        texts = [last_texts(episode) for episode in episodes]
        differing: list[list[float]] = [[] for _ in episodes]
        task = episodes[0].task
        for each, label in zip(self.rewards, self.labels, strict=True):
            if not isinstance(each, Ranking):
                continue
            part = [k for k, said in enumerate(texts) if each.agent is None or each.agent in said]
            for k in part:
                infos[k][label] = None
            if len(part) < 2:
                continue
            attempts = [
                spoken_of(e, answer_of(e, infos[k]) if each.agent is None else texts[k][each.agent])
                for k, e in enumerate(episodes)
                if k in part
            ]
            row = split_of(self.rows, task.id)
            reference = None if each.reference is None else shown(row.fields[each.reference])
            ask = self.judge_of(each)
            found = await judge_attempts(ask, task.question, attempts, each.rank, reference)
            missed = next((grade for grade in found.grades if grade.status == "ungraded"), None)
            if missed is not None:
                ask.ungraded += 1
                raise EpisodeError(f"`{label.removeprefix(PAID_BY)}`: {missed.explanation}")
            for k, grade in zip(part, found.grades, strict=True):
                infos[k][label] = grade.score
                if found.disagreement is not None:
                    differing[k].append(found.disagreement)
                for agent in texts[k] if each.agent is None else (each.agent,):
                    earned[k][agent] = earned[k].get(agent, 0.0) + each.weight * grade.score
        for k, info in enumerate(infos):
            if earned[k]:
                info.pop(UNSCORED, None)
            if differing[k]:
                info[DISAGREEMENT] = fmean(differing[k])
        return [
            Outcome(
                paid,
                self._reached(paid) if isinstance(self.success, float) else episode.success,
                info,
                episode.truncated,
                episode.roles,
            )
            for episode, paid, info in zip(episodes, earned, infos, strict=True)
        ]

    def judge_of(self, reward: Rubric | Ranking) -> Asking:
        """Return whom a reward asks: one for all rewards with the same judge, so that they share its budget."""
        return self._judges.of(reward.judge)

    @property
    def asked(self) -> Sequence[tuple[AnyJudge, QuestionCounts]]:
        """Of a rubric once about an episode, for all its criteria; of a ranking in two orders about a group."""
        return [
            (each.judge, QuestionCounts(episode=1) if isinstance(each, Rubric) else QuestionCounts(group=2))
            for each in self.rewards
            if isinstance(each, Rubric | Ranking)
        ]


UNSCORED = "unscored"
"""Where an episode's info says why nothing paid it."""
ALONE = "an attempt that is played alone has no other that it could be ranked with"
DISAGREEMENT = "judge/disagreement"
"""Where an episode's info says how far the verdicts in both orders differ (`grading.judge.Compared`)."""


def last_texts(episode: Episode) -> dict[str, str]:
    """Return the last text of every agent that spoke, in seat order."""
    last = {turn.agent: turn.text for turn in episode.turns}
    return {agent: last[agent] for agent in episode.agents if agent in last}


def answer_of(episode: Episode, info: Mapping[str, Json]) -> Any:
    """Return the text that a workflow named as the team's, else the last that was said."""
    answer = info.get("answer")
    answer = episode.answer if answer is None else answer
    # Functions read whole completions, thoughts included, as TRL's do.
    return next(
        (turn.text for turn in reversed(episode.turns) if turn.thoughts and turn.words == answer), answer
    )


def spoken_of(episode: Episode, text: Any) -> str:
    """Return what a judge reads of a completion: its words, without thoughts."""
    return next((turn.words for turn in reversed(episode.turns) if turn.text == text), str(text))


class RewardedWorld(BaseWorld):
    """One question, which all agents read and answer once; the functions pay for it."""

    _answer: str | None = None

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Take the answers; EpisodeError for a second time, or a stranger."""
        if self.over:
            raise EpisodeError("The question has been answered already. This world takes one step.")
        need_seats(actions, self.agents, "answered")
        self._answer, self.over = final, True
        return {}

    def outcome(self) -> Outcome:
        """Return the text that counts as the team's answer, where the workflow names one."""
        info = {} if self._answer is None else {"answer": self._answer}
        return Outcome(info=info, truncated=not self.over)
