"""Policies that are functions, for tests, golden transcripts, opponents and demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kapelle.engines.rollout.protocol import Completion, Recites, Request, RolloutEngine, WritingRenderer
from kapelle.errors import EngineError, did_you_mean
from kapelle.runtime.thoughts import split_thoughts
from kapelle.types import Message

Script = Callable[[Request], str]
"""A scripted policy: a function from a request to the text of its answer."""


class ByteRenderer:
    """A renderer with UTF-8 bytes as token ids, for scripts, which read the messages."""

    context = 1_000_000

    def start(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the bytes of all messages, one line each."""
        return tuple("".join([f"{m.role}: {m.content}\n" for m in messages]).encode("utf-8", "replace"))

    def extend(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new_messages: Sequence[Message],
        before: Sequence[Message] = (),
    ) -> tuple[int, ...]:
        """Return the last prompt and completion, followed by the bytes of the messages `new_messages` since."""
        return (*prompt, *completion, *b"\n", *self.start(new_messages))

    def thoughts(self, prompt: Sequence[int], completion: Sequence[int], text: str) -> tuple[int, int]:
        """Return the length of a text's thoughts; a server's text may lack the opening mark."""
        if "THINK]" not in text and "think>" not in text:
            return 0, 0
        return 0, len(text) - len(split_thoughts(text, thinking="</think>" in text)[1])

    def completion(self, text: str) -> tuple[int, ...]:
        """Return the bytes of a completion."""
        return tuple(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return bytes as text."""
        return bytes(ids).decode("utf-8", "replace")


_BYTES = ByteRenderer()


class ScriptedEngine(RolloutEngine, Recites):
    """Returns the text of its policy's script for each request, with log-prob 0."""

    def __init__(
        self, scripts: Mapping[str, Script], renderers: Mapping[str, WritingRenderer] | None = None
    ) -> None:
        """Take scripts by policy; `renderers` turn their text into tokens of a policy's model."""
        self.scripts = dict(scripts)
        self._renderers = dict(renderers or {})

    @property
    def policies(self) -> Sequence[str]:
        """Names of the scripted policies."""
        return tuple(self.scripts)

    def renderer(self, policy: str) -> WritingRenderer:
        """Return the policy's renderer, by default one with bytes as tokens."""
        return self._renderers.get(policy, _BYTES)

    async def generate(self, request: Request) -> Completion:
        """Return the text of the script of the request's policy; EngineError for an unknown policy."""
        script = self.scripts.get(request.policy)
        if script is None:
            raise EngineError(
                f"There is no script for the policy '{request.policy}'.{did_you_mean(request.policy, self.scripts)}"
            )
        text = script(request)
        ids = self.renderer(request.policy).completion(text)
        return Completion(ids, (0.0,) * len(ids), "stop", text, version=0, weights_hash="script")

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Raise EngineError: a script has no weights."""
        raise EngineError(f"The scripted policy '{policy}' has no weights to load. Mark its agent as frozen.")
