"""Three agents of an external program: a planner, a coder and a critic, selected by `model=`.

    kapelle train examples/outside_team.yaml          # one terminal: serves the agents, trains them, waits for episodes
    python examples/outside_team.py                   # another terminal: runs episodes until training has ended

The program requests episodes, runs them in its own way and posts each agent's reward. The critic may reject the coder's
answer once; the coder then continues its own conversation, token for token.
"""

import sys
import time
from typing import Any

try:
    from openai import APIConnectionError, APIStatusError, OpenAI
except ModuleNotFoundError:
    sys.exit(
        "This example needs OpenAI's client, which is not installed: pip install openai 'kapelle[serve]'"
    )


def ask(client: OpenAI, agent: str, conversation: list[Any], words: str) -> str:
    """Let an agent answer in a conversation that this program keeps."""
    conversation.append({"role": "user", "content": words})
    said = client.chat.completions.create(model=f"team/{agent}", messages=conversation)
    conversation.append({"role": "assistant", "content": said.choices[0].message.content})
    return said.choices[0].message.content or ""


def play(client: OpenAI, index: int) -> dict[str, float]:
    """Run one episode and return each agent's reward."""
    plan = ask(client, "planner", [], f"Plan task {index}.")
    coder: list[Any] = []
    code = ask(client, "coder", coder, f"Do this: {plan}")
    verdict = ask(client, "critic", [], f"Is this right? {code}")
    if len(verdict) % 2:
        code = ask(client, "coder", coder, f"The critic says: {verdict}")
    earned = sum(letter.islower() for letter in code) / max(1, len(code))
    return {"planner": earned, "coder": earned, "critic": earned if len(verdict) < 20 else 0.0}


def main(url: str = "http://127.0.0.1:8000/v1", key: str = "none", patience: str = "60") -> int:
    """Run episodes until training has ended, and return their number; training has `patience` seconds to begin."""
    played, begun = 0, time.monotonic()
    client = OpenAI(base_url=url, api_key=key, max_retries=0)
    while True:
        try:
            episode = client.post("/task", body={}, cast_to=dict[str, Any])
        except (APIConnectionError, APIStatusError) as error:
            if played:  # training has ended
                return played
            if isinstance(error, APIConnectionError) and time.monotonic() - begun < float(patience):
                time.sleep(1)
                continue
            sys.exit(
                f"No training run provides episodes at {url} ({error}). Start one first, in another terminal: "
                "kapelle train examples/outside_team.yaml"
            )
        session = client.with_options(default_headers={"x-kapelle-session": episode["session"]})
        rewards = play(session, episode["task"]["index"])
        session.post("/reward", body={"rewards": rewards}, cast_to=object)
        played += 1


if __name__ == "__main__":
    print(f"played {main(*sys.argv[1:])} episodes")
