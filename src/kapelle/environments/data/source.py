"""Read the rows of a data set from a local file, a local folder or the Hugging Face hub, with a train and a test split.

The module `runtime/row_files.py` lists the supported file formats. Every error message names the file, the line and a fix. Errors
are raised before any model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import Field, model_validator

from kapelle.environment import Reads, Reporting
from kapelle.environments.data.conversations import RENDERED, Question, field_of, question_in, read_question
from kapelle.environments.questions import Graded, place_of
from kapelle.errors import AbsentData, DataError
from kapelle.runtime.hub import bars_for_people, hub_fault, offline_hub
from kapelle.runtime.row_files import SUFFIXES, DataRow, held_out, read_rows
from kapelle.settings.base import Settings
from kapelle.types import Split

# -------- Usable and unusable rows: up to a maximum share, unusable rows are counted, reported and excluded

SHOWN = 3
"""The maximum number of unusable rows that are reported individually. All other unusable rows are only counted."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Skipped:
    """The rows of a split that are excluded because they are unusable."""

    count: int = 0
    total: int = 0
    """The number of all rows, including the excluded rows."""
    named: tuple[str, ...] = ()
    """The first excluded rows, each with its location and the reason why it is unusable."""

    def __str__(self) -> str:
        """Return a message such as `3 of 7,473 rows cannot be used and are excluded: …`, or an empty string if no row is excluded."""
        return self.report(" and are excluded") if self.count else ""

    def report(self, then: str) -> str:
        """Return a sentence with the number of unusable rows and the first of these rows.

        The string `then` is inserted after the number.
        """
        more = self.count - len(self.named)
        why = " | ".join(self.named) + (f" | and {more:,} more" if more else "")
        return f"{self.count:,} of {self.total:,} rows cannot be used{then}: {why}"


def usable(
    rows: Sequence[T], read: Callable[[T], object], share: float, where: str
) -> tuple[tuple[T, ...], Skipped]:
    """Return the rows that `read` accepts and a report on the other rows.

    Raises DataError if more than the fraction `share` is unusable.

    For an unusable row, `read` must raise DataError with a message that names the location of the row.
    """
    kept: list[T] = []
    faults: list[str] = []
    count = 0
    for row in rows:
        try:
            read(row)
        except DataError as fault:
            count += 1
            if len(faults) < SHOWN:
                faults.append(str(fault))
        else:
            kept.append(row)
    skipped = Skipped(count, len(rows), tuple(faults))
    if count > share * len(rows):
        allowed = f", more than `environment.max_unusable` = {share:.1%}"
        raise DataError(f"{where}: {skipped.report('' if count == len(rows) else allowed)}")
    return tuple(kept), skipped


MANIFEST = "manifest.json"
"""The name of the manifest file that `kapelle data prepare` writes into a prepared folder."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


RowsRead = tuple[tuple[DataRow, ...], tuple[DataRow, ...] | None]
"""The train rows and the test rows before unusable rows are excluded. The test rows are None if a single file contains both splits."""
Words = Callable[[DataRow, str, str], str]
"""A function that takes (row, field, setting) and returns the field as a string. The function raises DataError if the value is not a
string."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """The source of the rows of a data set."""

    path: str
    """A file, a folder, or the name of a data set on the hub (`owner/name`)."""
    config: str | None
    """The configuration of the data set on the hub."""
    train: str
    test: str
    """The name of the test split, as for `train`: a file in the folder (with or without suffix) or a split on the hub."""
    test_share: float
    """The fraction of the rows in the test split if `path` is a single file. A hash of the row's key field determines its split."""
    called: tuple[str, str] | None = None
    """The names of the train rows and the test rows in error messages. If None, `path` is used."""

    def describe(self, split: Split) -> str:
        """Return a description of the file, folder or hub split that contains a split."""
        if Path(self.path).expanduser().is_file():
            share = self.test_share if split == "test" else 1 - self.test_share
            return f"{self.path}, {share:.0%} of the rows, by a hash of the question"
        return f"{self.path}, {self.train if split == 'train' else self.test}"

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each file or hub split that is read."""
        return raw_rows(self)[1]

    def whole(self, split: Split, contents: MutableMapping[str, str]) -> tuple[DataRow, ...]:
        """Return all rows of a split, or of a single file. Raises DataError if the file, folder or data set does not exist."""
        local = Path(self.path).expanduser()
        if local.is_file():
            return read_rows(local, contents)
        if local.is_dir():
            return _folder(local, split, self, contents)
        if _HUB_NAME.fullmatch(self.path) and not self.path.endswith(SUFFIXES):
            name = self.train if split == "train" else self.test
            return hub_rows(self.path, self.config, name, contents)
        raise AbsentData(
            f"There is no file or folder '{self.path}'. Set `environment.path` to an existing file or folder, "
            "or to `owner/name` of a data set on the Hugging Face hub."
        )

    def read(self) -> RowsRead:
        """Return the rows of both splits before unusable rows are excluded."""
        return raw_rows(self)[0]

    def first_row(self) -> DataRow | None:
        """Return the first train row, whether usable or not, or None if there are no rows."""
        return next(iter(raw_rows(self)[0][0]), None)

    def load(
        self,
        key: str,
        setting: str,
        words: Words = DataRow.text,
        read: Callable[[DataRow], object] | None = None,
        max_unusable: float = 0.0,
    ) -> Splits:
        """Return both splits, such that they have no value of the field `key` in common (ignoring differences in spacing and case).

        `setting` is the name of the setting that specifies the key in error messages. `words` returns a row's key as a string, and
        `read` reads everything else that a task needs. If either function raises DataError for a row, the row is excluded, up to
        the fraction `max_unusable` of a split. A train row whose key also occurs in the test split is excluded and counted. Raises
        DataError if data are missing, corrupt or empty, or have a different format.
        """
        return self.apart(*raw_rows(self)[0], key, setting, words, read, max_unusable)

    def apart(
        self,
        first: tuple[DataRow, ...],
        second: tuple[DataRow, ...] | None,
        key: str,
        setting: str,
        words: Words = DataRow.text,
        read: Callable[[DataRow], object] | None = None,
        max_unusable: float = 0.0,
    ) -> Splits:
        """Return both splits, as `load` does. If `second` is None, `first` contains the rows of both splits."""

        def check(row: DataRow) -> None:
            words(row, key, setting)
            if read is not None:
                read(row)

        both = (self.path, self.path) if second is None else (self.describe("train"), self.describe("test"))
        named, other_named = self.called or both
        of_these = f"'{self.path}'" if self.called is None else named
        skipped: dict[Split, Skipped] = {}
        found, skipped["train"] = usable(first, check, max_unusable, named)
        if second is None:
            shares = [held_out(words(row, key, setting), self.test_share) for row in found]
            test = tuple(row for row, out in zip(found, shares, strict=True) if out)
            train = tuple(row for row, out in zip(found, shares, strict=True) if not out)
        else:
            train = found
            test, skipped["test"] = usable(second, check, max_unusable, other_named)
        for split, rows in (("train", train), ("test", test)):
            if not rows and second is None and found:
                raise DataError(
                    f"The {split} split of {len(found):,} rows of {of_these} is empty with "
                    f"`environment.test_share` = {self.test_share:g}. Add rows, change the share, or specify separate test rows."
                )
            if not rows:
                empty = self.path if second is None or split == "train" else self.test
                raise DataError(
                    f"The {split} split of '{empty}' is empty. Specify another file, or add rows."
                )
        tested = {one_spelling(words(row, key, setting)) for row in test}
        kept = tuple(row for row in train if one_spelling(words(row, key, setting)) not in tested)
        if not kept:
            raise DataError(
                f"All train rows of {of_these} are also test rows. Set `environment.train` and `environment.test` to "
                "different data."
            )
        return Splits(kept, test, len(train) - len(kept), skipped)


@dataclass(frozen=True, slots=True)
class Splits:
    """The usable rows of the train and the test split."""

    train: tuple[DataRow, ...]
    test: tuple[DataRow, ...]
    duplicates: int
    """The number of train rows that are excluded because they also occur in the test split."""
    skipped: Mapping[Split, Skipped] = field(default_factory=dict)
    """The unusable rows of each split. If a single file contains both splits, all unusable rows are counted in the train split."""

    def of(self, split: Split) -> tuple[DataRow, ...]:
        """Return the rows of one split."""
        return self.train if split == "train" else self.test

    def row_of(self, task_id: str) -> DataRow:
        """Return the row of a task, given the id of the task (`<split>-<index>`)."""
        split, index = place_of(task_id)
        return self.of(split)[index]


@lru_cache(maxsize=8)
def raw_rows(source: DataSource) -> tuple[RowsRead, Mapping[str, str]]:
    """Return the rows before unusable rows are excluded, and a mapping from the name of each input to its hash."""
    contents: dict[str, str] = {}
    train = source.whole("train", contents)
    one_file = Path(source.path).expanduser().is_file()
    return (train, None if one_file else source.whole("test", contents)), contents


def one_spelling(question: str) -> str:
    """Return a question with normalised spacing and case, so that copies of a question are equal."""
    return " ".join(question.split()).casefold()


def _folder(
    folder: Path, split: str, source: DataSource, contents: MutableMapping[str, str]
) -> tuple[DataRow, ...]:
    name = source.train if split == "train" else source.test
    places = [folder, folder / source.config] if source.config else [folder]
    for place in places:
        for candidate in (place / name, *(place / f"{name}{suffix}" for suffix in SUFFIXES)):
            if candidate.is_file():
                return read_rows(candidate, contents)
        if shards := sorted(place.glob(f"{name}-*.parquet")):
            return tuple(row for shard in shards for row in read_rows(shard, contents))
    if (folder / MANIFEST).is_file():
        try:
            named = str(json.loads((folder / MANIFEST).read_bytes())["splits"][split]["file"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"'{folder / MANIFEST}' does not name the file of the {split} split: {error!r}. Prepare the folder again."
            ) from error
        return read_rows(folder / named, contents)
    there = sorted(file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES))
    raise DataError(
        f"The folder '{folder}' has no file '{name}' with one of the endings {', '.join(SUFFIXES)}. "
        f"It contains {', '.join(there) or 'no data file'}. Put the file there, or specify other files with `environment.train` and "
        "`environment.test` (`--train` and `--test` of `kapelle data prepare`)."
    )


def hub_rows(
    path: str, config: str | None, split: str, contents: MutableMapping[str, str] | None = None
) -> tuple[DataRow, ...]:
    """Return the rows of a split on the Hugging Face hub, and add a hash of the rows to `contents`.

    Raises DataError if the data set is unavailable.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise AbsentData(
            f"'{path}' is not a local file or folder. To read it from the hub, run: "
            "pip install 'kapelle[data]'. Or set `environment.path` to a local copy."
        ) from error
    fault = hub_fault(path, "datasets", ".gitattributes")
    try:
        with bars_for_people(), offline_hub() if fault else nullcontext():
            rows = load_dataset(path, config, split=split)
    except Exception as error:
        # The hub's client also raises exceptions of the libraries that it uses.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise AbsentData(
            f"'{path}' is not a local file or folder, and the hub did not return its split '{split}': "
            f"{fault or reason[0]}. Check the name and the network, or set `environment.path` to a local copy."
        ) from error
    found = tuple(DataRow(f"{path} {split}, row {number}", row) for number, row in enumerate(rows, start=1))
    if contents is not None:
        digest = hashlib.sha256()
        for each in found:
            digest.update(json.dumps(each.fields, default=str).encode())
        contents[f"{path} {split}"] = digest.hexdigest()
    return found


# -------- Settings of environments with rows: the place, the splits, and how many rows may be unusable


class DataFiles(Settings, Reads):
    """Settings that specify where the rows of a data set are stored."""

    path: str
    """The location of the data: a folder with a file for each split (such as a folder from `kapelle data prepare`), a single file, or
    the name of a data set on the Hugging Face hub (`owner/name`)."""
    config: str | None = None
    """The configuration of the data set on the hub. If null, the data set must have only one configuration."""
    train: str = "train"
    """The file (with or without suffix) or the hub split that contains the train rows."""
    test: str = "test"
    """The file (with or without suffix) or the hub split that contains the test rows."""
    test_share: float = Field(default=0.1, gt=0.0, lt=1.0)
    """The fraction of the questions in the test split if `path` is a single file. A hash of a question determines its split."""

    @model_validator(mode="after")
    def _apart(self) -> DataFiles:
        if self.train == self.test:
            raise ValueError(f"`train` and `test` both name '{self.train}'. Set them to different data.")
        return self

    @property
    def sources(self) -> Mapping[Split, str]:
        """Descriptions of the files or hub splits from which the two splits are read."""
        return {"train": self.source.describe("train"), "test": self.source.describe("test")}

    @property
    def source(self) -> DataSource:
        """The source of the rows."""
        return DataSource(self.path, self.config, self.train, self.test, self.test_share)

    def contents(self) -> Mapping[str, str]:
        """Return the hash of each file or hub split that is read."""
        return self.source.contents()


class DataSettings(DataFiles, Graded, Reporting):
    """Settings of a data set of which some rows may be unusable."""

    max_unusable: float = Field(default=0.01, ge=0.0, lt=1.0)
    """The maximum fraction of a split's rows that may be excluded as unusable, for example because the question or the answer is
    missing. The run reports the number of excluded rows and the first of these rows. If the fraction is larger, the run does not
    start."""

    def check(self, agents: Sequence[str]) -> None:
        """Read both splits. Raises DataError, which names files and lines, if too many rows are unusable."""
        self.skipped()

    def size(self, split: Split) -> int | None:
        """Return the number of usable rows in a split."""
        return len(self.rows.of(split))

    @cached_property
    def rows(self) -> Splits:
        """The usable rows of both splits. Raises DataError if data are missing or corrupt, or if too many rows are unusable."""
        key, setting, words = self._key()
        return self.source.load(key, setting, words, self._read, self.max_unusable)

    def skipped(self) -> Mapping[Split, str]:
        """Return a report on the excluded rows of each split, with reasons. Splits without excluded rows are omitted."""
        return {split: str(found) for split, found in self.rows.skipped.items() if found.count}

    def question_of(self, row: DataRow) -> Question:
        """Return the question in a row."""
        key, setting, _ = self._key()
        return read_question(row, key, setting)

    def _key(self) -> tuple[str, str, Words]:
        """Return the field that must differ between train and test rows, the setting for this field, and the function that reads it."""
        return "question", "path", question_in

    def _read(self, row: DataRow) -> object:
        """Read everything that a task needs. Raises DataError, which names the location of the row, if the row is unusable."""
        key, setting, words = self._key()
        return words(row, key, setting)


class DataWithQuestions(DataSettings):
    """Settings of a data set with a column of questions, which are strings or conversations."""

    rendered_prompts: bool = False
    """Whether the column of questions contains complete prompts, to which a chat template has already been applied. If true, the model
    reads these prompts unchanged, and agents have neither a prompt nor a system message."""

    def remarks(self) -> Sequence[str]:
        """Return a warning with the number of prompts to which the chat template would be applied a second time, if there are any."""
        key, setting, words = self._key()
        if self.rendered_prompts or words is not question_in:
            return ()
        found = [field_of(row, key, setting) for row in self.rows.train]
        count = sum(isinstance(text, str) and RENDERED.search(text) is not None for text in found)
        if not count:
            return ()
        remark = (
            f"{count:,} of {len(found):,} prompts (column `{key}`) contain the markers of a chat template, and the model's template would "
            "be applied to them again. Use rows of messages, or set `environment.rendered_prompts: true` to use such prompts unchanged."
        )
        return (remark,)
