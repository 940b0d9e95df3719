"""Honest programs use processes, threads, sockets of their own and databases: the bounds leave all of it alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits
from kapelle.environments.sandbox.session import run

POOLS = """
import multiprocessing as mp, concurrent.futures as cf
from multiprocessing import shared_memory
def square(x): return x * x
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with mp.get_context(method).Pool(2) as pool:
            assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
    for executor in (cf.ProcessPoolExecutor, cf.ThreadPoolExecutor):
        with executor(2) as pool:
            assert list(pool.map(square, range(5))) == [0, 1, 4, 9, 16]
    with mp.Manager() as manager:
        shared = manager.dict(a=1)
        assert dict(shared) == {"a": 1}
    one, other = mp.Pipe()
    one.send({"x": 1})
    assert other.recv() == {"x": 1}
    queue, value = mp.Queue(), mp.Value("i", 3)
    queue.put(value.value)
    assert queue.get() == 3 and len(mp.Array("d", 100_000)) == 100_000
    block = shared_memory.SharedMemory(create=True, size=5_000_000)
    block.buf[0] = 1
    block.close()
    block.unlink()
"""
FORKS = """
import os
held = [b"x" * 1_000_000 for _ in range(40)]
children = []
for _ in range(6):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, b"%d" % sum(len(one) for one in held))
        os._exit(0)
    children.append(reader)
assert [os.read(reader, 100) for reader in children] == [b"40000000"] * 6
import time; time.sleep(0.2)
"""
CHILDREN = """
import subprocess
# Until it starts its program, a child has its parent's memory: that is not twice as much.
held = b"x" * 130_000_000
for _ in range(150):
    subprocess.run(["/bin/true"])
"""
COMMANDS = """
import mmap, os, shutil, subprocess, tempfile
done = subprocess.run(["sh", "-c", "sleep 0.05 & wait; echo waited"], capture_output=True)
assert done.stdout == b"waited\\n"
assert subprocess.run("cat | wc -c", shell=True, input=b"x" * 200_000, capture_output=True).stdout.strip() == b"200000"
with tempfile.TemporaryDirectory() as folder:
    with open(f"{folder}/a", "w") as file:
        file.write("x" * 100_000)
        file.flush()
        os.fsync(file.fileno())
    shutil.copy(f"{folder}/a", f"{folder}/b")
    shutil.copytree(folder, "copied")
assert os.path.getsize("copied/b") == 100_000
shared = mmap.mmap(-1, 4096)
if os.fork() == 0:
    shared.write(b"hello")
    os._exit(0)
os.wait()
assert shared[:5] == b"hello"
assert len(os.urandom(8)) == 8 and open("/dev/null").read() == ""
"""
DATABASES = """
import sqlite3
for mode in ("delete", "wal"):
    one = sqlite3.connect(f"/box/{mode}.db")
    assert one.execute(f"pragma journal_mode={mode}").fetchone() == (mode,)
    one.execute("create table numbers (x)")
    one.execute("insert into numbers values (1)")
    one.commit()
    one.execute("begin immediate")
    one.execute("insert into numbers values (2)")
    other = sqlite3.connect(f"/box/{mode}.db")
    assert other.execute("select count(*) from numbers").fetchone() == (1,)
    one.commit()
    assert other.execute("select count(*) from numbers").fetchone() == (2,)
"""
SHELVES = """
import dbm, fcntl, mailbox, mmap, os, shelve, shutil, sqlite3, subprocess, sys, tarfile, tempfile
for kind in dbm._names:
    try:
        with __import__(kind, fromlist=["open"]).open(f"/box/{kind}", "n") as store:
            store["key"] = "value"
    except ImportError:
        continue
with shelve.open("/box/shelf") as shelf:
    shelf["numbers"] = [1, 2]
with shelve.open("/box/shelf") as shelf:
    assert shelf["numbers"] == [1, 2]
base = sqlite3.connect("/box/base", timeout=0.0)
base.execute("create table numbers (x)")
base.execute("begin exclusive")
other = "import sqlite3; sqlite3.connect('/box/base', timeout=0.0).execute('insert into numbers values (1)').connection.commit()"
assert b"database is locked" in subprocess.run([sys.executable, "-c", other], capture_output=True).stderr
base.commit()
assert subprocess.run([sys.executable, "-c", other]).returncode == 0
assert base.execute("select count(*) from numbers").fetchone() == (1,)
letters = mailbox.mbox("/box/letters")
letters.add("hello")
letters.flush()
with tempfile.TemporaryFile() as one, tempfile.NamedTemporaryFile() as two, tempfile.SpooledTemporaryFile(10) as three:
    for file in (one, two, three):
        file.write(b"x" * 5000)
    two.flush()
    fcntl.lockf(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.utime(two.name, (1, 1))
    assert os.stat(shutil.copy2(two.name, "/box/copy")).st_mtime == 1
    assert mmap.mmap(two.fileno(), 0, access=mmap.ACCESS_READ)[4999:] == b"x"
with tarfile.open("/box/all.tar.gz", "w:gz") as archive:
    archive.add("/box/copy")
done = subprocess.run("cp -a /box/copy /box/more && mv /box/more /box/moved && dd if=/box/moved | sort | tee /box/tee | wc -c && "
    "ls -la /box && du /box && find /box -newer /box/copy && stat -f /box && od -An -N4 /dev/urandom && sed -i s/x/y/ /box/tee",
    shell=True, capture_output=True)
assert done.returncode == 0 and done.stdout.startswith(b"5001"), done
"""
LOOPS = """
import asyncio
async def echo(reader, writer):
    writer.write(await reader.readline())
    await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_unix_server(echo, "/box/socket")
    reader, writer = await asyncio.open_unix_connection("/box/socket")
    writer.write(b"hi\\n")
    assert await reader.readline() == b"hi\\n"
    writer.close()
    server.close()
    process = await asyncio.create_subprocess_exec("echo", "x", stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0] == b"x\\n"
    assert await asyncio.gather(*(asyncio.to_thread(pow, 2, k) for k in range(4))) == [1, 2, 4, 8]
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [POOLS, FORKS, CHILDREN, COMMANDS, DATABASES, SHELVES, LOOPS],
    ids=["pools", "forks", "children", "commands", "databases", "shelves", "loops"],
)
def test_an_honest_program_runs_to_its_end(sandbox: Bubblewrap, program: str) -> None:
    limits = Limits(wall_s=120.0, cpu_s=60.0, memory_bytes=192 * 1024**2)
    result = run(sandbox, {"program.py": program.encode()}, [sandbox.python, "program.py"], limits=limits)
    assert (result.limit, result.exit_code) == (None, 0), result.stderr.decode()


BUSY = "import time\nwhile time.process_time() < 0.4: pass\nprint('done')"


def test_a_busy_machine_is_not_an_error_of_the_program(sandbox: Bubblewrap) -> None:
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(ours)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(11)]
    try:
        # A twelfth of one core: 0.4 s of work take seconds on the clock.
        result = run(
            sandbox,
            {"program.py": BUSY.encode()},
            [sandbox.python, "program.py"],
            limits=Limits(wall_s=1.0, patience=9.0),
        )
    finally:
        os.sched_setaffinity(0, ours)
        for other in others:
            other.kill()
            other.wait()
    assert (result.limit, result.stdout) == (None, b"done\n"), result


def test_who_sleeps_is_not_taken_to_wait_for_a_core(sandbox: Bubblewrap) -> None:
    sleeps = b"import time\ntime.sleep(30)"
    result = run(
        sandbox,
        {"program.py": sleeps},
        [sandbox.python, "program.py"],
        limits=Limits(wall_s=1.0, patience=9.0),
    )
    assert result.limit == "wall"
    assert result.wall_s < 10.0
