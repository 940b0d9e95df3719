"""What every backend must do, whatever it contains."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.docker import engine_problem
from kapelle.environments.sandbox.pool import Pool, backend
from kapelle.environments.sandbox.session import Backend, run
from kapelle.errors import SandboxError

LIMITS = Limits(wall_s=10.0, cpu_s=5.0, output_bytes=100_000, processes=16)


@pytest.fixture(params=["bubblewrap", "bubblewrap in a pool", "docker", "unsafe_subprocess"])
def box(request: pytest.FixtureRequest) -> Iterator[Backend]:
    name = str(request.param)
    if name.startswith("bubblewrap"):
        sandbox: Bubblewrap = request.getfixturevalue("sandbox")
        if name == "bubblewrap":
            yield sandbox
            return
        with Pool(sandbox, LIMITS, parallel=1) as pool:
            assert pool.wait_until_warm()
            yield pool
    elif name == "docker":
        problem = engine_problem()
        if problem:
            pytest.skip(f"no Docker engine here: {problem}")
        yield backend(name)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield backend(name)


def test_bytes_arrive_as_they_were_sent(box: Backend) -> None:
    data = bytes(range(256)) * 200
    result = run(box, {}, ["cat"], data, LIMITS)
    assert (result.stdout, result.stderr, result.exit_code, result.limit) == (data, b"", 0, None)
    assert result.ok


def test_files_lie_in_the_work_directory(box: Backend) -> None:
    files = {"a b.txt": b"\0\xff", "in/a/folder": b"x" * 30_000, "-rf": b"", "nötig": b"ja"}
    program = (
        b"import os; print([(n, os.path.getsize(n)) for n in ('a b.txt', 'in/a/folder', '-rf', 'n\\xf6tig')])"
    )
    result = run(box, {**files, "p.py": program}, [box.python, "p.py"], limits=LIMITS)
    assert result.stdout.decode() == "[('a b.txt', 2), ('in/a/folder', 30000), ('-rf', 0), ('nötig', 2)]\n"


def test_arguments_are_never_read_by_a_shell(box: Backend) -> None:
    words = ["$(id)", "a b", "'", '"', "*", "\\n", ";exit 3", ""]
    result = run(box, {}, [box.python, "-c", "import sys; print(sys.argv[1:])", *words], limits=LIMITS)
    assert result.stdout.decode().strip() == repr(words)


@pytest.mark.parametrize("code", [0, 1, 3, 127])
def test_the_exit_code_is_the_programs(box: Backend, code: int) -> None:
    result = run(box, {}, ["/bin/sh", "-c", f"exit {code}"], limits=LIMITS)
    assert (result.exit_code, result.signal, result.ok) == (code, None, code == 0)


def test_unread_input_does_not_block(box: Backend) -> None:
    assert run(box, {}, ["/bin/sh", "-c", "exit 4"], b"x" * 3_000_000, LIMITS).exit_code == 4


def test_wall_time_ends_a_run_at_once(box: Backend) -> None:
    limits = replace(LIMITS, wall_s=1.0)
    result = run(box, {}, ["/bin/sh", "-c", "echo begun; sleep 60"], limits=limits)
    assert (result.stdout, result.exit_code, result.signal, result.limit) == (b"begun\n", None, None, "wall")
    assert 1.0 <= result.wall_s < 1.5


def test_output_is_cut_at_its_limit_in_bytes(box: Backend) -> None:
    result = run(
        box, {}, ["/bin/sh", "-c", "while :; do echo aaaaaaaaaaaaaaaaaaaa; echo b >&2; done"], limits=LIMITS
    )
    assert result.limit == "output"
    assert len(result.stdout) + len(result.stderr) == LIMITS.output_bytes


@pytest.mark.slow
def test_cpu_time_ends_a_run_and_is_counted(box: Backend) -> None:
    limits = replace(LIMITS, cpu_s=1.0)
    result = run(box, {}, [box.python, "-c", "while True: pass"], limits=limits)
    assert result.limit == "cpu"
    assert 0.7 <= result.cpu_s <= 3.0


def test_a_conversation_goes_line_by_line(box: Backend) -> None:
    session = box.prepare(LIMITS).start(
        {}, ["/bin/sh", "-c", 'while read -r x; do echo "<$x>"; done; echo end']
    )
    for word in (b"one", b"two", b"three"):
        session.send(word + b"\n")
        assert session.receive(5.0) == b"<" + word + b">"
    assert session.receive(0.05) is None
    result = session.finish()
    assert result.stdout == b"<one>\n<two>\n<three>\nend\n"
    assert session.finish() is result


def test_a_line_of_an_ended_program_is_none_immediately(box: Backend) -> None:
    session = box.prepare(LIMITS).start({}, ["/bin/sh", "-c", "printf unfinished"])
    assert session.receive(5.0) is None
    assert session.finish().stdout == b"unfinished"


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../b", "a//b", "nul\0", "."])
def test_a_file_name_outside_its_folder_is_rejected(box: Backend, name: str) -> None:
    with pytest.raises(SandboxError, match="Use a relative path"):
        run(box, {name: b""}, ["true"], limits=LIMITS)


def test_files_that_do_not_fit_are_rejected(box: Backend) -> None:
    with pytest.raises(SandboxError, match="do not fit"):
        run(box, {"big": b"x" * 100_000}, ["true"], limits=replace(LIMITS, file_bytes=50_000))


def test_runs_leave_no_descriptor(box: Backend) -> None:
    other = replace(LIMITS, cpu_s=4.0)
    run(box, {}, ["true"], limits=other)
    gc.collect()  # what other tests have left open
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        run(box, {"f": b"x"}, ["true"], b"input", other)
        box.prepare(other).discard()
    with pytest.raises(SandboxError):
        run(box, {"..": b""}, ["true"], limits=other)
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_the_work_directory_is_new_each_time(box: Backend) -> None:
    for _ in range(2):
        result = run(box, {}, ["/bin/sh", "-c", "ls -A; touch left behind"], limits=LIMITS)
        assert result.stdout == b""
