"""Every workflow on one sum, with scripts in place of models: which agent acts when, what it reads, and which answer counts.

python examples/every_workflow.py            # all of them
python examples/every_workflow.py debate     # one
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence

from kapelle.engines.rollout.protocol import Request
from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environment import Environment
from kapelle.environments import Arithmetic, OpenSpiel, Proposals
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode, Task
from kapelle.workflow import Workflow
from kapelle.workflows import (
    Chain,
    Cory,
    Dag,
    Debate,
    Node,
    Parallel,
    PlayWorkflow,
    Propose,
    Reflect,
    Router,
    Solo,
    Summary,
    Swarm,
    ToolUse,
    Vote,
)

SUM = Task("47+85", "47+85", {"answer": 132})
PLAN = Node(id="plan", agent="ann", prompt="Plan ${question}:")
SOLVE = Node(id="solve", agent="bob", dependencies=("plan",), prompt="${question} ${plan.output}")

# A workflow, and each agent's messages in its turns; this is also the order of the agents.
SHOWN: Mapping[str, tuple[Workflow, Mapping[str, Sequence[str]]]] = {
    "solo": (Solo(), {"ann": ["132"]}),
    "parallel": (Parallel(), {"ann": ["132"], "bob": ["122"]}),
    "chain": (Chain(), {"ann": ["2,12+1"], "bob": ["132"]}),
    "debate": (Debate(rounds=2, consensus=1.0), {"ann": ["122", "132"], "bob": ["132", "132"]}),
    "vote": (Vote(weights={"cid": 3}), {"ann": ["122"], "bob": ["122"], "cid": ["132"]}),
    "summary": (Summary(layers=1), {"ann": ["122"], "bob": ["132"], "cid": ["132"]}),
    "reflect": (Reflect(attempts=2), {"ann": ["122", "132"], "bob": ["You forgot the carry."]}),
    "router": (Router(), {"ann": ["@bob, mind the carry"], "bob": ["132"]}),
    "swarm": (Swarm(), {"ann": ["- 47+85", "132"], "bob": ["132"]}),
    "cory": (Cory(), {"ann": ["122"], "bob": ["132"]}),
    "tool_use": (ToolUse(), {"ann": ["132"]}),
    "dag": (Dag(nodes=(PLAN, SOLVE)), {"ann": ["carry 1"], "bob": ["132"]}),
    "propose": (Propose(), {"ann": ["47+85"], "bob": ["132"], "cid": ["132"]}),
    "play": (PlayWorkflow(), {"ann": ["x(1,1)", "x(0,0)", "x(2,2)"], "bob": ["o(0,1)", "o(0,2)"]}),
}


async def played(name: str) -> Episode:
    workflow, says = SHOWN[name]

    def speak(request: Request) -> str:
        return next(words[request.agent])

    words = {agent: iter(texts) for agent, texts in says.items()}
    team = Team(
        tuple(Agent(agent) for agent in says),
        {agent: Policy(agent, base="", trained=False) for agent in says},
        {agent: agent for agent in says},
    )
    environment: Environment = Arithmetic(digits=2)
    task = SUM
    if name == "play":
        environment = OpenSpiel(game="tic_tac_toe")
        task = environment.task("train", 0)
    elif name == "propose":
        environment, task = Proposals(proposer="ann"), Task("47", "47", {"given": 47})
    workflow.check(team.agents, environment)
    stage = RolloutSetup(team, environment, workflow, ScriptedEngine(dict.fromkeys(says, speak)))
    (group,) = await rollout(stage, [task], 1, 0)
    return group.episodes[0]


def main(*names: str) -> None:
    for name in names or SHOWN:
        episode = asyncio.run(played(name))
        said = "  ".join(
            f"{turn.agent}: {turn.text!r} (after {turn.completed_before})" for turn in episode.turns
        )
        earned = ", ".join(f"{agent} {reward:g}" for agent, reward in episode.rewards.items())
        won = "" if episode.success is None else f"; success {episode.success}"
        print(f"{name:9s} {said}\n          {episode.error or f'rewards: {earned}{won}'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
