"""What is held from step to step: weights, what their training keeps, and copies.

weights      4 bytes where they train; frozen ones in the compute type; linear layers of a frozen base in nf4 as codes of
             half a byte with a scale of one byte for 64 of them, and one of four bytes for 256 scales; adapters, critics' heads
             and references of adapters in float32; a reference of whole weights is a second copy
gradients    4 bytes for each number that trains, from an update's first pass to its step
optimiser    AdamW's two moments: 8 bytes; of the 8-bit ones 2 bytes and two scales of four bytes for 256 numbers
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from kapelle.models.outline import Outline
from kapelle.planning.situation import Situation

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in four bits, with its share of the scales (2305.14314, section 3)."""
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 2 * 4 / 256, "paged_adamw_8bit": 2 + 2 * 4 / 256}
"""Bytes of the moments of a number that trains, by `optimizer.name`; 2110.02861 for those of one byte."""


def base_bytes(outline: Outline, size: int, *, nf4: bool) -> int:
    """Return the bytes of a frozen base in a compute type of so many bytes, or with linear layers in four bits."""
    if not nf4:
        return size * outline.parameters
    layers = outline.layers
    codes = {f"{path}.weight" for path in layers.linear if path != layers.head}
    total = 0.0
    for name, shape in outline.weights.items():
        total += prod(shape) * (NF4 if name in codes else size)
    return int(total)


def copies(now: Situation) -> Iterator[tuple[str, int]]:
    """Yield every base in memory once, with its bytes: frozen ones of one path and place are one."""
    seen: set[tuple[str, object]] = set()
    for base, path in now.team.bases.items():
        if base in now.team.trained_bases:
            yield base, 4 * now.outlines[base].parameters
        elif (path, now.places[base]) not in seen:
            seen.add((path, now.places[base]))
            yield base, base_bytes(now.outlines[base], now.size(base), nf4=base in now.nf4)


def adapters(now: Situation, base: str) -> int:
    """Return the bytes of all adapters and heads on a base, references' too."""
    team = now.team
    total = 0
    for policy in team.every.values():
        if policy.endpoint is None and policy.base == base and policy.lora is not None:
            copied = 1 + (now.references and policy.trained)
            total += copied * now.adapters[policy.name].parameters
    for critic in team.critics.values():
        if critic.base == base:
            total += now.adapters[critic.name].parameters + now.outlines[base].hidden + 1
    return 4 * total


def whole_copies(now: Situation, base: str) -> int:
    """Return the bytes of references and embedders of a base whose own weights train."""
    if base not in now.team.trained_bases:
        return 0
    return (now.references + now.embedders) * 4 * now.outlines[base].parameters


def trained(now: Situation, base: str) -> list[int]:
    """Return how many numbers each learner on a base trains."""
    counts = []
    for policy in now.team.policies.values():
        if policy.trained and policy.endpoint is None and policy.base == base:
            whole = now.outlines[base].parameters
            counts.append(whole if policy.lora is None else now.adapters[policy.name].parameters)
    critics = [critic for critic in now.team.critics.values() if critic.trained and critic.base == base]
    heads = now.outlines[base].hidden + 1
    counts += [now.adapters[critic.name].parameters + heads for critic in critics]
    return counts


def moments(now: Situation, base: str) -> int:
    """Return the bytes of the optimisers' state on a base."""
    return int(MOMENTS[now.optimizer] * sum(trained(now, base)))
