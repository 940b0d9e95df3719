"""Graders, tools and requests under way in a process that may be stopped: `python -m tests.support.stopped_graders`.

Writes `working` when all of them wait, and at the end one JSON object: what → what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx

from kapelle.environments.grading import judge as judge_endpoint
from kapelle.environments.grading.code.grade import (
    CallTest,
    OutputTest,
    ProgramTests,
    grade_calls,
    grade_output,
    grade_program,
)
from kapelle.environments.grading.judge import Ask, JudgeEndpoint, ask_endpoint
from kapelle.environments.grading.processes import AnswerLimits as ProcessLimits
from kapelle.environments.grading.processes import KillableProcesses, ProcessGaveUp
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.pool import backend
from kapelle.environments.tools.contract import Lost, ToolFault
from kapelle.environments.tools.mcp import Mcp, connected
from kapelle.environments.tools.python import Python
from kapelle.errors import KapelleError
from kapelle.types import Message

LIMIT_S = 3.0
WORKS_S = 1.0
"""How long what is right takes."""

RIGHT = f"import time\ndef f(x):\n    time.sleep({WORKS_S})\n    return x + 1\n"
SLOW = "import time\ndef f(x):\n    time.sleep(60)\n    return x + 1\n"
PRINTS = f"import time\ntime.sleep({WORKS_S})\nprint(2)"
MCP = f"""
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "tools/call":
        time.sleep({WORKS_S})
    if "id" in asked:
        said = {{"content": [{{"type": "text", "text": "2"}}]}}
        if asked["method"] == "initialize":
            version = asked["params"]["protocolVersion"]
            said = {{"protocolVersion": version, "capabilities": {{}}, "serverInfo": {{"name": "two", "version": "1"}}}}
        print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": said}}), flush=True)
"""


def _code(sandbox: str, kind: str, solution: str) -> str:
    box, limits = backend(sandbox), Limits(wall_s=LIMIT_S, cpu_s=20.0)
    if kind == "calls":
        return grade_calls(solution, (CallTest("f", (1,), 2),), box, limits).tests[0].status
    if kind == "output":
        return grade_output(solution, (OutputTest("", "2\n"),), box, limits).tests[0].status
    return grade_program(solution, ProgramTests(("assert f(1) == 2",)), box, limits).tests[0].status


def _asked(do: str) -> str:
    limits = ProcessLimits(cpu_s=20.0, wall_s=LIMIT_S)
    with KillableProcesses("tests.environments.grading.misbehaving_worker", 1, limits) as processes:
        try:
            return str(processes.ask({"do": do, "seconds": WORKS_S, "value": "passed"}))
        except ProcessGaveUp as fault:
            return f"ungraded: {fault}"


def _tool(program: str) -> str:
    interpreter = Python(call_s=LIMIT_S).open()
    try:
        return interpreter.run({"program": program})
    except ToolFault as fault:
        return str(fault)
    finally:
        interpreter.close()


def _server() -> str:
    try:
        connection = connected(Mcp(command=(sys.executable, "-c", MCP), call_s=LIMIT_S))
        try:
            return connection.call("add", {})
        finally:
            connection.close()
    except (Lost, ToolFault) as fault:
        return str(fault)


def _judge(seconds: float) -> str:
    async def answer(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(seconds)
        return httpx.Response(200, json={"choices": [{"message": {"content": "2"}}]})

    ask = ask_endpoint(JudgeEndpoint(endpoint="http://judge", model="judge"), httpx.MockTransport(answer))
    try:
        return asyncio.run(_said(ask))
    except KapelleError as fault:
        return str(fault)


async def _said(ask: Ask) -> str:
    return await ask([Message("user", "2?")])


WORK: dict[str, Callable[[], str]] = {
    "calls": lambda: _code("bubblewrap", "calls", RIGHT),
    "output": lambda: _code("bubblewrap", "output", PRINTS),
    "tests": lambda: _code("bubblewrap", "tests", RIGHT),
    "unsafe output": lambda: _code("unsafe_subprocess", "output", PRINTS),
    "slow calls": lambda: _code("bubblewrap", "calls", SLOW),
    "slow output": lambda: _code("bubblewrap", "output", SLOW + "print(f(1))"),
    "process": lambda: _asked("sleep"),
    "slow process": lambda: _asked("wait"),
    "tool": lambda: _tool(f"import time\ntime.sleep({WORKS_S})\nprint(2)"),
    "slow tool": lambda: _tool("import time\ntime.sleep(60)"),
    "ended tool": lambda: _tool("import os\nos._exit(3)"),
    "server": _server,
    "judge": lambda: _judge(WORKS_S),
    "slow judge": lambda: _judge(60.0),
}


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    warnings.simplefilter("ignore")
    judge_endpoint.TIMEOUT = LIMIT_S
    backend("bubblewrap").layers()  # tried once, before anything waits
    with ThreadPoolExecutor(len(WORK)) as threads:
        under_way = {what: threads.submit(work) for what, work in WORK.items()}
        _write("working")
        _write(json.dumps({what: work.result() for what, work in under_way.items()}))


if __name__ == "__main__":
    main()
