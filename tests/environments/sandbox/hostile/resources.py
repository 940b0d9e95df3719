"""21 programs that use up what the machine has."""

from __future__ import annotations

from tests.environments.sandbox.hostile.program import ANY, Hostile, ends

RESOURCES = {
    "fork bomb": Hostile(
        """
forked(1 << 30, 60)
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        ends("wall", "cpu"),
        counts={"made": 16},
    ),
    "thread bomb": Hostile(
        """
import threading
made = 0
try:
    while True:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        made += 1
except (RuntimeError, MemoryError):
    print("made", made, flush=True)
    time.sleep(60)
""",
        ends("wall"),
        counts={"made": 16},
    ),
    "memory bomb": Hostile(
        """
for _ in range(6):
    if os.fork() == 0:
        held = [b"x" * 1_000_000 for _ in range(60)]
        time.sleep(60)
try:
    alone = bytearray(1 << 40)
    escaped("a terabyte")
except MemoryError:
    time.sleep(60)
""",
        ends("memory"),
    ),
    "mmap and shared memory bomb": Hostile(
        """
import mmap
refused(os.memfd_create, "hidden")
refused_call("shmget", 29, 0, 1 << 20, 0o1600)
try:
    for index in range(64):
        with open(f"/dev/shm/{index}", "wb") as file:
            file.write(b"x" * 4_000_000)
except OSError:
    pass
held = []
for _ in range(6):
    if os.fork() == 0:
        held.append(mmap.mmap(-1, 50_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        held[-1].write(b"x" * 50_000_000)
        time.sleep(60)
time.sleep(60)
""",
        ends("memory"),
    ),
    "infinite standard output": Hostile("while True: print('x' * 1000)", ends("output")),
    "infinite standard error": Hostile("while True: print('x' * 1000, file=sys.stderr)", ends("output")),
    "a gigabyte without a newline": Hostile(
        "for _ in range(1000): sys.stdout.write('x' * 1_000_000)", ends("output")
    ),
    "CPU loop that ignores signals": Hostile(
        """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
""",
        ends("cpu", "wall"),
    ),
    "sleep past the time-out": Hostile("time.sleep(600)", ends("wall")),
    "ignored TERM, INT, ALRM and XCPU": Hostile(
        """
import signal
for name in ("SIGTERM", "SIGINT", "SIGALRM", "SIGXCPU", "SIGHUP"):
    signal.signal(getattr(signal, name), lambda *_: None)
while True:
    time.sleep(0.01)
""",
        ends("wall", "cpu"),
    ),
    "huge file": Hostile(
        """
try:
    with open("huge", "wb") as file:
        for _ in range(1000):
            file.write(b"x" * 1_000_000)
except OSError:
    pass
print("size", os.path.getsize("huge"))
""",
        counts={"size": 8 * 1024**2},
    ),
    "sparse file of a terabyte": Hostile(
        """
with open("sparse", "wb") as file:
    refused(os.truncate, "sparse", 1 << 40)
    refused(os.posix_fallocate, file.fileno(), 0, 1 << 40)
"""
    ),
    "a million empty files": Hostile(
        """
for index in range(1_000_000):
    open(f"/box/{index}", "w").close()
escaped("a million files")
""",
        ends("files"),
    ),
    "descriptor exhaustion": Hostile(
        """
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print("opened", len(held))
""",
        counts={"opened": 128},
    ),
    "paths beyond PATH_MAX": Hostile(
        """
for _ in range(1_000_000):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
escaped("a path of 200 megabytes")
""",
        ends("files"),
    ),
    "recursion with a raised limit": Hostile(
        """
sys.setrecursionlimit(10**9)
class Deep:
    def __getattr__(self, name): return repr(self)
    def __repr__(self): return str(self)
    def __str__(self): return self.x
str(Deep())
""",
        ANY,
    ),
    "nested literal that crashes the parser": Hostile(
        """
import ast
for text in ("(" * 100_000, "-" * 500_000 + "1", "[" * 90 + "]" * 90 + "+1" * 200_000):
    try:
        compile(text, "nested", "eval")
        ast.literal_eval(text)
    except BaseException:
        pass
""",
        ANY,
    ),
    "zip bomb": Hostile(
        """
import zlib
squeezed = zlib.compress(b"0" * 20_000_000, 9)
try:
    data = b"".join(zlib.decompress(squeezed) for _ in range(50))
    escaped("a gigabyte in memory")
except MemoryError:
    pass
""",
        ends("end", "memory", "cpu", "wall"),
    ),
    "giant int to str": Hostile(
        """
sys.set_int_max_str_digits(0)
str(7 ** (10**7))
escaped("ten million digits")
""",
        ends("cpu", "wall"),
    ),
    "catastrophic regex": Hostile(
        """
import re
re.match(r"(a+)+$", "a" * 60 + "!")
escaped("2**60 steps")
""",
        ends("cpu", "wall"),
    ),
    "stops itself": Hostile(
        """
import signal
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
""",
        ends("wall"),
    ),
}
