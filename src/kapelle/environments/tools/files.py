"""File tools for a folder. Each part of a path is opened relative to the previous part, and links are never followed.

An opened file is therefore always inside the root folder, even if another process changes the folder at the same time.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from kapelle.environment import Reads
from kapelle.environments.tools.contract import Tool, Toolbox, ToolFault, ToolSchema, ToolSettings
from kapelle.errors import DataError
from kapelle.runtime.files import folder_content
from kapelle.types import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LISTED = 200
MAX_DEPTH = 32
"""The maximum number of parts of a path. Trees with thousands of levels are difficult to delete."""
MAX_READ = 20_000
"""The maximum number of characters of a result."""
MAX_WRITTEN = 1 << 20
"""The maximum size of a file in bytes."""

_PATH: Mapping[str, Json] = {"type": "string", "description": "relative, such as notes/today.txt"}
_LIST = ToolSchema(
    "list_files", "Lists a folder.", {"type": "object", "properties": {"folder": {**_PATH, "default": "."}}}
)
_READ = ToolSchema(
    "read_file",
    "Returns the text of a file, from a line on.",
    {
        "type": "object",
        "properties": {"path": _PATH, "from_line": {"type": "integer", "default": 1}},
        "required": ["path"],
    },
)
_WRITE = ToolSchema(
    "write_file",
    "Writes a text file, and the folders that it stands in; an old one is replaced.",
    {
        "type": "object",
        "properties": {"path": _PATH, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
)


class Files(ToolSettings, Reads):
    """Settings of the tools `list_files` and `read_file`, and of `write_file` if `write` is true."""

    tool: Literal["files"] = "files"
    root: str | None = None
    """The root folder. Paths outside this folder are rejected. If null and `write` is true, each episode has an empty folder for
    notes."""
    write: bool = False
    """Whether agents can write files. If true, each agent has its own writable copy of the folder in each episode."""
    files: int = Field(default=200, ge=1)
    """The maximum number of files that an agent may write in an episode."""
    texts: Mapping[str, str] = Field(default_factory=dict)
    """Mapping from the path of a file to its text. If there is no `root`, the new folder of an episode contains these files."""

    @model_validator(mode="after")
    def _check_folder(self) -> Files:
        if self.root is None and not self.write:
            raise ValueError(
                "The tool `files` has no `root`. Set `root` to a folder, or set `write: true` for notes."
            )
        if self.root is not None and self.texts:
            raise ValueError(
                "`texts` are the files of a new folder, but `root` is set. Remove `root`, or put the files into `root`."
            )
        for path, text in self.texts.items():
            try:
                empty = not _parts(path)
            except ToolFault as fault:
                raise ValueError(f"`texts`: {fault}") from None
            if empty or len(text.encode("utf-8", errors="replace")) > MAX_WRITTEN:
                raise ValueError(f"`texts.{path}` is not a file of at most {MAX_WRITTEN:,} bytes.")
            if any(
                other != path and _parts(other)[: len(_parts(path))] == _parts(path) for other in self.texts
            ):
                raise ValueError(f"`texts.{path}` is both a file and a folder. Rename one of them.")
        return self

    def contents(self) -> Mapping[str, str]:
        """Return a mapping from the root folder to a hash of its content."""
        return {} if self.root is None else {self.root: folder_content(Path(self.root).expanduser())}

    def check(self) -> None:
        """Raise DataError if the root folder does not exist."""
        if self.root is not None and not Path(self.root).expanduser().is_dir():
            raise DataError(
                f"There is no folder '{self.root}'. Set `root` of the tool `files` to an existing folder."
            )

    def open(self) -> Folder:
        """Return the tools for the folder. If a copy of the folder is needed, it is created on first use."""
        root = None if self.root is None else Path(self.root).expanduser()
        return Folder(root, self.files if self.write else 0, self.texts)


class Folder(Toolbox):
    """The folder of one agent in one episode."""

    def __init__(self, root: Path | None, writes: int, texts: Mapping[str, str] | None = None) -> None:
        self._root = root
        self._texts = texts or {}
        self._writes = writes
        self._copied: tempfile.TemporaryDirectory[str] | None = None
        self._copies = writes > 0
        writing = (Tool(_WRITE, self.write_file),) if self._copies else ()
        super().__init__(Tool(_LIST, self.list_files), Tool(_READ, self.read_file), *writing)

    def _path(self) -> Path:
        if not self._copies:
            assert self._root is not None, "validated above"
            return self._root
        if self._copied is None:
            # Python removes the folder with this object, at the latest when the process ends.
            self._copied = tempfile.TemporaryDirectory(prefix="kapelle-files-", ignore_cleanup_errors=True)
            copied = Path(self._copied.name, "files")
            if self._root is not None:
                shutil.copytree(self._root, copied, symlinks=True, ignore=_special)
            for path, text in self._texts.items():
                file = copied.joinpath(*_parts(path))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(text.encode("utf-8", errors="replace"))
            copied.mkdir(exist_ok=True)
        return Path(self._copied.name, "files")

    def state(self) -> dict[str, str]:
        """Return the path and the text of every regular file, sorted by path. Links are excluded."""
        if self._copied is None and self._root is None:
            return dict(sorted(self._texts.items()))
        root = self._path()
        found = {}
        for folder, _, names in os.walk(root):
            for name in names:
                file = Path(folder, name)
                if stat.S_ISREG(file.lstat().st_mode):
                    found[str(file.relative_to(root))] = file.read_bytes().decode("utf-8", errors="replace")
        return dict(sorted(found.items()))

    def list_files(self, arguments: Mapping[str, Json]) -> str:
        """Return the names of the files and folders in a folder. The names of folders end with a slash."""
        with self._folder(_parts(arguments.get("folder", "."))) as opened:
            names = sorted(os.listdir(opened))  # noqa: PTH208 (a descriptor, not a path)
            shown = []
            for name in names[:MAX_LISTED]:
                try:
                    folder = stat.S_ISDIR(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode)
                except OSError:  # the entry was removed in the meantime
                    folder = False
                shown.append(f"{name}/" if folder else name)
        more = len(names) - len(shown)
        return "\n".join([*shown, *([f"… and {more} more"] if more else [])]) or "(empty)"

    def read_file(self, arguments: Mapping[str, Json]) -> str:
        """Return the text of a file, beginning at a given line, up to the maximum number of characters of a result."""
        parts = _parts(arguments["path"])
        if not parts:
            raise ToolFault("That is a folder. Use `list_files`.")
        with (
            self._folder(parts[:-1]) as folder,
            _opened(parts[-1], os.O_RDONLY, folder) as file,
            os.fdopen(os.dup(file), "rb") as stream,
        ):
            data = stream.read(4 * MAX_WRITTEN)
        first = max(int(arguments.get("from_line", 1)), 1)
        lines = data.decode("utf-8", errors="replace").splitlines(keepends=True)
        text = "".join(lines[first - 1 :])
        if len(text) <= MAX_READ:
            return text or "(nothing)"
        shown = text[:MAX_READ]
        shown = shown[: shown.rfind("\n") + 1] or f"{shown}\n"
        return f"{shown}… go on with from_line {first + shown.count(chr(10))}"

    def write_file(self, arguments: Mapping[str, Json]) -> str:
        """Write a file. Raises ToolFault if too many files have been written or the text is too long."""
        parts, data = _parts(arguments["path"]), str(arguments["text"]).encode("utf-8", errors="replace")
        if not parts:
            raise ToolFault("That is a folder. Name a file in it.")
        if len(data) > MAX_WRITTEN:
            raise ToolFault(f"The text has {len(data):,} bytes; a file may have at most {MAX_WRITTEN:,}.")
        if self._writes < 1:
            raise ToolFault("No more files may be written in this episode.")
        self._writes -= 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with (
            self._folder(parts[:-1], create=True) as folder,
            _opened(parts[-1], flags, folder) as file,
            os.fdopen(os.dup(file), "wb") as stream,
        ):
            stream.write(data)
        return f"Wrote {len(data):,} bytes to {'/'.join(parts)}."

    @contextmanager
    def _folder(self, parts: list[str], *, create: bool = False) -> Iterator[int]:
        """Open a folder inside the root folder, one part of the path after another."""
        opened = os.open(self._path(), os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts:
                if create:
                    try:
                        os.mkdir(part, 0o700, dir_fd=opened)
                    except FileExistsError:
                        pass
                    except (OSError, ValueError):
                        raise ToolFault(f"The folder '{part[:80]}' cannot be made.") from None
                with _faults(part):
                    inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
                os.close(opened)
                opened = inner
            yield opened
        finally:
            os.close(opened)

    def close(self) -> None:
        """Delete the copy of the folder."""
        if self._copied is not None:
            self._copied.cleanup()
            self._copied = None


def _special(folder: str, names: Sequence[str]) -> list[str]:
    """Return the names of pipes, sockets and devices in a folder, which are not copied."""
    kinds = {name: os.lstat(Path(folder, name)).st_mode for name in names}
    return [
        name
        for name, mode in kinds.items()
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    ]


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part not in {"", "."}]
    if path.startswith("/") or ".." in parts or "\0" in path:
        raise ToolFault(f"'{path[:80]}' is not a path beneath the folder. Give it relative, without '..'.")
    if len(parts) > MAX_DEPTH:
        raise ToolFault(f"The path has {len(parts):,} steps; at most {MAX_DEPTH} are allowed.")
    return parts


@contextmanager
def _opened(name: str, flags: int, folder: int) -> Iterator[int]:
    with _faults(name):
        # Open without blocking, because a FIFO would wait for its other end.
        file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ToolFault(f"'{name}' is not a file.")
        yield file
    finally:
        os.close(file)


@contextmanager
def _faults(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ToolFault(f"There is no '{name}'.") from None
    except OSError as error:
        raise ToolFault(f"'{name}' cannot be opened: {error.strerror}.") from None
    except ValueError:
        raise ToolFault("That name cannot be that of a file.") from None
