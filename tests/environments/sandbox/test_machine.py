"""The last net: what the machine loses to its kernel is charged to the run that was in the kernel, and to no other."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.environments.sandbox.hostile.program import PREAMBLE, SMALL

from kapelle.environments.sandbox import bubblewrap
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.environments.sandbox.contract import Limits, Result
from kapelle.environments.sandbox.session import NET_EVERY_S, Net, Session, run, unattributed_bytes
from kapelle.environments.sandbox.usage import strong_or_why_not
from kapelle.errors import SandboxError

MIB = 1024**2
NARROW = replace(SMALL, wall_s=20.0, cpu_s=15.0, memory_bytes=120 * MIB, unexplained_bytes=96 * MIB)
"""A margin that a program can pass without the machine noticing much."""

# Tables of futexes, which the kernel keeps for a process, or messages that no one takes: neither is memory of a process. Bounded, whatever
# becomes of the net.
FUTEX_TABLES = """
for _ in range(14):
    if os.fork() == 0:
        import threading
        libc.prctl(78, 1, 262144, 0, 0)
        time.sleep(30)
        os._exit(0)
    time.sleep(0.1)
time.sleep(15)
"""
MESSAGES = """
message = ctypes.create_string_buffer(b"\\1" + bytes(8199), 8200)
for _ in range(12_000):
    queue = libc.msgget(0, 0o1600)
    libc.msgsnd(queue, message, 8192, 0)
    libc.msgsnd(queue, message, 8192, 0)
time.sleep(15)
"""


class Program(Session):
    """A run that takes the time that the test says."""

    limits = Limits(unexplained_bytes=256 * MIB)

    def __init__(self) -> None:
        self.cpu_s, self.in_kernel_s, self.suspected = 0.0, 0.0, False

    def kernel_s(self) -> tuple[float, float] | None:
        return self.cpu_s, self.in_kernel_s

    def computes(self, cpu_s: float, in_kernel_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.in_kernel_s += in_kernel_s


def test_the_run_that_was_in_the_kernel_is_charged() -> None:
    net, thief, idle, busy = Net(), Program(), Program(), Program()
    for look in range(8):
        thief.computes(0.1, 0.1)
        busy.computes(0.2)
        net.look([idle, busy, thief], 100.0 + look, 1000 * MIB + look * 40 * MIB)
    assert [one.suspected for one in (idle, busy, thief)] == [False, False, True]


def test_only_one_run_at_a_time_is_suspected() -> None:
    net, one, other = Net(), Program(), Program()
    net.look([one, other], 100.0, 1000 * MIB)
    one.computes(0.2, 0.2)
    other.computes(0.1, 0.1)
    net.look([one, other], 100.0 + NET_EVERY_S, 1600 * MIB)
    assert one.suspected
    assert not other.suspected
    one.computes(0.2, 0.2)
    other.computes(0.1, 0.1)
    net.look([other], 100.0 + 2 * NET_EVERY_S, 1600 * MIB)
    assert not other.suspected
    other.computes(0.1, 0.1)
    net.look([other], 110.0, 1000 * MIB)
    assert not other.suspected, "the memory came back with the first"


def test_memory_of_processes_files_and_cores_is_attributed(tmp_path: Path) -> None:
    rows = {
        "MemTotal": 10000,
        "MemFree": 3000,
        "Buffers": 100,
        "Cached": 2000,
        "SwapCached": 10,
        "AnonPages": 3000,
        "KReclaimable": 400,
        "PageTables": 50,
        "KernelStack": 20,
        "Hugetlb": 500,
        "Slab": 700,
        "VmallocUsed": 30,
    }
    meminfo, zoneinfo = tmp_path / "meminfo", tmp_path / "zoneinfo"
    meminfo.write_text("".join(f"{name}:   {value} kB\n" for name, value in rows.items()))
    zoneinfo.write_text("Node 0, zone Normal\n  pagesets\n    cpu: 0\n              count:    20\n")
    # 10000 - 3000 - 100 - 2000 - 10 - 3000 - 400 - 50 - 20 - 500 = 920 KiB, of which a core keeps 20 pages of 4 KiB.
    assert unattributed_bytes(meminfo, zoneinfo) == (920 - 80) * 1024
    assert unattributed_bytes(tmp_path / "none", zoneinfo) is None
    meminfo.write_text("MemTotal: 1 kB\nnonsense\n")
    assert unattributed_bytes(meminfo, zoneinfo) is None


def weak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only the net in place: as if the filter knew nothing of what is tried."""
    if isinstance(strong_or_why_not(), Path):
        pytest.skip("a cgroup bounds the kernel's memory here")
    monkeypatch.setattr(bubblewrap, "filter_program", lambda **_: None)


def attack(sandbox: Bubblewrap, text: str, limits: Limits) -> Result:
    return run(
        sandbox, {"program.py": (PREAMBLE + text).encode()}, [sandbox.python, "program.py"], limits=limits
    )


def wait_until_the_dead_are_freed() -> None:
    """Wait until the kernel's memory stands still: what earlier runs give back would hide what the next one takes."""
    until, before = time.monotonic() + 15.0, 0
    while time.monotonic() < until:
        held = unattributed_bytes()
        assert held is not None
        if abs(held - before) < 4 * MIB:
            return
        before = held
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("text", [FUTEX_TABLES, MESSAGES], ids=["futex tables", "messages"])
def test_kernel_memory_that_nothing_counts_ends_the_run(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    weak(monkeypatch)
    wait_until_the_dead_are_freed()
    result = attack(sandbox, text, NARROW)
    assert result.limit == "memory", (result, result.stderr[-500:])


@pytest.mark.slow
def test_a_run_that_is_ended_for_memory_of_others_has_no_result(
    sandbox: Bubblewrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak(monkeypatch)
    box = sandbox.prepare(replace(NARROW, unexplained_bytes=1024**4)).start(
        {}, [sandbox.python, "-c", "while True: pass"]
    )
    box.send(b"")
    box.suspected = True
    for _ in range(2):
        with pytest.raises(SandboxError, match="something else holds it"):
            box.finish()


HONEST = """
import mmap, threading, subprocess
for _ in range(20):
    held = bytearray(30_000_000)
threads = [threading.Thread(target=sum, args=(range(1000),)) for _ in range(8)]
[one.start() for one in threads]
[one.join() for one in threads]
for _ in range(5):
    subprocess.run([sys.executable, "-c", "print(1)"], check=True)
for number in range(100):
    open(f"/box/{number}", "w").write("x" * 10_000)
reader, writer = os.pipe()
for _ in range(2000):
    os.write(writer, b"x" * 60_000)
    os.read(reader, 60_000)
print("DONE")
"""


@pytest.mark.slow
def test_an_honest_program_with_much_kernel_time_continues(sandbox: Bubblewrap) -> None:
    result = attack(sandbox, HONEST, Limits(wall_s=60.0, cpu_s=60.0))
    assert result.stdout.endswith(b"DONE\n"), result
