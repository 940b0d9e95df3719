"""A world on an environment server, as it is played from here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kapelle.environment import Outcome, RemoteWorld, Retriable, Scorable, WorkerLost
from kapelle.environments.remote.messages import from_map
from kapelle.environments.remote.server import Busy, EnvironmentServerLink, Line
from kapelle.runtime.deadlines import UNBREAKABLE, Patience, within
from kapelle.wire import environment_v1_pb2 as pb


class ServerWorld(RemoteWorld):
    """A world on a server, which bounds each call of the environment; here that bound holds with some time to spare."""

    def __init__(
        self, server: EnvironmentServerLink, line: Line, began: pb.ResetReply, name: str, patience: Patience
    ) -> None:
        """Take the place of a session that has begun."""
        super().__init__(name, patience)
        self._server, self._line, self._session = server, line, began.session
        self.scorable = began.scorable
        self.update_view(view_of(began.view))
        self._allowed: int | None = None

    @property
    def lost(self) -> WorkerLost | None:
        """How the world was lost with its server; None while the server lives."""
        return None if self._line.lost is None else WorkerLost(self._line.lost, blamed=False)

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """See `environment.World`."""
        answer = await self._ask("step", act=act_request(self._session, actions, final, self._allowed))
        self._allowed = None
        self.update_view(view_of(answer.view))
        return {each.agent: each.amount for each in answer.rewards}

    async def score(self, agent: str, text: str) -> float:
        """See `environment.Scorable`."""
        asked = pb.ScoreRequest(session=self._session, agent=agent, text=text)
        return float((await self._ask("score", score=asked)).score)

    async def outcome(self) -> Outcome:
        """See `environment.World`."""
        return outcome_of(await self._ask("outcome", outcome=pb.OutcomeRequest(session=self._session)))

    def outcome_now(self, seconds: float) -> Outcome:
        """Return the outcome and wait for it here, for so many seconds at most."""
        asked = self._line.ask(outcome=pb.OutcomeRequest(session=self._session))
        return outcome_of(asked.result(seconds))

    def allow_answers(self, most: int) -> None:
        """See `environment.Retriable`; the server hears of it with the first step."""
        self._allowed = most

    async def close(self) -> None:
        """See `environment.World`; a world lost with its server is already closed."""
        try:
            if self.lost is None:
                await self._ask("close", close=pb.CloseRequest(session=self._session))
        except WorkerLost:
            pass
        finally:
            self._server.sessions -= 1

    async def _ask(self, method: str, **question: Any) -> Any:
        slowest = max(self._patience.grader, self._patience.environment)
        seconds = (slowest if method == "score" else self._patience.environment) + UNBREAKABLE
        return await within(
            f"`{method}` of environment '{self._name}'", "environment", seconds, self._answer(**question)
        )

    async def _answer(self, **question: Any) -> Any:
        try:
            return await asyncio.wrap_future(self._line.ask(**question))
        except Busy as busy:  # only a server that ends says this to one that plays
            raise WorkerLost(str(busy), blamed=False) from None


class InnerWorld(Retriable):
    """A world on a server inside another world that is here: what has to be answered at once waits for the server."""

    def __init__(self, world: ServerWorld, patience: Patience) -> None:
        self._world = world
        self._seconds = patience.environment + UNBREAKABLE

    def observe(self, agent: str) -> str:
        """See `environment.World`."""
        return self._world.observe(agent)

    def movers(self) -> tuple[str, ...]:
        """See `environment.World`."""
        return self._world.movers()

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        """See `environment.World`."""
        return await self._world.step(actions, final)

    def allow_answers(self, most: int) -> None:
        """See `environment.Retriable`."""
        self._world.allow_answers(most)

    def outcome(self) -> Outcome:
        """See `environment.World`."""
        return self._world.outcome_now(self._seconds)

    async def close(self) -> None:
        """See `environment.World`."""
        await self._world.close()


class ScorableInnerWorld(InnerWorld, Scorable):
    """One that can score a text before the episode is over."""

    async def score(self, agent: str, text: str) -> float:
        """See `environment.Scorable`."""
        return await self._world.score(agent, text)


def act_request(
    session: str, actions: Mapping[str, str], final: str | None, allowed: int | None
) -> pb.ActRequest:
    """Return a move as a message."""
    moves = [pb.Move(agent=agent, text=text) for agent, text in actions.items()]
    return pb.ActRequest(session=session, moves=moves, final=final, answers_allowed=allowed)


def view_of(view: pb.View) -> dict[str, Any]:
    """Return a view as `RemoteWorld.update_view` takes it."""
    movers = (
        {"error": _error(view.movers_error)}
        if view.HasField("movers_error")
        else {"value": tuple(view.movers)}
    )
    shown: dict[str, dict[str, Any]] = {agent: {"value": text} for agent, text in view.shown.items()}
    shown |= {agent: {"error": _error(said)} for agent, said in view.shown_errors.items()}
    return {"movers": movers, "shown": shown}


def outcome_of(outcome: pb.Outcome) -> Outcome:
    """Return the outcome of a message."""
    return Outcome(
        {each.agent: each.amount for each in outcome.rewards},
        outcome.success if outcome.HasField("success") else None,
        from_map(outcome.info),
        outcome.truncated,
        {each.agent: each.role for each in outcome.roles},
    )


def _error(said: str) -> list[str]:
    kind, _, message = said.partition(": ")
    return [kind, message]
