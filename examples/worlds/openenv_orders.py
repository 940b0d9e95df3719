"""Orders on an openenv-core server, two in each episode: `python examples/worlds/openenv_orders.py 8000`."""

import random
import sys
from typing import Any

import uvicorn
from openenv.core import Action, Observation
from openenv.core.env_server import Environment, State, create_app
from orders import ITEMS, asked, named, polite


class Answer(Action):  # type: ignore[misc]
    """The shop's message."""

    message: str


class Order(Observation):  # type: ignore[misc]
    """A customer's message."""

    text: str = ""


class Shop(Environment):  # type: ignore[misc]
    """Two customers in sequence; each answer gets a quarter for the correct item and a quarter for politeness."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        """Begin empty; `reset` draws the customers."""
        super().__init__()
        self._waiting: list[str] = []
        self._state = State(episode_id="shop", step_count=0)

    def reset(self, seed: int | None = None, **given: Any) -> Order:
        """Return the first order."""
        self._waiting = random.Random(seed).sample(ITEMS, 2)
        self._state = State(episode_id="shop", step_count=0)
        return Order(text=asked(self._waiting[0]))

    def step(self, action: Any, **given: Any) -> Order:
        """Reward an answer and return the next order."""
        item, *self._waiting = self._waiting
        self._state.step_count += 1
        reward = (named(action.message, item) + polite(action.message)) / 4
        following = asked(self._waiting[0]) if self._waiting else "Closed."
        return Order(text=following, reward=reward, done=not self._waiting)

    @property
    def state(self) -> Any:
        """Return the number of answers so far."""
        return self._state


app = create_app(Shop, Answer, Order, max_concurrent_envs=64)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
