"""The tool `search`, which uses a full-text index of a local corpus or a server on the network."""

from __future__ import annotations

import functools
import os
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

from pydantic import Field, model_validator

from kapelle.environment import Reads
from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSchema, ToolSettings, one_text
from kapelle.errors import ConfigError, DataError
from kapelle.runtime.credentials import bearer
from kapelle.runtime.files import content_or_fault, folder_content
from kapelle.runtime.row_files import SUFFIXES, read_rows
from kapelle.settings.base import FREE, open_address
from kapelle.types import Json

MAX_WORDS = 32
"""The maximum number of words in a query. Further words are ignored."""
MAX_PASSAGE = 600
"""The maximum number of characters of a result."""

_SCHEMA = one_text(
    "search", "Searches documents and returns the passages that fit best.", "query", "a few words"
)


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that a search returns."""

    title: str
    text: str


Find = Callable[[str, int], Sequence[Passage]]
"""A function that takes a query and the number of results, and returns the best results in descending order. The function raises
ToolFault with a message for the agent."""


class Search(ToolSettings, Reads):
    """Settings of the tool `search`."""

    tool: Literal["search"] = "search"
    corpus: str | None = None
    """A file of rows with `title` and `text` (JSON lines or a JSON array, optionally compressed with gzip, or parquet), or a folder of
    .txt and .md files."""
    url: str | None = None
    """The URL of a search server that replaces the corpus. The URL contains the placeholder `{query}`. The server returns a JSON list
    of objects with `title` and `text`."""
    local: bool = False
    """Whether `url` may refer to this machine or its local network, for the user's own retrieval server."""
    key_env: Annotated[str | None, FREE] = None
    """The name of the environment variable that holds a bearer token for `url`."""
    results: int = Field(default=3, ge=1, le=20)
    """The number of passages that each call returns."""

    @model_validator(mode="after")
    def _corpus_or_url(self) -> Search:
        if (self.corpus is None) == (self.url is None):
            raise ValueError("The tool `search` needs either a `corpus` or a `url`.")
        if self.url is not None and "{query}" not in self.url:
            raise ValueError("`url` does not contain `{query}`. Insert `{query}` at the place of the query.")
        if self.url is not None:
            open_address(self.url)
        return self

    def contents(self) -> Mapping[str, str]:
        """Return a mapping from the corpus to a hash of its content."""
        place = Path(self.corpus or "").expanduser()
        if self.corpus is None:
            return {}
        return {self.corpus: folder_content(place, _is_text) if place.is_dir() else content_or_fault(place)}

    def check(self) -> None:
        """Build the index. Raises DataError if the corpus is missing, and ConfigError if the token is missing."""
        if self.key_env is not None and self.key_env not in os.environ:
            raise ConfigError(
                f"The environment variable {self.key_env}, which the tool `search` needs, is not set. Set it."
            )
        bearer(self.key_env, self.url or "")
        self._find()

    def _find(self) -> Find:
        if self.url is not None:
            return functools.partial(query_server, self.url, self.local, self.key_env)
        assert self.corpus is not None, "validated above"
        return corpus_index(self.corpus).search

    def schemas(self) -> tuple[ToolSchema, ...]:
        """Return the schema of the tool without building an index."""
        return (_SCHEMA,)

    def open(self) -> Toolbox:
        """Return the tool. All search tools of a process that use the same corpus share one index."""
        return search_toolbox(self._find(), self.results)


def search_toolbox(find: Find, results: int) -> Toolbox:
    """Return the tool `search`, which calls `find` to search for passages."""

    def search(arguments: Mapping[str, Json]) -> str:
        found = [
            f"[{k}] {each.title}\n{each.text[:MAX_PASSAGE]}"
            for k, each in enumerate(find(arguments["query"], results), start=1)
        ]
        return "\n\n".join(found) or "Nothing was found."

    return Toolbox(Tool(_SCHEMA, search))


class CorpusIndex:
    """A full-text index in memory (FTS5 of SQLite, ranked by BM25), which any thread can use."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._index.close)
        try:
            self._index.execute(
                "CREATE VIRTUAL TABLE texts USING fts5(title, text, tokenize = 'porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"The SQLite of this Python has no full-text search ({error}). Set `url` instead of `corpus`."
            ) from error
        with self._index:
            self._index.executemany("INSERT INTO texts VALUES (?, ?)", ((p.title, p.text) for p in passages))

    def search(self, query: str, count: int) -> Sequence[Passage]:
        """Return the best passages, ranked by BM25. Raises ToolFault if the query contains no word."""
        words = re.findall(r"\w+", query[:1000])[:MAX_WORDS]
        if not words:
            raise ToolFault("The query holds no word.")
        # Quotes disable the index's query language.
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._index.execute(
                "SELECT title, snippet(texts, 1, '', '', '…', 64) FROM texts WHERE texts MATCH ?"
                " ORDER BY bm25(texts, 4.0, 1.0), rowid LIMIT ?",
                (match, count),
            ).fetchall()
        return [Passage(title, text) for title, text in rows]


def _is_text(file: Path) -> bool:
    return file.suffix in {".txt", ".md"}


@functools.lru_cache(maxsize=8)
def corpus_index(corpus: str) -> CorpusIndex:
    """Return the index of a corpus, which is built once per process. Raises DataError if the corpus is missing or empty."""
    place = Path(corpus).expanduser()
    if place.is_dir():
        files = sorted(file for file in place.rglob("*") if _is_text(file) and file.is_file())
        passages = [
            Passage(str(file.relative_to(place)), file.read_text("utf-8", errors="replace")) for file in files
        ]
    elif place.is_file():
        passages = [
            Passage(row.text("title", "tools"), row.text("text", "tools")) for row in read_rows(place)
        ]
    else:
        raise DataError(
            f"There is no corpus '{corpus}'. Set `corpus` of the tool `search` to a folder of text files or a file "
            f"with one of the endings {', '.join(SUFFIXES)}."
        )
    if not passages:
        raise DataError(f"The corpus '{corpus}' contains no text. Add texts, or set another `corpus`.")
    return CorpusIndex(passages)


def query_server(url: str, local: bool, key_env: str | None, query: str, count: int) -> Sequence[Passage]:
    """Return the passages from a search server. Raises ToolFault if the request fails or the response is invalid."""
    from kapelle.environments.tools.web import WebFault, any_address, fetch_json, is_public

    address = url.replace("{query}", quote(query[:1000], safe=""))
    try:
        value = fetch_json(address, bearer(key_env, url), allowed=any_address if local else is_public)
    except WebFault as fault:
        raise ToolFault(f"The search failed: {fault}") from None
    results = value.get("results") if isinstance(value, Mapping) else value
    if not isinstance(results, list) or not all(isinstance(each, Mapping) for each in results[:count]):
        raise ToolFault("The search failed: the server did not answer with a list of objects.")
    found = []
    for each in results[:count]:
        texts = (each[name] for name in ("text", "snippet", "content") if isinstance(each.get(name), str))
        found.append(Passage(str(each.get("title", "")), next(texts, "")))
    return found
