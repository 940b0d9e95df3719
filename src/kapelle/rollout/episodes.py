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
from kapelle.engines.rollout.protocol import Interruptible
from kapelle.engines.rollout.request_queue import PAUSE
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
from kapelle.rollout.partial import EndOfStep, PartialEpisode, PartialGroup, as_recorded
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
from kapelle.runtime.ranks import Meeting, Peers
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
    setup: RolloutSetup, task: Task, left: PartialEpisode, sample: int, on_scene: Callable[[LiveScene], None]
) -> Episode:
    """Continue an unfinished episode in a new environment.

    If the replay differs from the recorded turns, the result is a failed episode.
    """
    record = Record(left.turns, left.drafts, left.begun)
    episode = await roll_out_episode(setup, task, left.seed, sample, record, on_scene=on_scene)
    how = record.diverged(episode)
    if how is not None:
        error = does_not_repeat(setup.environment.name, how, "`training.partial_rollouts: 0`")
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


def schedule(
    tasks: Sequence[Task], samples: int, seed: int, *, one_seed: bool = False
) -> list[ScheduledEpisode]:
    """Return the list of `samples` episodes for every task.

    Each episode has a different seed, even if a task is listed twice. With `one_seed`, all episodes of a task have the same seed.
    """
    times: Counter[str] = Counter()
    episodes: list[ScheduledEpisode] = []
    for task in tasks:
        repetition = ("again", times[task.id]) if times[task.id] else ()
        times[task.id] += 1
        episodes += [
            ScheduledEpisode(task, k, derive_seed(seed, task.id, 0 if one_seed else k, *repetition))
            for k in range(samples)
        ]
    return episodes


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
    step, widths, interventions = len(tasks), setup.data.widths, setup.data.interventions
    scheduled = schedule(tasks, samples, seed, one_seed=bool(widths))
    if own is not None:
        scheduled = [each for g in own for each in scheduled[g * samples : (g + 1) * samples]]
        tasks = [tasks[g] for g in own]
    shared = [SharedAnswers(widths) for _ in tasks] if widths else []

    def play_one(number: int, each: ScheduledEpisode) -> Coroutine[Any, Any, Episode]:
        branch = shared[number // samples].branch(each.sample) if shared else None
        return roll_out_episode(setup, each.task, each.seed, each.sample, branch=branch)

    episodes = await collect_scheduled(setup, scheduled, play_one, max_concurrent)
    groups = [Group(task, tuple(episodes[g * samples : (g + 1) * samples])) for g, task in enumerate(tasks)]
    groups = await compare_episodes(setup, groups)
    if interventions is None:
        return groups
    roll_out_all = partial(roll_out_continuations, setup, max_concurrent=max_concurrent)
    return await intervene(groups, interventions, setup.team, step, setup.environment.name, roll_out_all)


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
    return await collect_scheduled(replace(setup, data=Data()), scheduled, one, max_concurrent)


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


async def collect_scheduled(
    setup: RolloutSetup,
    scheduled: Sequence[ScheduledEpisode],
    play_one: Callable[[int, ScheduledEpisode], Coroutine[Any, Any, Episode]],
    max_concurrent: int = 4096,
    *,
    followed: bool = False,
) -> list[Episode]:
    """Roll out all scheduled episodes concurrently, as far as resources allow, and return them in order.

    With `followed`, the sampler waits until an episode has ended completely, because further work depends on the end of the episode.
    """
    under_way = at_once(setup, max_concurrent)
    gate = asyncio.Semaphore(under_way)
    followed = followed or len(scheduled) > under_way  # the next episode begins when one has ended
    participants: dict[int, Participant] = {}

    async def one(number: int, each: ScheduledEpisode) -> Episode:
        await gate.acquire()
        try:
            with Participant(number, followed=followed) as participants[number]:
                episode = await play_one(number, each)
            if setup.first_failures is not None:
                running, environment = len(participants) - 1, setup.environment
                if offers(environment, DrivenByPrograms):
                    running = min(running, environment.programs)
                setup.first_failures.note(episode, running)
            return episode
        finally:
            leave(number)

    def leave(number: int) -> None:
        if participants.pop(number, None) is not None:
            gate.release()

    def given_up(number: int, why: DeadlineExceeded) -> Episode:
        if number in participants:
            # Its coroutine may still run, but the sampler stops waiting for its requests.
            participants[number].end()
        leave(number)
        each = scheduled[number]
        return Episode(each.task, each.seed, setup.team.names, (), error=f"DeadlineExceeded: {why}")

    coroutines = [partial(one, number, each) for number, each in enumerate(scheduled)]
    return await gather_abandonable(coroutines, given_up)


# -------- Partial rollouts: groups are rolled out until enough of them are done; a later step continues the others.
#
# The result does not depend on timing, because requests are interrupted when every coroutine waits for a completion. This code is part
# of this module, and not of a feature, because rollout workers and the scene share it.

Enough = Callable[[Sequence[bool]], bool]
"""Function that receives whether each group is done, and returns whether the remaining groups may stay unfinished."""


def begun(tasks: Sequence[Task], samples: int, seed: int, number: int) -> list[PartialGroup]:
    """Return groups without samples, with the same seeds as in `rollout`.

    The argument `number` is the number of the step that starts them.
    """
    episodes = [PartialEpisode(each.seed) for each in schedule(tasks, samples, seed)]
    return [
        PartialGroup(task, number, tuple(episodes[g * samples : (g + 1) * samples]))
        for g, task in enumerate(tasks)
    ]


async def collect_groups(
    setup: RolloutSetup, groups: Sequence[PartialGroup], enough: Enough, meeting: Peers | None = None
) -> list[PartialGroup]:
    """Continue groups until enough of them are done, and return all groups in their current state, in order.

    The engine of `setup` must be `Interruptible`. If several processes take part (`meeting`), `groups` contains only the groups of
    this process, and `enough` receives the state of the groups of all processes. Groups are assigned to the processes in turn. The
    processes synchronise after every `PAUSE` tokens of each sequence, so that the end of the step depends only on the number of
    tokens.
    """
    alone = meeting is None or meeting.size == 1
    known = {(g, k): each for g, group in enumerate(groups) for k, each in enumerate(group.episodes)}
    left = {place: each for place, each in known.items() if not isinstance(each, Episode)}
    places = list(left)
    scenes: dict[tuple[int, int], LiveScene] = {}
    stop = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []

    def as_they_are() -> list[PartialGroup]:
        return [
            replace(group, episodes=tuple(known[g, k] for k, _ in enumerate(group.episodes)))
            for g, group in enumerate(groups)
        ]

    async def one(number: int, each: ScheduledEpisode) -> Episode:
        place, task = places[number], asyncio.current_task()
        if task is not None:
            tasks.append(task)
        on_scene = partial(scenes.__setitem__, place)
        episode = await continue_episode(setup, each.task, left[place], each.sample, on_scene)
        scenes.pop(place, None)
        known[place] = episode
        if alone and enough([group.done for group in as_they_are()]):
            stop.set()
        return episode

    failed: list[BaseException] = []

    def agreed() -> bool:
        """Exchange which groups are done, and return whether all processes should end.

        If one process fails, all processes end.
        """
        assert meeting is not None, "a single process has no meeting"
        try:
            shares = meeting.all_gather("groups that are done", lambda: bytes(g.done for g in as_they_are()))
        except BaseException as error:  # noqa: BLE001 - raised below, outside of the episodes
            failed.append(error)
            return True
        done = [False] * sum(map(len, shares))
        for rank, share in enumerate(shares):
            done[rank :: meeting.size] = map(bool, share)
        return enough(done)

    async def at_pause() -> bool:
        if agreed():
            stop.set()
        return stop.is_set()

    scheduled = [ScheduledEpisode(groups[g].task, k, left[g, k].seed) for g, k in places]
    playing = asyncio.create_task(collect_scheduled(setup, scheduled, one, followed=True))
    stopping = asyncio.create_task(stop.wait())
    tasks += [playing, stopping]
    assert isinstance(setup.engine, Interruptible), "checked before the run starts"
    try:
        if not alone:
            setup.engine.pause_every(PAUSE, at_pause)
        await asyncio.wait({playing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        # A process without unfinished groups synchronises with the others until all end.
        while not (alone or stop.is_set() or playing.cancelled() or playing.exception()):
            if agreed():
                stop.set()
        if failed:
            raise failed[0]
        if not playing.done():
            broken = await setup.engine.interrupt()
            for place, scene in scenes.items():
                if (now := scene.left(broken)) is not None:
                    turns, reward_events = as_recorded(left[place], now.turns, now.reward_events)
                    known[place] = replace(now, turns=turns, reward_events=reward_events)
        if playing.done():
            known |= zip(places, playing.result(), strict=True)  # including the groups that were given up
    finally:  # environments of running episodes are closed within their deadlines
        if not alone:
            setup.engine.pause_every(0, None)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=setup.patience.environment)
    return as_they_are()


# -------- Rollouts that ranks share: whole groups are assigned in a fixed order, and every rank receives all of them
#
# A group's seeds depend only on its task, so its tokens do not depend on the rank that samples them.


class CollectsGroups:
    """A rollout engine that collects whole groups of episodes in other processes, instead of answering single requests.

    The methods request groups and return a function that waits for them. After that, the global random generators have the same state
    as if this process had collected the groups.
    """

    def request_groups(
        self, setup: RolloutSetup, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
    ) -> Callable[[], list[Group]]:
        """Request `samples` episodes of each task whose index is in `own`, with the same seeds as among all tasks.

        The returned function waits for the episodes and returns one group per task.
        """
        raise NotImplementedError

    @property
    def weights(self) -> Mapping[str, Mapping[str, Any]]:
        """The tensors that were loaded last, by policy and by tensor name."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Abandon requests whose results nobody has waited for."""
        raise NotImplementedError

    def request_partial(
        self, setup: RolloutSetup, pool: Sequence[PartialGroup], enough: EndOfStep, meeting: Meeting
    ) -> Callable[[], Mapping[int, PartialGroup]]:
        """Request the continuation of this rank's share of the groups, until enough groups are done.

        The returned function waits for the result: a mapping from the index of a group in `pool` to the group. The argument `meeting`
        connects the ranks.
        """
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
