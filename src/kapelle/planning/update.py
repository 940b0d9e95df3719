"""The moments of an update at which a base may hold the most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from kapelle.planning.held import trained
from kapelle.planning.passes import Pass, Tree, passes_of
from kapelle.planning.situation import NOTHING, Situation
from kapelle.planning.update_memory import Compute, activations, block_backward, logits
from kapelle.planning.workload import Said

ENOUGH = 3
"""Passes of one learner after which all kinds of passes have been seen."""


def update_moments(now: Situation, base: str) -> Iterator[Mapping[str, int]]:
    """Yield what an update's passes hold on a base, beside weights and optimiser, by kind."""
    shape = now.shapes[base]
    full = base in now.team.trained_bases
    found = passes(now, base)
    whole = 4 * sum(trained(now, base))
    head = 4 * shape.head if full else 0
    for number, work in enumerate(found):
        how = Compute(
            now.size(base),
            4 if full else now.size(base),
            now.cpu(base),
            full,
            any(now.adapters[name].output for name in now.learners(base) if name in now.adapters),
            now.checkpointing,
            now.entropy,
        )
        before = whole if number or not full or now.minibatches > 1 else 0
        yield {
            "activations": activations(shape, work, how),
            "logits": logits(shape, work, how),
            "gradients": before + head,
        }
        block = 4 * shape.block // shape.depth if full else 0
        yield {
            "activations": block_backward(shape, work, how),
            "logits": 0,
            "gradients": before + head + block,
        }
    if full and found:
        yield {"activations": 0, "logits": 0, "gradients": whole + head * (1 + shape.tied)}


def passes(now: Situation, base: str) -> list[Pass]:
    """Return the passes of one optimiser step over a base's share of a step's answers."""
    most, tasks = now.microbatch_tokens, -(-now.work.tasks // now.minibatches)
    trees = []
    for tree in _trees(now, base):
        enough = ENOUGH + ENOUGH * most // tree.size  # tasks are alike: passes repeat
        trees += [tree] * min(tasks, enough)
    if not now.shapes[base].flat:  # nothing is shared
        trees = [single for tree in trees for single in _apart(tree)]
    return _distinct(list(passes_of(trees, most)))


def step_tokens(now: Situation, base: str) -> int:
    """Return the tokens that all passes of an update compute on a base, each distinct one once."""
    return now.work.tasks * sum(tree.size for tree in _trees(now, base))


def _distinct(found: Sequence[Pass]) -> list[Pass]:
    """Return the first pass, and the largest of the others: those after the first find gradients of it."""
    return [*found[:1], *sorted(found[1:], key=lambda work: work.tokens)[-1:]]


def _trees(now: Situation, base: str) -> Iterator[Tree]:
    """Yield what one task's episodes have to be computed for, learner by learner."""
    team, group = now.team, now.work.group
    for name in sorted({said.policy for said in now.work.said}):
        policy = team.policies[name]
        if policy.base != base or not policy.trained or policy.endpoint is not None:
            continue
        own = now.adapters.get(name, NOTHING)
        for chain in _chains([said for said in now.work.said if said.policy == name]):
            yield replace(_tree(chain, group), low=own.low, masked=own.masked)
    for name, critic in team.critics.items():
        if critic.base != base or not critic.trained:
            continue
        own = now.adapters[name]
        for said in now.work.said:
            if team.critic_of.get(said.agent) == name:
                tree = _tree([said], group)
                yield replace(tree, low=own.low, masked=own.masked, critic=True)


def _chains(said: Sequence[Said]) -> list[list[Said]]:
    """Return answers in runs in which each prompt continues the text before it: one sequence computes them all."""
    chains: list[list[Said]] = []
    last: dict[str, list[Said]] = {}
    for each in said:
        if each.continues and each.agent in last:
            last[each.agent].append(each)
        else:
            last[each.agent] = [each]
            chains.append(last[each.agent])
    return chains


def _tree(chain: Sequence[Said], group: int) -> Tree:
    """Return the sequences of a group's answers; their first prompt is shared where nobody has spoken before it."""
    first, last = chain[0], chain[-1]
    length, targets = last.prompt + last.answer - 1, sum(said.answer for said in chain)
    if first.moment == 0 and group > 1:
        return Tree(first.prompt, (length - first.prompt,) * group, (targets,) * group)
    return Tree(0, (length,) * group, (targets,) * group)


def _apart(tree: Tree) -> list[Tree]:
    pairs = zip(tree.branches, tree.targets, strict=True)
    return [replace(tree, stem=0, branches=(tree.stem + branch,), targets=(k,)) for branch, k in pairs]
