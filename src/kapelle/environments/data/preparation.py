"""Convert data sets to files for environments, with disjoint train and test rows and a manifest.

    prepared = prepare("gsm8k", Path("data/gsm8k"))                     # from the Hugging Face hub
    prepared = prepare("anli", Path("data/anli"), source="downloads/anli", train=["r1_dev"], test=["r2_dev"])

    <folder>/
      train.jsonl     (or .parquet) rows with the fields that the environment reads
      test.jsonl
      manifest.json   source, counts, hashes, excluded rows with reasons
      README.md       how to train on the data

The setting `environment.path` can be set to a prepared folder.
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
    """A data set that the command `kapelle data prepare` can convert."""

    hub: str
    """The name of the data set on the Hugging Face hub (`owner/name`)."""
    fields: Callable[[DataRow], Fields]
    """A function that returns the fields to write for a row. The function raises DataError if the row is unusable."""
    licence: str
    config: str | None = None
    train: tuple[str, ...] = ("train",)
    """Possible names of the train split on the hub, or of its file in a folder (with or without suffix). The first name that exists is
    used."""
    test: tuple[str, ...] = ()
    """Possible names of the test split or its file, as for `train`. If the tuple is empty, no test split is published, and the
    fraction `test_share` of the rows is selected for the test split by a hash of the question."""
    key: tuple[str, ...] = ("question",)
    """Fields that identify a question. No value of this field occurs in both splits. The first of these fields that a row has is used."""
    environment: str = "math"
    """The name of the environment that reads the prepared data."""
    by_id: bool = False
    """Whether the rows of a single file are split by `task_id`, as in MBPP."""


def _math_fields(question: Sequence[str], answer: Sequence[str]) -> Callable[[DataRow], Fields]:
    def fields(row: DataRow) -> Fields:
        column = next((name for name in question if name in row.fields), question[0])
        solved = next((name for name in answer if name in row.fields), answer[0])
        text = question_in(row, column, "question_field")
        written = field_of(row, solved, "answer_field")
        if isinstance(written, float) and written.is_integer():
            written = int(written)  # some data sets store whole numbers as 142.0
        if not isinstance(written, int):
            written = text_in(row, solved, "answer_field")
        found: Fields = {"question": text, "answer": str(written)}
        Math(path=".").gold_of(DataRow(row.place, found))
        return found

    return fields


def _nli_fields(row: DataRow) -> Fields:
    NLI(path=".").pair_of(row)
    return {name: row.fields[name] for name in ("premise", "hypothesis", "label")}


_MBPP = (
    "task_id",
    "text",
    "prompt",
    "code",
    "test_imports",
    "test_setup_code",
    "test_list",
    "challenge_test_list",
)


def _mbpp_fields(row: DataRow) -> Fields:
    mbpp_problem(row)
    return {name: row.fields[name] for name in _MBPP if name in row.fields}


_PROBLEMS = _math_fields(
    ("problem", "question", "prompt"), ("answer", "ground_truth", "final_answer", "solution")
)
_MAA = "MIT (problems by MAA and AoPS)"

DATA_SETS: Mapping[str, DataSet] = {
    "gsm8k": DataSet(
        "openai/gsm8k", _math_fields(("question",), ("answer",)), "MIT", config="main", test=("test",)
    ),
    "math": DataSet(
        "DigitalLearningGmbH/MATH-lighteval", _PROBLEMS, _MAA, train=("train", "train_math"), test=("test",)
    ),
    "deepscaler": DataSet(
        "agentica-org/DeepScaleR-Preview-Dataset",
        _PROBLEMS,
        _MAA,
        train=("train", "deepscaler", "train_math"),
    ),
    "deepmath": DataSet(
        "zwhe99/DeepMath-103K",
        _math_fields(("question", "prompt"), ("final_answer", "ground_truth")),
        "MIT",
    ),
    "anli": DataSet(
        "facebook/anli",
        _nli_fields,
        "CC BY-NC 4.0: not for commercial use",
        train=("train_r1", "r1_train"),
        test=("test_r1", "r1_test"),
        key=("premise",),
        environment="nli",
    ),
    "mbpp": DataSet(
        "google-research-datasets/mbpp",
        _mbpp_fields,
        "CC BY 4.0",
        config="full",
        test=("test",),
        key=("text", "prompt"),
        environment="code",
        by_id=True,
    ),
}


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A data set that has been written to a folder, with its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def use(self) -> tuple[str, str]:
        """The settings that select the prepared data for training."""
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
    """Write the train and test rows of a data set to the new folder `out`, and return the prepared data.

    `source` is a folder, a file, or the name of a data set on the hub (`owner/name`); the default is the published data set on the
    hub. `train` and `test` replace the usual names of the splits or files. Train rows that are also test rows (ignoring differences
    in spacing and case) are excluded. Raises DataError if data are missing or too many rows are unusable, and RunDirectoryError if
    `out` exists.
    """
    if name not in DATA_SETS:
        raise DataError(f"Unknown data set '{name}'.{did_you_mean(name, DATA_SETS)}")
    if out.exists():
        raise RunDirectoryError(f"{out} already exists. Choose another folder with --out.")
    chosen = DATA_SETS[name]
    where = source or chosen.hub
    rows, skipped = _gathered(chosen, where, tuple(train), tuple(test), test_share, max_unusable)
    tested = {_normal(row, chosen.key) for row in rows["test"]}
    separate = [row for row in rows["train"] if _normal(row, chosen.key) not in tested]
    shared = len(rows["train"]) - len(separate)
    sides: dict[Split, list[Fields]] = {"train": separate, "test": rows["test"]}
    kept = {
        split: list({json.dumps(row, sort_keys=True): row for row in own}.values())  # each row once
        for split, own in sides.items()
    }
    for split, own in kept.items():
        if not own:
            raise DataError(
                f"The {split} split of '{where}' is empty. Specify other files with --train and --test."
            )
    manifest: dict[str, Any] = {
        "name": name,
        "source": where,
        "licence": chosen.licence,
        "environment": chosen.environment,
        "splits": {},
        "excluded": {
            place: {"count": found.count, "of": found.total, "first": list(found.named)}
            for place, found in skipped.items()
        },
        "train_rows_that_are_tested": shared,
    }
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # The folder receives its final name only when it is complete.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as place:
            folder = Path(place) / "data"
            folder.mkdir()
            for split, own in kept.items():
                file = folder / f"{split}.{form}"
                if form == "jsonl":
                    # Write ASCII, because some readers treat U+2028, which occurs in GSM8K, as the end of a line.
                    file.write_text("".join(json.dumps(row) + "\n" for row in own), "ascii")
                else:
                    try:
                        from pyarrow import Table, parquet
                    except ImportError as error:
                        raise DataError(
                            "Writing parquet needs an extra. Run: pip install 'kapelle[data]'."
                        ) from error
                    parquet.write_table(Table.from_pylist(list(own)), file)
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
                manifest["splits"][split] = {"file": file.name, "rows": len(own), "sha256": digest}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", "utf-8")
            prepared = PreparedData(out, manifest)
            (folder / "README.md").write_text(_readme(prepared), "utf-8")
            shutil.move(folder, out)
    return prepared


def _gathered(
    chosen: DataSet,
    where: str,
    train: tuple[str, ...],
    test: tuple[str, ...],
    test_share: float,
    max_unusable: float,
) -> tuple[dict[Split, list[Fields]], dict[str, Skipped]]:
    """Return the fields to write for the rows of each split, and the excluded rows of each source."""
    local = Path(where).expanduser()
    skipped: dict[str, Skipped] = {}

    def read(place: str, rows: Sequence[DataRow]) -> list[Fields]:
        found, skipped[place] = usable(rows, chosen.fields, max_unusable, place)
        return [chosen.fields(row) for row in found]

    def exists(name: str) -> bool:
        return any((local / f"{name}{suffix}").is_file() for suffix in ("", *SUFFIXES))

    if local.is_file() or (local.is_dir() and chosen.by_id and not train and not exists("train")):
        candidates = (local / f"mbpp{suffix}" for suffix in SUFFIXES) if local.is_dir() else (local,)
        file = next((each for each in candidates if each.is_file()), None)
        if file is None:
            raise DataError(
                f"The folder '{local}' has neither a file 'mbpp' nor a file 'train'. Specify files with --train and --test."
            )
        return _divided(chosen, read(where, read_rows(file)), test_share), skipped
    found: dict[Split, list[Fields]] = {"train": [], "test": []}
    wanted: tuple[tuple[Split, tuple[str, ...], tuple[str, ...]], ...] = (
        ("train", train, chosen.train),
        ("test", test, chosen.test),
    )
    config = chosen.config if where == chosen.hub else None
    for split, named, usual in wanted:
        # Use the first usual name that exists in the folder. On the hub, or if none exists, use the first name.
        there = tuple(name for name in usual if local.is_dir() and exists(name))
        for place in named or (there or usual)[:1]:
            found[split] += read(place, DataSource(where, config, place, place, 0.0).whole("train", {}))
    if not found["test"] and not test and not chosen.test:
        found = _divided(chosen, found["train"], test_share)
    return found, skipped


def _divided(chosen: DataSet, rows: Sequence[Fields], share: float) -> dict[Split, list[Fields]]:
    """Divide the rows of one file into a train and a test split."""
    if chosen.by_id:
        return {
            split: [row for row in rows if int(str(row["task_id"])) in ids]
            for split, ids in MBPP_SPLITS.items()
        }
    found: dict[Split, list[Fields]] = {"train": [], "test": []}
    for row in rows:
        found["test" if held_out(_normal(row, chosen.key), share) else "train"].append(row)
    return found


def _normal(row: Fields, key: Sequence[str]) -> str:
    """Return the key of a row in normalised form, so that different spellings of a question have the same key."""
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
        f"{manifest['train_rows_that_are_tested']} train rows that are also test rows were excluded, and the unusable rows in "
        f"`{MANIFEST}`.\n\n```sh\nkapelle train RECIPE {' '.join(prepared.use)}\n```\n"
    )
