"""Selects the images in prompts that are shown, and reads their bytes.

A run stores each image as `images/HASH.TYPE`. A file is sent only if it is a PNG, JPEG or WebP file and its bytes have
the hash in its name. For other files, only the name is shown, because SVG files may contain scripts and GIF files are
not supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kapelle.types import LARGEST_IMAGE, Image
from kapelle.viewer.lines import listing, mapping, text

SHOWN = ("png", "jpeg", "webp")
"""The image types that are sent."""
MOST_SHOWN = 16
"""The maximum number of images of one message that are shown. For further images, only the name is shown."""
NAMED = re.compile(rf"[0-9a-f]{{32}}\.(?:{'|'.join(SHOWN)})")


class Picture(NamedTuple):
    """An image of a message."""

    name: str
    """The hash of the image."""
    file: str
    """The name of the image's file; empty if only the name of the image is shown."""


def pictures_of(message: Mapping[str, Any], row: Mapping[str, Any]) -> list[Picture]:
    """Return the images of a message in the row of an episode. Damaged rows do not raise an error."""
    media = {name: text(mapping(each).get("media")) for name, each in mapping(row.get("images")).items()}
    found: list[Picture] = []
    for name in map(text, listing(message.get("images"))):
        file = f"{name}.{media.get(name, '').removeprefix('image/')}"
        showable = NAMED.fullmatch(file) and len(found) < MOST_SHOWN
        found.append(Picture(name, file if showable else ""))
    return found


def read_picture(run: Path, file: str) -> Image | None:
    """Return an image of a run, or None if the image is missing, does not match the hash in its name, or is too large."""
    path = run / "images" / file
    if not NAMED.fullmatch(file):
        return None
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_IMAGE:
            return None
        found = Image.of(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if found.file == file else None
