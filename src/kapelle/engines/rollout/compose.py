"""A rollout engine composed of several engines, which sends each request to the engine that holds the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kapelle.engines.rollout.protocol import (
    Completion,
    HasNotes,
    HeldRequest,
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
    """Return the engine that samples from a policy: either the given engine or a component of a composed engine."""
    return engine.engine_of(policy) if isinstance(engine, ComposedEngine) else engine


class ComposedEngine(Interruptible, ServesCallers, HasNotes):
    """An engine that sends each request to the component engine that holds the policy of the request."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = tuple(engines)
        self._engine_of = {policy: engine for engine in engines for policy in engine.policies}
        self._interruptible = [engine for engine in engines if isinstance(engine, Interruptible)]

    @property
    def policies(self) -> Sequence[str]:
        """The names of the policies of all component engines."""
        return tuple(self._engine_of)

    @property
    def notes(self) -> Sequence[str]:
        """The notes of all component engines for the user."""
        return tuple(note for engine in self._engines for note in notes_of(engine))

    def renderer(self, policy: str) -> Renderer:
        """Return the renderer that converts the conversations of a policy into tokens."""
        return self._engine_of[policy].renderer(policy)

    async def generate(self, request: Request) -> Completion:
        """Return one completion from the engine that holds the policy."""
        return await self._engine_of[request.policy].generate(request)

    def serve(self) -> None:
        """Make the component engines that support serving return completions independently of each other."""
        for engine in self._engines:
            if isinstance(engine, ServesCallers):
                engine.serve()

    async def stream(self, request: Request, on_tokens: OnTokens | None) -> Completion:
        """Return one completion from the engine that holds the policy, and pass tokens to `on_tokens` as they are sampled."""
        return await stream_or_generate(self._engine_of[request.policy], request, on_tokens)

    def engine_of(self, policy: str) -> RolloutEngine:
        """Return the component engine that holds a policy."""
        return self._engine_of[policy]

    def run_freely(self) -> None:
        """Let every `Interruptible` component engine sample without waiting for busy episodes."""
        for engine in self._interruptible:
            engine.run_freely()

    async def hold(self) -> Sequence[HeldRequest]:
        """Put the requests of each `Interruptible` component engine on hold. The other engines continue."""
        return [held for engine in self._interruptible for held in await engine.hold()]

    def resume(self) -> None:
        """Continue the requests on hold."""
        for engine in self._interruptible:
            engine.resume()

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Pass new weights to the component engine that holds the policy."""
        self._engine_of[policy].load(policy, weights, version)

    def release_caches(self) -> None:
        """Release the caches of every component engine."""
        for engine in self._engines:
            engine.release_caches()

    def close(self) -> None:
        """Close every component engine."""
        for engine in self._engines:
            engine.close()
