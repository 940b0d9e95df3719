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
    World,
    asks_questions,
    offers,
)
from kapelle.environments.bounded_worlds import BoundedWorld
from kapelle.errors import ContextError, EpisodeError
from kapelle.rollout.branching import Record, judge, settle
from kapelle.rollout.outcomes import payments, share, text
from kapelle.rollout.partial import PartialEpisode, answered_turn, asked_turn, grown
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
        self._agent = agent
        self._opening = [Message("system", agent.system)] if agent.system else []
        self._messages: list[Message] = []
        self._last: Turn | None = None
        self._turn_count = 0
        """Turns begun so far; selects the policy where it differs by turn."""
        self._ended: dict[int, list[Message]] = {}
        """Index of a turn → the conversation that ended with it, where turns may follow earlier ones than the last."""

    @property
    def agent(self) -> Agent:
        """The agent that sits here."""
        return self._agent

    async def say(self, *heard: Message | str, fresh: bool = False) -> Turn:
        """Read the messages `heard`, answer, record and return the turn; see `workflow.Seat`."""
        return (await self._scene.together({self._agent.name: heard}, fresh))[self._agent.name]

    async def draft(self, heard: Sequence[Message | str], fresh: bool = False) -> list[Turn]:
        """Return the candidates of a tree, or the one turn without a tree; nothing is recorded yet."""
        play = self._scene.play
        messages = [Message("user", m) if isinstance(m, str) else m for m in heard]
        renderer = play.engine.renderer(self._policy.name)
        if self._last is None or fresh:
            messages = [*self._opening, *messages]
            self._messages = list(messages)
            prompt = renderer.start(messages)
        else:
            self._messages.extend(messages)
            prompt = renderer.extend(self._last.prompt_ids, self._last.completion_ids, messages)
        return await self._drafted(prompt, messages, self._sampling, self._messages)

    async def draft_after(self, asked: Continued, before: Turn | None) -> tuple[Turn, list[Message]]:
        """Return an answer in the conversation that ended with the turn `before`, and all that the agent has read for it.

        Several may be under way at once: nothing of the seat's own conversation is used.
        """
        renderer = self._scene.play.engine.renderer(self._policy.name)
        messages = list(asked.messages)
        if before is None:
            conversation = messages
            prompt = renderer.start(messages)
        else:
            conversation = [*self._ended[before.index], *messages]
            prompt = renderer.extend(before.prompt_ids, before.completion_ids, messages)
        own = self._sampling
        most = own.max_tokens if asked.max_tokens is None else min(own.max_tokens, asked.max_tokens)
        sampling = replace(own, max_tokens=most, stop=(*own.stop, *asked.stop))
        [turn] = await self._drafted(prompt, messages, sampling, conversation)
        return turn, conversation

    @property
    def _policy(self) -> Policy:
        return self._scene.play.team.policy(self._agent.name, self._turn_count)

    @property
    def _sampling(self) -> Sampling:
        return (self._scene.play.sampling or {}).get(self._agent.name, self._agent.sampling)

    async def _drafted(
        self,
        prompt: tuple[int, ...],
        messages: list[Message],
        sampling: Sampling,
        conversation: Sequence[Message],
    ) -> list[Turn]:
        play = self._scene.play
        policy = self._policy
        renderer = play.engine.renderer(policy.name)
        if len(prompt) >= renderer.context:
            raise ContextError(
                f"The prompt of agent '{self._agent.name}' has {len(prompt)} tokens; its model reads "
                f"{renderer.context}. Use shorter prompts, fewer rounds or a model with a longer context."
            )
        number, seen = self._turn_count, self._scene.clock
        self._turn_count += 1
        given, begun = self._scene.given(self._agent.name, number, prompt)
        if given is not None and not begun:
            turn = replace(given, reward=0.0, score=None, worth=None, parent=None)
            self._scene.drafts[self._agent.name] = turn
            return [turn]
        request = Request(
            policy.name,
            self._agent.name,
            tuple(conversation),
            prompt,
            replace(sampling, max_tokens=min(sampling.max_tokens, renderer.context - len(prompt))),
            derive_seed(self._scene.sampling_seed, self._agent.name, number),
            self._scene.task,
            self._scene.sample,
            () if given is None else given.completion_ids,
        )
        turn = asked_turn(request, tuple(messages), seen, policy.trained, given)
        self._scene.asked[self._agent.name] = request, turn
        count = play.tree.candidates if play.tree and policy.trained else 1
        others = [replace(request, seed=derive_seed(request.seed, "branch", k)) for k in range(1, count)]
        completions = await asyncio.gather(*(self._complete(each) for each in (request, *others)))
        turns = [answered_turn(turn, completion) for completion in completions]
        self._scene.drafts[self._agent.name] = turns[0]
        return turns

    def keep(self, turn: Turn) -> None:
        """Continue the conversation after this turn."""
        self._last = turn
        self._messages.append(Message("assistant", turn.text, speaker=self._agent.name))

    def remember(self, turn: Turn, conversation: Sequence[Message]) -> None:
        """Keep the conversation that ends with a recorded turn, for others that follow it."""
        self._ended[turn.index] = [*conversation, Message("assistant", turn.text, speaker=self._agent.name)]

    async def _complete(self, request: Request) -> Completion:
        play = self._scene.play
        what = f"An answer of policy '{request.policy}'"
        answer = within(what, "engine", play.patience.engine, play.engine.generate(request))
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
        world: World | BoundedWorld,
        sample: int = 0,
        record: Record | None = None,
        sampling_seed: int | None = None,
        replay: Replay | None = None,
    ) -> None:
        """Play with a seed; a continuation first replays a `record` and has its own `sampling_seed`.

        `replay` plays such a continuation; episodes that do not branch need none.
        """
        self.play = play
        self.sample = sample
        self.sampling_seed = seed if sampling_seed is None else sampling_seed
        self.continued: Counter[str] = Counter()
        """Policy → tokens sampled to continue from candidates."""
        self._record = record
        self._replay = replay
        self._task = task
        self._seed = seed
        self._world = BoundedWorld.around(world, play.environment.name, play.patience)
        self._seats = {agent.name: LiveSeat(self, agent) for agent in play.team.agents}
        self._turns: list[Turn] = []
        self._open: dict[str, list[Turn]] = {}
        """Agent → siblings of its chosen candidate, until that is recorded."""
        self._branches: list[Turn] = []
        self.asked: dict[str, tuple[Request, Turn]] = {}
        """Agent → its last request, and what of the answer was known when it was sent."""
        self.drafts: dict[str, Turn] = {}
        """Agent → its complete turn, until that is recorded."""
        self.payments: list[Payment] = []
        self._owed: dict[str, float] = {}
        """Agent → what it earned before its first turn."""

    @property
    def task(self) -> Task:
        """The problem."""
        return self._task

    @property
    def names(self) -> tuple[str, ...]:
        """Agent names in seat order."""
        return tuple(self._seats)

    @property
    def seed(self) -> int:
        """Seed of this episode."""
        return self._seed

    @property
    def clock(self) -> int:
        """Number of turns recorded so far."""
        return len(self._turns)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns recorded so far."""
        return tuple(self._turns)

    def __getitem__(self, name: str) -> LiveSeat:
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

    def given(self, agent: str, number: int, prompt_ids: Sequence[int]) -> tuple[Turn | None, bool]:
        """Return the recorded turn of this number, and whether it has only begun; None if the agent samples anew."""
        turn = None if self._record is None else self._record.take(agent, number, prompt_ids, self._turns)
        return turn, turn is not None and self._record is not None and self._record.is_begun(turn)

    def left(self, broken: Sequence[Interrupted]) -> PartialEpisode | None:
        """Return what the episode has sampled, with what was sampled for requests that were broken off.

        None while it still replays what it had before.
        """
        if self._record is not None and self._record.left:
            return None
        sampled = {id(each.request): each for each in broken}
        begun = []
        for agent in self._seats:
            if agent in self.asked and agent not in self.drafts:
                request, turn = self.asked[agent]
                more = sampled.get(id(request))
                now = (
                    turn
                    if more is None
                    else grown(turn, more.ids, more.logprobs, more.version, more.weights_hash)
                )
                begun.append(now)
        drafts = [self.drafts[agent] for agent in self._seats if agent in self.drafts]
        return PartialEpisode(
            self._seed, self.turns, tuple(drafts), tuple(begun), payments=tuple(self.payments)
        )

    async def together(
        self, words: Mapping[str, Sequence[Message | str]], fresh: bool = False
    ) -> dict[str, Turn]:
        """Let several agents answer at the same moment; see `workflow.Scene`."""
        past = self.turns
        drafts = await asyncio.gather(
            *(self._seats[name].draft(heard, fresh) for name, heard in words.items())
        )
        chosen = await self._chosen(past, drafts)
        for turn in chosen:
            self._seats[turn.agent].keep(turn)
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
            self._seats[turn.agent].remember(turn, conversation)
        return {turn.agent: turn for turn in turns}

    async def _chosen(self, past: Sequence[Turn], drafts: Sequence[Sequence[Turn]]) -> list[Turn]:
        """Return each agent's turn; the tree chooses among several candidates, and the others become branches."""
        tree = self.play.tree
        if tree is None or all(len(candidates) == 1 for candidates in drafts):
            return [candidates[0] for candidates in drafts]

        async def play_on(record: Record, number: int) -> Episode:
            seed = derive_seed(self._seed, "continuation", len(past), number)
            with Participant():
                assert self._replay is not None, "an episode that branches needs `replay`"
                episode = await self._replay(record, seed)
            self.continued += record.sampled(episode)
            return episode

        worths = await judge(tree, past, drafts, self.play.environment.name, play_on)
        settled = settle(tree, drafts, worths)
        self._open |= {turn.agent: siblings for turn, siblings in settled if siblings}
        return [turn for turn, _ in settled]

    def allow_answers(self, most: int) -> None:
        """Let the world of a question stay open after a wrong answer; see `workflow.Scene`."""
        self._world.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return what the world shows this agent now."""
        return text(self._world.observe(agent), f"What the world shows '{agent}'")

    def movers(self) -> tuple[str, ...]:
        """Return who may move in the world now."""
        return self._world.movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Move in the world and add its rewards to the agents' last turns.

        An agent without a turn gets it on its first one; EpisodeError for an agent outside the team.
        """
        with Participant():
            rewards = await self.play.timeline.during("environment", self._world.step(actions, final))
        paid = payments(rewards, self.names)
        for agent, reward in paid.items():
            self.payments.append(Payment(agent, self.clock, reward))
            last = max((turn.index for turn in self._turns if turn.agent == agent), default=None)
            if last is None:
                self._owed[agent] = self._owed.get(agent, 0.0) + reward
            else:
                self._turns[last] = replace(self._turns[last], reward=self._turns[last].reward + reward)
        return paid

    def settle(self, outcome: Outcome) -> Outcome:
        """Return the outcome, with earlier rewards of agents that had no turn added to their terminal reward."""
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
        """Train on none of the turns recorded so far, nor on their siblings."""
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
