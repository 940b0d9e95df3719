"""Read rows of data from local files, together with the position of each row for error messages.

Supported formats are JSON lines and JSON arrays (optionally compressed with gzip), JSON lines compressed with Zstandard
(`.jsonl.zst`), CSV with a header, and Parquet. Every error message contains the file, the line and how to fix the error, and is raised before a model is
loaded. Environments use this module to read their tasks, and runs use it to read the data that they wrote.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, cast

from kapelle.errors import DataError, did_you_mean
from kapelle.runtime.files import decompressed, hashed
from kapelle.types import Json

SUFFIXES = (".jsonl.gz", ".jsonl", ".jsonl.zst", ".json.gz", ".json", ".parquet", ".csv")


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of a data file, with its position in the file."""

    place: str
    """Position of the row for error messages, such as `train.jsonl.gz, line 17`."""
    fields: Mapping[str, Json]

    def text(self, field: str, setting: str) -> str:
        """Return a field that must be a string.

        Raises DataError, with the name of the setting to change, if the field is missing or not a string.
        """
        if field not in self.fields:
            raise DataError(
                f"{self.place} has no field '{field}'.{did_you_mean(field, self.fields)} "
                f"Set `environment.{setting}` to a field that the data has."
            )
        value = self.fields[field]
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.unusable(
                f"the field '{field}' holds {type(value).__name__}, not a string or number", setting
            )
        return str(value)

    def unusable(self, fault: str, setting: str = "") -> DataError:
        """Return the error for a row that cannot be used. The argument `setting` is the setting that may have caused the fault."""
        other = f", or set `environment.{setting}`" if setting else ""
        return DataError(f"{self.place}: {fault}. Fix or drop the row{other}.")


def held_out(key: str, share: float) -> bool:
    """Return whether the row with this key belongs to the test split, which is determined by a hash of the key."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def read_rows(file: Path, contents: MutableMapping[str, str] | None = None) -> tuple[DataRow, ...]:
    """Return the rows of a local file. Raises DataError if the file is damaged or has another format.

    The hash of the file is added to `contents` under the name of the file.
    """
    if file.name.endswith(".parquet"):
        try:
            from pyarrow import ArrowException, parquet
        except ImportError as error:
            raise DataError(
                f"'{file}' is parquet, which needs an extra: pip install 'kapelle[data]'."
            ) from error
        try:
            # Parquet is read from its end, so it is read a second time for the hash.
            with hashed(file, contents):
                read = parquet.read_table(file).to_pylist()
        except (ArrowException, OSError) as error:
            raise DataError(f"'{file}' cannot be read as parquet: {error}. Fetch the file again.") from error
        return tuple(DataRow(f"{file}, row {number}", row) for number, row in enumerate(read, start=1))
    if file.name.endswith(".csv"):
        try:
            with hashed(file, contents) as opened:
                return _csv_rows(file, io.StringIO(opened.read().decode("utf-8-sig"), newline=""))
        except (csv.Error, UnicodeDecodeError, OSError) as error:
            raise DataError(f"'{file}' cannot be read as CSV: {error}. Save it as CSV in UTF-8.") from error
    compressed = file.name.endswith(".gz")
    lines = file.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst"))
    if not lines and not file.name.endswith((".json", ".json.gz")):
        raise DataError(
            f"'{file}' does not end in {', '.join(SUFFIXES)}, so its format is unknown. Convert or rename it."
        )
    rows: list[DataRow] = []
    try:
        with hashed(file, contents) as opened:
            stream = cast("IO[bytes]", gzip.GzipFile(fileobj=opened) if compressed else opened)
            if file.name.endswith(".zst"):
                stream = decompressed(opened)
            if not lines:
                values = _parsed(str(file), stream.read())
                if not isinstance(values, list):
                    raise DataError(
                        f"'{file}' contains {type(values).__name__}, not an array of rows. Use JSON lines or an array."
                    )
                return tuple(_row(f"{file}, row {number}", each) for number, each in enumerate(values, 1))
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    place = f"{file}, line {number}"
                    rows.append(_row(place, _parsed(place, line)))
            return tuple(rows)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"'{file}' is damaged or truncated after row {len(rows)}: {error}. Fetch the file again."
        ) from error
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error}. Check the file and its permissions.") from error


def _csv_rows(file: Path, text: Iterable[str]) -> tuple[DataRow, ...]:
    """Return the rows of a CSV file whose first line contains the names of the columns. All values are strings."""
    lines = csv.reader(text, strict=True)
    names = next(lines, [])
    rows = []
    for values in lines:
        place = f"{file}, line {lines.line_num}"
        if values and len(values) != len(names):
            raise DataError(
                f"{place} has {len(values)} values, but the first line names {len(names)} columns. Fix it, and put values with commas "
                "in double quotes."
            )
        if values:
            rows.append(_row(place, _columns(place, list(zip(names, values, strict=True)))))
    return tuple(rows)


def _columns(place: str, pairs: Sequence[tuple[str, Json]]) -> Json:
    """Return a row as a JSON object. Raises DataError if a key is repeated, because JSON parsers would silently keep only its last value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise DataError(f"{place} has the key '{twice}' twice. Rename or drop one of them.")
    return row


def _parsed(place: str, text: bytes) -> Json:
    try:
        return json.loads(text, object_pairs_hook=partial(_columns, place))
    except DataError:
        raise
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise DataError(
                f"{place} has an integer with more digits than Python reads (4,300). Write it as a string, in quotes."
            ) from error
        raise DataError(f"{place} is not valid JSON: {error}. Fix it, or fetch the file again.") from error
    except RecursionError as error:
        raise DataError(f"{place} is nested too deeply to be a row. Fix it.") from error


def _row(place: str, value: Json) -> DataRow:
    if not isinstance(value, dict):
        raise DataError(f"{place} is {type(value).__name__}, not an object with named fields. Fix it.")
    return DataRow(place, value)
