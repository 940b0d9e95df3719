"""Rows of a data set from a local file, a local folder or the Hugging Face hub, with a train and a test split.

The local forms are those of `runtime/row_files.py`. Every fault names the file, the line and the way out, and is found by
reading alone: before any model is loaded.
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
from typing import Generic, TypeVar

from pydantic import Field, model_validator

from kapelle.environment import Reads, Reporting
from kapelle.environments.data.conversations import RENDERED, Question, field_of, question_in, read_question
from kapelle.environments.questions import Graded
from kapelle.errors import AbsentData, DataError
from kapelle.runtime.hub import bars_for_people, hub_fault, offline_hub
from kapelle.runtime.row_files import SUFFIXES, DataRow, held_out, read_rows
from kapelle.settings.base import Settings
from kapelle.types import Split

# -------- Rows that can be used, and those that cannot: counted, named, and left out up to a stated share

SHOWN = 3
"""Rows that are named; the others are counted."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Skipped:
    """The rows that were left out."""

    count: int = 0
    total: int = 0
    """All rows, those included."""
    named: tuple[str, ...] = ()
    """Where the first of them stand and why they cannot be used."""

    def __str__(self) -> str:
        """Return `3 of 7,473 rows cannot be used and are left out: …`, empty when there are none."""
        return self._said(" and are left out") if self.count else ""

    def _said(self, then: str) -> str:
        more = self.count - len(self.named)
        why = " | ".join(self.named) + (f" | and {more:,} more" if more else "")
        return f"{self.count:,} of {self.total:,} rows cannot be used{then}: {why}"

    def refused(self, where: str, share: float) -> DataError:
        """Return the error for more of them than may be left out."""
        allowed = f", more than `environment.max_unusable` = {share:.1%}"
        more_than = "" if self.count == self.total else allowed  # no share of all would do
        return DataError(f"{where}: {self._said(more_than)}")


@dataclass(frozen=True, slots=True)
class Usable(Generic[T]):
    """What is left."""

    rows: tuple[T, ...]
    skipped: Skipped


def usable(rows: Sequence[T], read: Callable[[T], object], share: float, where: str) -> Usable[T]:
    """Return the rows that `read` takes; DataError where it refuses more than `share` of them.

    `read` raises DataError, with the place of the row, for an unusable one.
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
        raise skipped.refused(where, share)
    return Usable(tuple(kept), skipped)


MANIFEST = "manifest.json"
"""What `kapelle data prepare` says of the files beside it."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


Words = Callable[[DataRow, str, str], str]
"""(row, field, setting) → the field as text; DataError where it is none."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where rows come from."""

    path: str
    """A file, a folder, or `owner/name` on the hub."""
    config: str | None
    """The hub data set's configuration."""
    train: str
    test: str
    """Names of the splits: files in the folder (suffix optional), or splits on the hub."""
    test_share: float
    """Share held out, by a hash of the row's key field, where `path` is one file."""
    called: tuple[str, str] | None = None
    """What messages call the rows to train on and those to test on; None for `path`, which has both."""

    def describe(self, split: Split) -> str:
        """Return where a split comes from, in words."""
        if Path(self.path).expanduser().is_file():
            share = self.test_share if split == "test" else 1 - self.test_share
            return f"{self.path}, {share:.0%} of the rows, by a hash of the question"
        return f"{self.path}, {self.train if split == 'train' else self.test}"

    def contents(self) -> Mapping[str, str]:
        """Return every file, or data set and split of the hub, that is read, with a hash of what was in it."""
        return _raw(self).contents

    def whole(self, split: Split, contents: MutableMapping[str, str]) -> tuple[DataRow, ...]:
        """Return the rows of one split, all of a file; DataError if it has none."""
        local = Path(self.path).expanduser()
        if local.is_file():
            return read_rows(local, contents)
        if local.is_dir():
            return _folder(local, split, self, contents)
        if _HUB_NAME.fullmatch(self.path) and not self.path.endswith(SUFFIXES):
            name = self.train if split == "train" else self.test
            return hub_rows(self.path, self.config, name, contents)
        raise AbsentData(
            f"There is no file or folder '{self.path}'. Set `environment.path` to one that exists, "
            "or to `owner/name` of a data set on the Hugging Face hub."
        )

    def read(self) -> tuple[tuple[DataRow, ...], tuple[DataRow, ...] | None]:
        """Return the rows to train on and to test on as they were read; None for the second where one file is both."""
        return _raw(self).rows

    def first_row(self) -> DataRow | None:
        """Return the first row to train on, usable or not; None for data without any."""
        return next(iter(_raw(self).rows[0]), None)

    def load(
        self,
        key: str,
        setting: str,
        words: Words = DataRow.text,
        read: Callable[[DataRow], object] | None = None,
        max_unusable: float = 0.0,
    ) -> Splits:
        """Return both splits; they share no value of the field `key` (`setting` names it in messages), spacing and case aside.

        `words` says what a row's value of the field is, as text, and `read` reads whatever else a task needs; a row at
        which one of them raises DataError is left out, up to the share `max_unusable` of a split. A train row whose key
        occurs in the test split is left out and counted. DataError for data that are missing, damaged, empty or of
        another form.
        """
        return self.apart(*_raw(self).rows, key, setting, words, read, max_unusable)

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
        """Return rows to train on and to test on, as `load` does; without a `second`, `first` is both splits."""

        def check(row: DataRow) -> None:
            words(row, key, setting)
            if read is not None:
                read(row)

        both = (self.path, self.path) if second is None else (self.describe("train"), self.describe("test"))
        named, other_named = self.called or both
        of_these = f"'{self.path}'" if self.called is None else named
        found = usable(first, check, max_unusable, named)
        skipped: dict[Split, Skipped] = {"train": found.skipped}
        if second is None:
            shares = [held_out(words(row, key, setting), self.test_share) for row in found.rows]
            test = tuple(row for row, out in zip(found.rows, shares, strict=True) if out)
            train = tuple(row for row, out in zip(found.rows, shares, strict=True) if not out)
        else:
            other = usable(second, check, max_unusable, other_named)
            train, test = found.rows, other.rows
            skipped["test"] = other.skipped
        for split, rows in (("train", train), ("test", test)):
            if not rows and second is None and found.rows:
                raise DataError(
                    f"Of {len(found.rows):,} rows of {of_these} none is left to {split} on where a share of "
                    f"`environment.test_share` = {self.test_share:g} is held out, by a hash of the question. Give more rows, another "
                    "share, or rows of their own to test on."
                )
            if not rows:
                empty = self.path if second is None or split == "train" else self.test
                raise DataError(f"The {split} split of '{empty}' is empty. Name another file, or more rows.")
        tested = {one_spelling(words(row, key, setting)) for row in test}
        kept = tuple(row for row in train if one_spelling(words(row, key, setting)) not in tested)
        if not kept:
            raise DataError(
                f"Every train row of {of_these} is a test row too. Set `environment.train` and "
                "`environment.test` to different data."
            )
        return Splits(kept, test, len(train) - len(kept), skipped)


@dataclass(frozen=True, slots=True)
class Splits:
    """The rows of both splits."""

    train: tuple[DataRow, ...]
    test: tuple[DataRow, ...]
    left_out: int
    """Train rows that also stood in the test split."""
    skipped: Mapping[Split, Skipped] = field(default_factory=dict)
    """Unusable rows; `train` counts those of a file that is both splits."""

    def of(self, split: Split) -> tuple[DataRow, ...]:
        """Return the rows of one split."""
        return self.train if split == "train" else self.test


@dataclass(frozen=True, slots=True)
class _Raw:
    """What was read."""

    rows: tuple[tuple[DataRow, ...], tuple[DataRow, ...] | None]
    """To train on and to test on; None for the second where one file is both."""
    contents: Mapping[str, str]
    """File, or data set and split of the hub → hash of what was in it."""


@lru_cache(maxsize=8)
def _raw(source: DataSource) -> _Raw:
    contents: dict[str, str] = {}
    train = source.whole("train", contents)
    one_file = Path(source.path).expanduser().is_file()
    return _Raw((train, None if one_file else source.whole("test", contents)), contents)


def one_spelling(question: str) -> str:
    """Return a question with spacing and case normalised, so that copies of it are equal."""
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
        # `kapelle data prepare` has written it, which says itself what is where.
        try:
            named = str(json.loads((folder / MANIFEST).read_bytes())["splits"][split]["file"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"'{folder / MANIFEST}' does not say which file is the {split} split: {error!r}. Prepare the folder again."
            ) from error
        return read_rows(folder / named, contents)
    there = sorted(file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES))
    raise DataError(
        f"The folder '{folder}' has no file '{name}' with one of the endings {', '.join(SUFFIXES)}. "
        f"It holds {', '.join(there) or 'no data file'}. Put the file there, or name others in `environment.train` and "
        "`environment.test` (`--train` and `--test` of `kapelle data prepare`)."
    )


def hub_rows(
    path: str, config: str | None, split: str, contents: MutableMapping[str, str] | None = None
) -> tuple[DataRow, ...]:
    """Return the rows of a split on the Hugging Face hub; DataError if it is unavailable.

    A hash of the rows goes into `contents`.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise AbsentData(
            f"'{path}' is no local file or folder; reading it from the hub needs an extra: "
            "pip install 'kapelle[data]'. Or set `environment.path` to a local copy."
        ) from error
    fault = hub_fault(path, "datasets", ".gitattributes")
    try:
        with bars_for_people(), offline_hub() if fault else nullcontext():
            rows = load_dataset(path, config, split=split)
    except Exception as error:
        # The boundary to the hub: its client raises whatever its own libraries do.
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise AbsentData(
            f"'{path}' is no local file or folder, and the hub did not give its split '{split}': "
            f"{fault or reason[0]}. Check the name and the network, or set `environment.path` to a local copy."
        ) from error
    found = tuple(DataRow(f"{path} {split}, row {number}", row) for number, row in enumerate(rows, start=1))
    if contents is not None:
        digest = hashlib.sha256()
        for each in found:
            digest.update(json.dumps(each.fields, default=str).encode())
        contents[f"{path} {split}"] = digest.hexdigest()
    return found


# -------- What environments of rows share: where the rows are, how they are split, and how many may be unusable


class DataFiles(Settings, Reads):
    """Where rows come from."""

    path: str
    """A folder with a file per split (also one of `kapelle data prepare`), one file, or `owner/name` on the Hugging Face
    hub."""
    config: str | None = None
    """Configuration of the hub's data set; null for its only one."""
    train: str = "train"
    """File (suffix optional) or hub split to train on."""
    test: str = "test"
    """File or hub split to evaluate on."""
    test_share: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the questions held out for testing where `path` is one file; a hash of each decides."""

    @model_validator(mode="after")
    def _apart(self) -> DataFiles:
        if self.train == self.test:
            raise ValueError(
                f"`train` and `test` both name '{self.train}'. Nothing is tested on what it trains on."
            )
        return self

    @property
    def sources(self) -> Mapping[Split, str]:
        """The file or hub split of each."""
        return {"train": self.source.describe("train"), "test": self.source.describe("test")}

    @property
    def source(self) -> DataSource:
        """Where the rows are."""
        return DataSource(self.path, self.config, self.train, self.test, self.test_share)

    def contents(self) -> Mapping[str, str]:
        """Return every file or hub split that is read, with a hash of what was in it."""
        return self.source.contents()


class DataSettings(DataFiles, Graded, Reporting):
    """Rows of which some may be unusable."""

    max_unusable: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Greatest share of a split's rows that may be left out as unusable (answer or question missing, another
    form); the run reports how many and which, and refuses to start above this share."""

    def check(self, agents: Sequence[str]) -> None:
        """Read both splits; DataError names the file and line of unusable rows, if there are too many."""
        self.skipped()

    def size(self, split: Split) -> int | None:
        """Return the number of usable rows."""
        return len(self.rows.of(split))

    @cached_property
    def rows(self) -> Splits:
        """The usable rows of both splits; DataError for data that are missing, damaged or mostly unusable."""
        key, setting, words = self._key()
        return self.source.load(key, setting, words, self._read, self.max_unusable)

    def skipped(self) -> Mapping[Split, str]:
        """Return, by split, which rows are left out and why; empty where all are used."""
        return {split: str(found) for split, found in self.rows.skipped.items() if found.count}

    def question_of(self, row: DataRow) -> Question:
        """Return what a row asks."""
        key, setting, _ = self._key()
        return read_question(row, key, setting)

    def _key(self) -> tuple[str, str, Words]:
        """Return the field that keeps train and test apart, its setting, and how it is read."""
        return "question", "path", question_in

    def _read(self, row: DataRow) -> object:
        """Read what a task needs besides the key; DataError, with the row's place, for an unusable row."""
        key, setting, words = self._key()
        return words(row, key, setting)


class AskingData(DataSettings):
    """Rows with a column that asks a question: a text or a conversation."""

    rendered_prompts: bool = False
    """True: the column of the question holds whole prompts that a chat template has rendered already. The model reads their tokens as
    they are, and agents have neither a prompt nor a system message."""

    def remarks(self) -> Sequence[str]:
        """Return what a reader of the settings may not expect of the rows: prompts that are rendered already."""
        key, setting, words = self._key()
        if self.rendered_prompts or words is not question_in:
            return ()
        found = [field_of(row, key, setting) for row in self.rows.train]
        count = sum(isinstance(text, str) and RENDERED.search(text) is not None for text in found)
        if not count:
            return ()
        said = f"{count:,} of {len(found):,} prompts (column `{key}`) hold a chat template's own marks"
        return (f"{said}, and the model's own template is applied to them again. {_HOW_TO_RENDER}",)


_HOW_TO_RENDER = (
    "Give rows of messages, or set `environment.rendered_prompts: true` to use such texts as they are."
)
