"""An engine composed of several engines; each policy is sampled by the engine that holds it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from kapelle.engines.rollout.protocol import (
    Completion,
    HasNotes,
    Interrupted,
    Interruptible,
    OnTokens,
    Renderer,
    Request,
    RolloutEngine,
    ServesCallers,
    notes_of,
    stream_or_generate,
)


def engine_of(engine: RolloutEngine, policy: str) -> RolloutEngine:
    """Return the engine that samples a policy: the engine itself, or a part of a composed engine."""
    return engine.engine_of(policy) if isinstance(engine, ComposedEngine) else engine


class ComposedEngine(Interruptible, ServesCallers, HasNotes):
    """Sends each request to the engine that holds its policy."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = tuple(engines)
        self._engine_of = {policy: engine for engine in engines for policy in engine.policies}

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies of all engines."""
        return tuple(self._engine_of)

    @property
    def notes(self) -> Sequence[str]:
        """The engines' notes for the user."""
        return tuple(note for engine in self._engines for note in notes_of(engine))

    def renderer(self, policy: str) -> Renderer:
        """Return the renderer of a policy's conversations."""
        return self._engine_of[policy].renderer(policy)

    async def generate(self, request: Request) -> Completion:
        """Return one completion from the engine that holds the policy."""
        return await self._engine_of[request.policy].generate(request)

    def serve(self) -> None:
        """Return completions independently of each other, in the engines that support it."""
        for engine in self._engines:
            if isinstance(engine, ServesCallers):
                engine.serve()

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        """Return one completion from the engine that holds the policy; `on_tokens` gets its tokens as they are sampled."""
        return await stream_or_generate(self._engine_of[request.policy], request, on_tokens)

    def engine_of(self, policy: str) -> RolloutEngine:
        """Return the engine that holds a policy."""
        return self._engine_of[policy]

    async def interrupt(self) -> Sequence[Interrupted]:
        """Interrupt the requests of `Interruptible` engines, one engine after another, and wait for the requests of the others."""
        return [
            broken
            for engine in self._engines
            if isinstance(engine, Interruptible)
            for broken in await engine.interrupt()
        ]

    def pause_every(self, tokens: int, pause: Callable[[], Awaitable[bool]] | None) -> None:
        """Make the one `Interruptible` engine pause."""
        for engine in self._engines:
            if isinstance(engine, Interruptible):
                engine.pause_every(tokens, pause)

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Pass new weights to the engine that holds the policy."""
        self._engine_of[policy].load(policy, weights, version)

    def release_caches(self) -> None:
        """Release the caches of every engine."""
        for engine in self._engines:
            engine.release_caches()

    def close(self) -> None:
        """Close every engine."""
        for engine in self._engines:
            engine.close()
