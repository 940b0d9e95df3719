"""Run environments of the package `verifiers` in its form `verifiers.v1` (0.4). Only that package and the standard library are needed.

    python verifiers_v1_program.py < REQUEST     prints the environment's roles and tasks as JSON

`verifiers_v1.py` starts this file in the interpreter `environment.python`, where kapelle may not be installed. `ForkServer` imports
it once and calls `episode` in a fork for each episode. A request has the keys of `VerifiersV1.request`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

# Python puts the folder of this file first, where `verifiers` would be the classic adapter. Environments of the current folder can be
# imported, as for the package's own commands.
sys.path[0] = str(Path.cwd())

KEY = "OPENAI_API_KEY"
"""The environment variable with the key of kapelle's server."""


class Failed(Exception):
    """Raised if the environment cannot be used or an episode of it failed."""


try:
    FOUND = version("verifiers")
except PackageNotFoundError:
    FOUND = ""
if FOUND and tuple(map(int, FOUND.split(".")[:2])) >= (0, 4):  # earlier versions had drafts of `verifiers.v1`
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.null import NullHarness
    from verifiers.v1.harnesses.utils.compaction import is_context_overflow
    from verifiers.v1.runtimes import ProgramResult, Runtime
    from verifiers.v1.utils import loaders

    class TeamChat(NullHarness):  # type: ignore[misc]
        """The package's chat loop `null`, which without tools is one completion and so needs no process (seconds of imports)."""

        async def setup(self, runtime: Runtime) -> None:
            """Do nothing, because `launch` prepares the package's program if there are tools."""

        async def launch(
            self,
            ctx: ModelContext,
            trace: vf.Trace,
            runtime: Runtime,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: vf.TaskData,
            tool_interception_url: str | None = None,
        ) -> ProgramResult:
            """Request one completion through the package's own server, or run the package's program if there are tools."""
            if mcp_urls:
                return await super().launch(
                    ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url
                )
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages.extend(map(message_to_wire, prompt or ()))
            try:
                async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
                    await client.chat.completions.create(model=ctx.model, messages=messages)
            except APIStatusError as error:
                if not is_context_overflow(error):  # the package's program also ends without an error then
                    return ProgramResult(1, "", str(error))
            return ProgramResult(0, "", "")

    # The package finds a harness as the only one that the module of its id exports.
    __all__ = ["TeamChat"]
    sys.modules["kapelle_chat"] = sys.modules[__name__]


def config_of(request: Mapping[str, Any], address: str) -> Any:
    """Return the package's configuration of an environment, in which the roles of `players` call kapelle's agents at `address`.

    The package would otherwise run each role in a paid cloud sandbox with a shell. Here a role that says nothing else has the chat
    loop `null` in a process of this machine.
    """
    taskset = {"id": request["id"], **request["taskset"]}
    args = dict(request["args"])
    kind = loaders.env_config_type(request["id"], args.get("id", ""))
    for role, default in roles_of(kind).items():
        given = dict(args.get(role) or {})
        stated = given.keys() | default.model_fields_set
        if "harness" not in stated and loaders.default_harness_id(request["id"]) == "bash":
            given["harness"] = {"id": "null"}
        if "runtime" not in stated:
            given["runtime"] = {"type": "subprocess"}
        if role in request["players"]:
            given["model"] = f"team/{request['players'][role]}"
            given["client"] = {"type": "eval", "base_url": address, "api_key_var": KEY}
        args[role] = given
    config = kind.model_validate({**args, "taskset": taskset})
    for role, harness in config.agent_harnesses().items():
        if harness.id == "null":
            getattr(config, role).harness = harness.model_copy(update={"id": "kapelle-chat"})
            continue
        local = getattr(config, role).runtime.type == "subprocess"
        if (
            local
            and loaders.harness_class(harness.id).EXECUTES_CODE
            and "runtime" not in (request["args"].get(role) or {})
        ):
            raise Failed(
                f"The harness '{harness.id}' of the role `{role}` lets the model run commands on this machine, without a sandbox. Set "
                f"`environment.args.{role}.runtime`, such as {{type: docker}}"
            )
    return config


def roles_of(kind: Any) -> dict[str, Any]:
    """Return the roles of an environment's configuration class with their default settings."""
    fields = {name: field.default for name, field in kind.model_fields.items()}
    return {name: value for name, value in fields.items() if isinstance(value, vf.AgentConfig)}


async def described(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the version of the package, the roles of the environment, and the data of its tasks."""
    if not FOUND:
        raise Failed("The package verifiers is not installed there")
    if "vf" not in globals():
        raise Failed(
            f"verifiers {FOUND} has no v1 environments, which need 0.4. For the classic form, set `environment.name: verifiers`"
        )
    config = config_of(request, "http://127.0.0.1/v1")
    environment = loaders.load_environment(config)
    assigned = vf.Agents(config, lambda _name, _spec: SimpleNamespace(trainable=True))
    await environment.setup(assigned)
    roles = roles_of(type(config))
    taskset, most = environment.taskset, request["tasks"]
    if most is None and not taskset.bounded:
        raise Failed(
            f"The taskset {request['id']} is infinite. Set the number of its tasks in `environment.tasks`"
        )
    return {
        "version": FOUND,
        "environment": f"{type(environment).__name__} over {type(taskset).__name__}",
        "roles": list(roles),
        "pinned": [role for role in roles if getattr(config, role).client is not None],
        "frozen": [role for role in roles if not getattr(assigned, role).trainable],
        "tasks": [
            {
                "prompt": task.data.prompt_text,
                "data": task.data.model_dump(mode="json", exclude_defaults=True),
            }
            for task in islice(taskset, most)
        ],
    }


async def episode(task: Mapping[str, Any]) -> dict[str, Any]:
    """Run one episode and return the rewards and metrics of its agents. Raises Failed if the environment or a role failed."""
    running = asyncio.current_task()
    assert running is not None
    # When kapelle ends an episode early, the package stops the programs of its roles.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    request = task["row"]
    address = os.environ["OPENAI_BASE_URL"]
    environment = loaders.load_environment(config_of(request, address))
    kind = type(environment.taskset).task_type()
    # This is how the package's own server builds a task, so that the data set is not loaded for every episode.
    one = kind(kind.data_type().model_validate(request["data"]), environment.config.taskset.task)
    context = ModelContext(model="team", client=EvalClientConfig(base_url=address, api_key_var=KEY))
    async with environment.serving():
        played = await environment.run_episode(one, context)
    if not environment.complete(played):
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        why = "; ".join(dict.fromkeys(" ".join(f"{error.type}: {error.message}".split()) for error in errors))
        raise Failed(why or "an agent did not finish")
    return result(played.by_agent, request)


def result(traces: Mapping[str, Sequence[Any]], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rewards, the success and the metrics of an episode.

    The reward of an agent is the mean over its runs, such as the runs of `best-of-n`. The success is the mean reward of the roles that
    the environment trains, scaled to [0, 1].
    """
    players, (low, high) = request["players"], request["rewards"]
    rewards: dict[str, float] = {}
    scores: list[float] = []
    info: dict[str, Any] = {}
    for role in traces.keys() & players.keys():
        runs, agent = traces[role], players[role]
        rewards[agent] = fmean(run.reward for run in runs)
        if all(run.agent.trainable for run in runs):
            scores.append(min(1.0, max(0.0, (rewards[agent] - low) / (high - low))))
        found: dict[str, list[float]] = {}
        for run in runs:
            parts = {name: reward.score for name, reward in run.rewards.items() if reward is not None}
            for name, value in {**parts, **run.metrics}.items():
                if value is not None:
                    found.setdefault(name, []).append(value)
        for name, values in {**found, "runs": [float(len(runs))]}.items():
            if len(players) == 1:
                info[name] = fmean(values)
            else:
                info.setdefault(name, {})[agent] = fmean(values)
    return {"rewards": rewards, "success": fmean(scores) if scores else None, "info": info}


def main() -> None:
    """Describe the environment of the request on standard input. Errors are part of the description."""
    output = os.dup(1)
    os.dup2(2, 1)  # data sets print their progress
    try:
        found = asyncio.run(described(json.load(sys.stdin)))
    except Exception as error:  # noqa: BLE001 - the environment is third-party code
        found = {"error": f"{error}" if isinstance(error, Failed) else f"{type(error).__name__}: {error}"}
    with os.fdopen(output, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
