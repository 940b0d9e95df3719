"""Three agents of someone else's program: a planner, a coder and a critic, named by `model=`.

    kapelle train examples/outside_team.yaml          # one terminal: serves the agents, trains them, waits for episodes
    python examples/outside_team.py                   # another one: plays until training is over

The program asks for episodes, plays them as it likes and posts what each agent has earned. The critic may send the coder
back once; the coder then continues with its own conversation, token for token.
"""

import sys
import time
from typing import Any

try:
    from openai import APIConnectionError, APIStatusError, OpenAI
except ModuleNotFoundError:
    sys.exit(
        "This example talks through OpenAI's client, which is not installed: pip install openai 'kapelle[serve]'"
    )


def ask(client: OpenAI, agent: str, conversation: list[Any], words: str) -> str:
    """Let an agent answer in a conversation that is kept here."""
    conversation.append({"role": "user", "content": words})
    said = client.chat.completions.create(model=f"team/{agent}", messages=conversation)
    conversation.append({"role": "assistant", "content": said.choices[0].message.content})
    return said.choices[0].message.content or ""


def play(client: OpenAI, index: int) -> dict[str, float]:
    """Play one episode and return what each agent has earned."""
    plan = ask(client, "planner", [], f"Plan task {index}.")
    coder: list[Any] = []
    code = ask(client, "coder", coder, f"Do this: {plan}")
    verdict = ask(client, "critic", [], f"Is this right? {code}")
    if len(verdict) % 2:
        code = ask(client, "coder", coder, f"The critic says: {verdict}")
    earned = sum(letter.islower() for letter in code) / max(1, len(code))
    return {"planner": earned, "coder": earned, "critic": earned if len(verdict) < 20 else 0.0}


def main(url: str = "http://127.0.0.1:8000/v1", key: str = "none", patience: str = "60") -> int:
    """Play until training is over, and return how many episodes that were; training has `patience` seconds to begin."""
    played, begun = 0, time.monotonic()
    client = OpenAI(base_url=url, api_key=key, max_retries=0)
    while True:
        try:
            episode = client.post("/task", body={}, cast_to=dict[str, Any])
        except (APIConnectionError, APIStatusError) as error:
            if played:  # training is over
                return played
            if isinstance(error, APIConnectionError) and time.monotonic() - begun < float(patience):
                time.sleep(1)
                continue
            sys.exit(
                f"No training gives out episodes at {url} ({error}). Start it first, in another terminal: "
                "kapelle train examples/outside_team.yaml"
            )
        session = client.with_options(default_headers={"x-kapelle-session": episode["session"]})
        rewards = play(session, episode["task"]["index"])
        session.post("/reward", body={"rewards": rewards}, cast_to=object)
        played += 1


if __name__ == "__main__":
    print(f"played {main(*sys.argv[1:])} episodes")
