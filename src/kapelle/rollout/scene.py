"""One running episode: what a workflow sees of it, and what is recorded while it is played."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from kapelle.engines.rollout.protocol import (
    Completion,
    Interrupted,
    ReadsPrompts,
    Renderer,
    Request,
    agent_renderer,
)
from kapelle.environment import (
    Answerable,
    Outcome,
    RemoteWorld,
    asks_questions,
    offers,
)
from kapelle.errors import ContextError, EpisodeError, did_you_mean
from kapelle.rollout.bounded_worlds import BoundedWorld
from kapelle.rollout.branching import Branch
from kapelle.rollout.compaction import compacted
from kapelle.rollout.interventions import Continuation, Record, choose
from kapelle.rollout.outcomes import payments, share, text
from kapelle.rollout.partial import PartialEpisode, grown
from kapelle.rollout.play import Play
from kapelle.runtime.batch_barrier import Participant
from kapelle.runtime.deadlines import call, within
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Agent, Policy
from kapelle.types import (
    Constraint,
    Episode,
    FinishReason,
    Image,
    Message,
    Payment,
    Routing,
    Said,
    Sampling,
    Task,
    Turn,
    images_in,
)
from kapelle.workflow import (
    Continued,
    GoesOnWithout,
    Written,
    conversation,
    instructions,
)

_TURN_VALUES = attrgetter(*Turn.__slots__)


def placed(turn: Turn, index: int, reward: float) -> Turn:
    """Return a turn at its place in the episode's order, with what was paid for it."""
    # `dataclasses.replace` asks for each field by a call of its own, and every turn comes by here.
    values = dict(zip(Turn.__slots__, _TURN_VALUES(turn), strict=True))
    values["index"], values["reward"] = index, reward
    return Turn(**values)


@dataclass(frozen=True, slots=True)
class AskedTurn:
    """A turn whose answer was asked for: what is known of it until the answer comes."""

    request: Request
    trained: bool
    seen: int
    """How many turns were complete when its prompt was fixed."""
    heard: tuple[Message, ...]
    begun: Turn | None
    """The turn that is sampled further, where it had begun before."""
    dropped: int = 0
    """How many messages of its conversation were dropped before it."""

    def answered(
        self,
        ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        version: int = 0,
        weights_hash: str = "",
        finish_reason: FinishReason = "length",
        text: str = "",
        routing: Routing | None = None,
        usage: tuple[int, int] | None = None,
        constraint: Constraint | None = None,
        thoughts: int = 0,
    ) -> Turn:
        """Return the turn with these tokens, in nobody's order yet; by default as it is before the first token."""
        if self.begun is not None:
            known = replace(
                self.begun,
                finish_reason=finish_reason,
                text=text,
                thoughts=thoughts,
                routing=routing,
                constraint=constraint,
            )
            return grown(known, ids, logprobs, version, weights_hash)
        asked = self.request
        return Turn(
            agent=asked.agent,
            policy=asked.policy,
            version=version,
            weights_hash=weights_hash,
            index=-1,
            seen=self.seen,
            prompt_ids=asked.prompt_ids,
            completion_ids=tuple(ids),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            text=text,
            heard=self.heard,
            trained=self.trained,
            images=images_in(asked.messages),
            routing=routing,
            constraint=constraint,
            usage=usage,
            thoughts=thoughts,
            dropped=self.dropped,
        )


def said(turn: Turn, renderer: Renderer | None) -> Said:
    """Return an answer as a message of its agent's conversation."""
    ids, text, count = turn.completion_ids, turn.text, 0
    if turn.thoughts and renderer is not None:
        count = renderer.thoughts(turn.prompt_ids, ids, text)[0]
    return Said("assistant", text, turn.agent, ids=ids, thoughts=count)


def plain(messages: Sequence[Message]) -> list[Message]:
    """Return messages without the tokens of answers."""
    return [Message(m.role, m.content, m.speaker, m.images, m.structured) for m in messages]


def _fits(renderer: Renderer, most: int, messages: Sequence[Message]) -> bool:
    return len(renderer.start(messages)) <= most


class LiveSeat:
    """One agent in one running episode: its conversation as messages and as tokens."""

    def __init__(self, scene: LiveScene, agent: Agent) -> None:
        self._scene: LiveScene = weakref.proxy(scene)
        """A weak reference: a cycle of scene and seat would keep the conversation until garbage collection."""
        self.agent = agent
        """The agent that sits here."""
        self.messages: list[Message] = []
        self.last: Turn | None = None
        """Its last recorded turn; the conversation continues from the turn's tokens."""
        self._opening = instructions(agent, scene.task) if agent.system or scene.task.system else []
        self.read_by: Renderer | None = None
        """How its conversation became tokens in its last turn."""
        self._turn_count = 0
        """Turns begun so far; selects the policy where it differs by turn."""
        self.ended: dict[int, list[Message]] = {}
        """Index of a turn → the conversation that ended with it, where turns may follow earlier ones than the last."""

    @property
    def renderer(self) -> Renderer:
        """How its conversation becomes tokens in its next turn."""
        return agent_renderer(self.agent, self._scene.play.engine.renderer(self._policy.name))

    @property
    def _policy(self) -> Policy:
        """Who speaks for the agent in its next turn."""
        scene, team = self._scene, self._scene.play.team
        record = scene.record
        if record is not None and self.agent.name in record.swapped and not record.replays(self.agent.name):
            return team.every[record.swapped[self.agent.name]]
        cast = scene.task.cast.get(self.agent.name)
        if cast is not None and cast.policy:
            return team.every[cast.policy]
        return team.policy(self.agent.name, self._turn_count)

    @property
    def _is_absent(self) -> bool:
        record, name = self._scene.record, self.agent.name
        return record is not None and name in record.absent and not record.replays(name)

    def _nothing(self) -> Turn:
        """Return the turn of an agent that is absent: it reads nothing and says nothing."""
        policy, self._turn_count = self._policy.name, self._turn_count + 1
        seen = len(self._scene.turns)
        silent = Turn(self.agent.name, policy, 0, "", -1, seen, (), (), (), "stop", "", trained=False)
        self._scene.drafts[self.agent.name] = silent
        return silent

    async def say(self, *heard: Message | str, fresh: bool = False) -> Turn:
        """Read the messages `heard`, answer, record and return the turn; see `workflow.Seat`."""
        return (await self._scene.together({self.agent.name: heard}, fresh))[self.agent.name]

    async def draft(self, heard: Sequence[Message | str], fresh: bool = False) -> list[Turn]:
        """Return the candidates of a tree, or the one turn without a tree; nothing is recorded yet."""
        if self._is_absent:
            return [self._nothing()]
        play = self._scene.play
        read: Sequence[object] = [heard] if isinstance(heard, str) else heard
        messages: list[Message] = []
        for each in read:
            message = Message("user", each) if isinstance(each, str) else each
            if read is not heard or not isinstance(message, Message):
                kind = type(each).__name__ if read is heard else "text"  # its letters would pass as texts
                raise EpisodeError(
                    f"The workflow gives '{self.agent.name}' a {kind} to read. Give `say` texts, such as `turn.text`, and `together` "
                    "a list of texts for each agent."
                )
            messages.append(message)
        policy = self._policy
        renderer = self.read_by = agent_renderer(self.agent, play.engine.renderer(policy.name))
        begins = self.last is None or fresh
        task = self._scene.task
        if task.messages:
            number = 0 if begins else self._turn_count
            messages = [each for message in messages for each in conversation(message, task, number)]
        messages = self._scene.shown(self.agent.name, messages, () if begins else images_in(self.messages))
        if self.last is None or fresh:
            last = messages[-1] if messages else None
            if isinstance(last, Written):
                messages[-1] = Message(last.role, last.content, last.speaker)
            messages = [*self._opening, *messages]
            self.messages = list(messages)
            written = isinstance(last, Written) and not self._opening
            prompt = last.ids if written and isinstance(last, Written) else renderer.start(messages)
            if task.rendered and [each.content for each in messages] == [task.question]:
                assert isinstance(renderer, ReadsPrompts), "`check_run` requires a model in this process"
                prompt = renderer.plain(task.question)
        else:
            known = self.last.prompt_ids + self.last.completion_ids
            prompt = renderer.extend(self.last.prompt_ids, self.last.completion_ids, messages, self.messages)
            self.messages.extend(messages)
            if prompt[: len(known)] != known:  # thoughts were removed, so the prompt starts over
                messages = plain(self.messages)
        own, dropped = play.sampling_of(self.agent), 0
        if play.compaction is not None and not begins:
            most = play.compaction.over or renderer.context - own.max_tokens
            if (
                len(prompt) > most
                and len(self.messages) > len(self._opening) + play.compaction.keep_first + 1
            ):
                # What was sampled before is read as a text from here on: the tokens of the prompt are another beginning.
                fits = partial(_fits, renderer, most)
                self.messages, dropped = compacted(plain(self.messages), play.compaction, fits)
                messages, prompt = list(self.messages), renderer.start(self.messages)
        return await self._sample(policy, renderer, prompt, messages, own, self.messages, dropped)

    async def draft_after(self, asked: Continued, before: Turn | None) -> tuple[Turn, list[Message]]:
        """Return an answer in the conversation that ended with the turn `before`, and all that the agent has read for it.

        Several may be under way at once: nothing of the seat's own conversation is used.
        """
        play = self._scene.play
        if self._is_absent:
            return self._nothing(), list(asked.messages)
        policy = self._policy
        renderer = self.read_by = agent_renderer(self.agent, play.engine.renderer(policy.name))
        messages = list(asked.messages)
        if before is None:
            conversation = messages
            prompt = renderer.start(messages)
        else:
            earlier = self.ended[before.index]
            conversation = [*earlier, *messages]
            known = before.prompt_ids + before.completion_ids
            prompt = renderer.extend(before.prompt_ids, before.completion_ids, messages, earlier)
            if prompt[: len(known)] != known:
                messages = plain(conversation)
        own = play.sampling_of(self.agent)
        most = own.max_tokens if asked.max_tokens is None else min(own.max_tokens, asked.max_tokens)
        form = asked.constraint or own.constraint
        sampling = replace(own, max_tokens=most, stop=(*own.stop, *asked.stop), constraint=form)
        [turn] = await self._sample(policy, renderer, prompt, messages, sampling, conversation)
        return replace(turn, caller=asked.caller), conversation

    async def _sample(
        self,
        policy: Policy,
        renderer: Renderer,
        prompt: tuple[int, ...],
        messages: list[Message],
        sampling: Sampling,
        conversation: Sequence[Message],
        dropped: int = 0,
    ) -> list[Turn]:
        """Return the turn that replays a record, or else what the policy answers: several candidates where a tree asks for them."""
        scene, play, name = self._scene, self._scene.play, self.agent.name
        room = renderer.context - len(prompt)
        if room <= 0:
            raise ContextError(
                f"The prompt of agent '{name}' has {len(prompt)} tokens; its model reads "
                f"{renderer.context}. Use shorter prompts, fewer rounds or a model with a longer context."
            )
        number, seen, recorded = self._turn_count, len(scene.turns), scene.record
        self._turn_count += 1
        given = None if recorded is None else recorded.take(name, number, prompt, scene.turns)
        begun = None if recorded is None else recorded.begun.get(name)
        if sampling.constraint is not None and sampling.constraint.is_legal:
            moves = scene.legal(name)  # none where it is not to move: then it says what it likes
            sampling = replace(sampling, constraint=Constraint.choices(moves) if moves else None)
        if given is not None and given is not begun:
            turn = replace(given, reward=0.0, score=None, worth=None, parent=None)
            scene.drafts[name] = turn
            return [turn]

        branch, depth = scene.branch, 0 if scene.branch is None else scene.moments + policy.trained
        way = () if branch is None else branch.ways[:depth]
        # A turn that had only begun is sampled further, from the tokens that it has.
        request = Request(
            policy.name,
            name,
            tuple(conversation),
            prompt,
            sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room),
            derive_seed(scene.sampling_seed, *way, name, number),
            scene.task,
            scene.sample,
            () if given is None else given.completion_ids,
        )
        asked = scene.asked[name] = AskedTurn(request, policy.trained, seen, tuple(messages), given, dropped)
        count = play.tree.candidates if play.tree and policy.trained else 1
        if count == 1:  # awaited here, without a task of its own
            answers = [
                await self._complete(request)
                if branch is None or depth >= len(branch.ways)
                else await branch.answers.once((way, name, number, prompt), partial(self._complete, request))
            ]
        else:
            others = [replace(request, seed=derive_seed(request.seed, "branch", k)) for k in range(1, count)]
            answers = await asyncio.gather(*(self._complete(each) for each in (request, *others)))
        turns = [
            asked.answered(
                *(a.ids, a.logprobs, a.version, a.weights_hash, a.finish_reason, a.text, a.routing, a.usage),
                constraint=a.constraint,
                thoughts=renderer.thoughts(prompt, (*request.begun, *a.ids), a.text)[1],
            )
            for a in answers
        ]
        if branch is not None and any(branch.ways[depth:]):
            turns = [replace(turn, copied=True) for turn in turns]
        scene.drafts[name] = turns[0]
        return turns

    async def _complete(self, request: Request) -> Completion:
        play = self._scene.play
        what = f"An answer of policy '{request.policy}'"
        generate = play.generate or play.engine.generate
        answer = within(what, "engine", play.patience.engine, generate(request))
        completion = await play.timeline.during("generate", answer)
        if not all(map(math.isfinite, completion.logprobs)):
            raise EpisodeError(
                f"Policy '{request.policy}' returned log-probs that are not finite: its weights are broken. "
                "Go back to an earlier checkpoint, and lower `optimizer.lr`."
            )
        return completion


class LiveScene:
    """One running episode, as its workflow sees it."""

    def __init__(
        self,
        play: Play,
        task: Task,
        seed: int,
        world: BoundedWorld | RemoteWorld,
        play_continuation: Callable[[Continuation], Awaitable[Episode]],
        sample: int = 0,
        record: Record | None = None,
        sampling_seed: int | None = None,
        branch: Branch | None = None,
    ) -> None:
        """Play with a seed; a continuation first replays a `record` and has its own `sampling_seed`.

        A tree's candidates are judged by what `play_continuation` plays. A `branch` shares turns with others of its group.
        """
        self.play = play
        self.task = task
        """The problem."""
        self.seed = seed
        """Seed of this episode."""
        self.one_seat = play.one_seat
        """Whether the world takes one text a move."""
        self.sample = sample
        self.sampling_seed = seed if sampling_seed is None else sampling_seed
        self.record = record
        self.branch = branch
        self.continued: Counter[str] = Counter()
        """Policy → tokens sampled to continue from candidates."""
        self._play_continuation = play_continuation
        self._world = world
        self._seats = {agent.name: LiveSeat(self, agent) for agent in play.team.agents}
        without = record is not None and isinstance(play.workflow, GoesOnWithout)
        absent = record.absent if without and record is not None else frozenset[str]()
        self.names = tuple(name for name in self._seats if name not in absent) or tuple(self._seats)
        """Agent names in seat order; without those that are absent where the workflow goes on without them."""
        self._turns: list[Turn] = []
        self._open: dict[str, list[Turn]] = {}
        """Agent → siblings of its chosen candidate, until that is recorded."""
        self._branches: list[Turn] = []
        self.asked: dict[str, AskedTurn] = {}
        """Agent → the turn that it was last asked for."""
        self.drafts: dict[str, Turn] = {}
        """Agent → its complete turn, until that is recorded."""
        self.stepped = False
        """Whether the workflow has moved in the world."""
        self.final: str | None = None
        """The text that the workflow last named as the team's answer."""
        self.payments: list[Payment] = []
        self._owed: dict[str, float] = {}
        """Agent → what it earned before its first turn."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns recorded so far."""
        return tuple(self._turns)

    @property
    def moments(self) -> int:
        """Return at how many moments trained agents have spoken."""
        return len({turn.seen for turn in self._turns if turn.trained})

    def __getitem__(self, name: str) -> LiveSeat:
        if name not in self._seats:
            raise EpisodeError(
                f"The workflow lets {name!r:.60} speak, and there is no such agent.{did_you_mean(str(name), self._seats)}"
            )
        return self._seats[name]

    def commit(self, drafts: Sequence[Turn]) -> list[Turn]:
        """Record turns in the order given and return them with their index."""
        turns = [
            placed(turn, len(self._turns) + k, turn.reward + self._owed.pop(turn.agent, 0.0))
            for k, turn in enumerate(drafts)
        ]
        self._turns.extend(turns)
        for turn in turns:
            self.asked.pop(turn.agent, None)
            self.drafts.pop(turn.agent, None)
            if turn.agent in self._open:
                siblings = self._open.pop(turn.agent)
                self._branches.extend(replace(sibling, parent=turn.index) for sibling in siblings)
        return turns

    @property
    def branches(self) -> tuple[Turn, ...]:
        """Candidates that the episode did not continue with, numbered after the turns."""
        return tuple(replace(turn, index=len(self._turns) + k) for k, turn in enumerate(self._branches))

    def left(self, broken: Sequence[Interrupted]) -> PartialEpisode | None:
        """Return what the episode has sampled, with what was sampled for requests that were broken off.

        None while it still replays what it had before.
        """
        if self.record is not None and self.record.left:
            return None
        sampled = {id(each.request): each for each in broken}
        begun = []
        for agent in self._seats:
            if agent in self.asked and agent not in self.drafts:
                asked = self.asked[agent]
                more = sampled.get(id(asked.request))
                if more is not None:
                    own = asked.request.sampling.constraint
                    sampled_for = (more.ids, more.logprobs, more.version, more.weights_hash)
                    begun.append(asked.answered(*sampled_for, constraint=own))
                else:
                    begun.append(asked.begun or asked.answered())
        drafts = [self.drafts[agent] for agent in self._seats if agent in self.drafts]
        return PartialEpisode(
            self.seed, self.turns, tuple(drafts), tuple(begun), payments=tuple(self.payments)
        )

    async def together(
        self, words: Mapping[str, Sequence[Message | str]], fresh: bool = False
    ) -> dict[str, Turn]:
        """Let several agents answer at the same moment; see `workflow.Scene`."""
        if type(words) is not dict and not isinstance(words, Mapping):
            raise EpisodeError(
                f"The workflow gives `together` a {type(words).__name__}. Give a list of texts for each agent: {{name: [text]}}."
            )
        # All are drafted before any is recorded, so that the agents do not see one another's texts.
        tree = self.play.tree
        past = () if tree is None else self.turns
        if len(words) == 1:
            # One agent is awaited here: a task of its own would cost more than all else that a turn needs. Answers of the same
            # moment are recorded before any of their agents speaks on.
            await asyncio.sleep(0)
            [(name, heard)] = words.items()
            drafts = [await self[name].draft(heard, fresh)]
        else:
            drafts = await asyncio.gather(*(self[name].draft(heard, fresh) for name, heard in words.items()))
        chosen = [candidates[0] for candidates in drafts]
        if tree is not None and any(len(candidates) > 1 for candidates in drafts):
            # The tree chooses among several candidates, and the others become branches.
            so_far = Episode(self.task, self.seed, self.play.team.names, past)
            name = self.play.environment.name
            settled = await choose(tree, so_far, self.sample, drafts, name, self._play_all)
            self._open |= {turn.agent: siblings for turn, siblings in settled if siblings}
            chosen = [turn for turn, _ in settled]
        for turn in chosen:  # their agents' conversations continue after them
            seat = self._seats[turn.agent]
            seat.last = turn
            seat.messages.append(said(turn, seat.read_by))
        shares = self.play.share_thoughts
        return {
            turn.agent: replace(turn, text=turn.words, thoughts=0) if turn.thoughts and not shares else turn
            for turn in self.commit(chosen)
        }

    async def _play_all(self, runs: Sequence[Continuation]) -> list[Episode]:
        """Play a tree's continuations at once: inside this episode, which waits for them and had room for their worlds before it began."""

        async def one(run: Continuation) -> Episode:
            with Participant():
                return await self._play_continuation(run)

        episodes = await asyncio.gather(*map(one, runs))
        for run, episode in zip(runs, episodes, strict=True):  # in their order, whichever ended first
            self.continued += run.record.sampled(episode)
        return episodes

    async def converse(self, asked: Mapping[str, Continued]) -> dict[str, Turn]:
        """Let several agents answer at the same moment in conversations of the workflow's; see `workflow.Scene`."""
        assert self.play.tree is None, "`check_run` refuses trees for environments whose answers may differ"
        drafts = await asyncio.gather(
            *(
                self._seats[name].draft_after(each, None if each.after is None else self._turns[each.after])
                for name, each in asked.items()
            )
        )
        turns = self.commit([turn for turn, _ in drafts])
        for turn, (_, whole) in zip(turns, drafts, strict=True):
            seat = self._seats[turn.agent]
            seat.ended[turn.index] = [*whole, said(turn, seat.read_by)]
        return {turn.agent: turn for turn in turns}

    def allow_answers(self, most: int) -> None:
        """Let the world of a question stay open after a wrong answer; see `workflow.Scene`."""
        self._world.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return what the world shows this agent now."""
        return text(self._world.observe(agent), f"What the world shows '{agent}'")

    def legal(self, agent: str) -> Sequence[str]:
        """Return the moves that the world lists for an agent now; empty where it is not to move."""
        return self._world.legal(agent)

    def shown(self, agent: str, read: list[Message], known: Sequence[Image]) -> list[Message]:
        """Return what an agent reads, with the pictures that the world shows it beyond those that it knows."""
        if isinstance(self._world, RemoteWorld) or not read:
            return read
        new = [image for image in dict.fromkeys(self._world.images(agent)) if image not in known]
        if not new:
            return read
        first = read[0]  # perhaps `Written`, whose tokens have no place for a picture
        return [Message(first.role, first.content, first.speaker, (*first.images, *new)), *read[1:]]

    def movers(self) -> tuple[str, ...]:
        """Return who may move in the world now."""
        movers = self._world.movers()
        found: object = movers
        if isinstance(found, str):
            raise EpisodeError(
                f"`movers` returns {found!r:.60}; return a tuple of agents' names, empty when it is over."
            )
        return movers

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Move in the world and add its rewards to the agents' last turns.

        An agent without a turn gets it on its first one; EpisodeError for an agent outside the team.
        """
        for given in (*actions.values(), final or ""):
            if not isinstance(given, str):
                raise EpisodeError(
                    f"The workflow gives `step` a {type(given).__name__}. Give texts by agent, such as `turn.text`."
                )
        self.stepped = True
        self.final = self.final if final is None else final
        with Participant():
            rewards = await self.play.timeline.during("environment", self._world.step(actions, final))
        paid = payments(rewards, self._seats)  # the world knows all, the absent too
        for agent, reward in paid.items():
            self.payments.append(Payment(agent, len(self._turns), reward))
            last = max((turn.index for turn in self._turns if turn.agent == agent), default=None)
            if last is None:
                self._owed[agent] = self._owed.get(agent, 0.0) + reward
            else:
                turn = self._turns[last]
                self._turns[last] = placed(turn, last, turn.reward + reward)
        return paid

    def settle(self, outcome: Outcome) -> Outcome:
        """Return the outcome, with earlier rewards of agents that had no turn added to their terminal reward."""
        found: object = outcome
        if not isinstance(found, Outcome):
            raise EpisodeError(f"`outcome` returns {found!r:.60}; return a kapelle.Outcome.")
        rewards = payments(outcome.rewards, self._seats)
        for agent, reward in self._owed.items():
            rewards[agent] = rewards.get(agent, 0.0) + reward
        return Outcome(rewards, outcome.success, outcome.info, outcome.truncated, outcome.roles)

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text where the environment knows answers, else None."""
        environment = self.play.environment
        if offers(environment, Answerable) and asks_questions(environment):
            return call("`extract`", "environment", self.play.patience.environment, environment.extract, text)
        return None

    def leave_out(self) -> None:
        """Leave the turns recorded so far, and their siblings, out of training."""
        self._turns = [replace(turn, trained=False) for turn in self._turns]
        self._branches = [replace(turn, trained=False) for turn in self._branches]

    async def score(self, turn: Turn) -> float:
        """Score a recorded turn's text as an answer; see `workflow.Scene`."""
        if not self._world.scorable:
            raise EpisodeError(
                f"The world of `{self.play.environment.name}` cannot score a text before the episode is over. "
                "Set `workflow.score_rounds: false`, or another environment."
            )
        with Participant():
            value = await self.play.timeline.during("grade", self._world.score(turn.agent, turn.text))
        score = share(value, f"The world's score of a text of '{turn.agent}'")
        self._turns[turn.index] = replace(self._turns[turn.index], score=score)
        return score
