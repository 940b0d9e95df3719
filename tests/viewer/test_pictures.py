"""Pictures that agents saw are shown, as what they are; what is no such picture stays a name."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from PIL import Image as Pillow
from tests.support.viewed_runs import CONFIG, append_step, episode, metrics

from kapelle.runs.writer import RunDirectory
from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.types import Group, Image, Message, Task
from kapelle.viewer import pictures
from kapelle.viewer.library import Library
from kapelle.viewer.pictures import pictures_of, read_picture
from kapelle.viewer.server import viewer


def picture(kind: str, shade: int = 90, size: tuple[int, int] = (40, 24), **how: object) -> Image:
    file = io.BytesIO()
    Pillow.new("RGB", size, (shade, 20, 20)).save(file, kind, **how)
    return Image.of(file.getvalue())


SHOWN = {
    "png": picture("PNG"),
    "jpeg": picture("JPEG"),
    "progressive jpeg": picture("JPEG", progressive=True),
    "webp": picture("WEBP"),
    "lossless webp": picture("WEBP", lossless=True),
    "webp with a profile": picture("WEBP", icc_profile=b"x" * 20),
}
GIF = picture("GIF")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "seen"
    said = episode(Task("t", "Which?", {}), 2, right=True)
    new_messages = (Message("user", "Which?", images=(*SHOWN.values(), GIF)),)
    first = replace(said.turns[0], new_messages=new_messages, images=new_messages[0].images)
    config = CONFIG.format(name="pair", seed=0, algorithm="grpo", lr=0.001)
    with RunDirectory.create(path, config=config, provenance={}, resume=False) as run:
        run.rewind({})
        append_step(run, 1)
        run.record_metrics(2, metrics(2))
        run.record_episodes(2, [Group(said.task, (replace(said, turns=(first, *said.turns[1:])),))])
        run.report("done", 2, "finished")
    return path


@pytest.fixture(scope="module")
def server(seen: Path) -> Iterator[str]:
    with HttpServer(Binding(), viewer(Library([seen.parent]), Binding())) as made:
        yield made.url


@pytest.fixture
def client(server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server, timeout=60.0) as made:
        yield made


@pytest.mark.parametrize("kind", SHOWN)
def test_a_picture_is_sent_as_what_it_is(kind: str, client: httpx.Client) -> None:
    image = SHOWN[kind]
    page = client.get("/run/seen/episode/train/2/0").text
    assert f'<img src="/run/seen/image/{image.file}" alt="image {image.hash}' in page
    answer = client.get(f"/run/seen/image/{image.file}")
    assert (answer.status_code, answer.content) == (200, image.data)
    assert answer.headers["content-type"] == image.media
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "img-src 'self';" in answer.headers["content-security-policy"]
    assert f"/run/seen/image/{image.file}" in client.get("/run/seen/together?e=train.2.0").text


@pytest.mark.parametrize(
    "name",
    [
        "config.yaml",
        "..%2fconfig.yaml",
        "..%2f..%2fetc%2fpasswd",
        f"{'0' * 32}.png",
        f"{'0' * 32}.svg",
        f"{SHOWN['png'].hash}.svg",
        f"{SHOWN['png'].hash}.jpeg",
        f"{SHOWN['png'].hash.upper()}.png",
        f"{SHOWN['png'].file}%00",
        f"{SHOWN['png'].file}%0a",
    ],
)
def test_no_other_name_is_read(name: str, client: httpx.Client) -> None:
    answer = client.get(f"/run/seen/image/{name}")
    assert answer.status_code == 404
    assert "content-security-policy" in answer.headers


SVG = b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'></svg>"


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("scripts", SVG),
        ("nothing", b""),
        ("another picture", picture("PNG", 91).data),
        ("a picture with a script behind it", SHOWN["png"].data + b"<script>alert(1)</script>"),
    ],
)
def test_bytes_that_are_not_what_their_name_says_are_not_sent(tmp_path: Path, what: str, data: bytes) -> None:
    (tmp_path / "images").mkdir()
    image = SHOWN["png"]
    (tmp_path / "images" / image.file).write_bytes(image.data)
    assert read_picture(tmp_path, image.file) == image
    (tmp_path / "images" / image.file).write_bytes(data)
    assert read_picture(tmp_path, image.file) is None, what


def test_files_that_are_too_large_or_no_files_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images").mkdir()
    image = SHOWN["png"]
    path = tmp_path / "images" / image.file
    os.mkfifo(path)  # no one would ever write into it
    assert read_picture(tmp_path, image.file) is None
    path.unlink()
    path.write_bytes(image.data)
    monkeypatch.setattr(pictures, "LARGEST_IMAGE", len(image.data) - 1)
    assert read_picture(tmp_path, image.file) is None


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"images": 5},
        {"images": {"0" * 32: None}},
        {"images": {"0" * 32: {"media": 7}}},
        {"images": {"0" * 32: {"media": "image/svg+xml"}}},
        {"images": {"0" * 32: {"media": "image/png/../../x.png"}}},
    ],
)
def test_a_row_that_says_something_else_shows_none(row: dict[str, object]) -> None:
    [found] = pictures_of({"images": ["0" * 32]}, row)
    assert found.file == ""
    assert [each.file for each in pictures_of({"images": [None, 5, "../x.png", {}]}, row)] == [""] * 4
