"""Roll out episodes of tasks concurrently, and collect them in groups.

Every episode is a coroutine. All episodes run concurrently, and the engine batches their requests. The function `_roll_out_once`
converts an exception inside an episode to its `error`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from kapelle.algorithm import Data
from kapelle.engines.rollout.protocol import HeldRequest
from kapelle.environment import (
    DrivenByPrograms,
    Outcome,
    RemoteState,
    RewardsEpisodes,
    WorkerLost,
    offers,
    report_of,
)
from kapelle.errors import EpisodeError
from kapelle.rollout import bounded_states
from kapelle.rollout.bounded_states import BoundedState, open_state
from kapelle.rollout.branching import Branch, SharedAnswers
from kapelle.rollout.interventions import Continuation, Record, does_not_repeat, intervene
from kapelle.rollout.outcomes import accepted, fault, pending_cancellations
from kapelle.rollout.partial import Exchange, PartialEpisode, PartialGroup, Wanted, as_recorded
from kapelle.rollout.scene import LiveScene
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runtime.batch_barrier import Participant, ends_requests
from kapelle.runtime.deadlines import DeadlineExceeded, gather_abandonable, patience_here, within
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.machine import most_open
from kapelle.runtime.randomness import (
    capture_random,
    derive_seed,
    random_as_lists,
    random_from_lists,
    restore_random,
)
from kapelle.types import Episode, Group, Task, Turn

REDONE = 2
"""Maximum number of times that an episode is repeated because the process of its environment crashed while this environment was
computing."""
LOST = 100
"""Maximum number of times that an episode is repeated because its environment was lost for any reason, such as the restart of a server."""


async def roll_out_episode(
    setup: RolloutSetup,
    task: Task,
    seed: int,
    sample: int = 0,
    record: Record | None = None,
    sampling_seed: int | None = None,
    on_scene: Callable[[LiveScene], None] | None = None,
    branch: Branch | None = None,
) -> Episode:
    """Roll out one episode, which has the index `sample` in its group.

    If a `record` is given, the recorded turns are replayed, and the following turns are sampled with `sampling_seed`. The function
    `on_scene` is called with the scene of the episode. If a `branch` is given, the first turns are shared with other episodes of the
    group.

    An exception inside the episode is stored in its `error`. This function raises only errors that are not caused by a single
    episode: EngineError, KeyboardInterrupt, and a cancellation by the caller.

    If the process of the environment ends, the episode is restarted with the same seed, and the turns that were already sampled are
    replayed. An episode with tree sampling, or with an environment that does not repeat exactly, is sampled again from the start.
    """
    blamed, lost, replayed = 0, 0, record
    turns: tuple[Turn, ...] = ()
    while True:
        result = await _roll_out_once(setup, task, seed, sample, replayed, sampling_seed, on_scene, branch)
        if isinstance(result, Episode):
            if replayed is record or replayed is None or not replayed.diverged():
                return result
            replayed = None  # the environment does not repeat: sample from the start
            continue
        # An environment that was computing when its process died may have killed it, so it gets fewer repetitions.
        blamed, lost = blamed + result.how.blamed, lost + 1
        if blamed > REDONE or lost > LOST:
            times = (
                f"{blamed} times while its environment was computing" if blamed > REDONE else f"{lost} times"
            )
            reason = f"WorkerLost: {result.how}, {times}"
            return Episode(task, seed, setup.team.names, result.turns, error=reason)
        turns = max(turns, result.turns, key=len)
        if record is not None:
            record.rewind()
        elif setup.data.tree is None:
            replayed = Record(turns, ())


async def continue_episode(
    setup: RolloutSetup,
    task: Task,
    left: PartialEpisode,
    sample: int,
    on_scene: Callable[[LiveScene], None] | None = None,
) -> Episode:
    """Continue an unfinished episode in a new environment.

    If the replay differs from the recorded turns, the result is a failed episode.
    """
    record = Record(left.turns, left.drafts, left.begun)
    episode = await roll_out_episode(setup, task, left.seed, sample, record, on_scene=on_scene)
    how = record.diverged(episode)
    if how is not None:
        error = does_not_repeat(setup.environment.name, how, "`training.asynchronous: false`")
        return Episode(task, left.seed, setup.team.names, (), error=f"EpisodeError: {error}")
    turns, events = as_recorded(left, episode.turns, episode.reward_events)
    return replace(episode, turns=turns, reward_events=events)


@dataclass(frozen=True, slots=True)
class _Lost:
    """The process of an environment ended during an episode. This object contains the turns that had been recorded."""

    how: WorkerLost
    turns: tuple[Turn, ...]


async def _roll_out_once(
    setup: RolloutSetup,
    task: Task,
    seed: int,
    sample: int,
    record: Record | None,
    sampling_seed: int | None,
    on_scene: Callable[[LiveScene], None] | None,
    branch: Branch | None,
) -> Episode | _Lost:
    names, cancellations = setup.team.names, pending_cancellations()
    scene: LiveScene | None = None
    state: BoundedState | RemoteState | None = None
    start = open_state if setup.workers is None else setup.workers.open_state
    try:
        patience_here.set(setup.patience)
        state = await start(setup.environment, task, names, seed, setup.patience)
        try:
            continuation = partial(roll_out_continuation, setup)
            scene = LiveScene(setup, task, seed, state, continuation, sample, record, sampling_seed, branch)
            if on_scene is not None:
                on_scene(scene)
            await within("The episode", "episode", setup.patience.episode, setup.workflow.run(scene))
            if scene.turns and not scene.stepped and not offers(setup.environment, DrivenByPrograms):
                raise EpisodeError(
                    f"The workflow '{setup.workflow.name}' ended without a step of the environment. Write `await scene.step({{name: text}})` "
                    "in `run`."
                )
            found = await setup.timeline.during("grade", state.outcome())
            if setup.rewarded and offers(setup.environment, RewardsEpisodes):
                ends_requests()  # sampling has ended, so other episodes continue while a judge model scores
                episode = Episode(task, seed, names, scene.turns, final=scene.final)
                rewarding = setup.environment.reward_episode(episode, found)
                work = within("Paying the episode", "grader", setup.patience.grader, rewarding)
                found = await setup.timeline.during("grade", work)
            outcome = scene.settle(found)
        finally:
            ends_requests()  # the sampler does not wait for this episode while its environment closes
            await state.close()
        outcome = accepted(outcome, scene.turns, setup.environment.reward_range, names)
    except BaseException as error:  # noqa: BLE001 - the only boundary where a failed episode becomes data
        lost = state.lost if isinstance(state, RemoteState) else None
        lost = error if isinstance(error, WorkerLost) else lost
        reason = fault(error, cancellations)
        turns, continued = (scene.turns, dict(scene.continued)) if scene else ((), {})
        if lost is not None:
            return _Lost(lost, turns)
        known = dict(error.info) if isinstance(error, EpisodeError) else {}
        return Episode(task, seed, names, turns, info=known, error=reason, continued=continued)
    return Episode(
        task,
        seed,
        names,
        scene.turns,
        outcome.rewards,
        outcome.success,
        outcome.info,
        outcome.truncated,
        branches=scene.branches,
        reward_events=tuple(scene.reward_events),
        roles=outcome.roles,
        continued=dict(scene.continued),
        final=scene.final,
    )


class ScheduledEpisode(NamedTuple):
    """An episode to roll out, which has the index `sample` in the group of its task."""

    task: Task
    sample: int
    seed: int


async def rollout(
    setup: RolloutSetup,
    tasks: Sequence[Task],
    samples: int,
    seed: int,
    max_concurrent: int = 4096,
    own: Sequence[int] | None = None,
) -> list[Group]:
    """Roll out `samples` episodes of every task concurrently, and return one group per task, in order.

    If `own` is given, only the tasks with these indices are rolled out, with the same seeds as in a rollout of all tasks.
    """
    groups = begun(setup, tasks, samples, seed)
    own_groups = groups if own is None else [groups[g] for g in own]
    return await complete_groups(setup, own_groups, len(tasks), max_concurrent)


def begun(
    setup: RolloutSetup, tasks: Sequence[Task], samples: int, seed: int, number: int = 0
) -> list[PartialGroup]:
    """Return a group without turns for every task. The argument `number` is the number of the step that starts the groups.

    Each episode has a different seed, even if a task is listed twice. With `widths`, all episodes of a task have the same seed.
    """
    times: Counter[str] = Counter()
    groups = []
    for task in tasks:
        repetition = ("again", times[task.id]) if times[task.id] else ()
        times[task.id] += 1
        seeds = [
            derive_seed(seed, task.id, 0 if setup.data.widths else k, *repetition) for k in range(samples)
        ]
        groups.append(PartialGroup(task, number, tuple([PartialEpisode(each) for each in seeds])))
    return groups


class Progress:
    """The state of the episodes of groups that are being rolled out."""

    def __init__(self, groups: Sequence[PartialGroup]) -> None:
        self.groups = groups
        self.ended: dict[tuple[int, int], Episode] = {}
        """The finished episodes, by the index of the group and the index of the episode in the group."""
        self.scenes: dict[tuple[int, int], LiveScene] = {}
        """The scenes of the running episodes."""

    def now(self, held: Sequence[HeldRequest]) -> list[PartialGroup]:
        """Return the groups with the turns so far. The argument `held` contains all unfinished requests."""
        return [
            replace(
                group,
                episodes=tuple(self._episode((g, k), each, held) for k, each in enumerate(group.episodes)),
            )
            for g, group in enumerate(self.groups)
        ]

    def _episode(
        self, place: tuple[int, int], before: Episode | PartialEpisode, held: Sequence[HeldRequest]
    ) -> Episode | PartialEpisode:
        if isinstance(before, Episode) or place in self.ended:
            return self.ended.get(place, before)
        now = self.scenes[place].left(held) if place in self.scenes else None
        if now is None:
            return before
        turns, reward_events = as_recorded(before, now.turns, now.reward_events)
        return replace(now, turns=turns, reward_events=reward_events)


async def complete_groups(
    setup: RolloutSetup,
    groups: Sequence[PartialGroup],
    step: int,
    max_concurrent: int = 4096,
    progress: Progress | None = None,
    gate: Gate | None = None,
) -> list[Group]:
    """Roll out the unfinished episodes of groups concurrently, and return the groups in order.

    The argument `step` is the number of groups of the whole step. The argument `progress` follows the episodes. With a `gate`, the
    number of concurrent episodes is limited together with other calls.
    """
    widths, interventions = setup.data.widths, setup.data.interventions
    followed, progress = progress is not None, progress or Progress(groups)
    shared = [SharedAnswers(widths) for _ in groups] if widths else []
    left = [
        (g, k, each)
        for g, group in enumerate(groups)
        for k, each in enumerate(group.episodes)
        if isinstance(each, PartialEpisode)
    ]

    async def one(number: int, each: ScheduledEpisode) -> Episode:
        g, k, begun_so_far = left[number]
        on_scene = partial(progress.scenes.__setitem__, (g, k)) if followed else None
        if begun_so_far.turns or begun_so_far.drafts or begun_so_far.begun:
            episode = await continue_episode(setup, each.task, begun_so_far, k, on_scene)
        else:
            branch = shared[g].branch(k) if shared else None
            episode = await roll_out_episode(setup, each.task, each.seed, k, on_scene=on_scene, branch=branch)
        if followed:
            progress.scenes.pop((g, k), None)
        progress.ended[g, k] = episode
        return episode

    scheduled = [ScheduledEpisode(groups[g].task, k, each.seed) for g, k, each in left]
    found = await collect_scheduled(setup, scheduled, one, max_concurrent, gate=gate)
    progress.ended |= {
        (g, k): episode for (g, k, _), episode in zip(left, found, strict=True)
    }  # with abandoned ones
    if len(left) < sum([len(group.episodes) for group in groups]):
        progress.ended |= {
            (g, k): each
            for g, group in enumerate(groups)
            for k, each in enumerate(group.episodes)
            if isinstance(each, Episode)
        }
    whole = [
        Group(group.task, tuple([progress.ended[g, k] for k in range(len(group.episodes))]))
        for g, group in enumerate(groups)
    ]
    complete = await compare_episodes(setup, whole)
    if interventions is None:
        return complete
    roll_out_all = partial(roll_out_continuations, setup, max_concurrent=max_concurrent, gate=gate)
    return await intervene(complete, interventions, setup.team, step, setup.environment.name, roll_out_all)


async def compare_episodes(setup: RolloutSetup, groups: Sequence[Group]) -> list[Group]:
    """Return copies of the groups with the rewards that an environment with the capability `RewardsEpisodes` computes for them.

    Failed episodes are not changed. If the computation raises an exception, all episodes of the group fail with this error, as in
    `roll_out_episode`.
    """
    environment = setup.environment
    if not (setup.rewarded and offers(environment, RewardsEpisodes) and environment.compared):
        return list(groups)

    async def rewarded(group: Group) -> Group:
        valid, cancellations = group.valid, pending_cancellations()
        if not valid:
            return group
        patience_here.set(setup.patience)
        try:
            work = within("Paying a group", "grader", setup.patience.grader, environment.reward_group(valid))
            found = await setup.timeline.during("grade", work)
            if len(found) != len(valid):
                raise EpisodeError(
                    f"`reward_group` of '{environment.name}' returned {len(found)} outcomes for {len(valid)} episodes."
                )
            outcomes = [
                accepted(outcome, episode.turns, environment.reward_range, setup.team.names)
                for outcome, episode in zip(found, valid, strict=True)
            ]
        except BaseException as error:  # noqa: BLE001 - as for one episode, in `_roll_out_once`
            return _failed(group, fault(error, cancellations))
        return _rewarded(group, outcomes)

    def given_up(place: int, why: DeadlineExceeded) -> Group:
        return _failed(groups[place], f"DeadlineExceeded: {why}")

    return await gather_abandonable([partial(rewarded, group) for group in groups], given_up)


def _failed(group: Group, reason: str) -> Group:
    """Return a copy of a group in which all valid episodes have failed for this reason."""
    episodes = [
        each
        if each.error is not None
        else Episode(each.task, each.seed, each.agents, each.turns, error=reason, continued=each.continued)
        for each in group.episodes
    ]
    return replace(group, episodes=tuple(episodes))


def _rewarded(group: Group, outcomes: Sequence[Outcome]) -> Group:
    """Return a copy of a group in which the valid episodes have these outcomes."""
    left = iter(outcomes)
    episodes = []
    for episode in group.episodes:
        if episode.error is not None:
            episodes.append(episode)
            continue
        outcome = next(left)
        rewarded = replace(
            episode,
            rewards=outcome.rewards,
            success=outcome.success,
            info=outcome.info,
            truncated=outcome.truncated,
            roles=outcome.roles,
        )
        episodes.append(rewarded)
    return replace(group, episodes=tuple(episodes))


async def roll_out_continuation(setup: RolloutSetup, run: Continuation) -> Episode:
    """Replay an episode and continue it without branches."""
    episode, sample = run.fork.episode, run.fork.sample
    plain = replace(setup, data=Data())
    return await roll_out_episode(plain, episode.task, episode.seed, sample, run.record, run.seed)


async def roll_out_continuations(
    setup: RolloutSetup,
    runs: Sequence[Continuation],
    max_concurrent: int = 4096,
    ended: Callable[[Continuation, Episode], None] = lambda run, episode: None,
    gate: Gate | None = None,
) -> list[Episode]:
    """Roll out continuations concurrently, as far as resources allow, and return their episodes in order.

    The function `ended` is called with each continuation and its episode.
    """

    async def one(number: int, _: ScheduledEpisode) -> Episode:
        episode = await roll_out_continuation(setup, runs[number])
        ended(runs[number], episode)
        return episode

    forks = [run.fork for run in runs]
    scheduled = [ScheduledEpisode(fork.episode.task, fork.sample, fork.episode.seed) for fork in forks]
    return await collect_scheduled(replace(setup, data=Data()), scheduled, one, max_concurrent, gate=gate)


def at_once(setup: RolloutSetup, most: int) -> int:
    """Return the maximum number of concurrent episodes (at most `most`) for which there are enough resources.

    These resources are file descriptors, and threads if the environment blocks. Further episodes wait before they use any resource,
    so that episodes never block each other. The resources of an episode include the resources of its continuations, so that an
    episode never waits for itself.
    """
    environment, agents, tree = setup.environment, len(setup.team.names), setup.data.tree
    processes = setup.workers.size if setup.workers else 1
    # In a tree, the candidates of every agent are continued in their own environments.
    states = 1 + tree.candidates * agents if tree else 1
    if getattr(environment, "blocking", False):
        most = min(most, processes * max(1, bounded_states.WORKERS // states))
    if held := states * report_of(environment).descriptors(agents):
        most = min(most, processes * most_open(held, most))
    return most


class Gate:
    """The limit of concurrent episodes, which several calls may share."""

    def __init__(self, most: int) -> None:
        self.free = asyncio.Semaphore(most)
        self.running = 0
        """The number of running episodes."""


async def collect_scheduled(
    setup: RolloutSetup,
    scheduled: Sequence[ScheduledEpisode],
    play_one: Callable[[int, ScheduledEpisode], Coroutine[Any, Any, Episode]],
    max_concurrent: int = 4096,
    *,
    gate: Gate | None = None,
) -> list[Episode]:
    """Roll out all scheduled episodes concurrently, as far as resources allow, and return them in order.

    A `gate` limits the number of concurrent episodes together with other calls.
    """
    under_way = at_once(setup, max_concurrent)
    gate = gate or Gate(under_way)
    followed = len(scheduled) > under_way  # the next episode begins when one has ended
    participants: dict[int, Participant] = {}

    async def one(number: int, each: ScheduledEpisode) -> Episode:
        await gate.free.acquire()
        gate.running += 1
        try:
            with Participant(number, followed=followed) as participants[number]:
                episode = await play_one(number, each)
            if setup.first_failures is not None:
                running, environment = gate.running - 1, setup.environment
                if offers(environment, DrivenByPrograms):
                    running = min(running, environment.programs)
                setup.first_failures.note(episode, running)
            return episode
        finally:
            leave(number)

    def leave(number: int) -> None:
        if participants.pop(number, None) is not None:
            gate.running -= 1
            gate.free.release()

    def given_up(number: int, why: DeadlineExceeded) -> Episode:
        if number in participants:
            # Its coroutine may still run, but the sampler stops waiting for its requests.
            participants[number].end()
        leave(number)
        each = scheduled[number]
        return Episode(each.task, each.seed, setup.team.names, (), error=f"DeadlineExceeded: {why}")

    coroutines = [partial(one, number, each) for number, each in enumerate(scheduled)]
    return await gather_abandonable(coroutines, given_up)


# -------- Rollouts that ranks share: whole groups are assigned in a fixed order, and every rank receives all of them
#
# A group's seeds depend only on its task, so its tokens do not depend on the rank that samples them.


class CollectsGroups:
    """A rollout engine that collects whole groups of episodes in other processes, instead of answering single requests.

    Groups are collected for one step (`request_groups`) or without interruption (`exchange`).
    """

    def request_groups(
        self, setup: RolloutSetup, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
    ) -> Callable[[], list[Group]]:
        """Request `samples` episodes of each task whose index is in `own`, with the same seeds as among all tasks.

        The returned function waits for the episodes and returns one group per task. Afterwards, the global random generators have the
        same state as if this process had collected the groups.
        """
        raise NotImplementedError

    def exchange(self, wanted: Wanted, *, unfinished: bool = False, seconds: float = 0.0) -> Exchange:
        """Roll out groups without interruption, and return those that are finished; see `continuous.ContinuousRollouts`."""
        raise NotImplementedError

    @property
    def weights(self) -> Mapping[str, Mapping[str, Any]]:
        """The tensors that were loaded last, by policy and by tensor name."""
        raise NotImplementedError


def request_groups(
    setup: RolloutSetup, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
) -> Callable[[], list[Group]]:
    """Start the rollout of the tasks with the indices `own` in rollout workers, and return a function that waits for their groups.

    If there are no rollout workers, the returned function rolls out the tasks in this process.
    """
    if not own:
        return list
    if isinstance(setup.engine, CollectsGroups):
        return setup.engine.request_groups(setup, tasks, samples, seed, own)
    return partial(run_async, partial(rollout, setup, tasks, samples, seed, own=own))


def shared_rollout(setup: RolloutSetup, tasks: Sequence[Task], samples: int, seed: int) -> list[Group]:
    """Divide the tasks among the ranks, roll out `samples` episodes of every task, and return one group per task in every rank.

    Afterwards, the global random generators of all ranks have the state of rank 0.
    """
    ranks = setup.ranks
    if ranks.size == 1:
        return request_groups(setup, tasks, samples, seed, range(len(tasks)))()
    dealt = [range(rank, len(tasks), ranks.size) for rank in range(ranks.size)]

    def share() -> bytes:
        own = dealt[ranks.rank]
        groups = request_groups(setup, tasks, samples, seed, own)()
        drawn = {} if ranks.rank else random_as_lists(capture_random())
        return json.dumps(drawn).encode() + b"\n" + dump_groups(0, groups)

    found: dict[int, Group] = {}
    for rank, part in enumerate(ranks.all_gather("rollout", share)):
        drawn, *rows = part.splitlines()
        if rank == 0:
            restore_random(random_from_lists(json.loads(drawn)))
        found |= zip(dealt[rank], load_groups(map(json.loads, rows)), strict=True)
    return [found[place] for place in range(len(tasks))]
