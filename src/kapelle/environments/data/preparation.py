"""Data sets written as the files that environments read: train and test apart, with a manifest of what was done.

    prepared = prepare("gsm8k", Path("data/gsm8k"))                     from the Hugging Face hub
    prepared = prepare("anli", Path("data/anli"), source="downloads/anli", train=["r1_dev"], test=["r2_dev"])

    <folder>/
      train.jsonl     (or .parquet) rows with the fields that the environment reads
      test.jsonl
      manifest.json   source, counts, hashes, rows that were left out and why
      README.md       how to train on it

A prepared folder is what `environment.path` may name.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kapelle.environments.code import MBPP_SPLITS, mbpp_problem
from kapelle.environments.data.conversations import field_of, question_in, text_in
from kapelle.environments.data.source import (
    MANIFEST,
    DataSource,
    Skipped,
    one_spelling,
    usable,
)
from kapelle.environments.math import Math
from kapelle.environments.nli import NLI
from kapelle.errors import DataError, RunDirectoryError, did_you_mean
from kapelle.runtime.files import writing
from kapelle.runtime.row_files import SUFFIXES, DataRow, held_out, read_rows
from kapelle.types import Json, Split

Form = Literal["jsonl", "parquet"]
Fields = dict[str, Json]


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set that can be prepared."""

    hub: str
    """`owner/name` on the Hugging Face hub."""
    config: str | None
    train: tuple[str, ...]
    """Splits on the hub, or files in a folder (suffix optional), to train on; the first of several that are there."""
    test: tuple[str, ...]
    """Empty if there is no published test split: a hash of each question then holds `test_share` out."""
    fields: Callable[[DataRow], Fields]
    """What is written of a row; DataError for an unusable one."""
    key: tuple[str, ...]
    """The written field that train and test do not share: the first of these that a row has."""
    environment: str
    """The environment that reads it."""
    licence: str
    by_id: bool = False
    """Whether rows of one file are split by `task_id`, as MBPP's are."""


def _math_fields(question: Sequence[str], answer: Sequence[str]) -> Callable[[DataRow], Fields]:
    def fields(row: DataRow) -> Fields:
        asked = next((name for name in question if name in row.fields), question[0])
        said = next((name for name in answer if name in row.fields), answer[0])
        text = question_in(row, asked, "question_field")
        written = field_of(row, said, "answer_field")
        # Some sets keep whole numbers as 142.0.
        if isinstance(written, float) and written.is_integer():
            written = int(written)
        found = {
            "question": text,
            "answer": str(text_in(row, said, "answer_field") if not isinstance(written, int) else written),
        }
        Math(path=".").gold_of(DataRow(row.place, found))
        return found

    return fields


def _nli_fields(row: DataRow) -> Fields:
    NLI(path=".").pair_of(row)
    return {name: row.fields[name] for name in ("premise", "hypothesis", "label")}


def _mbpp_fields(row: DataRow) -> Fields:
    mbpp_problem(row)
    kept = (
        "task_id",
        "text",
        "prompt",
        "code",
        "test_imports",
        "test_setup_code",
        "test_list",
        "challenge_test_list",
    )
    return {name: row.fields[name] for name in kept if name in row.fields}


_PROBLEM = ("problem", "question", "prompt")
_ANSWER = ("answer", "ground_truth", "final_answer", "solution")

DATA_SETS: Mapping[str, DataSet] = {
    "gsm8k": DataSet(
        "openai/gsm8k",
        "main",
        ("train",),
        ("test",),
        _math_fields(("question",), ("answer",)),
        ("question",),
        "math",
        "MIT",
    ),
    "math": DataSet(
        "DigitalLearningGmbH/MATH-lighteval",
        None,
        ("train", "train_math"),
        ("test",),
        _math_fields(_PROBLEM, _ANSWER),
        ("question",),
        "math",
        "MIT (problems by MAA and AoPS)",
    ),
    "deepscaler": DataSet(
        "agentica-org/DeepScaleR-Preview-Dataset",
        None,
        ("train", "deepscaler", "train_math"),
        (),
        _math_fields(_PROBLEM, _ANSWER),
        ("question",),
        "math",
        "MIT (problems by MAA and AoPS)",
    ),
    "deepmath": DataSet(
        "zwhe99/DeepMath-103K",
        None,
        ("train",),
        (),
        _math_fields(("question", "prompt"), ("final_answer", "ground_truth")),
        ("question",),
        "math",
        "MIT",
    ),
    "anli": DataSet(
        "facebook/anli",
        None,
        ("train_r1", "r1_train"),
        ("test_r1", "r1_test"),
        _nli_fields,
        ("premise",),
        "nli",
        "CC BY-NC 4.0: not for commercial use",
    ),
    "mbpp": DataSet(
        "google-research-datasets/mbpp",
        "full",
        ("train",),
        ("test",),
        _mbpp_fields,
        ("text", "prompt"),
        "code",
        "CC BY 4.0",
        by_id=True,
    ),
}


@dataclass(frozen=True, slots=True)
class PreparedData:
    """What was written."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def use(self) -> tuple[str, str]:
        """The settings that train on it."""
        return f"environment.name={self.manifest['environment']}", f"environment.path={self.folder}"


def prepare(
    name: str,
    out: Path,
    *,
    source: str | None = None,
    train: Sequence[str] = (),
    test: Sequence[str] = (),
    form: Form = "jsonl",
    test_share: float = 0.1,
    max_unusable: float = 0.01,
) -> PreparedData:
    """Write a data set's train and test rows into the new folder `out` and return what was written.

    `source` is a folder or file, or `owner/name` on the hub (the data set's own place there); `train` and `test` name its
    splits or files in place of the usual ones. Train rows that are also tested are left out, whatever their spacing and
    case. Raises DataError for data that are missing or mostly unusable, RunDirectoryError where `out` exists.
    """
    if name not in DATA_SETS:
        raise DataError(f"No data set '{name}' can be prepared.{did_you_mean(name, DATA_SETS)}")
    if out.exists():
        raise RunDirectoryError(f"{out} exists already, and nothing is overwritten. Name another --out.")
    chosen = DATA_SETS[name]
    where = source or chosen.hub
    gathered = _Gathering(chosen, where, max_unusable)
    rows, skipped = gathered.splits(tuple(train), tuple(test), test_share)
    # Train and test apart, and no row twice.
    tested = {_normal(row, chosen.key) for row in rows["test"]}
    fresh = [row for row in rows["train"] if _normal(row, chosen.key) not in tested]
    shared = len(rows["train"]) - len(fresh)
    apart: dict[Split, list[Fields]] = {"train": fresh, "test": rows["test"]}
    kept = {
        split: list({json.dumps(row, sort_keys=True): row for row in own}.values())
        for split, own in apart.items()
    }
    for split, own in kept.items():
        if not own:
            raise DataError(
                f"The {split} split of '{where}' is empty. Name other files with --train and --test."
            )
    manifest: dict[str, Any] = {
        "name": name,
        "source": where,
        "licence": chosen.licence,
        "environment": chosen.environment,
        "splits": {},
        "left_out": {
            place: {"count": said.count, "of": said.total, "first": list(said.named)}
            for place, said in skipped.items()
        },
        "train_rows_that_are_tested": shared,
    }
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # All or nothing: the folder gets its name when it is whole.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
            folder = Path(place) / "data"
            folder.mkdir()
            for split, own in kept.items():
                file = folder / f"{split}.{form}"
                if form == "jsonl":
                    # ASCII: some readers take U+2028, which stands in GSM8K, for the end of a line.
                    file.write_text("".join(json.dumps(row) + "\n" for row in own), "ascii")
                else:
                    try:
                        from pyarrow import Table, parquet
                    except ImportError as error:
                        raise DataError(
                            "Writing parquet needs an extra: pip install 'kapelle[data]'."
                        ) from error
                    parquet.write_table(Table.from_pylist(list(own)), file)
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                manifest["splits"][split] = {"file": file.name, "rows": len(own), "sha256": digest}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", "utf-8")
            prepared = PreparedData(out, manifest)
            (folder / "README.md").write_text(_readme(prepared), "utf-8")
            shutil.move(folder, out)
    return prepared


class _Gathering:
    """Reads the rows of a source as the fields that are written."""

    def __init__(self, chosen: DataSet, where: str, max_unusable: float) -> None:
        self._set = chosen
        self._where = where
        self._share = max_unusable

    def splits(
        self, train: tuple[str, ...], test: tuple[str, ...], test_share: float
    ) -> tuple[dict[Split, list[Fields]], dict[str, Skipped]]:
        """Return each split's rows, and what was left out by source."""
        single = Path(self._where).expanduser()
        if single.is_file() or (
            single.is_dir() and self._set.by_id and not train and not self._has(single, "train")
        ):
            file: Path | None = single
            if single.is_dir():
                named_mbpp = (single / f"mbpp{suffix}" for suffix in SUFFIXES)
                file = next((each for each in named_mbpp if each.is_file()), None)
            if file is None:
                raise DataError(f"The folder '{single}' has no file 'mbpp' and no 'train'. Name the files.")
            every, said = self._usable(self._where, read_rows(file))
            return self._divided(every, test_share), {self._where: said}
        found: dict[Split, list[Fields]] = {"train": [], "test": []}
        skipped: dict[str, Skipped] = {}
        wanted: tuple[tuple[Split, tuple[str, ...], tuple[str, ...]], ...] = (
            ("train", train, self._set.train),
            ("test", test, self._set.test),
        )
        for split, named, usual in wanted:
            # The first of the usual names that a folder has; on the hub, and where it has none, the first of all.
            there = tuple(name for name in usual if single.is_dir() and self._has(single, name))
            for place in named or (there or usual)[:1]:
                kept, said = self._usable(place, self._of(place))
                found[split] += kept
                skipped[place] = said
        if not found["test"] and not test and not self._set.test:
            found = self._divided(found["train"], test_share)
        return found, skipped

    def _divided(self, rows: Sequence[Fields], share: float) -> dict[Split, list[Fields]]:
        if self._set.by_id:
            return {
                split: [row for row in rows if int(str(row["task_id"])) in ids]
                for split, ids in MBPP_SPLITS.items()
            }
        out = [held_out(_normal(row, self._set.key), share) for row in rows]
        return {
            "train": [row for row, test in zip(rows, out, strict=True) if not test],
            "test": [row for row, test in zip(rows, out, strict=True) if test],
        }

    def _usable(self, place: str, rows: Sequence[DataRow]) -> tuple[list[Fields], Skipped]:
        found = usable(rows, self._set.fields, self._share, place)
        return [self._set.fields(row) for row in found.rows], found.skipped

    def _has(self, folder: Path, name: str) -> bool:
        return any((folder / f"{name}{suffix}").is_file() for suffix in ("", *SUFFIXES))

    def _of(self, place: str) -> tuple[DataRow, ...]:
        """Return the rows of a file in the folder, or of a split on the hub."""
        config = self._set.config if self._where == self._set.hub else None
        return DataSource(self._where, config, place, place, 0.0).whole("train", {})


def _normal(row: Fields, key: Sequence[str]) -> str:
    """Return a row's key, normalised so that two spellings of one question are equal."""
    written = next(row[name] for name in key if name in row)
    return one_spelling(str(written))


def _readme(prepared: PreparedData) -> str:
    manifest = prepared.manifest
    splits = "\n".join(
        f"| {split} | `{each['file']}` | {each['rows']:,} | `{each['sha256'][:16]}…` |"
        for split, each in manifest["splits"].items()
    )
    return (
        f"# {manifest['name']}\n\nPrepared by `kapelle data prepare` from `{manifest['source']}`. "
        f"Licence of the data: {manifest['licence']}.\n\n"
        f"| split | file | rows | sha256 |\n|---|---|---|---|\n{splits}\n\n"
        f"{manifest['train_rows_that_are_tested']} train rows that are tested were left out; so were the unusable ones that "
        f"`{MANIFEST}` names.\n\n```sh\nkapelle train RECIPE {' '.join(prepared.use)}\n```\n"
    )
