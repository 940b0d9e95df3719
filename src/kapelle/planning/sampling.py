"""The moments of sampling at which a base may hold the most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kapelle.planning.sampling_memory import (
    Rows,
    making_merged,
    merged,
    merges,
    place_bytes,
    places,
    reading,
    step_logits,
)
from kapelle.planning.situation import Situation
from kapelle.planning.workload import Said


def sampling_moments(now: Situation, base: str, tasks: int, group: int) -> Iterator[Mapping[str, int]]:
    """Yield what sampling holds on a base at each moment of its episodes, beside weights, by kind."""
    shape, size, cpu = now.shapes[base], now.size(base), now.cpu(base)
    policies = {
        name for name, policy in now.team.policies.items() if policy.base == base and not policy.endpoint
    }
    copies = making = 0
    if merges(shape, len(policies)):
        used = {now.team.policies[name].lora and name for name in policies}
        copies, making = merged(shape, len(used), size, cpu=cpu), making_merged(shape, size, cpu=cpu)
    each, kept = place_bytes(shape, size), 0
    for rows in rows_of(now, policies, tasks, group):
        prompts = rows.prompt * (rows.prompts if rows.rows >= 2 * rows.prompts else rows.rows)
        end, most = places(rows, flat=shape.flat)
        logits, all_logits = step_logits(shape, rows), rows.rows * shape.vocabulary * 4
        read = reading(shape, rows, size, fused=bool(copies), cpu=cpu)
        for held, active, scores in (
            (prompts, read, 0),
            (prompts, making, 0),
            (prompts, 0, logits),
            (end, 0, logits),
            (most, 0, all_logits),
        ):
            yield {
                "keys and values": each * (held + kept),
                "merged weights": copies,
                "activations": active,
                "logits": scores,
            }
        kept = min(now.kept_tokens, kept + end) if shape.flat else 0


def rows_of(now: Situation, policies: set[str], tasks: int, group: int) -> Iterator[Rows]:
    """Yield the rows of each moment of all episodes that these policies sample."""
    by_moment: dict[int, list[Said]] = {}
    for said in now.work.said:
        if said.policy in policies:
            by_moment.setdefault(said.moment, []).append(said)
    for moment, together in sorted(by_moment.items()):
        rows = len(together) * tasks * group
        prompts = rows if moment else len(together) * tasks
        yield Rows(
            min(now.max_rows, rows),
            min(now.max_rows, prompts),
            max(said.prompt for said in together),
            max(said.answer for said in together),
            any(said.tempered for said in together),
            len({said.policy for said in together}),
        )
