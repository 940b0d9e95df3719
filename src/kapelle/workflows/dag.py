"""Nodes that wait for one another: who speaks after whom, and what each one reads.

The form of MARFT's workflows (2504.16129) with the names of siiRL's YAML. A whole workflow file, which also
says who trains and whose critic is shared, is laid over a recipe by `dag_file`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from kapelle.environment import Environment, Recorded, offers
from kapelle.errors import ConfigError, EpisodeError, did_you_mean, need_known
from kapelle.runtime.foreign_code import reason
from kapelle.runtime.plugins import find_module, find_object
from kapelle.settings.base import Settings
from kapelle.team import Agent
from kapelle.types import Json, Message
from kapelle.workflow import (
    Drawable,
    Scene,
    ScoresRounds,
    TokenizesChats,
    Written,
    append_texts,
    instructions,
    need_answers,
)
from kapelle.workflows.graph import Graph, ancestors, check_graph, levels, mermaid, sinks

# -------- Functions of the user's own before and after a node speaks: `pre_process` and `post_process` of a Python file
#
# Ours take texts:
#
#     def pre_process(prompt: str, **kwargs) -> str         # what the node was handed → what it reads, or messages
#     def post_process(prompt: str, response: str, **kwargs) -> str   # → what it hands on
#
# siiRL's, whose first parameter is called `tokenizer`, get the tokeniser of the node's model, and take and return its token ids:
#
#     def pre_process(tokenizer, prompt_id, obs, **kwargs) -> list[int]
#     def post_process(tokenizer, prompt_id, response_id, **kwargs) -> list[int]
#
# The ids that `pre_process` returns are what the model reads, and `response_id` is what it sampled, without the token that ended
# the turn. An agent with words of its own (`system`, or a node's `prompt`), or without a model here (an endpoint), reads the same as
# text: the messages of `tokenizer.apply_chat_template`, or one message of what was written.
#
# A `pre_process` of either form that has a parameter `obs` is given what the world has answered to the agent, as a text, and None
# before the first answer. The file is the user's own code: it runs in this process, in no sandbox, and is tried once with made-up
# texts, and siiRL's form with a tokeniser of bytes, before a model loads.


class NodeTokens:
    """The tokeniser that siiRL's functions get: that of transformers, whose conversations are rendered as everywhere else."""

    def __init__(self, renderer: TokenizesChats) -> None:
        """Hand out the tokeniser of a renderer."""
        self._renderer = renderer
        self.written: dict[tuple[int, ...], list[Message]] = {}
        """Ids → the messages that `apply_chat_template` made them of."""

    def encode(self, text: str, **how: Any) -> list[int]:
        """Return a text's ids. TypeError for what is no text, as of a template that was not given."""
        if not isinstance(text, str):
            raise TypeError(f"tokenizer.encode takes a text and was given {type(text).__name__}")
        return list(self._renderer.tokenizer(text, **how)["input_ids"])

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **how: Any,
    ) -> Any:
        """Return a conversation as ids, or with `tokenize=False` as text."""
        if not tokenize or how.keys() - {"add_special_tokens"}:
            return self._renderer.tokenizer.apply_chat_template(
                list(conversation), tokenize=tokenize, add_generation_prompt=add_generation_prompt, **how
            )
        messages = [Message(str(each["role"]), str(each["content"])) for each in conversation]
        ids = (self._renderer.start if add_generation_prompt else self._renderer.whole)(messages)
        self.written[ids] = messages
        return list(ids)

    def __call__(self, *texts: Any, **how: Any) -> Any:
        """Return what the tokeniser of transformers returns."""
        return self._renderer.tokenizer(*texts, **how)

    def __len__(self) -> int:
        """Return the number of its tokens."""
        return len(self._renderer.tokenizer.get_vocab())

    def __getattr__(self, name: str) -> Any:
        """Return any other part of the tokeniser of transformers, such as `decode` and `eos_token`."""
        return getattr(self._renderer.tokenizer, name)


BYTES = "kapelle.models.renderer:byte_renderer"
"""Returns how conversations become bytes: what a file is tried with, and what agents without a model here are written in."""


@lru_cache(maxsize=1)
def _in_bytes() -> TokenizesChats:
    made: TokenizesChats = find_object(BYTES, "tokenizer")()
    return made


@dataclass(frozen=True, slots=True)
class Processing:
    """The two functions of one file; None for one that it does not define."""

    path: str
    pre: Callable[..., object] | None
    post: Callable[..., object] | None

    def before(
        self,
        prompt: str,
        observation: str | None,
        kwargs: Mapping[str, Json],
        renderer: TokenizesChats | None = None,
    ) -> tuple[list[Message], tuple[int, ...] | None]:
        """Return what the node reads, and as which ids of the model that `renderer` is of, where the function has written them.

        `observation` is what the world has answered, None before it has.
        """
        if self.pre is None:
            return [Message("user", prompt)], None
        observed = {"obs": observation} if "obs" in inspect.signature(self.pre).parameters else {}
        if not _takes_ids(self.pre):
            made = self.pre(prompt, **observed, **kwargs)
            if isinstance(made, list) and made and all(isinstance(one, Mapping) for one in made):
                return [Message(str(one["role"]), str(one["content"])) for one in made], None
            return [Message("user", self._text(made, "pre_process"))], None
        tokens = NodeTokens(renderer or _in_bytes())
        made = self.pre(tokens, tokens.encode(prompt, add_special_tokens=False), **observed, **kwargs)
        ids = self._ids(made, "pre_process", len(tokens))
        messages = tokens.written.get(ids) or [Message("user", str(tokens.decode(list(ids))))]
        return messages, None if renderer is None else ids

    def after(
        self,
        prompt: str,
        response: str,
        kwargs: Mapping[str, Json],
        renderer: TokenizesChats | None = None,
        sampled: Sequence[int] = (),
    ) -> str:
        """Return what the node hands on; there must be a `post_process`. `sampled` are the ids of the response in the model's tokens."""
        assert self.post is not None
        if not _takes_ids(self.post):
            return self._text(self.post(prompt, response, **kwargs), "post_process")
        tokens = NodeTokens(renderer or _in_bytes())
        own = list(sampled) if renderer is not None else tokens.encode(response, add_special_tokens=False)
        if own and tokens.decode(own) != response and tokens.decode(own[:-1]) == response:
            own = own[:-1]  # the token that ended the turn
        made = self.post(tokens, tokens.encode(prompt, add_special_tokens=False), own, **kwargs)
        return str(tokens.decode(list(self._ids(made, "post_process", len(tokens)))))

    def try_out(self, node: str, pre_kwargs: Mapping[str, Json], post_kwargs: Mapping[str, Json]) -> None:
        """Call both functions with made-up texts, before and after a first turn; ConfigError where one fails."""
        trials: list[tuple[str, Callable[[], object]]] = [
            ("pre_process", lambda: self.before("What is 1 + 1?", None, pre_kwargs)),
            ("pre_process", lambda: self.before("What is 1 + 1? 3", "This answer is wrong.", pre_kwargs)),
        ]
        if self.post is not None:
            trials.append(("post_process", lambda: self.after("What is 1 + 1?", "3", post_kwargs)))
        for function, call in trials:
            try:
                call()
            except Exception as error:
                raise ConfigError(
                    f"process_path: `{function}` of {self.path} fails with the `{function}_kwargs` of node '{node}': "
                    f"{reason(error).rstrip('.')}. Fix the function or the keywords; it was tried with a tokenizer of bytes."
                ) from error

    def _text(self, made: object, function: str) -> str:
        if not isinstance(made, str):
            raise EpisodeError(f"`{function}` of {self.path} returned {type(made).__name__}, not a text.")
        return made

    def _ids(self, made: object, function: str, known: int) -> tuple[int, ...]:
        if not isinstance(made, list | tuple) or not made or not all(isinstance(one, int) for one in made):
            raise EpisodeError(
                f"`{function}` of {self.path} returned {type(made).__name__}, not a list of token ids."
            )
        wrong = next((one for one in made if not 0 <= one < known), None)
        if wrong is not None:
            raise EpisodeError(
                f"`{function}` of {self.path} returned the id {wrong}; the tokenizer has {known} tokens."
            )
        return tuple(made)


def _takes_ids(function: Callable[..., object]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "tokenizer"


@lru_cache(maxsize=64)
def load_processing(path: str) -> Processing:
    """Return the functions of `folder/file.py` or `package.module`; ConfigError for one that has neither."""
    module = find_module(path, f"process_path: '{path}'")
    found = {name: vars(module).get(name) for name in ("pre_process", "post_process")}
    if not any(map(callable, found.values())):
        raise ConfigError(
            f"process_path: {path} defines neither `pre_process` nor `post_process`. Define one, or remove the key."
        )
    for name, function in found.items():
        if function is not None and not callable(function):
            raise ConfigError(f"process_path: `{name}` of {path} is no function.")
    return Processing(path, found["pre_process"], found["post_process"])


_FIELD = re.compile(r"\$\{([\w.-]+)\}")


class Node(Settings):
    """One turn of one agent; it starts a conversation of its own, so its prompt is all that it reads."""

    id: str = Field(pattern=r"^[A-Za-z_][\w-]*$")
    """The node's name."""
    agent: str | None = None
    """Who speaks: a name, or its seat number as `agent_group`; exactly one of both."""
    agent_group: int | None = Field(default=None, ge=0)
    """Who speaks, by seat number from 0."""
    dependencies: tuple[str, ...] = ()
    """Nodes that have to have spoken before."""
    prompt: str = "${prompt}"
    """Template of what the agent reads. `${prompt}` is what the node was handed: the question, then every
    earlier text that it depends on, unless `post_process` says otherwise. `${question}` is the question and,
    from the second turn on, what the world answered last; `${ID.output}` the text of a node that it depends on,
    directly or not."""
    process_path: str | None = None
    """Python file or module with `pre_process` and `post_process`; see `workflows.processing`."""
    pre_process_kwargs: Mapping[str, Any] = Field(default={})
    """What the function before it is given."""
    post_process_kwargs: Mapping[str, Any] = Field(default={})
    """What the function after it is given."""
    obs_with_env: bool = True
    """True: this agent reads what the world shows it, its answers to earlier turns too. False: the task's text, and
    no answers."""
    rewards_with_env: bool | None = None
    """True: the world takes this node's text and pays for it. Null: the answer's, where no node sets true."""


class Dag(Settings, Drawable, ScoresRounds):
    """A directed graph of turns, played once, or again and again until the world is done."""

    name: Literal["dag"] = "dag"
    nodes: tuple[Node, ...] = Field(min_length=1)
    answer: str | None = None
    """The node whose text counts as the team's; null takes the one that no other waits for."""
    max_assistant_turns: int = Field(default=1, ge=1)
    """How often the graph is played while the world has not ended. Worlds of questions stay open after an answer
    that is not right. From the second time on, nodes without dependencies are handed what the answer handed on,
    and then what the world shows."""
    use_all_traj: bool = True
    """Whether every turn is trained on, or each time only the last play of the graph, as siiRL's scripts set it."""
    whole_texts: bool = False
    """True: the world takes what nodes hand on in place of what they said, and the next turn begins with what it
    shows to the answering agent, alone: siiRL's environments, which write the history themselves."""
    score_rounds: bool = False
    """Have the world say what every node's text would earn as an answer, on `Turn.score`."""

    @property
    def graph(self) -> Graph:
        """Node → its dependencies."""
        return {node.id: node.dependencies for node in self.nodes}

    @property
    def answering(self) -> str:
        """The node whose text counts."""
        return self.answer or sinks(self.graph)[0]

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError for a circle, an unknown name, two answers, a silent agent, or a game."""
        need_answers("dag", "ends in one answer", environment)
        if self.max_assistant_turns > 1 and offers(environment, Recorded):
            raise ConfigError(
                f"`{environment.name}` holds recorded words, and no world answers another turn of them. Set "
                "`workflow.max_assistant_turns: 1`."
            )
        self._check_nodes()
        for node in self.nodes:
            if (processing := _processing(node)) is not None:
                processing.try_out(node.id, node.pre_process_kwargs, node.post_process_kwargs)
        names = [agent.name for agent in agents]
        speakers = {node.id: self._speaker(node, names) for node in self.nodes}
        silent = [name for name in names if name not in speakers.values()]
        if silent:
            raise ConfigError(
                f"Agent '{silent[0]}' speaks in no node of workflow.nodes, so it would learn nothing. "
                "Give it a node, or take it out of `team.agents`."
            )
        acting = [speakers[name] for name in self._acting()]
        twice = sorted({name for name in acting if acting.count(name) > 1})
        if twice:
            raise ConfigError(
                f"Two nodes of agent '{twice[0]}' say `rewards_with_env: true`; the world takes one text of an "
                "agent. Leave it to one of them."
            )
        for agent in agents:
            if agent.prompt is not None:
                raise ConfigError(
                    f"The nodes of the workflow `dag` decide what agents read; remove `prompt` of agent '{agent.name}'."
                )

    def _check_nodes(self) -> None:
        ids = [node.id for node in self.nodes]
        if twice := sorted({name for name in ids if ids.count(name) > 1}):
            raise ConfigError(f"workflow.nodes has two nodes '{twice[0]}'. Give each an id of its own.")
        check_graph(self.graph, "workflow.nodes")
        ends = sinks(self.graph)
        if self.answer is None and len(ends) > 1:
            raise ConfigError(
                f"Nobody waits for the nodes {', '.join(ends)}, so the answer may be any of them. "
                "Set `workflow.answer` to the one that counts."
            )
        need_known("workflow.answer", "node", self.answer, ids)
        for node in self.nodes:
            known = ["prompt", "question", *(f"{name}.output" for name in ancestors(self.graph, node.id))]
            for field in _FIELD.findall(node.prompt):
                if field not in known:
                    raise ConfigError(
                        f"The prompt of node '{node.id}' uses ${{{field}}}, which it cannot know: it knows its "
                        f"dependencies' outputs.{did_you_mean(field, known)}"
                    )
            _processing(node)

    def _speaker(self, node: Node, names: Sequence[str]) -> str:
        if node.agent is not None and node.agent_group is None:
            need_known(f"Node '{node.id}'", "agent", node.agent, names)
            return node.agent
        if node.agent is not None or node.agent_group is None:
            raise ConfigError(
                f"Node '{node.id}' names its agent by `agent` or by `agent_group`: by one of both."
            )
        if node.agent_group >= len(names):
            raise ConfigError(
                f"Node '{node.id}' has agent_group {node.agent_group}; seats go from 0 to {len(names) - 1}."
            )
        return names[node.agent_group]

    def _acting(self) -> list[str]:
        return [node.id for node in self.nodes if node.rewards_with_env] or [self.answering]

    async def run(self, scene: Scene) -> None:
        """Play one episode."""
        if self.max_assistant_turns > 1:
            scene.allow_answers(self.max_assistant_turns)
        speakers = {node.id: self._speaker(node, scene.names) for node in self.nodes}
        before: str | None = None
        for _ in range(self.max_assistant_turns):
            if not self.use_all_traj:
                scene.leave_out()
            said, handed = await self._play_once(scene, before)
            texts = handed if self.whole_texts else said
            await scene.step({speakers[k]: texts[k] for k in self._acting()}, final=said[self.answering])
            if not scene.movers():
                return
            answering = speakers[self.answering]
            before = scene.observe(answering) if self.whole_texts else handed[self.answering]

    async def _play_once(self, scene: Scene, before: str | None) -> tuple[dict[str, str], dict[str, str]]:
        """Return the text of every node and what it handed on."""
        nodes = {node.id: node for node in self.nodes}
        said: dict[str, str] = {}
        handed: dict[str, str] = {}
        for level in levels(self.graph):
            for batch in _one_turn_each([(k, self._speaker(nodes[k], scene.names)) for k in level]):
                given = {k: self._handed_to(scene, nodes[k], who, said, handed, before) for k, who in batch}
                words = {
                    who: self._prompt(scene, nodes[k], who, given[k], said, before is not None)
                    for k, who in batch
                }
                readers = {
                    who: _tokenizing(scene, who) for _, who in batch
                }  # before they speak: weights may differ by turn
                turns = await scene.together(words, fresh=True)
                for k, who in batch:
                    if self.score_rounds:
                        await scene.score(turns[who])
                    said[k] = turns[who].text
                    handed[k] = append_texts(given[k], {k: said[k]})
                    if (processing := _processing(nodes[k])) is not None and processing.post is not None:
                        handed[k] = processing.after(
                            given[k],
                            said[k],
                            nodes[k].post_process_kwargs,
                            readers[who],
                            turns[who].completion_ids,
                        )
        return said, handed

    def _handed_to(
        self,
        scene: Scene,
        node: Node,
        agent: str,
        said: Mapping[str, str],
        handed: Mapping[str, str],
        before: str | None,
    ) -> str:
        earlier = [_processing(each) for each in self.nodes if each.id in node.dependencies]
        if any(each is not None and each.post is not None for each in earlier):
            return "\n\n".join(handed[name] for name in node.dependencies)
        question = scene.observe(agent) if node.obs_with_env else scene.task.question
        if before is not None:
            answered = node.obs_with_env and not self.whole_texts
            question = f"{before}\n\n{question}" if answered else before
        return append_texts(question, {name: said[name] for name in ancestors(self.graph, node.id)})

    def _prompt(
        self, scene: Scene, node: Node, agent: str, given: str, said: Mapping[str, str], again: bool
    ) -> list[Message]:
        """Return what the node reads; `again` from the second turn on, when the world has answered."""
        shown = scene.observe(agent) if node.obs_with_env else None
        question = scene.task.question if again or shown is None else shown
        if again and shown is not None:
            question = f"{question}\n\n{shown}"
        messages = [Message("user", given)]
        if (processing := _processing(node)) is not None:
            answered = shown if again else None
            if (
                self.whole_texts and shown is not None and not again
            ):  # what the class showed before anybody spoke
                answered = shown.removeprefix(scene.task.question).lstrip("\n") or None
            reader = _tokenizing(scene, agent)
            messages, ids = processing.before(given, answered, node.pre_process_kwargs, reader)
            if (
                ids is not None
                and node.prompt == "${prompt}"
                and not instructions(scene[agent].agent, scene.task)
            ):
                last = messages[-1]
                return [*messages[:-1], Written(last.role, last.content, ids=ids)]
        values = {"prompt": messages[-1].content, "question": question}
        values |= {f"{k}.output": text for k, text in said.items()}
        text = _FIELD.sub(lambda match: values[match[1]], node.prompt)
        if instructions(
            scene[agent].agent, scene.task
        ):  # it has words of its own where a template writes none
            messages = [each for each in messages if each.role != "system" or each.content]
        return [*messages[:-1], replace(messages[-1], content=text)]

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the graph as a Mermaid flowchart; the answer has a double edge. Raises as `check`."""
        self._check_nodes()
        labels = {node.id: f"{node.id}: {self._speaker(node, names)}" for node in self.nodes}
        return mermaid(self.graph, labels, self.answering)


def _tokenizing(scene: Scene, agent: str) -> TokenizesChats | None:
    renderer = scene[agent].renderer
    return renderer if isinstance(renderer, TokenizesChats) else None


def _processing(node: Node) -> Processing | None:
    return None if node.process_path is None else load_processing(node.process_path)


def _one_turn_each(level: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Split a layer's (node, agent) so that no agent has to say two things at one moment."""
    batches: list[list[tuple[str, str]]] = []
    for node, agent in level:
        free = next((batch for batch in batches if agent not in {who for _, who in batch}), None)
        if free is None:
            free = []
            batches.append(free)
        free.append((node, agent))
    return batches
