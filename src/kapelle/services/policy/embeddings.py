"""Implements embeddings of texts (`POST /v1/embeddings`) with a sentence-transformers model.

The model is served together with the team (`--embedder`). This route is intended for programs with a memory or a
retriever that use the same base URL for their chat model and their embedder.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from pydantic import Field

from kapelle.algorithms.signals.embeddings import load_sentences
from kapelle.services.request_errors import Body, read_body, wrong
from kapelle.types import Json

MOST_TEXTS = 2048
"""The maximum number of texts of one call, as in OpenAI's API."""


class EmbeddingRequest(Body):
    """An embedding request. Parameters that are not listed raise a RequestError."""

    model: str
    input: str | list[Any]
    """The text to embed, or a list of texts."""
    encoding_format: Literal["float", "base64"] = "float"
    """The encoding of the vectors: a list of numbers, or the base64-encoded bytes of little-endian float32 numbers. OpenAI's
    client requests the bytes by default."""
    dimensions: int | None = Field(default=None, ge=1)
    # This parameter has no effect.
    user: str | None = None

    @property
    def texts(self) -> list[str]:
        """The texts as a list. Raises RequestError (400) for any other input."""
        given = [self.input] if isinstance(self.input, str) else self.input
        if given and all(isinstance(each, int | list) for each in given):
            raise wrong(
                "`input` contains token ids, but the embedder has a different tokeniser. Send strings: set "
                "check_embedding_ctx_length=False for `OpenAIEmbeddings` of LangChain.",
                "input",
            )
        if not given or not all(isinstance(each, str) and each for each in given):
            raise wrong("`input` must be a non-empty string or a list of non-empty strings.", "input")
        if len(given) > MOST_TEXTS:
            raise wrong(f"`input` has {len(given)} strings, but at most {MOST_TEXTS} are allowed.", "input")
        return given


class Embedder:
    """A named sentence-transformers model."""

    def __init__(self, path: str) -> None:
        """Load a model from a folder or from the hub. Raises AbsentPackage and ModelError."""
        self.name = Path(path).resolve().name if Path(path).is_dir() else path
        self._read = load_sentences(path)
        self._one_at_a_time = Lock()

    async def answer(self, body: Json) -> Json:
        """Return the vectors of the texts of a call in OpenAI's format.

        Raises RequestError (400), which names the first incorrect parameter.
        """
        given = read_body(EmbeddingRequest, body)
        texts = given.texts
        vectors, tokens = await asyncio.to_thread(self._vectors, texts)
        width = len(vectors[0])
        if given.dimensions not in (None, width):
            raise wrong(
                f"`dimensions` is {given.dimensions}, but vectors of '{self.name}' have {width} dimensions.",
                "dimensions",
            )
        rows = [
            {"object": "embedding", "index": place, "embedding": _written(vector, given.encoding_format)}
            for place, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": rows, "model": given.model, "usage": usage}

    def _vectors(self, texts: list[str]) -> tuple[list[list[float]], int]:
        with self._one_at_a_time:
            return self._read(texts).float().cpu().tolist(), self._read.tokens(texts)


def _written(vector: list[float], form: str) -> list[float] | str:
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
