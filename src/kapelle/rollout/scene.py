"""Run one episode: the scene that its workflow sees, and the turns and rewards that are recorded."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from kapelle.engines.rollout.protocol import Completion, HeldRequest, ReadsPrompts, Renderer, Request
from kapelle.environment import (
    Answerable,
    Outcome,
    RemoteState,
    TeamMoves,
    has_comparable_answers,
    offers,
)
from kapelle.errors import ContextError, EpisodeError, did_you_mean
from kapelle.features.compaction.settings import CompactionConfig, SummaryConfig
from kapelle.rollout.bounded_states import BoundedState
from kapelle.rollout.branching import Branch
from kapelle.rollout.compaction import compacted
from kapelle.rollout.interventions import Continuation, Record, choose
from kapelle.rollout.outcomes import checked_rewards, share, text
from kapelle.rollout.partial import PartialEpisode, continued
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import agent_renderer
from kapelle.runtime.batch_barrier import Participant
from kapelle.runtime.deadlines import call, within
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Agent, Policy
from kapelle.types import (
    Constraint,
    Episode,
    Image,
    Message,
    RewardEvent,
    SampledMessage,
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
    """Return a copy of a turn with this index and reward.

    The function is called for every turn and is several times faster than `dataclasses.replace`.
    """
    values = dict(zip(Turn.__slots__, _TURN_VALUES(turn), strict=True))
    values["index"], values["reward"] = index, reward
    return Turn(**values)


@dataclass(frozen=True, slots=True)
class RequestedTurn:
    """A turn whose completion was requested, with the values that are known before the completion."""

    request: Request
    trained: bool
    completed_before: int
    """Number of turns that were complete when the prompt of this turn was created."""
    new_messages: tuple[Message, ...]
    begun: Turn | None
    """The unfinished turn that is continued, or None for a new turn."""
    dropped: int = 0
    """Number of messages that were removed from the conversation before this turn."""
    summary: bool = False
    """Whether the turn is a summary of the agent's own conversation."""

    def completed(self, sampled: Completion | HeldRequest | None = None, thoughts: int = 0) -> Turn:
        """Return the turn with the sampled tokens, or with no tokens. The method `LiveScene.commit` sets the index of the turn."""
        request = self.request
        more = sampled or HeldRequest(request, (), (), (), "")
        ended = sampled if isinstance(sampled, Completion) else None
        turn = Turn(
            agent=request.agent,
            policy=request.policy,
            version=more.version,
            weights_hash=more.weights_hash,
            index=-1,
            completed_before=self.completed_before,
            prompt_ids=request.prompt_ids,
            completion_ids=more.ids,
            logprobs=more.logprobs,
            finish_reason="length" if ended is None else ended.finish_reason,
            text="" if ended is None else ended.text,
            new_messages=self.new_messages,
            trained=self.trained,
            versions=more.runs if len(more.runs) > 1 else (),
            images=images_in(request.messages),
            routing=None if ended is None else ended.routing,
            constraint=request.sampling.constraint if ended is None else ended.constraint,
            usage=None if ended is None else ended.usage,
            thoughts=thoughts,
            dropped=self.dropped,
            summary=self.summary,
        )
        return turn if self.begun is None else continued(self.begun, turn)


def as_message(turn: Turn, renderer: Renderer | None) -> SampledMessage:
    """Return a completion as a message of the conversation of its agent."""
    ids, text, count = turn.completion_ids, turn.text, 0
    if turn.thoughts and renderer is not None:
        count = renderer.thoughts(turn.prompt_ids, ids, text)[0]
    return SampledMessage("assistant", text, turn.agent, ids=ids, thoughts=count)


def plain(messages: Sequence[Message]) -> list[Message]:
    """Return a copy of the messages without the token ids of completions."""
    return [Message(m.role, m.content, m.speaker, m.images, m.structured) for m in messages]


class LiveAgentSession:
    """An agent in a running episode, with its conversation as messages and as tokens."""

    def __init__(self, scene: LiveScene, agent: Agent) -> None:
        self._scene: LiveScene = weakref.proxy(scene)
        """A weak reference to the scene. A reference cycle between scene and agents would stay in memory until garbage collection."""
        self.agent = agent
        """The agent."""
        self.messages: list[Message] = []
        self.last: Turn | None = None
        """The agent's last recorded turn. The conversation continues from the tokens of this turn."""
        self._opening = instructions(agent, scene.task)
        self.read_by: Renderer | None = None
        """The renderer of the agent's conversation in its last turn."""
        self._turn_count = 0
        """Number of turns that the agent has started, without summaries. If the agent has a different policy in each turn, this number
        selects the policy."""
        self._summary_count = 0
        """Number of summaries that the agent has started."""
        self.summary: Turn | None = None
        """The summary that the agent has written for its next turn."""
        self.ended: dict[int, list[Message]] = {}
        """Mapping from the index of a turn to the conversation that ended with this turn. The mapping is filled only if a later turn may
        follow a turn other than the last one."""

    @property
    def renderer(self) -> Renderer:
        """The renderer of the agent's conversation in its next turn."""
        return self._renderer(self._policy)

    def _renderer(self, policy: Policy) -> Renderer:
        return agent_renderer(self.agent, self._scene.setup.engine.renderer(policy.name))

    @property
    def _policy(self) -> Policy:
        """The policy that samples the agent's next turn."""
        scene, team, name = self._scene, self._scene.setup.team, self.agent.name
        record, cast = scene.record, scene.task.cast.get(name)
        if record is not None and name in record.swapped and not record.replays(name):
            return team.every[record.swapped[name]]
        if cast is not None and cast.policy:
            return team.every[cast.policy]
        return team.policy(name, self._turn_count)

    @property
    def _is_absent(self) -> bool:
        record, name = self._scene.record, self.agent.name
        return record is not None and name in record.absent and not record.replays(name)

    def _empty_turn(self) -> Turn:
        """Return the turn of an absent agent, with an empty prompt and an empty completion."""
        name, policy, scene = self.agent.name, self._policy.name, self._scene
        self._turn_count += 1
        turn = Turn(name, policy, 0, "", -1, len(scene.turns), (), (), (), "stop", "", trained=False)
        scene.completed[name] = turn
        return turn

    async def say(self, *new_messages: Message | str, fresh: bool = False) -> Turn:
        """Add `new_messages` to the conversation, sample an answer, and record and return the turn; see `workflow.AgentSession`."""
        return (await self._scene.together({self.agent.name: new_messages}, fresh))[self.agent.name]

    async def draft(self, new_messages: Sequence[Message | str], fresh: bool = False) -> list[Turn]:
        """Return the candidates of the agent's next turn, of which there is only one without tree sampling.

        The scene (`LiveScene`) records the chosen candidate. With `fresh`, the turn starts a new conversation.
        """
        if self._is_absent:
            return [self._empty_turn()]
        policy = self._policy
        renderer = self.read_by = self._renderer(policy)
        begins = self.last is None or fresh
        messages = self._read(new_messages, begins)
        if self.last is None or fresh:
            prompt, messages = self._begin(renderer, messages)
        else:
            prompt, added = _extended(renderer, self.last, self.messages, messages)
            self.messages.extend(messages)
            messages = added
        sampling, dropped = self._scene.setup.sampling_of(self.agent), 0
        written, self.summary = self.summary, None
        rule = self._scene.setup.compaction
        if not begins and rule is not None:
            most = self._most(rule, renderer)
            if self._overflows(rule, most, prompt, self.messages):
                summary = "" if written is None else written.words.strip()
                self.messages, dropped = _shortened(renderer, rule, self.messages, most, summary)
                messages, prompt = list(self.messages), renderer.start(self.messages)
        return await self._sample(policy, renderer, prompt, messages, sampling, self.messages, dropped)

    def needs_summary(self, new_messages: Sequence[Message | str]) -> bool:
        """Return whether the agent must summarise its conversation before its next turn, in which it reads `new_messages`."""
        rule = self._scene.setup.compaction
        if rule is None or rule.summary is None or self.last is None or self._is_absent:
            return False
        renderer, messages = self.renderer, self._read(new_messages, begins=False)
        prompt, _ = _extended(renderer, self.last, self.messages, messages)
        return self._overflows(rule, self._most(rule, renderer), prompt, [*self.messages, *messages])

    async def draft_summary(self, rule: CompactionConfig, settings: SummaryConfig) -> list[Turn]:
        """Return the candidates of the agent's summary of its conversation, of which there is only one without tree sampling.

        The policy of the agent's next turn samples the summary, without the agent's constraint and stop strings. If the conversation
        leaves no room for a summary, the agent reads a shortened conversation.
        """
        policy, own = self._policy, self._scene.setup.sampling_of(self.agent)
        renderer = self.read_by = self._renderer(policy)
        assert self.last is not None, "a conversation that does not fit has turns"
        sampling = replace(own, max_tokens=settings.max_tokens or own.max_tokens, stop=(), constraint=None)
        instruction = Message("user", settings.instruction)
        prompt, messages = _extended(renderer, self.last, self.messages, [instruction])
        whole, dropped = [*self.messages, instruction], 0
        most = renderer.context - sampling.max_tokens
        if self._overflows(rule, most, prompt, whole):
            whole, dropped = _shortened(renderer, rule, whole, most)
            messages, prompt = whole, renderer.start(whole)
        return await self._sample(policy, renderer, prompt, messages, sampling, whole, dropped, summary=True)

    def _most(self, rule: CompactionConfig, renderer: Renderer) -> int:
        """Return the maximum length of a prompt in tokens before messages are removed."""
        if rule.over is not None:
            return rule.over
        own = self._scene.setup.sampling_of(self.agent).max_tokens
        if rule.summary is None:
            return renderer.context - own
        # After this turn, the context must still have room for the instruction and the summary.
        instruction = renderer.start([Message("user", rule.summary.instruction)])
        return renderer.context - own - len(instruction) - (rule.summary.max_tokens or own)

    def _overflows(
        self, rule: CompactionConfig, most: int, prompt: Sequence[int], messages: Sequence[Message]
    ) -> bool:
        """Return whether a prompt has more than `most` tokens and its conversation has messages that can be removed."""
        return len(prompt) > most and len(messages) > len(self._opening) + rule.keep_first + 1

    def _read(self, new_messages: Sequence[Message | str], begins: bool) -> list[Message]:
        """Return the messages that the agent reads before its next turn, with new images of the environment."""
        scene, name, task = self._scene, self.agent.name, self._scene.task
        given: Sequence[object] = new_messages
        wrong = [type(each).__name__ for each in given if not isinstance(each, Message | str)]
        if wrong or isinstance(
            new_messages, str
        ):  # otherwise the letters of a string would be accepted as a list of strings
            raise EpisodeError(
                f"The workflow gives '{name}' a {wrong[0] if wrong else 'string'} to read. Pass strings to `say`, such as `turn.text`, and "
                "a list of strings for each agent to `together`."
            )
        messages = [Message("user", each) if isinstance(each, str) else each for each in new_messages]
        if task.messages:
            number = 0 if begins else self._turn_count
            messages = [each for message in messages for each in conversation(message, task, number)]
        return scene.shown(name, messages, () if begins else images_in(self.messages))

    def _begin(self, renderer: Renderer, messages: list[Message]) -> tuple[tuple[int, ...], list[Message]]:
        """Start a conversation, and return its prompt and its messages."""
        task, written = self._scene.task, messages[-1] if messages else None
        if isinstance(written, Written):
            messages[-1] = Message(written.role, written.content, written.speaker)
        messages = [*self._opening, *messages]
        self.messages = list(messages)
        if task.rendered and [each.content for each in messages] == [task.question]:
            assert isinstance(renderer, ReadsPrompts), "`check_run` requires a model in this process"
            return renderer.plain(task.question), messages
        if isinstance(written, Written) and not self._opening:
            return written.ids, messages
        return renderer.start(messages), messages

    async def draft_after(self, continued: Continued, before: Turn | None) -> tuple[Turn, list[Message]]:
        """Sample a completion in the conversation that ended with the turn `before`, and return the turn and all messages of its prompt.

        Several calls can run concurrently, because the agent's own conversation is neither read nor changed.
        """
        if self._is_absent:
            return self._empty_turn(), list(continued.messages)
        policy = self._policy
        renderer = self.read_by = self._renderer(policy)
        messages = list(continued.messages)
        if before is None:
            whole = messages
            prompt = renderer.start(messages)
        else:
            earlier = self.ended[before.index]
            whole = [*earlier, *messages]
            prompt, messages = _extended(renderer, before, earlier, messages)
        own = self._scene.setup.sampling_of(self.agent)
        most = own.max_tokens if continued.max_tokens is None else min(own.max_tokens, continued.max_tokens)
        constraint = continued.constraint or own.constraint
        sampling = replace(own, max_tokens=most, stop=(*own.stop, *continued.stop), constraint=constraint)
        [turn] = await self._sample(policy, renderer, prompt, messages, sampling, whole)
        return replace(turn, caller=continued.caller), whole

    async def _sample(
        self,
        policy: Policy,
        renderer: Renderer,
        prompt: tuple[int, ...],
        messages: list[Message],
        sampling: Sampling,
        conversation: Sequence[Message],
        dropped: int = 0,
        summary: bool = False,
    ) -> list[Turn]:
        """Return the turn that a record replays, or else turns that the policy samples: several candidates with tree sampling."""
        scene, setup, name = self._scene, self._scene.setup, self.agent.name
        room = renderer.context - len(prompt)
        if room <= 0:
            raise ContextError(
                f"The prompt of agent '{name}' has {len(prompt)} tokens; its model reads only "
                f"{renderer.context}. Use shorter prompts, fewer rounds or a model with a longer context."
            )
        number, seen, record = self._turn_count + self._summary_count, len(scene.turns), scene.record
        if summary:
            self._summary_count += 1
        else:
            self._turn_count += 1
        given = None if record is None else record.take(name, number, prompt, scene.turns)
        if sampling.constraint is not None and sampling.constraint.is_legal:
            moves = scene.legal(
                name
            )  # the list is empty if it is not the agent's turn; then any text is allowed
            sampling = replace(sampling, constraint=Constraint.choices(moves) if moves else None)
        if given is not None and (record is None or given is not record.begun.get(name)):
            turn = replace(given, reward=0.0, score=None, continuation_return=None, parent=None)
            scene.completed[name] = turn
            return [turn]

        branch, depth = scene.branch, 0 if scene.branch is None else scene.moments + policy.trained
        way = () if branch is None else branch.ways[:depth]
        request = Request(
            policy.name,
            name,
            tuple(conversation),
            prompt,
            sampling if sampling.max_tokens <= room else replace(sampling, max_tokens=room),
            derive_seed(scene.sampling_seed, *way, name, number),
            scene.task,
            scene.sample,
            () if given is None else given.completion_ids,  # an unfinished turn is sampled further
        )
        requested = RequestedTurn(request, policy.trained, seen, tuple(messages), given, dropped, summary)
        scene.requested[name] = requested
        count = setup.data.tree.candidates if setup.data.tree and policy.trained else 1
        if count > 1:
            others = [replace(request, seed=derive_seed(request.seed, "branch", k)) for k in range(1, count)]
            answers = await asyncio.gather(*(self._complete(each) for each in (request, *others)))
        elif branch is None or depth >= len(branch.ways):
            answers = [await self._complete(request)]  # awaited here, without a separate task
        else:
            key = (way, name, number, prompt)
            answers = [await branch.answers.once(key, partial(self._complete, request))]
        turns = [
            requested.completed(a, renderer.thoughts(prompt, (*request.begun, *a.ids), a.text)[1])
            for a in answers
        ]
        if branch is not None and any(branch.ways[depth:]):
            turns = [replace(turn, copied=True) for turn in turns]
        scene.completed[name] = turns[0]
        return turns

    async def _complete(self, request: Request) -> Completion:
        setup = self._scene.setup
        what = f"An answer of policy '{request.policy}'"
        generate = setup.generate or setup.engine.generate
        answer = within(what, "engine", setup.patience.engine, generate(request))
        completion = await setup.timeline.during("generate", answer)
        if not all(map(math.isfinite, completion.logprobs)):
            raise EpisodeError(
                f"Policy '{request.policy}' returned log-probs that are not finite, so its weights are damaged. "
                "Go back to an earlier checkpoint, and lower `optimizer.lr`."
            )
        return completion


def _extended(
    renderer: Renderer, last: Turn, earlier: Sequence[Message], new: list[Message]
) -> tuple[tuple[int, ...], list[Message]]:
    """Return the prompt that extends a conversation after its `last` turn, and the messages that were added to this turn's tokens.

    If the renderer removed thoughts from the last turn, all messages of the prompt are returned.
    """
    prompt = renderer.extend(last.prompt_ids, last.completion_ids, new, earlier)
    known = last.prompt_ids + last.completion_ids
    return prompt, new if tuple(prompt[: len(known)]) == known else plain([*earlier, *new])


def _shortened(
    renderer: Renderer, rule: CompactionConfig, messages: Sequence[Message], most: int, summary: str = ""
) -> tuple[list[Message], int]:
    """Return a conversation with at most `most` tokens if possible, and the number of messages that were removed.

    Rendering the whole prompt tokenises earlier completions as text, in place of their sampled token ids.
    """
    return compacted(plain(messages), rule, lambda shorter: len(renderer.start(shorter)) <= most, summary)


class LiveScene:
    """A running episode, as seen by its workflow."""

    def __init__(
        self,
        setup: RolloutSetup,
        task: Task,
        seed: int,
        state: BoundedState | RemoteState,
        roll_out_continuation: Callable[[Continuation], Awaitable[Episode]],
        sample: int = 0,
        record: Record | None = None,
        sampling_seed: int | None = None,
        branch: Branch | None = None,
    ) -> None:
        """Start an episode with a seed. A continuation first replays a `record`, and then samples with its own `sampling_seed`.

        The function `roll_out_continuation` rolls out the continuations that determine the values of candidates in tree sampling. If
        a `branch` is given, the episode shares its first turns with other episodes.
        """
        self.setup = setup
        self.task = task
        """The problem."""
        self.seed = seed
        """Seed of this episode."""
        self.team_moves = offers(setup.environment, TeamMoves)
        """Whether the environment takes one message per move, from any agent."""
        self.sample = sample
        self.sampling_seed = seed if sampling_seed is None else sampling_seed
        self.record = record
        self.branch = branch
        self.continued: Counter[str] = Counter()
        """Mapping from each policy to the number of tokens that it sampled in continuations of candidates."""
        self._roll_out_continuation = roll_out_continuation
        self._state = state
        self._sessions = {agent.name: LiveAgentSession(self, agent) for agent in setup.team.agents}
        without = record is not None and isinstance(setup.workflow, GoesOnWithout)
        absent = record.absent if without and record is not None else frozenset[str]()
        self.names = tuple(name for name in self._sessions if name not in absent) or tuple(self._sessions)
        """Names of the agents in team order, without absent agents if the workflow can run without them."""
        self._turns: list[Turn] = []
        self._open: dict[str, list[Turn]] = {}
        """Mapping from an agent to the other candidates of its chosen turn, until this turn is recorded."""
        self._branches: list[Turn] = []
        self.requested: dict[str, RequestedTurn] = {}
        """Mapping from an agent to its last requested turn, until this turn is recorded."""
        self.completed: dict[str, Turn] = {}
        """Mapping from an agent to its complete turn, until this turn is recorded."""
        self._converses = False
        """Whether the workflow manages conversations itself."""
        self.stepped = False
        """Whether the workflow has taken a step of the environment."""
        self.final: str | None = None
        """The message that the workflow last submitted as the team's answer."""
        self.reward_events: list[RewardEvent] = []
        self._owed: dict[str, float] = {}
        """Mapping from an agent to the rewards that it received before its first turn."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns recorded so far."""
        return tuple(self._turns)

    @property
    def moments(self) -> int:
        """The number of moments of the episode with a turn of a trained agent."""
        return len({turn.completed_before for turn in self._turns if turn.trained})

    def __getitem__(self, name: str) -> LiveAgentSession:
        if name not in self._sessions:
            raise EpisodeError(
                f"The workflow uses an agent {name!r:.60}, which does not exist.{did_you_mean(str(name), self._sessions)}"
            )
        return self._sessions[name]

    def commit(self, drafts: Sequence[Turn]) -> list[Turn]:
        """Record turns in the given order, and return them with their indices."""
        count = len(self._turns)
        turns = [
            placed(turn, count + k, turn.reward + self._owed.pop(turn.agent, 0.0))
            for k, turn in enumerate(drafts)
        ]
        self._turns.extend(turns)
        for turn in turns:
            self.requested.pop(turn.agent, None)
            self.completed.pop(turn.agent, None)
            if turn.agent in self._open:
                siblings = self._open.pop(turn.agent)
                self._branches.extend(replace(sibling, parent=turn.index) for sibling in siblings)
        return turns

    @property
    def branches(self) -> tuple[Turn, ...]:
        """The candidates that were not chosen. Their indices follow those of the turns."""
        return tuple(replace(turn, index=len(self._turns) + k) for k, turn in enumerate(self._branches))

    def left(self, held: Sequence[HeldRequest]) -> PartialEpisode | None:
        """Return the unfinished episode, with the tokens sampled by requests on hold.

        The result is None if the episode is still replaying a record, or if an agent may have several turns at once, which are
        recorded in the order in which they end.
        """
        if self._converses or (self.record is not None and self.record.left):
            return None
        sampled = {id(each.request): each for each in held}
        begun = [
            turn.completed(sampled.get(id(turn.request)))
            for agent in self._sessions
            if agent not in self.completed and (turn := self.requested.get(agent)) is not None
        ]
        drafts = [self.completed[agent] for agent in self._sessions if agent in self.completed]
        return PartialEpisode(
            self.seed, self.turns, tuple(drafts), tuple(begun), reward_events=tuple(self.reward_events)
        )

    async def together(
        self, words: Mapping[str, Sequence[Message | str]], fresh: bool = False
    ) -> dict[str, Turn]:
        """Sample turns of several agents at the same moment; see `workflow.Scene`."""
        if type(words) is not dict and not isinstance(words, Mapping):
            raise EpisodeError(
                f"The workflow gives `together` a {type(words).__name__}. Give a list of strings for each agent: {{name: [text]}}."
            )
        if len(words) == 1:
            # `sleep` lets other coroutines record their turns first.
            await asyncio.sleep(0)
        rule = self.setup.compaction
        if rule is not None and rule.summary is not None and not fresh:
            # Summaries are turns of an earlier moment: the next turns of all agents are sampled after all summaries.
            full = [name for name, new_messages in words.items() if self[name].needs_summary(new_messages)]
            if full:
                await self._take_turns([self[name].draft_summary(rule, rule.summary) for name in full])
        chosen = await self._take_turns(
            [self[name].draft(new_messages, fresh) for name, new_messages in words.items()]
        )
        shares = self.setup.share_thoughts
        return {
            turn.agent: replace(turn, text=turn.words, thoughts=0) if turn.thoughts and not shares else turn
            for turn in chosen
        }

    async def _take_turns(self, drafted: Sequence[Awaitable[list[Turn]]]) -> list[Turn]:
        """Sample, choose and record one turn of each of these agents at the same moment."""
        # All are sampled before one is recorded, so that no agent reads another's text.
        tree = self.setup.data.tree
        past = () if tree is None else self.turns
        if len(drafted) == 1:
            drafts = [await drafted[0]]  # a separate task would cost more than the rest of the turn
        else:
            drafts = await asyncio.gather(*drafted)
        chosen = [candidates[0] for candidates in drafts]
        if tree is not None and any(len(candidates) > 1 for candidates in drafts):
            so_far = Episode(self.task, self.seed, self.setup.team.names, past)
            name = self.setup.environment.name
            settled = await choose(tree, so_far, self.sample, drafts, name, self._roll_out_all)
            self._open |= {turn.agent: siblings for turn, siblings in settled if siblings}
            chosen = [turn for turn, _ in settled]
        for turn in chosen:
            session = self._sessions[turn.agent]
            if turn.summary:
                session.summary = turn
            else:
                session.last = turn
                session.messages.append(as_message(turn, session.read_by))
        return self.commit(chosen)

    async def _roll_out_all(self, runs: Sequence[Continuation]) -> list[Episode]:
        """Roll out the continuations of a tree concurrently.

        The function `at_once` counts their resources as resources of this episode.
        """

        async def one(run: Continuation) -> Episode:
            with Participant():
                return await self._roll_out_continuation(run)

        episodes = await asyncio.gather(*map(one, runs))
        for run, episode in zip(runs, episodes, strict=True):
            self.continued += run.record.sampled(episode)
        return episodes

    async def converse(self, continued: Mapping[str, Continued]) -> dict[str, Turn]:
        """Sample turns of several agents in conversations that the workflow manages; see `workflow.Scene`."""
        assert self.setup.data.tree is None, "`check_run` allows no tree here"
        self._converses = True
        drafts = await asyncio.gather(
            *(
                self._sessions[name].draft_after(
                    each, None if each.after is None else self._turns[each.after]
                )
                for name, each in continued.items()
            )
        )
        turns = self.commit([turn for turn, _ in drafts])
        for turn, (_, whole) in zip(turns, drafts, strict=True):
            session = self._sessions[turn.agent]
            session.ended[turn.index] = [*whole, as_message(turn, session.read_by)]
        return {turn.agent: turn for turn in turns}

    def allow_answers(self, most: int) -> None:
        """Keep the episode of a question open after an incorrect answer; see `workflow.Scene`."""
        self._state.allow_answers(most)

    def observe(self, agent: str) -> str:
        """Return the current observation of an agent."""
        return text(self._state.observe(agent), f"The observation of '{agent}'")

    def legal(self, agent: str) -> Sequence[str]:
        """Return the legal moves of an agent that the environment lists.

        The result is empty if the agent may not move now.
        """
        return self._state.legal(agent)

    def shown(self, agent: str, read: list[Message], known: Sequence[Image]) -> list[Message]:
        """Return the messages that an agent reads, with the images of its observation that are not yet in the conversation."""
        if isinstance(self._state, RemoteState) or not read:
            return read
        new = [image for image in dict.fromkeys(self._state.images(agent)) if image not in known]
        if not new:
            return read
        first = read[0]  # without the token ids of a `Written`, which have no place for a picture
        return [Message(first.role, first.content, first.speaker, (*first.images, *new)), *read[1:]]

    def movers(self) -> tuple[str, ...]:
        """Return the agents that may move now."""
        movers = self._state.movers()
        found: object = movers
        if isinstance(found, str):
            raise EpisodeError(
                f"`movers` returns {found!r:.60}. Return a tuple of agents' names, which is empty at the end of the episode."
            )
        return movers

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """Pass actions to the environment, and add the returned rewards to the last turns of the agents.

        If an agent has no turn yet, its reward will be added to its first turn. Raises EpisodeError if an agent is not in the team.
        """
        for given in (*actions.values(), final or ""):
            if not isinstance(given, str):
                raise EpisodeError(
                    f"The workflow gives `step` a {type(given).__name__}. Give a mapping from agents to strings, such as `turn.text`."
                )
        self.stepped = True
        self.final = self.final if final is None else final
        with Participant():
            rewards = await self.setup.timeline.during("environment", self._state.step(actions, final))
        checked = checked_rewards(rewards, self._sessions)  # absent agents may be rewarded too
        for agent, reward in checked.items():
            self.reward_events.append(RewardEvent(agent, len(self._turns), reward))
            last = max((turn.index for turn in self._turns if turn.agent == agent), default=None)
            if last is None:
                self._owed[agent] = self._owed.get(agent, 0.0) + reward
            else:
                turn = self._turns[last]
                self._turns[last] = placed(turn, last, turn.reward + reward)
        return checked

    def settle(self, outcome: Outcome) -> Outcome:
        """Add the outcome's rewards of individual turns to these turns, and return the outcome.

        If an agent has no turns, its earlier rewards are added to its terminal reward.
        """
        found: object = outcome
        if not isinstance(found, Outcome):
            raise EpisodeError(f"`outcome` returns {found!r:.60}. Return a kapelle.Outcome.")
        for index, reward in outcome.turn_rewards.items():
            turn = self._turns[index]
            self._turns[index] = placed(turn, index, turn.reward + reward)
        rewards = checked_rewards(outcome.rewards, self._sessions)
        for agent, reward in self._owed.items():
            rewards[agent] = rewards.get(agent, 0.0) + reward
        return Outcome(rewards, outcome.success, outcome.info, outcome.truncated, outcome.roles)

    def extract(self, text: str) -> str | None:
        """Return the final answer of a text, or None if the environment has no answers."""
        environment = self.setup.environment
        if offers(environment, Answerable) and has_comparable_answers(environment):
            return call(
                "`extract`", "environment", self.setup.patience.environment, environment.extract, text
            )
        return None

    def leave_out(self) -> None:
        """Exclude the turns recorded so far, and their alternative candidates, from training."""
        self._turns = [replace(turn, trained=False) for turn in self._turns]
        self._branches = [replace(turn, trained=False) for turn in self._branches]

    async def score(self, turn: Turn) -> float:
        """Score the text of a recorded turn as an answer; see `workflow.Scene`."""
        if not self._state.scorable:
            raise EpisodeError(
                f"`{self.setup.environment.name}` scores answers only at the end of an episode. Set `workflow.score_rounds: false`, or "
                "use another environment."
            )
        with Participant():
            value = await self.setup.timeline.during("grade", self._state.score(turn.agent, turn.text))
        score = share(value, f"The environment's score of an answer of '{turn.agent}'")
        self._turns[turn.index] = replace(self._turns[turn.index], score=score)
        return score
