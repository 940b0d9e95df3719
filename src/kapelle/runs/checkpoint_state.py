"""A state taken apart for a checkpoint: trees of JSON, and the tensors in them by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from kapelle.errors import CheckpointError
from kapelle.runs.checkpoint_shares import Share, held
from kapelle.runs.exact_json import encode
from kapelle.runtime.ranks import ALONE, Peers
from kapelle.types import Json

if TYPE_CHECKING:
    import torch

_PART = re.compile(r"[A-Za-z0-9_-]+")


class Contents:
    """What one rank has to write of a state."""

    def __init__(
        self,
        state: Mapping[str, object],
        ranks: Peers = ALONE,
        shared: Collection[str] = (),
        *,
        copied: bool = False,
    ) -> None:
        """Take a state apart; of several `ranks` each writes a share of the parts that are `shared`.

        `copied` takes copies, which training does not change any more. Raises CheckpointError for a value that has no form.
        """
        shared = shared if ranks.size > 1 else ()
        self.first = ranks.rank == 0
        """Whether this rank writes the trees."""
        self.trees: dict[str, Json] = {}
        """By part; a tensor is {"$tensor": "<part>/<name>"}."""
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        """What this rank writes, by part and name."""
        self.shares: dict[str, Share] = {}
        """By part, where several ranks write it."""
        for part, tree in state.items():
            assert _PART.fullmatch(part), f"'{part}' names a file"
            self.trees[part], tensors = _split(part, tree, whole=part in shared, copied=copied)
            if part in shared:
                self.shares[part] = Share(tensors, ranks.rank, ranks.size, copied=copied)
                tensors = self.shares[part].tensors
            self.tensors[part] = _apart(tensors)


def _split(part: str, tree: object, *, whole: bool, copied: bool) -> tuple[Json, dict[str, torch.Tensor]]:
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def tensor(value: object, place: str) -> Json | None:
        if not isinstance(value, torch.Tensor):
            return None
        # Places can repeat when keys contain dots; names must not.
        name = place.removeprefix(f"{part}.") if place != part else "value"
        while name in tensors:
            name += "'"
        tensors[name] = value.detach() if whole else held(value, copied=copied)
        return {"$tensor": f"{part}/{name}"}

    try:
        encoded = encode(tree, part, tensor)
    except TypeError as error:
        raise CheckpointError(f"Cannot write a checkpoint: {error}, and is not a tensor.") from error
    return encoded, tensors


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give every tensor memory of its own: the format does not store that tied weights and views share theirs."""
    seen: set[int] = set()
    for name, value in tensors.items():
        storage = value.untyped_storage().data_ptr()
        if storage in seen:
            tensors[name] = value.clone()
        seen.add(storage)
    return tensors
