"""Images in prompts: which images of a message are shown, and their bytes.

A run stores each image in `images/HASH.TYPE`. A file is sent only if it is a PNG, JPEG or WebP, its bytes have the hash in
its name, and a browser can unpack its size. Others are only named: SVG may hold scripts, and GIF is not shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kapelle.types import LARGEST_IMAGE, Image
from kapelle.viewer.lines import listing, mapping, text

SHOWN = ("png", "jpeg", "webp")
"""Image types that are sent."""
MOST_SHOWN = 16
"""Most images of one message that are shown; further ones are named."""
MOST_PIXELS = 50_000_000
"""Most pixels of an image that is sent; `models/vision.py` has the same limit."""
NAMED = re.compile(rf"[0-9a-f]{{32}}\.(?:{'|'.join(SHOWN)})")


class Picture(NamedTuple):
    """One image of a message."""

    name: str
    """Its hash."""
    file: str
    """Its file; empty if it is only named."""


def pictures_of(message: Mapping[str, Any], row: Mapping[str, Any]) -> list[Picture]:
    """Return the images of a message in an episode's row; damaged rows raise no error."""
    media = {name: text(mapping(each).get("media")) for name, each in mapping(row.get("images")).items()}
    found: list[Picture] = []
    for name in map(text, listing(message.get("images"))):
        file = f"{name}.{media.get(name, '').removeprefix('image/')}"
        showable = NAMED.fullmatch(file) and len(found) < MOST_SHOWN
        found.append(Picture(name, file if showable else ""))
    return found


def read_picture(run: Path, file: str) -> Image | None:
    """Return an image of a run; None if it is missing, does not match its name, or is too large."""
    path = run / "images" / file
    if not NAMED.fullmatch(file):
        return None
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_IMAGE:
            return None
        found = Image.of(path.read_bytes())
    except (OSError, ValueError):
        return None
    size = _pixels(found)
    return found if found.file == file and size is not None and 0 < size <= MOST_PIXELS else None


def _pixels(image: Image) -> int | None:
    """Return the number of pixels in the header of an image; None without one."""
    data = image.data
    if image.media == "image/png":
        return int.from_bytes(data[16:20]) * int.from_bytes(data[20:24]) if data[12:16] == b"IHDR" else None
    if image.media == "image/webp":
        kind = data[12:16]
        if kind == b"VP8X":
            return (1 + int.from_bytes(data[24:27], "little")) * (1 + int.from_bytes(data[27:30], "little"))
        if kind == b"VP8L":
            sides = int.from_bytes(data[21:25], "little")
            return (1 + (sides & 0x3FFF)) * (1 + (sides >> 14 & 0x3FFF))
        sides = int.from_bytes(data[26:30], "little")
        return (sides & 0x3FFF) * (sides >> 16 & 0x3FFF) if kind == b"VP8 " else None
    # A JPEG is a list of segments: 0xFF, a marker, a length in two bytes. The segment of the frame has the sides.
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(data[place + 5 : place + 7]) * int.from_bytes(data[place + 7 : place + 9])
        else:
            place += 2 + int.from_bytes(data[place + 2 : place + 4])
    return None
