"""The workflow `dag`: a directed graph of turns, which defines the order in which agents act and what each agent reads.

The graph has the form of the workflows of MARFT (arXiv:2504.16129), with the setting names of siiRL's YAML files. A workflow file can
also define which agents are trained and which agents share a critic; the module `dag_file` merges such a file into a recipe.
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

# -------- A user's functions before and after a node: `pre_process` and `post_process` of a Python file
#
# kapelle's form takes strings:
#
#     def pre_process(prompt: str, **kwargs) -> str         # input of the node → what its agent reads, or messages
#     def post_process(prompt: str, response: str, **kwargs) -> str   # → output of the node
#
# siiRL's form, whose first parameter is `tokenizer`, takes the tokeniser of the node's model, and takes and returns token ids:
#
#     def pre_process(tokenizer, prompt_id, obs, **kwargs) -> list[int]
#     def post_process(tokenizer, prompt_id, response_id, **kwargs) -> list[int]
#
# The model reads exactly the ids that `pre_process` returns. `response_id` contains the sampled ids without the token that ended
# the turn. An agent with its own text (`system`, or a node's `prompt`), or without a model on this machine (an endpoint), reads the same
# content as text: the messages of `tokenizer.apply_chat_template`, or one message with the decoded ids.
#
# A parameter `obs` of either form receives the environment's response to the agent as a string, or None before the first response. The
# file is the user's own code and runs in this process, without a sandbox. Before a model is loaded, each function is called once with
# sample texts; siiRL's form is called with a byte tokeniser.


class NodeTokens:
    """The tokeniser that siiRL's functions receive: the transformers tokeniser, with kapelle's rendering of conversations."""

    def __init__(self, renderer: TokenizesChats) -> None:
        """Wrap the tokeniser of a renderer."""
        self._renderer = renderer
        self.written: dict[tuple[int, ...], list[Message]] = {}
        """Mapping from token ids that `apply_chat_template` returned to the messages from which they were created."""

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the token ids of a string. Raises TypeError for other values, for example if a template is None."""
        if not isinstance(text, str):
            raise TypeError(f"tokenizer.encode needs a string, but got {type(text).__name__}")
        return list(self._renderer.tokenizer(text, **options)["input_ids"])

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **options: Any,
    ) -> Any:
        """Return a conversation as token ids, or as a string with `tokenize=False`."""
        if not tokenize or options.keys() - {"add_special_tokens"}:
            return self._renderer.tokenizer.apply_chat_template(
                list(conversation), tokenize=tokenize, add_generation_prompt=add_generation_prompt, **options
            )
        messages = [Message(str(each["role"]), str(each["content"])) for each in conversation]
        ids = (self._renderer.start if add_generation_prompt else self._renderer.whole)(messages)
        self.written[ids] = messages
        return list(ids)

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Call the transformers tokeniser."""
        return self._renderer.tokenizer(*texts, **options)

    def __len__(self) -> int:
        """Return the size of the vocabulary of the tokeniser."""
        return len(self._renderer.tokenizer.get_vocab())

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the transformers tokeniser, such as `decode` or `eos_token`."""
        return getattr(self._renderer.tokenizer, name)


BYTES = "kapelle.models.renderer:byte_renderer"
"""Import path of a renderer with bytes as tokens, which is used for trial calls and for agents without a model on this machine."""


@lru_cache(maxsize=1)
def _byte_renderer() -> TokenizesChats:
    renderer: TokenizesChats = find_object(BYTES, "tokenizer")()
    return renderer


@dataclass(frozen=True, slots=True)
class Processing:
    """The functions `pre_process` and `post_process` of one file. A function that the file does not define is None."""

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
        """Return the prompt of the node's agent as messages, and also as token ids if `pre_process` returned ids of its model.

        The argument `observation` is the response of the environment, or None before the first response.
        """
        if self.pre is None:
            return [Message("user", prompt)], None
        obs = {"obs": observation} if "obs" in inspect.signature(self.pre).parameters else {}
        if not _takes_ids(self.pre):
            result = self.pre(prompt, **obs, **kwargs)
            if isinstance(result, list) and result and all(isinstance(part, Mapping) for part in result):
                return [Message(str(part["role"]), str(part["content"])) for part in result], None
            return [Message("user", self._text(result, "pre_process"))], None
        tokens = NodeTokens(renderer or _byte_renderer())
        result = self.pre(tokens, tokens.encode(prompt, add_special_tokens=False), **obs, **kwargs)
        ids = self._ids(result, "pre_process", len(tokens))
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
        """Return the output of the node, computed by `post_process`.

        The argument `sampled` contains the token ids of the model's response.
        """
        assert self.post is not None
        if not _takes_ids(self.post):
            return self._text(self.post(prompt, response, **kwargs), "post_process")
        tokens = NodeTokens(renderer or _byte_renderer())
        ids = list(sampled) if renderer is not None else tokens.encode(response, add_special_tokens=False)
        if ids and tokens.decode(ids) != response and tokens.decode(ids[:-1]) == response:
            ids = ids[:-1]  # without the token that ended the turn
        result = self.post(tokens, tokens.encode(prompt, add_special_tokens=False), ids, **kwargs)
        return str(tokens.decode(list(self._ids(result, "post_process", len(tokens)))))

    def try_out(self, node: str, pre_kwargs: Mapping[str, Json], post_kwargs: Mapping[str, Json]) -> None:
        """Call both functions with sample texts, once as before and once as after a first turn. Raises ConfigError if a call fails."""
        function = "pre_process"
        try:
            self.before("What is 1 + 1?", None, pre_kwargs)
            self.before("What is 1 + 1? 3", "This answer is incorrect.", pre_kwargs)
            if self.post is not None:
                function = "post_process"
                self.after("What is 1 + 1?", "3", post_kwargs)
        except Exception as error:
            raise ConfigError(
                f"process_path: `{function}` of {self.path} fails with the `{function}_kwargs` of node '{node}': "
                f"{reason(error).rstrip('.')}. Fix the function or the keyword arguments. The test call used a byte tokenizer."
            ) from error

    def _text(self, result: object, function: str) -> str:
        if not isinstance(result, str):
            raise EpisodeError(f"`{function}` of {self.path} returned {type(result).__name__}, not a string.")
        return result

    def _ids(self, result: object, function: str, vocabulary: int) -> tuple[int, ...]:
        if not isinstance(result, list | tuple) or not result or not all(isinstance(k, int) for k in result):
            raise EpisodeError(
                f"`{function}` of {self.path} returned {type(result).__name__}, not a list of token ids."
            )
        for k in result:
            if not 0 <= k < vocabulary:
                raise EpisodeError(
                    f"`{function}` of {self.path} returned the token id {k}, but the tokenizer has {vocabulary} tokens."
                )
        return tuple(result)


def _takes_ids(function: Callable[..., object]) -> bool:
    return next(iter(inspect.signature(function).parameters), "") == "tokenizer"


@lru_cache(maxsize=64)
def load_processing(path: str) -> Processing:
    """Return the functions of `folder/file.py` or `package.module`. Raises ConfigError if the file defines neither function."""
    module = find_module(path, f"process_path: '{path}'")
    found = {name: vars(module).get(name) for name in ("pre_process", "post_process")}
    if not any(map(callable, found.values())):
        raise ConfigError(
            f"process_path: {path} defines neither `pre_process` nor `post_process`. Define one, or remove the key."
        )
    for name, function in found.items():
        if function is not None and not callable(function):
            raise ConfigError(f"process_path: `{name}` of {path} is not a function. Define it with `def`.")
    return Processing(path, found["pre_process"], found["post_process"])


_FIELD = re.compile(r"\$\{([\w.-]+)\}")


class Node(Settings):
    """A node of the graph: one turn of one agent, in a new conversation that contains only the prompt of the node."""

    id: str = Field(pattern=r"^[A-Za-z_][\w-]*$")
    """Name of the node."""
    agent: str | None = None
    """Name of the agent. Set either `agent` or `agent_group`."""
    agent_group: int | None = Field(default=None, ge=0)
    """Index of the agent in the team, from 0."""
    dependencies: tuple[str, ...] = ()
    """Names of the nodes that run before this node."""
    prompt: str = "${prompt}"
    """Template of the agent's prompt. The field `${prompt}` is the input of the node: the question, followed by the texts of all nodes on
    which this node depends, unless a `post_process` function changes it. The field `${question}` is the question, followed by the last
    response of the environment from the second turn on. The field `${ID.output}` is the text of the node ID, on which this node depends
    directly or indirectly."""
    process_path: str | None = None
    """Python file or module with the functions `pre_process` and `post_process`; see `workflows/dag.py`."""
    pre_process_kwargs: Mapping[str, Any] = Field(default={})
    """Keyword arguments of the function `pre_process`."""
    post_process_kwargs: Mapping[str, Any] = Field(default={})
    """Keyword arguments of the function `post_process`."""
    obs_with_env: bool = True
    """Whether the agent reads the observations of the environment, including responses to earlier turns. If false, the agent reads only
    the text of the task."""
    rewards_with_env: bool | None = None
    """Whether the environment receives and rewards the text of this node. If the setting is null for all nodes, it is true for the
    answering node."""


class Dag(Settings, Drawable, ScoresRounds):
    """A workflow that runs a directed graph of turns, once or repeatedly until the episode ends."""

    name: Literal["dag"] = "dag"
    nodes: tuple[Node, ...] = Field(min_length=1)
    answer: str | None = None
    """Name of the node whose text is the team's answer. If null, this is the node on which no other node depends."""
    max_assistant_turns: int = Field(default=1, ge=1)
    """Maximum number of runs of the graph while the episode is open. The episode of a question stays open after an incorrect answer. From
    the second run on, the input of nodes without dependencies is the output of the answering node, followed by the observation."""
    use_all_traj: bool = True
    """Whether all turns are trained on. If false, only the turns of the last run of the graph are trained on, as in siiRL's scripts."""
    whole_texts: bool = False
    """Whether the environment receives the outputs of the nodes instead of their texts, and each further run starts with only the
    observation of the answering agent. This setting is used for siiRL's environments, which manage the history themselves."""
    score_rounds: bool = False
    """Whether the score of each text as an answer is recorded on its turn (`Turn.score`)."""

    @property
    def graph(self) -> Graph:
        """Mapping from each node to its dependencies."""
        return {node.id: node.dependencies for node in self.nodes}

    @property
    def answering(self) -> str:
        """Name of the node whose text is the team's answer."""
        return self.answer or sinks(self.graph)[0]

    def check(self, agents: Sequence[Agent], environment: Environment) -> None:
        """Raise ConfigError if the graph is invalid, if an agent has no node, or if the environment is a game."""
        need_answers("dag", "ends in one answer", environment)
        if self.max_assistant_turns > 1 and offers(environment, Recorded):
            raise ConfigError(
                f"`{environment.name}` replays recorded messages and cannot respond to a second turn. Set "
                "`workflow.max_assistant_turns: 1`."
            )
        self._check_nodes()
        for node in self.nodes:
            if (processing := _processing(node)) is not None:
                processing.try_out(node.id, node.pre_process_kwargs, node.post_process_kwargs)
        names = [agent.name for agent in agents]
        agent_of = {node.id: self._agent(node, names) for node in self.nodes}
        unused = [name for name in names if name not in agent_of.values()]
        if unused:
            raise ConfigError(
                f"Agent '{unused[0]}' has no node in workflow.nodes. Give it a node, or remove it from `team.agents`."
            )
        acting = [agent_of[name] for name in self._acting()]
        repeated = sorted({name for name in acting if acting.count(name) > 1})
        if repeated:
            raise ConfigError(
                f"Two nodes of agent '{repeated[0]}' set `rewards_with_env: true`, but the environment takes one message per agent. "
                "Set it for one of them."
            )
        for agent in agents:
            if agent.prompt is not None:
                raise ConfigError(
                    f"The nodes of the workflow `dag` define all prompts. Remove `prompt` of agent '{agent.name}'."
                )

    def _check_nodes(self) -> None:
        ids = [node.id for node in self.nodes]
        if repeated := sorted({name for name in ids if ids.count(name) > 1}):
            raise ConfigError(f"workflow.nodes has the id '{repeated[0]}' twice. Use unique ids.")
        check_graph(self.graph, "workflow.nodes")
        ends = sinks(self.graph)
        if self.answer is None and len(ends) > 1:
            raise ConfigError(
                f"No node depends on {', '.join(ends)}, so any of them could be the answer. Set `workflow.answer` to one of them."
            )
        need_known("workflow.answer", "node", self.answer, ids)
        for node in self.nodes:
            known = ["prompt", "question", *(f"{name}.output" for name in ancestors(self.graph, node.id))]
            for field in _FIELD.findall(node.prompt):
                if field not in known:
                    raise ConfigError(
                        f"The prompt of node '{node.id}' uses ${{{field}}}, which is not an output of its dependencies."
                        f"{did_you_mean(field, known)}"
                    )
            _processing(node)

    def _agent(self, node: Node, names: Sequence[str]) -> str:
        """Return the name of the agent of a node."""
        if (node.agent is None) == (node.agent_group is None):
            raise ConfigError(f"Node '{node.id}' needs either `agent` or `agent_group`. Set one of them.")
        if node.agent_group is None:
            need_known(f"Node '{node.id}'", "agent", node.agent, names)
            return str(node.agent)
        if node.agent_group >= len(names):
            raise ConfigError(
                f"Node '{node.id}' has `agent_group: {node.agent_group}`, but the team's agents have the numbers 0 to {len(names) - 1}. Use one of these."
            )
        return names[node.agent_group]

    def _acting(self) -> list[str]:
        return [node.id for node in self.nodes if node.rewards_with_env] or [self.answering]

    async def run(self, scene: Scene) -> None:
        """Run one episode."""
        if self.max_assistant_turns > 1:
            scene.allow_answers(self.max_assistant_turns)
        agent_of = {node.id: self._agent(node, scene.names) for node in self.nodes}
        before: str | None = None
        for _ in range(self.max_assistant_turns):
            if not self.use_all_traj:
                scene.leave_out()
            texts, outputs = await self._run_once(scene, before)
            actions = outputs if self.whole_texts else texts
            await scene.step({agent_of[k]: actions[k] for k in self._acting()}, final=texts[self.answering])
            if not scene.movers():
                return
            answering = agent_of[self.answering]
            before = scene.observe(answering) if self.whole_texts else outputs[self.answering]

    async def _run_once(self, scene: Scene, before: str | None) -> tuple[dict[str, str], dict[str, str]]:
        """Run the graph once, and return the text and the output of every node.

        The argument `before` is the text at the start of the input. The argument is None in the first run.
        """
        nodes = {node.id: node for node in self.nodes}
        texts: dict[str, str] = {}
        outputs: dict[str, str] = {}
        for level in levels(self.graph):
            for batch in _one_turn_each([(k, self._agent(nodes[k], scene.names)) for k in level]):
                inputs = {
                    k: self._input(scene, nodes[k], agent, texts, outputs, before) for k, agent in batch
                }
                prompts = {
                    agent: self._prompt(scene, nodes[k], agent, inputs[k], texts, before is not None)
                    for k, agent in batch
                }
                # Read the renderers before the turns: an agent's weights can differ by turn.
                renderers = {agent: _renderer(scene, agent) for _, agent in batch}
                turns = await scene.together(prompts, fresh=True)
                for k, agent in batch:
                    turn = turns[agent]
                    if self.score_rounds:
                        await scene.score(turn)
                    texts[k] = turn.text
                    outputs[k] = append_texts(inputs[k], {k: turn.text})
                    if (processing := _processing(nodes[k])) is not None and processing.post is not None:
                        kwargs = nodes[k].post_process_kwargs
                        outputs[k] = processing.after(
                            inputs[k], turn.text, kwargs, renderers[agent], turn.completion_ids
                        )
        return texts, outputs

    def _input(
        self,
        scene: Scene,
        node: Node,
        agent: str,
        texts: Mapping[str, str],
        outputs: Mapping[str, str],
        before: str | None,
    ) -> str:
        """Return the input of a node: the question and earlier texts, or the outputs of `post_process` functions."""
        earlier = [_processing(other) for other in self.nodes if other.id in node.dependencies]
        if any(processing is not None and processing.post is not None for processing in earlier):
            return "\n\n".join(outputs[name] for name in node.dependencies)
        question = scene.observe(agent) if node.obs_with_env else scene.task.question
        if before is not None:
            shows_response = node.obs_with_env and not self.whole_texts
            question = f"{before}\n\n{question}" if shows_response else before
        return append_texts(question, {name: texts[name] for name in ancestors(self.graph, node.id)})

    def _prompt(
        self, scene: Scene, node: Node, agent: str, given: str, texts: Mapping[str, str], has_response: bool
    ) -> list[Message]:
        """Return the messages that the agent of a node reads. The argument `has_response` is true from the second run on."""
        observation = scene.observe(agent) if node.obs_with_env else None
        question = scene.task.question
        if observation is not None:
            question = f"{question}\n\n{observation}" if has_response else observation
        messages = [Message("user", given)]
        has_instructions = bool(instructions(scene[agent].agent, scene.task))
        if (processing := _processing(node)) is not None:
            response = observation if has_response else None
            if self.whole_texts and observation is not None and not has_response:
                # The observation of the class before the first turn.
                response = observation.removeprefix(scene.task.question).lstrip("\n") or None
            renderer = _renderer(scene, agent)
            messages, ids = processing.before(given, response, node.pre_process_kwargs, renderer)
            if ids is not None and node.prompt == "${prompt}" and not has_instructions:
                last = messages[-1]
                return [*messages[:-1], Written(last.role, last.content, ids=ids)]
        values = {"prompt": messages[-1].content, "question": question}
        values |= {f"{k}.output": text for k, text in texts.items()}
        text = _FIELD.sub(lambda match: values[match[1]], node.prompt)
        if has_instructions:  # they replace an empty system message of the template
            messages = [message for message in messages if message.role != "system" or message.content]
        return [*messages[:-1], replace(messages[-1], content=text)]

    def mermaid(self, names: Sequence[str]) -> str:
        """Return the graph as a Mermaid flowchart, in which the answering node has a double border. Raises the same errors as `check`."""
        self._check_nodes()
        labels = {node.id: f"{node.id}: {self._agent(node, names)}" for node in self.nodes}
        return mermaid(self.graph, labels, self.answering)


def _renderer(scene: Scene, agent: str) -> TokenizesChats | None:
    renderer = scene[agent].renderer
    return renderer if isinstance(renderer, TokenizesChats) else None


def _processing(node: Node) -> Processing | None:
    return None if node.process_path is None else load_processing(node.process_path)


def _one_turn_each(level: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Split a layer of (node, agent) pairs into batches in which each agent has at most one turn."""
    batches: list[dict[str, str]] = []
    for node, agent in level:
        batch = next((batch for batch in batches if agent not in batch), None)
        if batch is None:
            batch = {}
            batches.append(batch)
        batch[agent] = node
    return [[(node, agent) for agent, node in batch.items()] for batch in batches]
