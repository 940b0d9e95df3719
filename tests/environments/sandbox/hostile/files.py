"""16 programs that look for secrets, or leave files where the supervisor or another run would meet them."""

from __future__ import annotations

from tests.environments.sandbox.hostile.program import ANY, Hostile

FILES = {
    "passwd and shadow": Hostile(
        """
for path in ("/etc/passwd", "/etc/shadow", "/etc/group", "/etc/ssh", "/etc/hostname", "/etc/machine-id"):
    if os.path.exists(path):
        escaped(path)
"""
    ),
    "home and tokens": Hostile(
        """
refused(open, "{secret}")
for path in ("/root", "/home", "/var", "/mnt", "/srv", "/opt/secrets", "/run/secrets", "/run/user"):
    if os.path.exists(path):
        escaped(path)
for name in (".ssh", ".netrc", ".aws", ".cache", ".config", ".git-credentials"):
    if os.path.exists(os.path.join(os.path.expanduser("~"), name)):
        escaped(name)
"""
    ),
    "environment": Hostile(
        """
allowed = {"HOME", "LANG", "PATH", "PWD", "OLDPWD", "SHLVL", "_", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE"}
if set(os.environ) - allowed:
    escaped(sorted(set(os.environ) - allowed))
"""
    ),
    "/proc of the parent": Hostile(
        """
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            data = open(f"/proc/{pid}/{name}", "rb").read()
        except OSError:
            continue
        if b"KAPELLE_TEST_SECRET" in data or b"pytest" in data:
            escaped(pid, name)
    for place in ("root/home", "root/root", "root/var", "cwd/pyproject.toml"):
        if os.path.exists(f"/proc/{pid}/{place}"):
            escaped(pid, place)
if len(list(filter(str.isdigit, os.listdir("/proc")))) > 4:
    escaped("processes of others")
"""
    ),
    "inherited descriptors": Hostile(
        """
for fd in range(3, 1024):
    try:
        os.fstat(fd)
    except OSError:
        continue
    escaped("descriptor", fd)
"""
    ),
    "memory and disks": Hostile(
        """
import glob, stat
for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/fuse", "/dev/kvm", "/proc/kcore", "/proc/kmsg"):
    refused(lambda path: open(path, "rb").read(1), path)
for path in glob.glob("/dev/*"):
    if stat.S_ISBLK(os.lstat(path).st_mode):
        escaped(path)
refused(os.mknod, "/box/disk", stat.S_IFBLK | 0o600, os.makedev(8, 0))
refused(os.mknod, "/box/mem", stat.S_IFCHR | 0o600, os.makedev(1, 1))
"""
    ),
    "cgroup writes": Hostile(
        """
import glob
if os.path.exists("/sys"):
    escaped("/sys")
for path in glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True):
    refused(lambda: open(path, "w").write("0"))
refused_call("mount cgroup", 165, b"none", b"/box", b"cgroup2", 0, 0)
"""
    ),
    "/proc/sys writes": Hostile(
        """
for path in ("sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/overcommit_memory", "sys/net/ipv4/ip_forward",
             "sys/user/max_user_namespaces", "sys/kernel/yama/ptrace_scope", "sysrq-trigger"):
    refused(lambda path: open("/proc/" + path, "w").write("-1\\n"), path)
"""
    ),
    "writes outside the work directory": Hostile(
        """
for folder in ("/", "/usr", "/usr/bin", "/bin", "/lib", "/etc", "/dev", "/proc", "/usr/lib/python3"):
    refused(lambda: open(os.path.join(folder, "kapelle-hostile"), "w"))
refused(lambda: open("{secret}", "w"))
refused(lambda: open("/box/../kapelle-hostile", "w"))
refused(os.unlink, "/usr/bin/env")
"""
    ),
    "links where the supervisor might write": Hostile(
        """
refused(os.symlink, "{secret}", "/run/start")
for path in ("/box/program.py", "/box/out", "/box/result.json"):
    try:
        os.unlink(path)
    except OSError:
        pass
    os.symlink("{secret}", path)
    refused(lambda: open(path, "a").write("overwritten"))
""",
        again=True,
    ),
    "output replaced by a pipe, device or folder": Hostile(
        """
for path, make in (("program.py", os.mkfifo), ("stdout", os.mkfifo), ("result.json", os.mkdir)):
    if os.path.exists(path):
        os.unlink(path)
    make(path)
held = os.dup(1)
os.close(1)
os.mkfifo("pipe")
os.open("pipe", os.O_RDWR)
os.dup2(held, 1)
"""
    ),
    "rename race": Hostile(
        """
open("a", "w").close()
open("b", "w").close()
os.symlink("{secret}", "c")
until = time.monotonic() + 0.3
while time.monotonic() < until:
    os.rename("a", "x"); os.rename("b", "a"); os.rename("c", "b"); os.rename("x", "c")
"""
    ),
    "tree without rights": Hostile(
        """
import fcntl
os.makedirs("deep/er")
open("deep/er/file", "w").close()
try:
    fcntl.ioctl(os.open("deep/er/file", os.O_RDONLY), 0x40086602, b"\\x10\\0\\0\\0\\0\\0\\0\\0")
except OSError:
    pass
os.chmod("deep/er", 0)
os.chmod("deep", 0)
os.chmod("/box", 0)
"""
    ),
    "names that break scripts": Hostile(
        """
for name in (b"new\\nline", b"\\xff\\xfe", b"..hidden", b"-rf", b"$(id)", b"a b;c", b"x" * 255):
    open(b"/box/" + name, "w").close()
refused(lambda: open("nul\\0byte", "w"))
refused(lambda: open("/box/../../../kapelle-hostile", "w"))
"""
    ),
    "message to a parallel run": Hostile(
        """
for folder in ("/dev/shm", "/tmp", "/run", "/dev/mqueue"):
    path = folder + "/kapelle-hostile"
    if os.path.exists(path):
        escaped("a message in", folder)
    try:
        open(path, "w").close()
    except OSError:
        pass
time.sleep(0.5)
""",
        twice=True,
    ),
    "poisoned packages for the next run": Hostile(
        """
import site
if hasattr(sys, "poisoned"):
    escaped("poison of an earlier run")
folders = [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.__file__), "/box"]
for folder in folders:
    for name in ("sitecustomize.py", "usercustomize.py", "poison.pth", "json.py"):
        try:
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, name), "w") as file:
                file.write("import sys; sys.poisoned = True")
        except OSError:
            continue
        if not folder.startswith("/box"):
            escaped(folder, name)
""",
        again=True,
    ),
}

assert all(program.ends <= ANY for program in FILES.values())
