"""An interpreter that keeps its variables from one program to the next. This file runs inside the sandbox.

A request is one line: a number, a space, and the program as a JSON string. The reply is one line: the same number, a space, and the
output of the program as a JSON string. Each request has a new random number, so that a program cannot write a later reply in
advance. The caller trusts nothing else in the reply, because the program shares this process. Only the standard library is
imported, because this file is copied into sandboxes.
"""

from __future__ import annotations

import ast
import code
import contextlib
import io
import json
import os

MAX_PRINTED = 20_000
"""The maximum number of characters of a reply."""


def serve() -> None:
    """Run the programs that arrive on standard input, and write replies to standard output, until the input ends."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        interpreter = code.InteractiveInterpreter({"__name__": "__main__"})
        for line in requests:
            number, _, program = line.partition(b" ")
            replies.write(number + b" " + json.dumps(run(interpreter, json.loads(program))).encode() + b"\n")
            replies.flush()


def run(interpreter: code.InteractiveInterpreter, program: str) -> str:
    """Run a program and return its output, which includes tracebacks and the value of a final expression."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            before, last = split_off_value(program.replace("\r\n", "\n").replace("\r", "\n"))
            interpreter.runsource(before, "<input>", "exec")
            if last:
                interpreter.runsource(last, "<input>", "single")
        except SyntaxError as fault:
            printed.write(f"SyntaxError: {fault}\n")
        except SystemExit:
            printed.write("SystemExit: the interpreter goes on.\n")
        except (MemoryError, RecursionError, ValueError) as fault:
            printed.write(f"{type(fault).__name__}: {fault}\n")
    return printed.getvalue()[:MAX_PRINTED]


def split_off_value(program: str) -> tuple[str, str]:
    """Return a program without its final expression, and this expression. Raises SyntaxError if the program is invalid."""
    body = ast.parse(program).body
    if not body or not isinstance(body[-1], ast.Expr):
        return program, ""
    lines = program.split("\n")
    before, line = lines[: body[-1].lineno - 1], lines[body[-1].lineno - 1].encode()
    column = body[-1].col_offset
    rest = [line[column:].decode(), *lines[body[-1].lineno :]]
    # Empty lines keep the line numbers of a traceback.
    return "\n".join([*before, line[:column].decode()]), "\n" * len(before) + "\n".join(rest) + "\n"
