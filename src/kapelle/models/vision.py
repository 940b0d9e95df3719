"""Prepare the inputs of vision-language models: images as patches, image positions, and three-dimensional token positions.

This module supports models of the Qwen2-VL, Qwen2.5-VL and Qwen3-VL types. The chat template writes one token per image
between two marks, and this token is repeated for each merged patch. The model replaces these tokens with the outputs of
its vision tower. The vision tower and its projector are frozen. A text token has the same position in all three
dimensions (M-RoPE, arXiv:2409.12191). An image token has separate positions for time, row and column.

An agent may sample the token of a patch. The positions of images follow from the conversation, and such a token at any
other position is replaced by padding, both in sampling and in training.

In tensor shapes, B is the number of rows, L of positions, P of patches, and F of values of a patch.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

from kapelle.errors import ContextError, DataError, ModelError
from kapelle.models.paths import loading, local_only
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.types import Image

MOST_PIXELS = 50_000_000
"""The maximum number of pixels of an image. A larger image is rejected by its header, before its pixels take memory."""

KEPT = 64
"""The maximum number of images with cached patches."""

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""The image formats that Pillow may read. Each additional format would expose more code to untrusted files."""


class Patches(NamedTuple):
    """An image as the input of the vision tower."""

    values_PF: Tensor
    grid: tuple[int, int, int]
    """The numbers of patches in time, height and width."""


class ModelInputs(NamedTuple):
    """The arguments of a forward pass over some rows."""

    named: dict[str, Tensor]
    """The arguments by name, including `input_ids`."""
    positions: Tensor
    """The positions of the tokens, of shape (B, L), or of shape (3, B, L) if a row has images."""
    shift_B: Tensor
    """The position of a later token minus its index in the row."""


class Vision:
    """Prepares images for one model."""

    def __init__(self, processor: Any, config: Any, rope_index: Callable[..., tuple[Tensor, Tensor]]) -> None:
        """Take the image processor, the model's settings and the model's own method `get_rope_index`."""
        self.processor = processor
        self._rope_index = rope_index
        self._merged = int(config.vision_config.spatial_merge_size) ** 2
        self._begin = int(config.vision_start_token_id)
        self.token = int(config.image_token_id)
        """The id of the token that stands for one merged patch."""
        self._marks = (self.token, int(config.video_token_id))
        self._instead = int(config.get_text_config().pad_token_id or 0)
        self._read = lru_cache(KEPT)(self._patches)

    def patches(self, image: Image) -> Patches:
        """Return the patches of an image. Raises DataError if the file is damaged or too large."""
        return self._read(image)

    def _patches(self, image: Image) -> Patches:
        picture = opened(image)
        try:
            made = self.processor(images=[picture], return_tensors="pt")
        except ValueError as error:  # such as an image 200 times as wide as high
            raise DataError(f"The image {image.hash} cannot be read by the model: {error}.") from error
        time, height, width = map(int, made["image_grid_thw"][0].tolist())
        return Patches(made["pixel_values"], (time, height, width))

    def count(self, image: Image) -> int:
        """Return the number of tokens of an image."""
        time, height, width = self.patches(image).grid
        return time * height * width // self._merged

    def spread(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[int, ...]:
        """Return the tokens of a rendered text, with the token of each image repeated for the patches of the image.

        Raises ContextError unless the chat template wrote one token per image.
        """
        if ids.count(self.token) != len(images):
            raise ContextError(
                f"The chat template writes {ids.count(self.token)} placeholders for {len(images)} images, but must write one "
                "for each. Use the model's own chat_template.jinja."
            )
        counts = iter(images)
        return tuple(
            token
            for each in ids
            for token in ([each] * self.count(next(counts)) if each == self.token else [each])
        )

    def places(self, ids: Sequence[int], images: Sequence[Image]) -> list[tuple[int, int]]:
        """Return the position of the first token of each image and the position after its last token."""
        found: list[tuple[int, int]] = []
        place = 0
        for image in images:
            count = self.count(image)
            run = [self._begin, *[self.token] * count]
            starts = (k for k in range(place, len(ids) - count) if ids[k] == self._begin)
            first = next((k + 1 for k in starts if list(ids[k : k + count + 1]) == run), None)
            if first is None:
                raise ModelError(
                    f"The tokens of a row do not contain {count} consecutive image tokens for the image {image.hash}. "
                    "Use the model's own image processor."
                )
            found.append((first, first + count))
            place = first + count
        return found

    def inputs(
        self, ids_BL: Tensor, first_B: Sequence[int], images_B: Sequence[Sequence[Image]]
    ) -> ModelInputs:
        """Return the arguments of a forward pass over rows that begin at `first_B` and contain these images."""
        device, (rows, length) = ids_BL.device, ids_BL.shape
        first_B1 = torch.tensor(first_B, device=device)[:, None]
        plain_BL = (torch.arange(length, device=device)[None] - first_B1).clamp(min=0)
        shift_B = torch.zeros(rows, dtype=torch.long, device=device)
        seen_BL = torch.zeros(ids_BL.shape, dtype=torch.bool)
        if not any(images_B):
            return ModelInputs({"input_ids": self.readable(ids_BL)}, plain_BL, shift_B)
        positions_3BL = plain_BL[None].repeat(3, 1, 1)
        listed = ids_BL.tolist()
        for row, (first, images) in enumerate(zip(first_B, images_B, strict=True)):
            if not images:
                continue
            text = listed[row][first:]
            for start, end in self.places(text, images):
                seen_BL[row, first + start : first + end] = True
            grid_I3 = torch.tensor([self.patches(image).grid for image in images])
            kind_1L = seen_BL[row, first:].int()[None]
            own_3L, delta = self._rope_index(torch.tensor([text]), kind_1L, grid_I3)
            positions_3BL[:, row, first:] = own_3L[:, 0].to(device)
            shift_B[row] = int(delta)
        every = [image for images in images_B for image in images]
        named = {
            "input_ids": torch.where(seen_BL.to(device), ids_BL, self.readable(ids_BL)),
            "pixel_values": torch.cat([self.patches(image).values_PF for image in every]).to(device),
            "image_grid_thw": torch.tensor([self.patches(image).grid for image in every], device=device),
        }
        return ModelInputs(named, positions_3BL, shift_B)

    def readable(self, ids: Tensor) -> Tensor:
        """Return the tokens with every image token and video token replaced by padding."""
        stray = (ids == self._marks[0]) | (ids == self._marks[1])
        return torch.where(stray, self._instead, ids)


def opened(image: Image) -> Any:
    """Return a Pillow image in RGB. Raises DataError if the file is damaged, too large or missing."""
    from PIL import Image as Pillow

    if not image.data:
        raise DataError(f"The file of the image {image.hash} no longer exists.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about sizes, which are limited here
            with Pillow.open(io.BytesIO(image.data), formats=FORMATS) as picture:
                width, height = picture.size
                if width * height > MOST_PIXELS:
                    raise Pillow.DecompressionBombError
                return picture.convert("RGB")
    except Pillow.DecompressionBombError:
        raise DataError(
            f"The image {image.hash} has more than {MOST_PIXELS:,} pixels. Make it smaller."
        ) from None
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DataError(
            f"The image {image.hash} ({image.media}, {len(image.data):,} bytes) is damaged: {error}."
        ) from error


def sees(config: Any) -> bool:
    """Return whether a model with these settings reads images in the form that `Vision` prepares."""
    named = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id")
    return all(getattr(config, name, None) is not None for name in named)


def auto_class(config: Any) -> Any:
    """Return the `AutoModel` class for these settings: a causal LM, or a vision-language model if there is no causal LM."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    return (
        AutoModelForImageTextToText
        if sees(config) and config.model_type not in CAUSAL
        else AutoModelForCausalLM
    )


def read_image_processor(path: str, config: Any) -> Any:
    """Return the image processor of the model at a path, or None if a model with these settings reads only text.

    Raises ModelError if Pillow or the file of the image processor is missing.
    """
    if not sees(config):
        return None
    need_pillow()
    from transformers import AutoImageProcessor

    with loading(path, "read"):
        return AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=False, local_files_only=local_only(path)
        )


def need_pillow() -> None:
    """Raise ModelError if Pillow is not installed."""
    if find_spec("PIL") is None:
        raise ModelError("A vision-language model needs Pillow: pip install 'kapelle[images]'.")
