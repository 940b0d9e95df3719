"""Implements the command line `kapelle COMMAND …`, a thin layer over `Trainer`.

    from kapelle.cli import main
    main(["train", "demo", "training.steps=3"])

Errors defined in `errors.py`, and failures of the machine such as a full disk, are printed as one line and result in
exit code 2. Any other error is a bug in kapelle, and its traceback is printed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper

from kapelle.cli.output import complain, complain_of_stop, is_rank, leave_ranks_here
from kapelle.cli.parser import parse
from kapelle.cli.stopping import EXIT_WRONG, exit_code, leave, take_signals, termination
from kapelle.errors import KapelleError, for_command
from kapelle.runtime.console import say
from kapelle.runtime.interrupts import ending
from kapelle.runtime.machine import raise_descriptor_limit, refusal

EXIT_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. The exit codes are listed in `kapelle --help`.

    If `argv` is None, the command of this process is run, and the process is terminated if a signal has stopped the
    command.
    """
    if argv is not None:
        return _code(argv, own=False)
    take_signals()
    try:
        code = _code(sys.argv[1:], own=True)
    except KeyboardInterrupt:  # another Ctrl-C, while the first one was handled
        code = exit_code()
    leave(code)
    return code


def _code(argv: Sequence[str], *, own: bool) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    raise_descriptor_limit()
    with termination():
        try:
            if own and "RANK" in os.environ:  # imported here, so that `--help` is quick
                from kapelle.runtime.process_tree import join_launcher

                join_launcher()
            parsed = parse(argv)
            if isinstance(parsed, str):  # the text of `--help` or `--version`
                say(parsed)
                return 0
            name, arguments = parsed
            if own:
                from kapelle.cli.quiet import clean_what_others_print

                clean_what_others_print()
            module = importlib.import_module(f"kapelle.cli.{name}")
            with for_command():
                code: int = module.run(arguments)
            leave_ranks_here()
        except KapelleError as error:
            complain(str(error))
            return EXIT_WRONG
        except KeyboardInterrupt:
            complain_of_stop()
            return exit_code()
        except BrokenPipeError:
            # The reader has closed the pipe (`kapelle … | head`); Python would report it once more at its exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_PIPE
        except Exception as error:
            if ending:  # a Ctrl-C in the middle of a library's code can surface as any error
                complain_of_stop()
                return exit_code()
            failure = refusal(error)
            if failure is not None:
                complain(failure)
                return EXIT_WRONG
            if not is_rank():
                raise  # Python prints the traceback
            from kapelle.runtime.rank_group import report_defect

            return report_defect(error)  # printed once for all ranks
        return code
