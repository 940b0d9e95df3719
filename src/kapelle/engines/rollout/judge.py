"""Use a policy of any rollout engine as a judge."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kapelle.engines.rollout.protocol import Request, RolloutEngine
from kapelle.runtime.randomness import derive_seed
from kapelle.types import Message, Sampling, Task

GREEDY = Sampling(max_tokens=512, temperature=0.0)


def query_engine(
    engine: RolloutEngine, policy: str, sampling: Sampling = GREEDY
) -> Callable[[Sequence[Message]], Awaitable[str]]:
    """Return a judge that uses a policy of an engine: an async function from a conversation to the text of the reply.

    The seed is derived from the messages, so the judge always gives the same reply to the same conversation.
    """

    async def reply(messages: Sequence[Message]) -> str:
        prompt = engine.renderer(policy).start(messages)
        seed = derive_seed("judge", *(message.content for message in messages))
        request = Request(policy, "judge", tuple(messages), prompt, sampling, seed, Task("judge", ""))
        return (await engine.generate(request)).text

    return reply
