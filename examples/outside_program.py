"""A program that knows only OpenAI's client, and is trained as it stands.

    kapelle train examples/outside_program.yaml

starts it once for each episode. The address and the key that the client reads from the environment are those of the episode,
so that nothing here names one. The reward is the program's own: here the share of digits in the answer.
"""

import os
import sys

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit(
        "This example talks through OpenAI's client, which is not installed: pip install openai 'kapelle[serve]'"
    )


def main() -> None:
    client = OpenAI(max_retries=0)
    question = f"Write number {os.environ['KAPELLE_INDEX']}."
    said = client.chat.completions.create(
        model="team/writer", messages=[{"role": "user", "content": question}]
    )
    text = said.choices[0].message.content or ""
    reward = sum(letter.isdigit() for letter in text) / max(1, len(text))
    client.post("/reward", body={"reward": reward}, cast_to=object)


if __name__ == "__main__":
    main()
