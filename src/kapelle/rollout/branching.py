"""Trees and records: how an episode is played again up to a moment, and how the episodes of a group branch.

**Records.** An episode is determined by its task, its seed and its turns. So a continuation runs the same program in a fresh
world: the turns so far are replayed from their record, token for token, then something else is said or left unsaid, and
from there on every agent samples anew, with the continuation's own seeds. No world is ever copied.

**Shared beginnings.** With widths w₁, w₂, … the episodes of a group share turns: each first moment is sampled w₁ times, each second
moment after it w₂ times, so that w₁·w₂·… episodes have w₁ first moments. Every turn is sampled once. A moment counts if a trained agent
speaks in it.

**Candidates.** A tree finds the worth of each candidate of one moment by continuing the episode from it. The n-th continuations of all candidates of a moment use the same seeds. Equal candidates then have equal worth, luck
explains less of the difference between others, and no expectation changes, because the seeds do not depend on the
candidates. Candidates with the same tokens are continued once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from kapelle.algorithm import JointAction, Tree
from kapelle.engines.rollout.protocol import Completion
from kapelle.errors import EpisodeError
from kapelle.rollout.partial import numbered
from kapelle.runtime.batch_barrier import current_participant
from kapelle.types import Episode, Turn


class Record:
    """What a continuation replays: the turns so far and the joint action; used once, and again after `rewind`."""

    def __init__(
        self,
        past: Sequence[Turn],
        now: Sequence[Turn],
        begun: Sequence[Turn] = (),
        absent: Collection[str] = (),
        swapped: Mapping[str, str] = MappingProxyType({}),
        anew: Collection[str] = (),
    ) -> None:
        """Take the recorded turns, one candidate of each agent that moves next, and turns of others that have only begun.

        Agents that are `absent` say nothing in what follows; policies that are `swapped` in (by agent) speak there. Those who speak
        `anew` move next too, and sample what they say.
        """
        self.absent, self.swapped = frozenset(absent), swapped
        self._anew = frozenset(anew)
        self._all = dict(numbered((*past, *now, *begun)))
        self.begun = {turn.agent: turn for turn in begun}
        """Agent → its turn that is sampled further once it was taken."""
        self._past = tuple(past)
        self._now = {turn.agent for turn in (*now, *begun)} | self._anew
        self._tokens = _tokens((*past, *now))
        self.rewind()

    def rewind(self) -> None:
        """Replay everything once more."""
        self._given = dict(self._all)
        self._waits_for = set(self._anew)
        self.diverged: str | None = None
        """How the replay differed from the record; None while it did not."""

    def take(self, agent: str, number: int, prompt_ids: Sequence[int], turns: Sequence[Turn]) -> Turn | None:
        """Return the agent's recorded turn of this number (from 0), or None if it samples anew.

        `turns` are those played so far. Raises EpisodeError if the agent reads another prompt than it did, or got other
        rewards.
        """
        given = self._given.pop((agent, number), None)
        if given is None and agent not in self._waits_for:
            return None
        if given is None:
            self._waits_for.discard(agent)
        elif given.prompt_ids != tuple(prompt_ids):
            same = [a == b for a, b in zip(given.prompt_ids, prompt_ids, strict=False)]
            at = same.index(False) if False in same else len(same)
            self._fail(f"'{agent}' reads another prompt at its turn {number + 1}, from token {at} on")
        if len(turns) == len(self._past) and agent in self._now:
            now = dict(numbered(turns))
            for key, old in numbered(self._past):
                new = now.get(key, old)
                if old.reward != new.reward:
                    self._fail(
                        f"'{old.agent}' is paid {new.reward} for turn {old.index} and not {old.reward}"
                    )
        return given

    def replays(self, agent: str) -> bool:
        """Return whether the agent has a turn that is not replayed yet."""
        return any(name == agent for name, _ in self._given)

    @property
    def left(self) -> bool:
        """Whether anything is not replayed yet."""
        return bool(self._given)

    def check_repeated(
        self, episode: Episode, environment: str, off: str = "`algorithm.tree: false`"
    ) -> None:
        """Raise EpisodeError, which names the setting `off`, if the episode took another course before all was replayed."""
        left = len(self._given) + len(self._waits_for)
        if left and self.diverged is None:
            ended = episode.error or "no error"
            self.diverged = f"it ended with {left} of the turns not replayed ({ended})"
        if self.diverged is not None:
            raise EpisodeError(
                f"An episode of '{environment}' does not repeat: played again with its own seed and turns, "
                f"{self.diverged}. Set {off}, or let world and workflow take all randomness from their seeds."
            )

    def sampled(self, episode: Episode) -> Counter[str]:
        """Return the tokens that the continuation sampled itself, by policy."""
        return _tokens(episode.turns) - self._tokens

    def _fail(self, how: str) -> None:
        self.diverged = how
        raise EpisodeError(how)


def _tokens(turns: Sequence[Turn]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for turn in turns:
        counted[turn.policy] += len(turn.completion_ids)
    return counted


class SharedAnswers:
    """What the episodes of one group have sampled for all of them."""

    def __init__(self, widths: Sequence[int]) -> None:
        """Branch so many times at each moment; the product of `widths` is the number of episodes."""
        self.widths = tuple(widths)
        self._answers: dict[Hashable, asyncio.Future[Completion | None]] = {}

    def branch(self, sample: int) -> Branch:
        """Return how the episode of this number branches."""
        ways: list[int] = []
        for width in reversed(self.widths):
            sample, way = divmod(sample, width)
            ways.append(way)
        return Branch(self, tuple(reversed(ways)))

    async def once(self, key: Hashable, ask: Callable[[], Awaitable[Completion]]) -> Completion:
        """Return what the first call with this key gets; the others wait for it, and ask themselves where it fails."""
        while True:
            future = self._answers.get(key)
            if future is None:
                future = self._answers[key] = asyncio.get_running_loop().create_future()
                try:
                    answer = await ask()
                except BaseException:
                    del self._answers[key]
                    future.set_result(None)
                    raise
                future.set_result(answer)
                return answer
            part = current_participant()
            if part is not None:  # the sampler waits for the answer, and not for this episode
                part.began_request()
            try:
                found = await asyncio.shield(future)
            finally:
                if part is not None:
                    part.ended_request()
            if found is not None:
                return found


class Branch(NamedTuple):
    """One of the episodes that share their beginnings."""

    answers: SharedAnswers
    ways: tuple[int, ...]
    """Which way it takes at each moment that branches. What is sampled before the last one is counted in the episode whose later
    ways are all 0."""


PlayOn = Callable[[Record, int], Awaitable[Episode]]
"""(record, number) → the episode of the continuation of this number; a failed one is returned, not raised."""

Worths = tuple[tuple[float, ...], ...]
"""For each agent that moves, the worth of each of its candidates; empty for an agent with one candidate."""


async def judge(
    tree: Tree, past: Sequence[Turn], drafts: Sequence[Sequence[Turn]], environment: str, play_on: PlayOn
) -> Worths:
    """Return the worth of each candidate: its agent's mean return over the episodes that continue from it.

    `drafts` are the candidates of every agent that moves at this moment, one for a frozen agent. A failed
    continuation is left out of the mean. Raises EpisodeError if all continuations of a joint action failed, or
    if one did not reach the moment again.
    """
    counts = [len(candidates) for candidates in drafts]
    judges = {
        (m, k): tuple(tree.judged_by(counts, m, k))
        for m, count in enumerate(counts)
        if count > 1
        for k in range(count)
    }
    first_with: dict[tuple[tuple[int, ...], ...], JointAction] = {}
    alike: dict[JointAction, JointAction] = {}
    for action in dict.fromkeys(action for actions in judges.values() for action in actions):
        tokens = tuple(drafts[m][k].completion_ids for m, k in enumerate(action))
        alike[action] = first_with.setdefault(tokens, action)
    runs = [(action, number) for action in first_with.values() for number in range(tree.continuations)]
    records = [Record(past, [drafts[m][k] for m, k in enumerate(action)]) for action, _ in runs]
    played = await asyncio.gather(
        *(play_on(record, number) for record, (_, number) in zip(records, runs, strict=True))
    )
    for record, episode in zip(records, played, strict=True):
        record.check_repeated(episode, environment)
    episodes: dict[JointAction, list[Episode]] = {}
    for (action, _), episode in zip(runs, played, strict=True):
        episodes.setdefault(action, []).append(episode)
    # Each agent's mean return over the continuations of one joint action that did not fail.
    paid: dict[JointAction, dict[str, float]] = {}
    for action, own in episodes.items():
        valid = [tree.returns(episode) for episode in own if episode.error is None]
        if not valid:
            raise EpisodeError(
                f"Every episode that continued from a candidate failed. The first: {own[0].error}"
            )
        paid[action] = {agent: fmean(each.get(agent, 0.0) for each in valid) for agent in valid[0]}
    return tuple(
        tuple(
            fmean(paid[alike[action]].get(candidates[0].agent, 0.0) for action in judges[m, k])
            for k in range(len(candidates) if len(candidates) > 1 else 0)
        )
        for m, candidates in enumerate(drafts)
    )


def settle(tree: Tree, drafts: Sequence[Sequence[Turn]], worths: Worths) -> list[tuple[Turn, list[Turn]]]:
    """Return, for each agent that moves, the candidate that the episode continues with and its siblings."""
    settled = []
    for candidates, worth in zip(drafts, worths, strict=True):
        if not worth:
            settled.append((candidates[0], list[Turn]()))
            continue
        known = [replace(turn, worth=value) for turn, value in zip(candidates, worth, strict=True)]
        settled.append((known.pop(tree.chosen(worth)), known))
    return settled
