"""What environments of rows share: where the rows are, how they are split, and how many may be unusable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from pydantic import Field, model_validator

from kapelle.environment import Reads, Skipping
from kapelle.environments.data.source import DataSource, Splits, Words, keep_apart, question_in
from kapelle.environments.questions import Graded
from kapelle.runtime.row_files import DataRow
from kapelle.types import Split


class DataSettings(Graded, Skipping, Reads):
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
    max_unusable: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Greatest share of a split's rows that may be left out as unusable (answer or question missing, another
    form); the run reports how many and which, and refuses to start above this share."""

    @model_validator(mode="after")
    def _apart(self) -> DataSettings:
        keep_apart(self.train, self.test)
        return self

    @property
    def sources(self) -> Mapping[Split, str]:
        """The file or hub split of each."""
        return {"train": self.source.describe("train"), "test": self.source.describe("test")}

    @property
    def source(self) -> DataSource:
        """Where the rows are."""
        return DataSource(self.path, self.config, self.train, self.test, self.test_share)

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

    def contents(self) -> Mapping[str, str]:
        """Return every file or hub split that is read, with a hash of what was in it."""
        return self.source.contents()

    def skipped(self) -> Mapping[Split, str]:
        """Return, by split, which rows are left out and why; empty where all are used."""
        return {split: str(found) for split, found in self.rows.skipped.items() if found.count}

    def _key(self) -> tuple[str, str, Words]:
        """Return the field that keeps train and test apart, its setting, and how it is read."""
        return "question", "path", question_in

    def _read(self, row: DataRow) -> object:
        """Read what a task needs besides the key; DataError, with the row's place, for an unusable row."""
        key, setting, words = self._key()
        return words(row, key, setting)
