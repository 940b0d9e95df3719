"""Run interventions: change an episode at one of its moments, and continue the changed episode from this moment.

An episode is determined by its task, its seed and its turns. A continuation therefore runs the same workflow in a new episode state:
it replays the recorded turns token by token (`Record`), applies the change, and samples all later turns with its own seed.
Environments are never copied.

The function `continue_forks` has three callers:

- `intervene`: an algorithm changes finished episodes of a step;
- `choose`: tree sampling evaluates the candidates of a moment while the episode waits;
- `evaluation.blame`: a user measures the effect of every turn of evaluated episodes.

An algorithm can request one of these changes (`algorithm.Change`):

- `resample`: one turn is sampled again;
- `replace`: one turn is replaced by another turn, such as a turn of another episode with the same prompt;
- `remove`: all turns of some agents are empty;
- `swap`: another policy samples all turns of an agent.

The turns of other agents at the same moment are replayed. The n-th continuations of all changes at one moment have the same seed,
which reduces the variance of the difference of their returns without changing its expectation.

**Budget.** If the number of tokens is limited, each episode receives an equal part of the budget. Which changes of an episode are
rolled out is determined by the *other* episodes of its group. For each slot (an agent's turn with a given number), the cost in
tokens, the frequency and the priority are computed from these other episodes. The slots with the highest priority are chosen as long
as their expected cost fits in the budget. If an episode's own turns were used, the baseline would depend on the turns that it is
compared with, and the update would no longer follow ∇J. A slot whose cost only partly fits is rolled out in the corresponding share
of the episodes, drawn with their seeds. The sampled tokens are counted in `Episode.continued`.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, Self

from kapelle.algorithm import Change, Interventions, JointAction, Slot, Tree
from kapelle.errors import EpisodeError
from kapelle.rollout.partial import numbered
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Team
from kapelle.types import Episode, Group, Intervention, Turn


class Record:
    """The turns to replay and the joint action that follows them. The method `rewind` restarts the replay."""

    def __init__(
        self,
        past: Sequence[Turn],
        now: Sequence[Turn],
        begun: Sequence[Turn] = (),
        absent: Collection[str] = (),
        swapped: Mapping[str, str] = MappingProxyType({}),
        resampled: Collection[str] = (),
    ) -> None:
        """Set the recorded turns (`past`), one candidate of each agent that moves next (`now`), and unfinished turns (`begun`).

        After these turns, agents in `absent` have empty turns, and for agents in `swapped` the given policies sample. Agents in
        `resampled` also move next, and their turns are sampled.
        """
        self.absent, self.swapped = frozenset(absent), swapped
        self._moving = frozenset(resampled)
        self._all = dict(numbered((*past, *now, *begun)))
        self.begun = {turn.agent: turn for turn in begun}
        """Mapping from an agent to its unfinished turn, which will be continued."""
        self._past = tuple(past)
        self._now = {turn.agent for turn in (*now, *begun)} | self._moving
        self._tokens = _tokens((*past, *now))
        self.rewind()

    def rewind(self) -> None:
        """Restart the replay from the first turn."""
        self._given = dict(self._all)
        self._waits_for = set(self._moving)
        self._diverged: str | None = None

    def again(self) -> Self:
        """Return a copy of the record whose replay starts from the first turn."""
        other = copy.copy(self)
        other.rewind()
        return other

    def take(self, agent: str, number: int, prompt_ids: Sequence[int], turns: Sequence[Turn]) -> Turn | None:
        """Return the agent's recorded turn with this number (from 0), or None if the turn must be sampled.

        The argument `turns` contains the turns of the replay so far. Raises EpisodeError if the prompt or the rewards differ from the
        record.
        """
        given = self._given.pop((agent, number), None)
        if given is None and agent not in self._waits_for:
            return None
        if given is None:
            self._waits_for.discard(agent)
        elif given.prompt_ids != tuple(prompt_ids):
            same = [a == b for a, b in zip(given.prompt_ids, prompt_ids, strict=False)]
            at = same.index(False) if False in same else len(same)
            self._fail(f"the prompt of '{agent}' at its turn {number + 1} differs from token {at} on")
        if len(turns) == len(self._past) and agent in self._now:
            now = dict(numbered(turns))
            for key, old in numbered(self._past):
                new = now.get(key, old)
                if old.reward != new.reward:
                    self._fail(
                        f"'{old.agent}' has the reward {new.reward} for turn {old.index} instead of {old.reward}"
                    )
        return given

    def replays(self, agent: str) -> bool:
        """Return whether the record still contains a turn of the agent to replay."""
        return any(name == agent for name, _ in self._given)

    @property
    def left(self) -> bool:
        """Whether the record still contains turns to replay."""
        return bool(self._given)

    def diverged(self, ended: Episode | None = None) -> str | None:
        """Return a description of how the replay differs from the record, or None if it does not differ.

        If the `ended` episode ended before all turns were replayed, this is also a difference.
        """
        left = len(self._given) + len(self._waits_for)
        if left and ended is not None and self._diverged is None:
            reason = ended.error or "no error"
            self._diverged = f"it ended with {left} of the turns not replayed ({reason})"
        return self._diverged

    def sampled(self, episode: Episode) -> Counter[str]:
        """Return the number of sampled tokens of an episode by policy, without the replayed tokens."""
        return _tokens(episode.turns) - self._tokens

    def _fail(self, how: str) -> None:
        self._diverged = how
        raise EpisodeError(how)


def does_not_repeat(environment: str, how: str, off: str) -> EpisodeError:
    """Return the error of an episode that differed from its record. The message names the setting `off`, which avoids replays."""
    return EpisodeError(
        f"An episode of '{environment}' does not repeat with the same seed and turns: {how}. Set {off}, or derive all randomness of "
        "environment and workflow from their seeds."
    )


def _tokens(turns: Sequence[Turn]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for turn in turns:
        counted[turn.policy] += len(turn.completion_ids)
    return counted


# -------- Continuations


class Fork(NamedTuple):
    """A moment of an episode and a change, from which continuations of the episode start."""

    episode: Episode
    sample: int
    """Index of the episode in its group."""
    record: Record
    """The turns to replay, and the change that follows them."""
    seeds: tuple[int | str, ...]
    """Values from which the seeds of the continuations are derived, together with their indices. The values are equal for all forks at
    the same moment."""


class Continuation(NamedTuple):
    """One continuation of a forked episode."""

    fork: Fork
    record: Record
    """A copy of the record of the fork."""
    seed: int
    """Seed of the turns that are sampled."""


RollOutAll = Callable[[Sequence[Continuation]], Awaitable[Sequence[Episode]]]
"""Function that rolls out continuations concurrently and returns all of their episodes, including failed ones."""


class ContinuedFork(NamedTuple):
    """The results of all continuations of a fork."""

    episodes: tuple[Episode, ...]
    """The episodes of the continuations, including failed ones."""
    tokens: Counter[str]
    """Number of sampled tokens by policy."""
    diverged: str | None
    """How the first continuation that differs from the record differs from it, or None if all continuations repeat the record."""

    @property
    def valid(self) -> list[Episode]:
        """The continuations that did not fail."""
        return [episode for episode in self.episodes if episode.error is None]


async def continue_forks(forks: Sequence[Fork], times: int, roll_out_all: RollOutAll) -> list[ContinuedFork]:
    """Continue each fork `times` times. All continuations run concurrently."""
    runs = [
        Continuation(fork, fork.record.again(), derive_seed(*fork.seeds, number))
        for fork in forks
        for number in range(times)
    ]
    episodes = await roll_out_all(runs)
    found = []
    for begin in range(0, len(runs), times):
        own = list(zip(runs[begin : begin + times], episodes[begin : begin + times], strict=True))
        tokens = sum((run.record.sampled(episode) for run, episode in own), Counter[str]())
        diverged = [how for run, episode in own if (how := run.record.diverged(episode)) is not None]
        found.append(ContinuedFork(tuple(episode for _, episode in own), tokens, next(iter(diverged), None)))
    return found


def turns_until(episode: Episode, count: int) -> tuple[Turn, ...]:
    """Return the first `count` turns of an episode, with the rewards that had been received before the next turn started."""
    turns = episode.turns
    own = {turn.agent: k for k, turn in reversed(list(enumerate(turns)))}
    earned, by_then, begun = [0.0] * len(turns), None, 0
    # Summed in the order of the reward events, as in the scene, so that sums are bitwise equal.
    for event in episode.reward_events:
        if event.after > count and by_then is None:
            by_then = list(earned)
        while begun < min(event.after, len(turns)):
            own[turns[begun].agent] = begun
            begun += 1
        if event.agent in own:
            earned[own[event.agent]] += event.reward
    if by_then is None:
        return turns[:count]
    return tuple(
        replace(turn, reward=before) if turn.reward == whole else turn
        for turn, before, whole in zip(turns[:count], by_then, earned, strict=False)
    )


# -------- Changes of an algorithm to the episodes of a step


async def intervene(
    groups: Sequence[Group],
    interventions: Interventions,
    team: Team,
    step: int,
    environment: str,
    roll_out_all: RollOutAll,
) -> list[Group]:
    """Run interventions on the episodes of groups, and return groups with the results (`Episode.interventions`).

    The argument `step` is the number of groups of the whole step. Failed continuations are excluded from the returns of a change. If
    an episode does not repeat exactly, it becomes a failed episode.
    """
    chosen = [
        (g, e, change)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
        for change in affordable(group, e, interventions, team, step)
    ]
    forks = [fork_of(groups[g].episodes[e], e, change) for g, e, change in chosen]
    became: dict[tuple[int, int], list[tuple[Change, ContinuedFork]]] = {}
    for (g, e, change), found in zip(
        chosen, await continue_forks(forks, interventions.continuations, roll_out_all), strict=True
    ):
        became.setdefault((g, e), []).append((change, found))
    return [
        replace(
            group,
            episodes=tuple(
                _with(episode, became.get((g, e), []), interventions, environment)
                for e, episode in enumerate(group.episodes)
            ),
        )
        for g, group in enumerate(groups)
    ]


def _with(
    episode: Episode,
    became: Sequence[tuple[Change, ContinuedFork]],
    settings: Interventions,
    environment: str,
) -> Episode:
    if not became:
        return episode
    spent = sum((found.tokens for _, found in became), Counter[str]())
    for _, found in became:
        if found.diverged is not None:
            fault = does_not_repeat(environment, found.diverged, "another algorithm")
            recorded = (episode.task, episode.seed, episode.agents, episode.turns)
            return Episode(*recorded, error=f"EpisodeError: {fault}", continued=spent)
    made = tuple(
        Intervention(
            change.what,
            change.agents,
            _first_turn(episode, change),
            tuple(settings.returns(ended) for ended in found.valid),
        )
        for change, found in became
    )
    return replace(episode, interventions=made, continued=dict(Counter(episode.continued) + spent))


def affordable(
    group: Group, number: int, interventions: Interventions, team: Team, step: int
) -> list[Change]:
    """Return the changes of an episode that will be rolled out.

    Without a token limit, these are all changes; otherwise, they are the changes whose expected cost fits in the episode's budget.
    """
    changes = list(interventions.change(group, number, team))
    if interventions.share is None and interventions.tokens is None:
        return changes
    others = Group(group.task, tuple(each for k, each in enumerate(group.episodes) if k != number))
    costs: dict[Slot, list[int]] = {}
    for k, other in enumerate(others.episodes):
        for change in interventions.change(others, k, team) if other.error is None else ():
            first = _first_turn(other, change)
            after = 0 if first is None else interventions.continuations * _tokens(other.turns[first:]).total()
            costs.setdefault(slot_of(other, change), []).append(after)
    if not costs:
        return []
    room = float("inf")
    if interventions.share is not None:
        room = interventions.share * fmean(_tokens(other.turns).total() for other in others.valid)
    if interventions.tokens is not None:
        room = min(room, interventions.tokens / (step * len(group.episodes)))
    slots = list(costs)
    if interventions.says is not None:
        informative = interventions.says(others)
        slots.sort(key=lambda slot: -informative(slot))
    fitting: set[Slot] = set()
    for slot in slots:
        cost = sum(costs[slot]) / len(others.valid)
        share = 1.0 if cost <= room else room / cost
        if share == 1.0 or _drawn(group.episodes[number], slot) < share:
            fitting.add(slot)
        room = max(0.0, room - cost)
    return [change for change in changes if slot_of(group.episodes[number], change) in fitting]


def _drawn(episode: Episode, slot: Slot) -> float:
    """Return a random number in [0, 1) that is derived from the episode's seed and a slot."""
    number = -1 if slot.number is None else slot.number
    return random.Random(derive_seed(episode.seed, "budget", *slot.agents, number)).random()


def slot_of(episode: Episode, change: Change) -> Slot:
    """Return the slot of a change. Equivalent changes of other episodes have the same slot."""
    if change.turn is None:
        return Slot(change.agents, None)
    (agent,) = change.agents
    return Slot(change.agents, sum(turn.agent == agent for turn in episode.turns[: change.turn]))


def _first_turn(episode: Episode, change: Change) -> int | None:
    if change.turn is not None:
        return change.turn
    return next((turn.index for turn in episode.turns if turn.agent in change.agents), None)


def moment_of(episode: Episode, change: Change) -> tuple[Sequence[Turn], Sequence[Turn]]:
    """Return the turns that were complete when the first changed turn started, and the unchanged turns of the same moment."""
    first = _first_turn(episode, change)
    if first is None:
        return episode.turns, ()
    seen = episode.turns[first].completed_before
    beside = [
        turn
        for turn in episode.turns[seen:]
        if turn.completed_before <= seen and turn.agent not in change.agents
    ]
    return turns_until(episode, seen), beside


def fork_of(episode: Episode, sample: int, change: Change) -> Fork:
    """Return the fork at which an episode is changed and continued."""
    past, beside = moment_of(episode, change)
    match change.what, change.by:
        case "replace", Turn() as other:
            record = Record(past, (*beside, other))
        case "remove", None:
            record = Record(past, beside, absent=change.agents)
        case "swap", str() as policy:
            record = Record(past, beside, swapped=dict.fromkeys(change.agents, policy))
        case "resample", None:
            record = Record(past, beside, resampled=change.agents)
        case _:
            raise ValueError(f"a change `{change.what}` does not support `by` {change.by!r:.60}")
    return Fork(episode, sample, record, (episode.seed, "intervention", len(past)))


# -------- The candidates at a moment of a tree: each joint action is continued


async def choose(
    tree: Tree,
    so_far: Episode,
    sample: int,
    drafts: Sequence[Sequence[Turn]],
    environment: str,
    roll_out_all: RollOutAll,
) -> list[tuple[Turn, list[Turn]]]:
    """Return the chosen candidate of each agent that moves, and the other candidates of this agent.

    The argument `drafts` contains the candidates of every agent that moves after the turns `so_far`. The value of a candidate is the
    mean return of its agent over valid continuations, and is stored in `continuation_return`. A frozen agent has only one candidate,
    without a value. Candidates with the same tokens are continued only once. Raises EpisodeError if all continuations of a joint
    action failed, or if a continuation does not repeat the recorded turns.
    """
    counts = [len(candidates) for candidates in drafts]
    judged_by = {
        (m, k): tuple(tree.judged_by(counts, m, k))
        for m, count in enumerate(counts)
        if count > 1
        for k in range(count)
    }

    seeds = (so_far.seed, "continuation", len(so_far.turns))
    forks: dict[tuple[tuple[int, ...], ...], Fork] = {}
    tokens_of: dict[JointAction, tuple[tuple[int, ...], ...]] = {}
    for action in dict.fromkeys(action for actions in judged_by.values() for action in actions):
        joint = [drafts[m][k] for m, k in enumerate(action)]
        tokens_of[action] = tuple(turn.completion_ids for turn in joint)
        if tokens_of[action] not in forks:
            forks[tokens_of[action]] = Fork(so_far, sample, Record(so_far.turns, joint), seeds)
    found = dict(
        zip(forks, await continue_forks(list(forks.values()), tree.continuations, roll_out_all), strict=True)
    )
    for became in found.values():
        if became.diverged is not None:
            raise does_not_repeat(environment, became.diverged, "`algorithm.tree: false`")
    # Each agent's mean return over the continuations of one joint action.
    returns: dict[tuple[tuple[int, ...], ...], dict[str, float]] = {}
    for words, became in found.items():
        valid = [tree.returns(episode) for episode in became.valid]
        if not valid:
            raise EpisodeError(
                f"All continuations of a candidate failed. The first error was: {became.episodes[0].error}"
            )
        returns[words] = {agent: fmean(each.get(agent, 0.0) for each in valid) for agent in valid[0]}
    chosen = []
    for m, candidates in enumerate(drafts):
        if len(candidates) == 1:
            chosen.append((candidates[0], list[Turn]()))
            continue
        values = [
            fmean(returns[tokens_of[action]].get(turn.agent, 0.0) for action in judged_by[m, k])
            for k, turn in enumerate(candidates)
        ]
        known = [
            replace(turn, continuation_return=value) for turn, value in zip(candidates, values, strict=True)
        ]
        chosen.append((known.pop(tree.chosen(values)), known))
    return chosen
