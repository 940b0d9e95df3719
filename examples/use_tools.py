"""A question, two tools and the results of calling them: the environment `tools` with a script in place of a model.

    python examples/use_tools.py

`hermes` is the form in which Qwen and Hermes models write calls; `form: llama` and `form: pythonic` read other models' calls.
"""

import asyncio
import json
import tempfile
from pathlib import Path

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments import Math, Tools
from kapelle.environments.tools.calculator import Calculator
from kapelle.environments.tools.search import Search
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode
from kapelle.workflows import ToolUse

CORPUS = [
    {"title": "Aare", "text": "The Aare is 288 km long. It rises in the Bernese Alps."},
    {"title": "Emme", "text": "The Emme is 82 km long. It flows into the Aare near Solothurn."},
]
QUESTIONS = {
    "train": {"question": "How many km longer is the Aare than the Emme?", "answer": "#### 206"},
    "test": {"question": "How long is the Emme in km?", "answer": "#### 82"},
}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SAYS = (
    call("search", query="length of the Aare and the Emme"),
    call("calculator", expression="288 minus 82"),  # the calculator does not read words
    call("calculator", expression="288-82"),
    "The Aare is 206 km longer.\n#### 206",
)


async def answer(folder: Path) -> Episode:
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CORPUS))
    for split, row in QUESTIONS.items():
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    environment = Tools(
        questions=Math(path=str(folder)),
        tools=(Search(corpus=str(folder / "corpus.jsonl"), results=2), Calculator()),
    )
    environment.check(["solver"])
    team = Team(
        (Agent("solver"),), {"solver": Policy("solver", base="", trained=False)}, {"solver": "solver"}
    )
    engine = ScriptedEngine({"solver": lambda request: SAYS[len(request.messages) // 2]})
    [group] = await rollout(
        RolloutSetup(team, environment, ToolUse(), engine), [environment.task("train", 0)], samples=1, seed=0
    )
    return group.episodes[0]


def main() -> float:
    with tempfile.TemporaryDirectory() as folder:
        episode = asyncio.run(answer(Path(folder)))
    for turn in episode.turns:
        for message in turn.new_messages:
            print(f"--- {message.role}\n{message.content}")
        print(f"--- {turn.agent}\n{turn.text}")
    reward = episode.rewards["solver"]
    print(
        f"\nreward {reward}, calls {episode.info['calls']['solver']}, faults {episode.info['call_faults']['solver']}"
    )
    return reward


if __name__ == "__main__":
    main()
