from __future__ import annotations

import itertools
import json
import math
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from kapelle.environments.tools.contract import ToolFault
from kapelle.environments.tools.search import CorpusIndex, Passage, Search
from kapelle.errors import ConfigError, DataError

TEXTS = {
    "Bern": "Bern is the seat of the government of Switzerland. The Aare flows around its old town.",
    "Zurich": "Zurich is the largest city of Switzerland, on a lake.",
    "Bears": "A bear is the animal on the flag of Bern. Bears sleep in winter.",
}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"title": t, "text": x}) + "\n" for t, x in TEXTS.items()))
    return str(file)


def search(settings: Search, query: str) -> str:
    settings.check()
    [tool] = settings.open().tools
    return tool.call({"query": query})


def test_the_best_passage_comes_first(corpus: str) -> None:
    assert (
        search(Search(corpus=corpus, results=1), "river around the old town") == f"[1] Bern\n{TEXTS['Bern']}"
    )
    assert search(Search(corpus=corpus), "sleeping bear").startswith("[1] Bears\n")
    assert search(Search(corpus=corpus), "lake").count("[") == 1
    assert search(Search(corpus=corpus), "submarine") == "Nothing was found."


def test_a_folder_of_texts_is_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "towns").mkdir()
    (tmp_path / "towns" / "bern.md").write_text(TEXTS["Bern"])
    (tmp_path / "zurich.txt").write_text(TEXTS["Zurich"])
    (tmp_path / "ignored.bin").write_bytes(b"Bern")
    assert search(Search(corpus=str(tmp_path)), "Aare") == f"[1] towns/bern.md\n{TEXTS['Bern']}"


@pytest.mark.parametrize(
    "query",
    ['"', "NEAR(a b)", "title:Bern", "Bern AND", "* ^ -", "'; DROP TABLE texts; --", "Bern\x00", "(" * 5000],
)
def test_a_query_cannot_use_the_query_language_of_the_index(corpus: str, query: str) -> None:
    for _ in range(2):
        try:
            search(Search(corpus=corpus), query)
        except ToolFault as fault:
            assert str(fault) == "The query holds no word."  # noqa: PT017 (both are correct)
    assert search(Search(corpus=corpus), "lake").startswith("[1] Zurich")


def test_threads_search_at_the_same_time(corpus: str) -> None:
    settings = Search(corpus=corpus, results=1)
    settings.check()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda word: search(settings, word), ["lake", "Aare"] * 10))
    assert {text.split("\n")[0] for text in found[::2]} == {"[1] Zurich"}
    assert {text.split("\n")[0] for text in found[1::2]} == {"[1] Bern"}


def test_missing_corpora_and_tokens_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nowhere"):
        Search(corpus="nowhere").check()
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text"):
        Search(corpus=str(tmp_path / "empty")).check()
    monkeypatch.delenv("KAPELLE_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match="KAPELLE_TEST_KEY"):
        Search(url="https://example.org/?q={query}", key_env="KAPELLE_TEST_KEY").check()


class Engine(BaseHTTPRequestHandler):
    """A search server that repeats the query."""

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query).get("q", [""])[0]
        found = {"title": query, "snippet": self.headers.get("Authorization", "no key")}
        answers = {"odd": "5", "none": "[]", "broken": "<html>"}
        body = answers.get(query, json.dumps({"results": [found] * 9})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Engine) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}/?q={{query}}"
        running.shutdown()


def test_a_local_server_gets_the_query_and_the_token(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAPELLE_TEST_KEY", "a token")
    settings = Search(url=server, local=True, key_env="KAPELLE_TEST_KEY", results=2)
    assert search(settings, "a&b=ü") == "[1] a&b=ü\nBearer a token\n\n[2] a&b=ü\nBearer a token"
    assert search(Search(url=server, local=True, results=1), "x") == "[1] x\nno key"
    assert search(Search(url=server, local=True), "none") == "Nothing was found."


@pytest.mark.parametrize(("query", "why"), [("odd", "list"), ("broken", "JSON")])
def test_an_invalid_answer_is_a_fault_for_the_agent(server: str, query: str, why: str) -> None:
    with pytest.raises(ToolFault, match=why):
        search(Search(url=server, local=True), query)


def test_a_local_server_needs_a_setting(server: str) -> None:
    with pytest.raises(ToolFault, match="not public"):
        search(Search(url=server), "x")


def test_the_order_is_that_of_bm25() -> None:
    # Okapi BM25 (Robertson and Zaragoza 2009, eq. 3.15) with k1 = 1.2 and b = 0.75. A word in a title counts four times; a word
    # in more than half of the texts has a weight near 0, as in SQLite's manual.
    draw = random.Random(5)
    words = ["qa", "qb", "qc", "qd", "qe", "qf", "qg", "qh"]  # too short to be stemmed
    texts = [
        (draw.choice(words), draw.choices(words, [1, 1, 1, 1, 2, 2, 3, 9], k=draw.randint(3, 40)))
        for _ in range(40)
    ]
    index = CorpusIndex([Passage(title, " ".join(text)) for title, text in texts])
    mean = sum(1 + len(text) for _, text in texts) / len(texts)

    def score(word: str, title: str, text: list[str]) -> float:
        n = sum(word == t or word in x for t, x in texts)
        idf = max(math.log((len(texts) - n + 0.5) / (n + 0.5)), 1e-6)
        f = 4.0 * (title == word) + text.count(word)
        return idf * f * 2.2 / (f + 1.2 * (1 - 0.75 + 0.75 * (1 + len(text)) / mean))

    for query in itertools.combinations(words, 2):
        scores = [sum(score(word, *each) for word in query) for each in texts]
        best = sorted((k for k, value in enumerate(scores) if value > 0), key=lambda k: -scores[k])[:10]
        found = [(each.title, each.text.split()) for each in index.search(" ".join(query), 10)]
        shown = [scores[texts.index((title, text))] for title, text in found]
        assert shown == pytest.approx([scores[k] for k in best], rel=1e-9), query
