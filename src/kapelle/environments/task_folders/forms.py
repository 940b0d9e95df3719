"""Read task folders in the formats of Harbor (`task.toml`) and terminal-bench (`task.yaml`).

    Harbor                              terminal-bench
    task.toml, instruction.md           task.yaml (`instruction`, limits, parser)
    environment/Dockerfile, files       Dockerfile, files
    tests/test.sh → reward.txt or json  run-tests.sh, tests/ → pytest's summary
    solution/solve.sh                   solution.sh

By default, no image is built: a Dockerfile provides the files, working directories and variables, and the system is that of the
host. If a task requires anything else, an error names the line. With `images`, a Dockerfile is not interpreted, because a
container engine builds the image.
"""

from __future__ import annotations

import ast
import json
import math
import os
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kapelle.errors import DataError, SandboxError
from kapelle.settings.overlays import parse_yaml

TESTS = "/tests"
VERIFIER = "/logs/verifier"
MOST_FOLDER_BYTES = 256 << 20
"""Maximum total size in bytes of the files of a task; the same limit applies to its tests."""
_CLOSED = frozenset([
    "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr",
    "box", "kapelle", "logs", "oracle", "solution", "tests", "tmp",
])  # fmt: skip
"""Top-level folders that a task cannot use, because they belong to the system, the sandbox or the tests."""
_RESERVED = frozenset(["dev", "proc", "sys", "kapelle", "logs", "oracle", "solution", "tests", "tmp"])
"""Top-level folders that cannot contain the working directory or a volume of an image."""
_DOWNLOADS = re.compile(
    r"\b(?:apt(?:-get)?\s+(?:-\S+\s+)*install|apk\s+add|(?:yum|dnf)\s+install|pip3?\s+install|npm\s+(?:i|ci|install)\b|git\s+clone|"
    r"uvx?\s+\S|conda\s+install|(?:curl|wget)\s[^|;&]*https?://(?!localhost|127\.))"
)
"""Regular expression for commands in a script that download files."""
_NAMED = re.compile(r"(?<![\w.~/-])/([A-Za-z_][\w-]*)/")
"""Regular expression for the top-level folder of a path in an instruction or a RUN line. Such a folder is writable in the
sandbox even if it contains no files."""
_CANARY = b"terminal-bench-canary"
Runner = Literal["script", "pytest"]
RunLines = Literal["refuse", "skip", "run"]


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of a task in the sandbox."""

    path: str
    mode: int
    content: bytes


@dataclass(frozen=True, slots=True)
class RunLine:
    """A RUN line of a Dockerfile that is run in the sandbox."""

    command: str
    workdir: str
    after: int
    """The number of files of the task that are copied before the line is run."""


@dataclass(frozen=True, slots=True)
class Image:
    """The image of a task, which a container engine builds or pulls."""

    name: str | None
    """Name of an existing image, or the id of the image after it was built. With None, `context` is built."""
    context: tuple[FolderFile, ...] = ()
    """The folder of the Dockerfile, without tests and solutions."""
    build_s: float = 1800.0
    """Maximum time in seconds to build or pull the image."""


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """A task that was read from a task folder."""

    name: str
    """The name of the task folder."""
    form: Literal["harbor", "terminal-bench"]
    instruction: str
    workdir: str
    """The working directory of the agent and of the tests."""
    folders: tuple[str, ...]
    """Top-level folders of the sandbox that the agent may change, including all folders with files of the task."""
    files: tuple[FolderFile, ...]
    env: Mapping[str, str]
    """Environment variables for the programs of the agent and for the tests."""
    tests: tuple[tuple[str, bytes], ...]
    """Paths and contents of files that only the sandbox of the tests contains."""
    script: str | None
    """Path of the script that runs the tests. With None, pytest runs all test files."""
    tests_env: Mapping[str, str]
    agent_s: float
    tests_s: float
    memory_mb: int
    solution: str | None
    """A script that solves the task, or None if the task has no solution."""
    expected: tuple[str, ...] = ()
    """Names of the tests that pytest must report as passed; empty if a reward file gives the result."""
    without: tuple[str, ...] = field(default=())
    """RUN lines of the Dockerfile that are skipped (`run_lines: skip`)."""
    run: tuple[RunLine, ...] = ()
    """RUN lines of the Dockerfile that are run before the first agent starts (`run_lines: run`)."""
    image: Image | None = None
    """The image of the task, or None if the task uses the programs of the host."""
    benchmark: bool = False
    """Whether the files of the task are marked as part of a benchmark, on which models must not be trained."""


def task_folders(path: str) -> tuple[Path, ...]:
    """Return the path if it is a task folder, otherwise the task folders inside the path, sorted by name.

    Raises DataError if there is no task folder.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        raise DataError(
            f"The folder {place} does not exist. Give a task folder, or a folder that contains task folders."
        )
    if _is_task(place):
        return (place,)
    found = tuple(sorted(each for each in place.iterdir() if each.is_dir() and _is_task(each)))
    if not found:
        raise DataError(
            f"{place} contains no task folder. A task folder contains a `task.toml` (Harbor) or a `task.yaml` (terminal-bench)."
        )
    return found


def _is_task(folder: Path) -> bool:
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def read_task(folder: Path, runner: Runner, run_lines: RunLines, *, images: bool = False) -> TaskFolder:
    """Read one task folder, with its image if `images` is set.

    Raises DataError with the file and line of anything invalid or unsupported.
    """
    read = _harbor if (folder / "task.toml").is_file() else _terminal_bench
    return read(folder, runner, run_lines, images)


# -------- The two formats


def _harbor(folder: Path, runner: Runner, run_lines: RunLines, images: bool) -> TaskFolder:
    where = folder / "task.toml"
    try:
        settings: dict[str, Any] = tomllib.loads(_text(where))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{where} is not valid TOML: {error}.") from None
    environment, agent, verifier = (
        _table(settings, name, where) for name in ("environment", "agent", "verifier")
    )
    if settings.get("steps"):
        raise _unsupported(
            where, "[[steps]]", "a task must have exactly one instruction and one set of tests"
        )
    for name in ("mcp_servers", "healthcheck", "skills_dir", "gpus"):
        if environment.get(name):
            raise _unsupported(where, f"environment.{name}", "the sandbox does not provide it")
    if environment.get("os", "linux") != "linux":
        raise _unsupported(where, "environment.os", "the sandbox runs Linux")
    if verifier.get("environment_mode", "shared") != "shared" or verifier.get("collect"):
        raise _unsupported(
            where, "verifier.environment_mode or collect", "tests run on a copy of the agent's folders"
        )
    place = folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (place / name).exists():
            raise _unsupported(place / name, "services", "a task has only one sandbox")
    if (folder / "tests" / "Dockerfile").exists():
        raise _unsupported(
            folder / "tests" / "Dockerfile", "an image for the tests", "kapelle does not build images"
        )
    dockerfile, named = place / "Dockerfile", environment.get("docker_image")
    if not dockerfile.is_file() and not (images and named):
        raise DataError(
            f"{dockerfile} is missing, so the files of the task's image ({named or 'unnamed'}) are unknown. "
            "Add a Dockerfile that copies them, or run the image with `environment.sandbox: podman` or `docker`."
        )
    build_s = _seconds(environment, "build_timeout_sec", 1800.0, where)
    image = (
        _of_image(place, frozenset(), named, build_s)
        if images
        else _read_dockerfile(dockerfile, place, frozenset(), run_lines)
    )
    tests = _tests(folder / "tests")
    script = folder / "tests" / "test.sh"
    if runner == "script" and not script.is_file():
        raise DataError(f"{script} is missing. Add it, or set `environment.tests: pytest`.")
    env = {**image.env, **_env(environment, f"{where}: environment.env")}
    return _task(
        folder,
        "harbor",
        _text(folder / "instruction.md"),
        image,
        env,
        tests,
        (script, f"{TESTS}/test.sh") if runner == "script" else None,
        _env(verifier, f"{where}: verifier.env"),
        limits=(
            _seconds(agent, "timeout_sec", 600.0, where),
            _seconds(verifier, "timeout_sec", 600.0, where),
            _megabytes(environment, where),
        ),
        solution=folder / "solution" / "solve.sh",
        summary=runner == "pytest",
    )


def _terminal_bench(folder: Path, runner: Runner, run_lines: RunLines, images: bool) -> TaskFolder:
    where = folder / "task.yaml"
    try:
        settings = parse_yaml(_text(where))
    except ValueError as error:
        raise DataError(f"{where} is not valid YAML: {error}.") from None
    if not isinstance(settings, dict) or not isinstance(settings.get("instruction"), str):
        raise DataError(f"{where} has no `instruction`. Add it as a string.")
    if settings.get("parser_name", "pytest") != "pytest":
        raise _unsupported(where, f"parser_name: {settings['parser_name']}", "only pytest's summary is read")
    if settings.get("run_tests_in_same_shell"):
        raise _unsupported(where, "run_tests_in_same_shell", "tests run in a separate sandbox")
    compose = folder / "docker-compose.yaml"
    if compose.is_file():
        try:
            services = (parse_yaml(_text(compose)) or {}).get("services", {})
        except (ValueError, AttributeError):
            raise DataError(f"{compose} is not a valid YAML file with `services`.") from None
        if len(services) > 1:
            raise _unsupported(
                compose, f"services {', '.join(sorted(services))}", "a task has only one sandbox"
            )
    hidden = frozenset([
        "tests", "run-tests.sh", "solution.sh", "solution.yaml", "solution", "task.yaml", "docker-compose.yaml",
    ])  # fmt: skip
    image = (
        _of_image(folder, hidden, None, 1800.0)
        if images
        else _read_dockerfile(folder / "Dockerfile", folder, hidden, run_lines)
    )
    tests = _tests(folder / "tests")
    script = folder / "run-tests.sh"
    if script.is_file() and runner == "script":
        tests = (*tests, (f"{TESTS}/run-tests.sh", script.read_bytes()))
    return _task(
        folder,
        "terminal-bench",
        settings["instruction"],
        image,
        image.env,
        tests,
        (script, f"{TESTS}/run-tests.sh") if script.is_file() and runner == "script" else None,
        {"TEST_DIR": TESTS},
        limits=(
            _seconds(settings, "max_agent_timeout_sec", 360.0, where),
            _seconds(settings, "max_test_timeout_sec", 60.0, where),
            2048,
        ),
        solution=folder / "solution.sh",
        summary=True,
    )


def _task(
    folder: Path,
    form: Literal["harbor", "terminal-bench"],
    instruction: str,
    image: _Image,
    env: Mapping[str, str],
    tests: tuple[tuple[str, bytes], ...],
    script: tuple[Path, str] | None,
    tests_env: Mapping[str, str],
    *,
    limits: tuple[float, float, int],
    solution: Path,
    summary: bool,
) -> TaskFolder:
    if script is not None:
        for number, line in enumerate(_text(script[0]).splitlines(), 1):
            if not line.lstrip().startswith("#") and (found := _DOWNLOADS.search(line)):
                raise DataError(
                    f"{script[0]}, line {number}, downloads files ({found[0][:40].strip()}), but sandboxes have no network. Set "
                    "`environment.tests: pytest` to run the test files with `environment.packages`."
                )
    names = tuple(
        name for path, content in tests if path.endswith(".py") for name in _test_names(path, content)
    )
    if script is None and not names:
        raise DataError(
            f"{folder / 'tests'} has no test for pytest. Add a function `test_…` to a file `test_….py`."
        )
    paths = (*(file.path for file in image.files), *((image.workdir,) if image.image is None else ()))
    roots = {f"/{path.split('/')[1]}" for path in paths}
    named = (instruction, *(f"{line.command}/" for line in image.run))
    roots |= {f"/{name}" for text in named for name in _NAMED.findall(text) if name not in _CLOSED}
    marked = (
        folder / name
        for name in ("task.toml", "task.yaml", "instruction.md", "environment/Dockerfile", "Dockerfile")
    )
    return TaskFolder(
        folder.name,
        form,
        instruction.strip(),
        image.workdir,
        tuple(sorted(roots)),
        tuple(image.files),
        env,
        tests,
        None if script is None else script[1],
        tests_env,
        *limits,
        _text(solution) if solution.is_file() else None,
        names if summary else (),
        tuple(image.without),
        tuple(image.run),
        image.image,
        any(_CANARY in each.read_bytes() for each in marked if each.is_file()),
    )


def _tests(folder: Path) -> tuple[tuple[str, bytes], ...]:
    if not folder.is_dir():
        raise DataError(f"{folder} is missing. Add tests, because they give the reward.")
    return tuple((f"{TESTS}/{name}", content) for name, _, content in _files_below(folder, frozenset()))


def _test_names(path: str, content: bytes) -> Iterator[str]:
    """Yield the names of the test functions that pytest collects from a file."""
    name = posixpath.basename(path)
    if not (name.startswith("test_") or name.endswith("_test.py")):
        return
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"The task's file {path.removeprefix('/')} is not valid Python: {error}.") from None
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test") else [node]
        for each in inner:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test"):
                yield each.name


def summary_passed(output: str, expected: Sequence[str]) -> tuple[float, str]:
    """Return a reward and its reason from the short summary of pytest (`-rA`).

    The reward is 1 if the summary lists all expected tests and no failure, otherwise 0. Skipped tests and expected failures
    count as passed, as in terminal-bench.
    """
    begun = re.split(r"=+ short test summary info =+", output, maxsplit=1)
    if len(begun) < 2:
        return 0.0, "The tests printed no summary."
    passed, failed, skipped = set[str](), [], 0
    for line in begun[1].splitlines():
        status, _, rest = line.strip().partition(" ")
        parts = re.split(r"::|\[| - ", rest.strip())
        if status in ("PASSED", "XFAIL"):
            passed.add(next((part for part in parts[1:] if part.startswith("test")), parts[0]))
        elif status == "SKIPPED":  # the summary gives only the number of skipped tests
            found = re.match(r"\[(\d+)\]", rest)
            skipped += int(found[1]) if found else 1
        elif status in ("FAILED", "ERROR", "XPASS"):
            failed.append(rest.strip()[:200])
    if failed:
        return 0.0, f"Failed: {'; '.join(failed[:3])}"
    missing = [name for name in expected if name not in passed]
    if len(missing) > skipped or not passed:
        return 0.0, f"The summary has no result for {missing[0] if missing else 'any test'}."
    return 1.0, "All tests passed."


# -------- Dockerfiles: files, working directories and variables


@dataclass(slots=True)
class _Image:
    workdir: str = "/"
    files: list[FolderFile] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    run: list[RunLine] = field(default_factory=list)
    image: Image | None = None


def _of_image(folder: Path, hidden: frozenset[str], name: object, build_s: float) -> _Image:
    """Return an image to pull, or to build from a folder without the files in `hidden`; its engine knows its files."""
    if name:
        return _Image(image=Image(str(name), build_s=build_s))
    if not (folder / "Dockerfile").is_file():
        raise DataError(
            f"{folder / 'Dockerfile'} is missing. Add a Dockerfile, because the task needs an image."
        )
    context = tuple(FolderFile(path, mode, content) for path, mode, content in _files_below(folder, hidden))
    return _Image(image=Image(None, context, build_s))


def located(task: TaskFolder, image: Image, workdir: str, volumes: Sequence[str]) -> TaskFolder:
    """Return a task with its image, in which the working directory and the volumes of the image are writable.

    Raises SandboxError if the image uses a folder of the system or the tests for its work.
    """
    workdir = posixpath.normpath(f"/{workdir}").replace("//", "/")
    workdir = "/app" if workdir == "/" else workdir
    folders = set(task.folders)
    for place in (workdir, *map(posixpath.normpath, volumes)):
        top = place.split("/")[1]
        if top in _RESERVED or (top in _CLOSED and place.count("/") < 2):
            raise SandboxError(
                f"The image of the task {task.name} works in {place}, which belongs to the system or the tests. Use a folder such as "
                "/app or /workspace."
            )
        folders.add(place if top in _CLOSED else f"/{top}")
    return replace(task, image=image, workdir=workdir, folders=tuple(sorted(folders)))


_IGNORED = frozenset([
    "USER", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "SHELL", "STOPSIGNAL", "MAINTAINER", "VOLUME",
    "HEALTHCHECK",
])  # fmt: skip
"""Instructions of a Dockerfile that are ignored. For example, USER is ignored because all programs run as the same unprivileged
user."""


def _read_dockerfile(path: Path, context: Path, hidden: frozenset[str], run_lines: RunLines) -> _Image:
    """Return the files and settings of a Dockerfile; raise DataError for unsupported lines.

    Files in `hidden` are never copied.
    """
    image, variables = _Image(), dict[str, str]()
    for number, keyword, rest in _instructions(_text(path)):
        line = f"{path}, line {number}: {keyword}"
        if keyword == "FROM":
            image = _Image()
        elif keyword == "ARG":
            name, equals, value = rest.partition("=")
            variables[name.strip()] = shlex.split(value)[0] if equals and value.strip() else ""
        elif keyword == "ENV":
            words = shlex.split(rest)
            pairs = (
                [word.partition("=")[::2] for word in words]
                if "=" in words[0]
                else [(words[0], " ".join(words[1:]))]
            )
            for name, value in pairs:
                image.env[name] = variables[name] = _filled(value, variables)
        elif keyword == "WORKDIR":
            image.workdir = posixpath.normpath(
                posixpath.join(image.workdir, _filled(rest.strip(), variables))
            )
        elif keyword in ("COPY", "ADD"):
            image.files += _copied(line, _filled(rest, variables), image, context, hidden)
        elif keyword == "RUN" and run_lines == "refuse":
            raise DataError(
                f"{line} {rest[:60]} changes the image, but the sandbox `bubblewrap` does not build images. Set `environment.run_lines: run` to run "
                "such lines in the sandbox, without network access or root privileges, `skip` to skip them, or `environment.sandbox: "
                "podman` (or `docker`) to build the image."
            )
        elif keyword == "RUN" and run_lines == "run":
            image.run.append(RunLine(rest, image.workdir, len(image.files)))
        elif keyword == "RUN":
            image.without.append(f"{keyword} {rest}")
        elif keyword not in _IGNORED:
            raise DataError(f"{line} is not supported. Remove the line, or use COPY, WORKDIR or ENV instead.")
    if image.workdir == "/":
        image.workdir = "/app"
    for place in (image.workdir, *(file.path for file in image.files)):
        if place.split("/")[1] in _CLOSED or (place != image.workdir and place.count("/") < 2):
            raise DataError(
                f"{path} writes to {place}, which belongs to the system or the tests. Use a folder such as /app, /root, /data or /workspace."
            )
    return image


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the keyword and the arguments of each instruction of a Dockerfile; continued lines are joined."""
    begun, held, here = 0, "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if here:  # inside a here-document
            here = "" if line.strip() == here else here
            continue
        if line.lstrip().startswith("#") or not (line.strip() or held):
            continue
        begun = begun if held else number
        if line.rstrip().endswith("\\"):
            held += line.rstrip()[:-1] + " "
            continue
        keyword, _, rest = (held + line).strip().partition(" ")
        held = ""
        if found := re.search(r"<<-?[\"']?(\w+)", rest):
            here = found[1]
        if keyword:
            yield begun, keyword.upper(), rest.strip()
    if held:
        keyword, _, rest = held.strip().partition(" ")
        yield begun, keyword.upper(), rest.strip()


def _copied(
    line: str, rest: str, image: _Image, context: Path, hidden: frozenset[str]
) -> Iterator[FolderFile]:
    """Yield the files that a COPY or ADD instruction copies."""
    flags = re.match(r"(?:--\S+\s+)*", rest)
    assert flags is not None
    for flag in flags[0].split():
        if not flag.startswith(("--chown=", "--chmod=", "--link")):
            raise DataError(
                f"{line} {flag} is not supported. Put the files into the folder of the Dockerfile."
            )
    chmod = re.search(r"--chmod=([0-7]{3,4})\b", flags[0])
    rest = rest[flags.end() :]
    words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    if len(words) < 2 or any(word.startswith("<<") or "://" in word for word in words):
        raise DataError(
            f"{line} {rest[:60]} is not supported. Copy only files from the folder of the Dockerfile."
        )
    *sources, target = words
    into = posixpath.normpath(posixpath.join(image.workdir, target))
    there = (f"{image.workdir}/", *(file.path for file in image.files))
    several = len(sources) > 1 or target.endswith("/") or any(path.startswith(f"{into}/") for path in there)
    for source in sources:
        plain = posixpath.normpath(source.lstrip("/"))
        found = (
            [context] if plain == "." else sorted(context.glob(plain)) if not plain.startswith("..") else []
        )
        if not found:
            raise DataError(f"{line}: there is no {source} in {context}. Add the file, or correct the line.")
        if plain.split("/")[0] in hidden:
            raise DataError(f"{line} would make {source} visible to the agent. Remove the line.")
        for each in found:
            if each.is_dir():
                for name, mode, content in _files_below(each, hidden if each == context else frozenset()):
                    if each != context or name != "Dockerfile":
                        yield FolderFile(
                            posixpath.join(into, name), int(chmod[1], 8) if chmod else mode, content
                        )
            else:
                path = posixpath.join(into, each.name) if several or len(found) > 1 else into
                mode = int(chmod[1], 8) if chmod else each.stat().st_mode & 0o777
                yield FolderFile(path, mode, _bytes(each, context))


def _filled(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(
        r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))",
        lambda found: variables.get(found[1] or found[3], found[2] or ""),
        text,
    )


# -------- Files and values


def _files_below(folder: Path, hidden: frozenset[str]) -> Iterator[tuple[str, int, bytes]]:
    """Yield the relative path, mode and content of the files below a folder, except files in `hidden`."""
    size = 0
    for place, names, files in os.walk(folder):
        names.sort()
        for name in sorted(files):
            path = Path(place) / name
            relative = path.relative_to(folder).as_posix()
            if relative.split("/")[0] in hidden:
                continue
            content = _bytes(path, folder)
            size += len(content)
            if size > MOST_FOLDER_BYTES:
                raise DataError(
                    f"{folder} has more than {MOST_FOLDER_BYTES:,} bytes, which is too large for a sandbox. Remove files."
                )
            yield relative, path.stat().st_mode & 0o777, content


def _bytes(path: Path, folder: Path) -> bytes:
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise DataError(
            f"{path} is not a regular file inside {folder}. Links to the outside are not followed."
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{path} is missing. Every task folder must have this file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}.") from None


def _table(settings: Mapping[str, Any], name: str, where: Path) -> Mapping[str, Any]:
    found = settings.get(name, {})
    if not isinstance(found, dict):
        raise DataError(f"{where}: `{name}` is not a table. Write it as [{name}].")
    return found


def _unsupported(where: Path, what: str, why: str) -> DataError:
    return DataError(f"{where}: `{what}` is not supported: {why}. Change or remove this task.")


def _seconds(table: Mapping[str, Any], name: str, default: float, where: Path) -> float:
    value = table.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DataError(f"{where}: `{name}` is {value!r}. Give a number of seconds greater than 0.")
    return float(value)


def _megabytes(table: Mapping[str, Any], where: Path) -> int:
    value = table.get("memory_mb", 2048)
    if isinstance(table.get("memory"), str) and (
        found := re.fullmatch(r"([0-9.]+)([GMK])", table["memory"].upper())
    ):
        value = int(float(found[1]) * {"G": 1024.0, "M": 1.0, "K": 1 / 1024}[found[2]])
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DataError(f"{where}: `memory_mb` is {value!r}. Give a whole number of mebibytes.")
    return value


def _env(table: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return environment variables from a table; raise DataError if a value refers to a variable of this machine."""
    env = table.get("env", {})
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise DataError(f"{where} is not a table of strings.")
    for name, value in env.items():
        if re.search(r"\$\{\w+\}", value):
            raise DataError(
                f"{where}.{name} refers to {value}, a variable of this machine. Write the value itself."
            )
    return {name: _filled(value, {}) for name, value in env.items()}
