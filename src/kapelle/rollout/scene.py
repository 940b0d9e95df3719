"""One running episode: what a workflow sees of it, and what is recorded while it is played."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kapelle.engines.rollout.protocol import Completion, Interrupted, Request
from kapelle.environment import (
    Answerable,
    Outcome,
    RemoteWorld,
    asks_questions,
    offers,
)
from kapelle.errors import ContextError, EpisodeError, did_you_mean
from kapelle.rollout.bounded_worlds import BoundedWorld
from kapelle.rollout.branching import Record, judge, settle
from kapelle.rollout.outcomes import payments, share, text
from kapelle.rollout.partial import PartialEpisode, grown
from kapelle.runtime.batch_barrier import Participant
from kapelle.runtime.deadlines import call, within
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Agent, Policy
from kapelle.types import Episode, Message, Payment, Sampling, Task, Turn
from kapelle.workflow import Continued

if TYPE_CHECKING:
    from kapelle.rollout.play import Play

Replay = Callable[[Record, int], Awaitable[Episode]]
"""Replays an episode as recorded and continues it with a sampling seed."""


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
        self._opening = [Message("system", agent.system)] if agent.system else []
        self._turn_count = 0
        """Turns begun so far; selects the policy where it differs by turn."""
        self.ended: dict[int, list[Message]] = {}
        """Index of a turn → the conversation that ended with it, where turns may follow earlier ones than the last."""

    async def say(self, *heard: Message | str, fresh: bool = False) -> Turn:
        """Read the messages `heard`, answer, record and return the turn; see `workflow.Seat`."""
        return (await self._scene.together({self.agent.name: heard}, fresh))[self.agent.name]

    async def draft(self, heard: Sequence[Message | str], fresh: bool = False) -> list[Turn]:
        """Return the candidates of a tree, or the one turn without a tree; nothing is recorded yet."""
        play = self._scene.play
        read: Sequence[object] = [heard] if isinstance(heard, str) else heard
        wrong = [m for m in read if isinstance(heard, str) or not isinstance(m, str | Message)]
        if wrong:  # the letters of a single text would pass as texts
            kind = "text" if isinstance(heard, str) else type(wrong[0]).__name__
            raise EpisodeError(
                f"The workflow gives '{self.agent.name}' a {kind} to read. Give `say` texts, such as `turn.text`, and `together` a "
                "list of texts for each agent."
            )
        messages = [Message("user", m) if isinstance(m, str) else m for m in heard]
        policy = play.team.policy(self.agent.name, self._turn_count)
        renderer = play.engine.renderer(policy.name)
        if self.last is None or fresh:
            messages = [*self._opening, *messages]
            self.messages = list(messages)
            prompt = renderer.start(messages)
        else:
            self.messages.extend(messages)
            prompt = renderer.extend(self.last.prompt_ids, self.last.completion_ids, messages)
        return await self._sample(policy, prompt, messages, play.sampling_of(self.agent), self.messages)

    async def draft_after(self, asked: Continued, before: Turn | None) -> tuple[Turn, list[Message]]:
        """Return an answer in the conversation that ended with the turn `before`, and all that the agent has read for it.

        Several may be under way at once: nothing of the seat's own conversation is used.
        """
        play = self._scene.play
        policy = play.team.policy(self.agent.name, self._turn_count)
        renderer = play.engine.renderer(policy.name)
        messages = list(asked.messages)
        if before is None:
            conversation = messages
            prompt = renderer.start(messages)
        else:
            conversation = [*self.ended[before.index], *messages]
            prompt = renderer.extend(before.prompt_ids, before.completion_ids, messages)
        own = play.sampling_of(self.agent)
        most = own.max_tokens if asked.max_tokens is None else min(own.max_tokens, asked.max_tokens)
        sampling = replace(own, max_tokens=most, stop=(*own.stop, *asked.stop))
        [turn] = await self._sample(policy, prompt, messages, sampling, conversation)
        return turn, conversation

    async def _sample(
        self,
        policy: Policy,
        prompt: tuple[int, ...],
        messages: list[Message],
        sampling: Sampling,
        conversation: Sequence[Message],
    ) -> list[Turn]:
        """Return the turn that replays a record, or else what the policy answers: several candidates where a tree asks for them."""
        scene, play, name = self._scene, self._scene.play, self.agent.name
        renderer = play.engine.renderer(policy.name)
        if len(prompt) >= renderer.context:
            raise ContextError(
                f"The prompt of agent '{name}' has {len(prompt)} tokens; its model reads "
                f"{renderer.context}. Use shorter prompts, fewer rounds or a model with a longer context."
            )
        number, seen, recorded = self._turn_count, len(scene.turns), scene.record
        self._turn_count += 1
        given = None if recorded is None else recorded.take(name, number, prompt, scene.turns)
        begun = None if recorded is None else recorded.begun.get(name)
        if given is not None and given is not begun:
            turn = replace(given, reward=0.0, score=None, worth=None, parent=None)
            scene.drafts[name] = turn
            return [turn]

        # A turn that had only begun is sampled further, from the tokens that it has.
        request = Request(
            policy.name,
            name,
            tuple(conversation),
            prompt,
            replace(sampling, max_tokens=min(sampling.max_tokens, renderer.context - len(prompt))),
            derive_seed(scene.sampling_seed, name, number),
            scene.task,
            scene.sample,
            () if given is None else given.completion_ids,
        )
        turn = (
            given
            if given is not None
            else Turn(
                agent=name,
                policy=policy.name,
                version=0,
                weights_hash="",
                index=-1,
                seen=seen,
                prompt_ids=prompt,
                completion_ids=(),
                logprobs=(),
                finish_reason="length",
                text="",
                heard=tuple(messages),
                trained=policy.trained,
            )
        )
        scene.asked[name] = request, turn
        count = play.tree.candidates if play.tree and policy.trained else 1
        others = [replace(request, seed=derive_seed(request.seed, "branch", k)) for k in range(1, count)]
        answers = await asyncio.gather(*(self._complete(each) for each in (request, *others)))
        turns = [
            grown(
                replace(turn, finish_reason=answer.finish_reason, text=answer.text),
                answer.ids,
                answer.logprobs,
                answer.version,
                answer.weights_hash,
            )
            for answer in answers
        ]
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
        sample: int = 0,
        record: Record | None = None,
        sampling_seed: int | None = None,
        replay: Replay | None = None,
    ) -> None:
        """Play with a seed; a continuation first replays a `record` and has its own `sampling_seed`.

        `replay` plays such a continuation; episodes that do not branch need none.
        """
        self.play = play
        self.task = task
        """The problem."""
        self.seed = seed
        """Seed of this episode."""
        self.sample = sample
        self.sampling_seed = seed if sampling_seed is None else sampling_seed
        self.record = record
        self.continued: Counter[str] = Counter()
        """Policy → tokens sampled to continue from candidates."""
        self._replay = replay
        self._world = world
        self._seats = {agent.name: LiveSeat(self, agent) for agent in play.team.agents}
        self.names = tuple(self._seats)
        """Agent names in seat order."""
        self._turns: list[Turn] = []
        self._open: dict[str, list[Turn]] = {}
        """Agent → siblings of its chosen candidate, until that is recorded."""
        self._branches: list[Turn] = []
        self.asked: dict[str, tuple[Request, Turn]] = {}
        """Agent → its last request, and what of the answer was known when it was sent."""
        self.drafts: dict[str, Turn] = {}
        """Agent → its complete turn, until that is recorded."""
        self.stepped = False
        """Whether the workflow has moved in the world."""
        self.payments: list[Payment] = []
        self._owed: dict[str, float] = {}
        """Agent → what it earned before its first turn."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns recorded so far."""
        return tuple(self._turns)

    def __getitem__(self, name: str) -> LiveSeat:
        if name not in self._seats:
            raise EpisodeError(
                f"The workflow lets {name!r:.60} speak, and there is no such agent.{did_you_mean(str(name), self._seats)}"
            )
        return self._seats[name]

    def commit(self, drafts: Sequence[Turn]) -> list[Turn]:
        """Record turns in the order given and return them with their index."""
        turns = [
            replace(turn, index=len(self._turns) + k, reward=turn.reward + self._owed.pop(turn.agent, 0.0))
            for k, turn in enumerate(drafts)
        ]
        self._turns.extend(turns)
        for turn in turns:
            self.asked.pop(turn.agent, None)
            self.drafts.pop(turn.agent, None)
            siblings = self._open.pop(turn.agent, [])
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
                request, turn = self.asked[agent]
                more = sampled.get(id(request))
                if more is not None:
                    turn = grown(turn, more.ids, more.logprobs, more.version, more.weights_hash)
                begun.append(turn)
        drafts = [self.drafts[agent] for agent in self._seats if agent in self.drafts]
        return PartialEpisode(
            self.seed, self.turns, tuple(drafts), tuple(begun), payments=tuple(self.payments)
        )

    async def together(
        self, words: Mapping[str, Sequence[Message | str]], fresh: bool = False
    ) -> dict[str, Turn]:
        """Let several agents answer at the same moment; see `workflow.Scene`."""
        if not isinstance(words, Mapping):
            raise EpisodeError(
                f"The workflow gives `together` a {type(words).__name__}. Give a list of texts for each agent: {{name: [text]}}."
            )
        # All are drafted before any is recorded, so that the agents do not see one another's texts.
        past, tree = self.turns, self.play.tree
        drafts = await asyncio.gather(*(self[name].draft(heard, fresh) for name, heard in words.items()))
        chosen = [candidates[0] for candidates in drafts]
        if tree is not None and any(len(candidates) > 1 for candidates in drafts):
            # The tree chooses among several candidates, and the others become branches.
            async def play_on(record: Record, number: int) -> Episode:
                seed = derive_seed(self.seed, "continuation", len(past), number)
                with Participant():
                    assert self._replay is not None, "an episode that branches needs `replay`"
                    episode = await self._replay(record, seed)
                self.continued += record.sampled(episode)
                return episode

            worths = await judge(tree, past, drafts, self.play.environment.name, play_on)
            settled = settle(tree, drafts, worths)
            self._open |= {turn.agent: siblings for turn, siblings in settled if siblings}
            chosen = [turn for turn, _ in settled]
        for turn in chosen:  # their agents' conversations continue after them
            seat = self._seats[turn.agent]
            seat.last = turn
            seat.messages.append(Message("assistant", turn.text, speaker=turn.agent))
        return {turn.agent: turn for turn in self.commit(chosen)}

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
        for turn, (_, conversation) in zip(turns, drafts, strict=True):
            said = Message("assistant", turn.text, speaker=turn.agent)
            self._seats[turn.agent].ended[turn.index] = [*conversation, said]
        return {turn.agent: turn for turn in turns}

    def allow_answers(self, most: int) -> None:
        """Let the world of a question stay open after a wrong answer; see `workflow.Scene`."""
        self._world.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return what the world shows this agent now."""
        return text(self._world.observe(agent), f"What the world shows '{agent}'")

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
        for said in (*actions.values(), final or ""):
            if not isinstance(said, str):
                raise EpisodeError(
                    f"The workflow gives `step` a {type(said).__name__}. Give texts by agent, such as `turn.text`."
                )
        self.stepped = True
        with Participant():
            rewards = await self.play.timeline.during("environment", self._world.step(actions, final))
        paid = payments(rewards, self.names)
        for agent, reward in paid.items():
            self.payments.append(Payment(agent, len(self._turns), reward))
            last = max((turn.index for turn in self._turns if turn.agent == agent), default=None)
            if last is None:
                self._owed[agent] = self._owed.get(agent, 0.0) + reward
            else:
                self._turns[last] = replace(self._turns[last], reward=self._turns[last].reward + reward)
        return paid

    def settle(self, outcome: Outcome) -> Outcome:
        """Return the outcome, with earlier rewards of agents that had no turn added to their terminal reward."""
        found: object = outcome
        if not isinstance(found, Outcome):
            raise EpisodeError(f"`outcome` returns {found!r:.60}; return a kapelle.Outcome.")
        rewards = payments(outcome.rewards, self.names)
        owed = {agent: rewards.get(agent, 0.0) + reward for agent, reward in self._owed.items()}
        return replace(outcome, rewards={**rewards, **owed})

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
