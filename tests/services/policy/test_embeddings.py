"""Embeddings, by OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from tests.support.sentences import sentences

from kapelle.rollout.setup import RolloutSetup
from kapelle.services.binding import Binding
from kapelle.services.policy.embeddings import MOST_TEXTS, Embedder
from kapelle.services.policy.service import ServingLimits, serve_policy


@pytest.fixture(scope="module")
def reader(setup: RolloutSetup) -> Iterator[OpenAI]:
    """A client of a team with an embedding model."""
    with sentences():
        embedder = Embedder("letters")
    with (
        serve_policy(setup, "duo", Binding(), ServingLimits(), embedder=embedder) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0) as made,
    ):
        yield made


@pytest.mark.parametrize("form", [{"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_every_text_has_its_vector_in_order(reader: OpenAI, form: dict[str, Any]) -> None:
    """By default the client requests base64 and decodes it."""
    found = reader.embeddings.create(model="letters", input=["abba", "x" * 20], user="me", **form)
    vectors: list[Any] = [each.embedding for each in found.data]
    if form.get("encoding_format") == "base64":
        assert vectors == ["AAAAQAAAAEAAAAAA", "AAAAAAAAAAAAAKBB"], "float32 of 2, 2, 0 and 0, 0, 20"
    else:
        assert vectors == [[2.0, 2.0, 0.0], [0.0, 0.0, 20.0]]
    assert [each.index for each in found.data] == [0, 1]
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (12, 12), "the model reads 8 of the 20"


def test_the_embedding_model_is_listed(reader: OpenAI) -> None:
    assert [each.id for each in reader.models.list()] == ["duo", "duo/first", "duo/second", "letters"]
    assert reader.models.retrieve("letters").id == "letters"


@pytest.mark.parametrize(
    ("wrong", "parameter", "says"),
    [
        ({"input": ""}, "input", "non-empty"),
        ({"input": ["a", ""]}, "input", "non-empty"),
        ({"input": ["a", 3]}, "input", "non-empty"),
        ({"input": [1, 2]}, "input", "check_embedding_ctx_length=False"),
        ({"input": ["a"] * (MOST_TEXTS + 1)}, "input", "2048"),
        ({"input": "a", "dimensions": 2}, "dimensions", "have 3"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
        ({"input": "a", "extra_body": {"pooling": "mean"}}, "pooling", "not supported"),
    ],
)
def test_an_unreadable_part_is_named(
    reader: OpenAI, wrong: dict[str, Any], parameter: str, says: str
) -> None:
    with pytest.raises(BadRequestError) as raised:
        reader.embeddings.create(model="letters", **wrong)
    assert raised.value.param == parameter
    assert says in str(raised.value)


def test_calls_beyond_the_limit_are_told_to_retry(setup: RolloutSetup, web: httpx.Client) -> None:
    with sentences():
        embedder = Embedder("letters")
    with serve_policy(setup, "duo", Binding(), ServingLimits(calls=0), embedder=embedder) as server:
        answer = web.post(f"{server.url}/v1/embeddings", json={"model": "letters", "input": "a"})
    assert answer.status_code == 429
