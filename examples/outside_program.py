"""A program that uses only OpenAI's client, and is trained without changes.

    kapelle train examples/outside_program.yaml

starts it once for each episode. The client reads the episode's address and key from environment variables, so the program
contains neither. The program defines its own reward: here, the share of digits in the answer.
"""

import os
import sys

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit(
        "This example needs OpenAI's client, which is not installed: pip install openai 'kapelle[serve]'"
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
