"""Images as nouns: files known by their bytes, named in rows, given to endpoints as OpenAI's parts, and never fetched."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL")

from tests.support.seeing import picture

from kapelle.engines.rollout.endpoint import EndpointEngine
from kapelle.engines.rollout.protocol import Request
from kapelle.errors import DataError
from kapelle.runs.episode_json import dump_episode, load_episode
from kapelle.team import Endpoint
from kapelle.types import Episode, Image, Message, Sampling, Task, Turn, conversation

RED, BLUE = picture("red"), picture("blue", kind="JPEG")


def part(url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


class TestBytes:
    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
    def test_the_bytes_say_what_a_file_is(self, kind: str) -> None:
        image = picture("red", kind=kind)
        assert image.media == f"image/{kind.lower()}"
        assert image == Image.of(image.data)
        assert image != picture("green", kind=kind)
        assert image.file == f"{image.hash}.{kind.lower()}"

    @pytest.mark.parametrize("data", [b"", b"<svg/>", b"%PDF-1.7", b"BM" + b"\0" * 60, b"RIFF\0\0\0\0WAVE"])
    def test_other_files_raise_an_error(self, data: bytes) -> None:
        with pytest.raises(ValueError, match="PNG, JPEG, GIF or WebP"):
            Image.of(data)

    def test_too_large_a_file_raises_an_error(self) -> None:
        with pytest.raises(ValueError, match="20,000,001 bytes"):
            Image.of(RED.data[:8] + b"\0" * 19_999_993)


class TestParts:
    def test_a_message_with_images_has_openais_parts_and_one_without_is_as_it_was(self) -> None:
        said = conversation([Message("user", "look", images=(RED,)), Message("user", "and?")])
        assert said[1] == {"role": "user", "content": "and?"}
        shown, words = said[0]["content"]
        assert words == {"type": "text", "text": "look"}
        assert shown["image_url"]["url"].startswith("data:image/png;base64,")
        assert base64.b64decode(shown["image_url"]["url"].partition(",")[2]) == RED.data

    async def test_an_endpoint_gets_them(self) -> None:
        seen: list[Any] = []

        def answer(request: httpx.Request) -> httpx.Response:
            seen.append(json.loads(request.content)["messages"])
            choice = {"message": {"content": "red"}, "finish_reason": "stop"}
            return httpx.Response(200, json={"choices": [choice]})

        engine = EndpointEngine(
            {"p": Endpoint("http://localhost:1/v1", "m")}, transport=httpx.MockTransport(answer)
        )
        asked = (Message("user", "what?", images=(RED, BLUE)),)
        prompt = engine.renderer("p").start(asked)
        await engine.generate(Request("p", "a", asked, prompt, Sampling(), 0, Task("t", "q")))
        [[message]] = seen
        assert [each["image_url"]["url"] for each in message["content"][:2]] == [RED.url, BLUE.url]


def episode(*images: Image) -> Episode:
    new_messages = (Message("user", "look", images=images),)
    turn = Turn("a", "p", 0, "h", 0, 0, (5, 6), (7,), (-0.5,), "stop", "x", new_messages, images=images)
    return Episode(Task("t", "q"), 0, ("a",), (turn,))


class TestRows:
    def test_a_row_without_images_has_no_word_of_them(self) -> None:
        row = json.loads(dump_episode(episode()))
        assert "images" not in row
        assert "images" not in row["turns"][0]
        assert set(row["turns"][0]["new_messages"][0]) == {"role", "content", "speaker"}

    def test_rows_between_processes_hold_each_image_once(self) -> None:
        line = dump_episode(episode(RED, BLUE, RED))
        found = load_episode(json.loads(line))
        assert found == episode(RED, BLUE, RED)
        assert [image.data for image in found.turns[0].images] == [RED.data, BLUE.data, RED.data]
        assert line.count(base64.b64encode(RED.data)) == 1

    def test_rows_of_a_run_name_files(self, tmp_path: Path) -> None:
        line = dump_episode(episode(RED), lambda image: (tmp_path / image.file).write_bytes(image.data))
        assert base64.b64encode(RED.data) not in line
        found = load_episode(json.loads(line), lambda name: (tmp_path / name).read_bytes())
        assert found == episode(RED)
        assert found.turns[0].images[0].data == RED.data

    @pytest.mark.parametrize(
        "damage",
        [
            {"../../../etc/passwd": {"media": "image/png"}},
            {RED.hash: {"media": "image/../../passwd"}},
            {RED.hash.upper() + "/": {"media": "image/png"}},
            {},
        ],
    )
    def test_a_row_that_names_other_files_is_refused(self, damage: dict[str, Any]) -> None:
        row = {**json.loads(dump_episode(episode(RED))), "images": damage}
        asked: list[str] = []

        def find(name: str) -> bytes:
            asked.append(name)
            return b""

        with pytest.raises(DataError, match="has an unknown form"):
            load_episode(row, find)
        assert not asked
