"""Scripted policies, which are Python functions, for tests, golden transcripts, opponents and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kapelle.engines.rollout.protocol import Completion, Recites, Request, RolloutEngine, WritingRenderer
from kapelle.errors import EngineError, did_you_mean
from kapelle.runtime.thoughts import split_thoughts
from kapelle.types import Message

Script = Callable[[Request], str]
"""A scripted policy: a function that returns the text of an answer to a request."""


class ByteRenderer:
    """A renderer for scripted policies whose token ids are UTF-8 bytes."""

    context = 1_000_000

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the UTF-8 bytes of all messages, with one message per line."""
        return tuple("".join([f"{m.role}: {m.content}\n" for m in messages]).encode("utf-8", "replace"))

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new_messages: Sequence[Message],
        before: Sequence[Message] = (),
    ) -> tuple[int, ...]:
        """Return the previous prompt and the completion, followed by the bytes of `new_messages`."""
        return (*prompt, *completion, *b"\n", *self.start(new_messages))

    def thoughts(self, prompt: Sequence[int], completion: Sequence[int], text: str) -> tuple[int, int]:
        """Return the length of the thoughts at the start of a text. A server's text may lack the opening tag."""
        if "THINK]" not in text and "think>" not in text:
            return 0, 0
        return 0, len(text) - len(split_thoughts(text, thinking="</think>" in text)[1])

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the UTF-8 bytes of a completion."""
        return tuple(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the string that UTF-8 bytes encode."""
        return bytes(ids).decode("utf-8", "replace")


_BYTES = ByteRenderer()


class ScriptedEngine(RolloutEngine, Recites):
    """An engine that answers each request with the text of the policy's script and reports log-prob 0 for every token."""

    def __init__(
        self, scripts: Mapping[str, Script], renderers: Mapping[str, WritingRenderer] | None = None
    ) -> None:
        """Create an engine from scripts by policy name. The renderers convert a script's text into tokens of the policy's model."""
        self.scripts = dict(scripts)
        self._renderers = dict(renderers or {})

    @property
    def policies(self) -> Sequence[str]:
        """The names of the scripted policies."""
        return tuple(self.scripts)

    def renderer(self, policy: str) -> WritingRenderer:
        """Return the renderer of a policy. The default renderer uses bytes as token ids."""
        return self._renderers.get(policy, _BYTES)

    async def generate(self, request: Request) -> Completion:
        """Return the text of the policy's script as a completion. Raises EngineError if the policy is unknown."""
        script = self.scripts.get(request.policy)
        if script is None:
            raise EngineError(
                f"There is no script for the policy '{request.policy}'.{did_you_mean(request.policy, self.scripts)}"
            )
        text = script(request)
        ids = self.renderer(request.policy).completion(text)
        return Completion(ids, (0.0,) * len(ids), "stop", text, version=0, weights_hash="script")

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Raise EngineError, because scripted policies have no weights."""
        raise EngineError(f"The scripted policy '{policy}' has no weights to load. Mark its agent as frozen.")
