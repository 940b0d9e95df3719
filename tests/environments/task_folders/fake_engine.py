"""A fake of podman and docker: checks its arguments strictly and runs commands under bubblewrap, in a folder for each container.

It is started as `podman` or `docker`. It does not emulate limits on memory and processes, user ids, and processes that outlive
their command; `FAKE_ENGINE` names the folder of its images, containers and log.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

# The options that kapelle may use, as in the manual pages docker-run(1), podman-run(1) and so on. Docker 28 and podman 5 accept
# them; the options of a tmpfs differ.
BOTH = {
    "run": {
        "rm", "interactive", "pull", "name", "label", "stop-signal", "log-driver", "no-healthcheck", "network", "ipc",
        "read-only", "hostname", "cap-drop", "security-opt", "memory", "memory-swap", "pids-limit", "ulimit", "tmpfs",
        "user", "workdir", "entrypoint", "env", "cpus", "init",
    },
    "exec": {"interactive", "user", "workdir", "env", "detach"},
    "rm": {"force", "volumes"},
    "build": {"tag", "rm", "file"},
    "ps": {"all", "quiet", "filter"},
    "inspect": {"format"},
    "version": {"format"},
    "pull": set(),
    "image": set(),
}  # fmt: skip
OWN = {"podman": {"run": {"userns", "timeout", "image-volume"}}, "docker": {"run": {"runtime"}}}
WITHOUT_VALUE = {
    "rm", "interactive", "read-only", "no-healthcheck", "detach", "force", "volumes", "all", "quiet", "init",
}  # fmt: skip
TMPFS = {
    "podman": {"rw", "ro", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "size", "mode", "tmpcopyup", "notmpcopyup"},
    "docker": {"rw", "ro", "exec", "noexec", "suid", "nosuid", "dev", "nodev", "size", "mode", "uid", "gid", "nr_inodes"},
}  # fmt: skip
STATE = Path(os.environ["FAKE_ENGINE"])
ENGINE = Path(sys.argv[0]).name


def fail(message: str, code: int = 125) -> None:
    """End with an error message like an engine."""
    sys.stderr.write(f"Error: {message}\n")
    raise SystemExit(code)


def show(text: str) -> None:
    """Print text as the result of a command."""
    sys.stdout.write(f"{text}\n")


def parsed(command: str, words: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the options and the other arguments of a command; fail for an unknown option."""
    known = BOTH[command] | OWN[ENGINE].get(command, set())
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        name, equals, value = words.pop(0).removeprefix("--").partition("=")
        if name not in known or (equals and name in WITHOUT_VALUE):
            fail(f"unknown flag, or a flag with a wrong form: --{name}{equals}{value}")
        if not equals and name not in WITHOUT_VALUE:
            value = words.pop(0)
        options.setdefault(name, []).append(value)
    for each in options.get("tmpfs", []):
        path, _, flags = each.partition(":")
        unknown = {flag.partition("=")[0] for flag in flags.split(",")} - TMPFS[ENGINE]
        if unknown or not path.startswith("/"):
            fail(f'unknown mount option "{unknown}": invalid mount option')
    return options, words


def image_folder(name: str) -> Path:
    """Return the folder of an image."""
    return STATE / "images" / re.sub(r"\W", "_", name)


def build(tag: str, context: Path) -> None:
    """Build an image from the instructions FROM, WORKDIR, COPY and RUN."""
    root, workdir, base = STATE / "building", "/", ""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for line in (context / "Dockerfile").read_text().splitlines():
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            base = rest
        elif keyword == "WORKDIR":
            workdir = rest
            (root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif keyword == "COPY":
            source, target = rest.split()
            place = root / str(Path(workdir, target))[1:]
            if (context / source).is_dir():
                shutil.copytree(context / source, place, dirs_exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(context / source, place)
        elif keyword == "RUN":
            done = subprocess.run(["sh", "-c", rest], cwd=root / workdir[1:], check=False)
            if done.returncode:
                fail(f'building at STEP "{line}": exit status {done.returncode}', 1)
    if base == "missing":
        fail("initializing source docker://missing:latest: requested access to the resource is denied")
    keep(tag, root, workdir)


def keep(tag: str, root: Path, workdir: str) -> None:
    """Store an image under its name and its id."""
    made = {"Id": f"sha256:{hashlib.sha256(tag.encode()).hexdigest()}", "Config": {"WorkingDir": workdir}}
    for name in (tag, made["Id"]):
        folder = image_folder(str(name))
        shutil.copytree(root, folder / "root", symlinks=True)
        (folder / "image.json").write_text(json.dumps(made))


def alive(container: Path) -> bool:
    """Return whether process 1 of a container is running."""
    try:
        pid = int((container / "pid").read_text())
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, ValueError):
        return False


def enter(container: Path, options: dict[str, list[str]], command: list[str]) -> None:
    """Replace this process with a command in a container; only uid 0 may write to a folder that has the mode 755."""
    started = json.loads((container / "options.json").read_text())
    user = options["user"][-1].partition(":")[0]
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--hostname", "kapelle"]
    words += ["--uid", user, "--gid", user, "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for name in ("bin", "sbin", "lib", "lib64"):
        words += (
            ["--symlink", str(Path("/", name).readlink()), f"/{name}"] if Path("/", name).is_symlink() else []
        )
    for folder in sorted((container / "root").iterdir()):
        words += ["--ro-bind", str(folder), f"/{folder.name}"]
    for number, each in enumerate(started["tmpfs"]):
        path, _, flags = each.partition(":")
        place = container / f"tmpfs{number}"
        place.mkdir(exist_ok=True)
        words += ["--bind" if "mode=1777" in flags or user == "0" else "--ro-bind", str(place), path]
    for each in ("PATH=/usr/local/bin:/usr/bin:/bin", *options.get("env", [])):
        name, _, value = each.partition("=")
        words += ["--setenv", name, value]
    words += ["--remount-ro", "/", "--chdir", options["workdir"][-1], "--", *command]
    os.execvp(words[0], words)  # noqa: S606 - this process becomes the container


def main() -> None:
    """Run one command of the engine."""
    command, *words = sys.argv[1:]
    if command not in BOTH:
        fail(f"unknown command {command}")
    with (STATE / "log").open("a") as log:
        log.write(json.dumps([command, *words]) + "\n")
    if (STATE / "broken").exists():
        fail("Cannot connect to the engine. Is it running?", 1)
    options, words = parsed(command, words)
    containers = STATE / "containers"
    if command == "version":
        show("5.0")
    elif command == "image":
        file = image_folder(words[1]) / "image.json"
        if words[0] != "inspect" or not file.exists():
            fail(f"{words[1]}: image not known")
        show(json.dumps([json.loads(file.read_text())]))
    elif command == "pull":
        if not (STATE / "registry" / words[0]).is_dir():
            fail(f"initializing source docker://{words[0]}: manifest unknown")
        keep(words[0], STATE / "registry" / words[0], "/srv/work")
    elif command == "build":
        build(options["tag"][-1], Path(words[0]))
    elif command == "run":
        container = containers / options["name"][-1]
        if not image_folder(words[0]).is_dir() or options.get("pull") != ["never"]:
            fail(f"{words[0]}: image not known")
        container.mkdir(parents=True)
        (container / "root").symlink_to(image_folder(words[0]) / "root")
        (container / "options.json").write_text(json.dumps(options))
        (container / "pid").write_text(str(os.getpid()))
        enter(container, options, [*options["entrypoint"], *words[1:]])
    elif command == "exec":
        if not alive(containers / words[0]):
            fail(f"no container with name or ID {words[0]} found: no such container")
        enter(containers / words[0], options, words[1:])
    elif command == "rm":
        for name in words:
            if alive(containers / name):
                os.kill(int((containers / name / "pid").read_text()), signal.SIGKILL)
            shutil.rmtree(containers / name, ignore_errors=True)
    elif command == "ps":
        found = sorted(each.name for each in containers.iterdir()) if containers.is_dir() else []
        show("\n".join(found))
    elif command == "inspect":
        label = json.loads((containers / words[0] / "options.json").read_text())["label"][0]
        show(label.partition("=")[2])


if __name__ == "__main__":
    main()
