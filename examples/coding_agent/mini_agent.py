"""A coding agent in thirty lines, in the style of mini-swe-agent: one bash command at a time, until an answer contains none.

It does not depend on kapelle. Started by hand, it works with any chat completions server:

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python mini_agent.py MODEL "Write hello into greeting.txt."
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

SYSTEM = "You work in a shell. Answer with one command between ```bash and ```; you read what it prints. Without one you are done."
STEPS = 5


def ask(model: str, messages: list[dict[str, str]]) -> dict[str, str]:
    """Return the model's next message."""
    body = json.dumps({"model": model, "messages": messages}).encode()
    key = f"Bearer {os.environ['OPENAI_API_KEY']}"
    headers = {"content-type": "application/json", "authorization": key}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        said: dict[str, str] = json.load(answer)["choices"][0]["message"]
    return said


def work(model: str, instruction: str) -> None:
    """Run the model's commands until an answer contains none."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction}]
    for _ in range(STEPS):
        messages.append(ask(model, messages))
        found = re.search(r"```bash\n(.*?)```", messages[-1]["content"], re.DOTALL)
        if found is None:
            break
        done = subprocess.run(
            ["bash", "-c", found[1]], check=False, capture_output=True, text=True, timeout=60
        )
        messages.append(
            {"role": "user", "content": f"(exit code {done.returncode})\n{done.stdout}{done.stderr}"[:2000]}
        )


if __name__ == "__main__":
    work(sys.argv[1], sys.argv[2])
