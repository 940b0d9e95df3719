"""Find the class of a plug-in by a built-in name, `module:Class`, `path/file.py:Class` or the name of an entry point.

Built-in plug-ins are listed in the table `BUILTIN` of their package, so that imports do not register anything. Other packages add
plug-ins with entry points.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import pydantic

from kapelle.errors import AbsentCode, ConfigError, did_you_mean
from kapelle.runtime.foreign_code import reason


def catalogue(package: str) -> Mapping[str, str]:
    """Return the table `BUILTIN` of a package of plug-ins, which maps names to `module:Class`.

    Callers pass the name of the package instead of importing it, so that they do not depend on its modules.
    """
    found: Mapping[str, str] = importlib.import_module(package).BUILTIN
    return found


def known_names(kind: str, builtin: Mapping[str, str]) -> list[str]:
    """Return all names of plug-ins that are not paths: the built-in names and the entry points of `kapelle.<kind>s`."""
    return [*builtin, *(point.name for point in entry_points(group=f"kapelle.{kind.replace(' ', '_')}s"))]


def find_class(kind: str, name: str, builtin: Mapping[str, str]) -> type[Any]:
    """Return the class for a built-in name, `module:Class`, `path/file.py:Class` or an entry point of `kapelle.<kind>s`.

    A kind of two words is written with an underscore, as in `kapelle.train_engines`. In settings classes of other packages, the field
    `name` is set to the name by which the class was found. Raises ConfigError if the name is unknown (with the closest known name) or
    if the module cannot be imported. If the name is a path, the file is executed as user code.
    """
    if name in builtin:
        return _checked(kind, name, find_object(builtin[name], kind, name))
    target = name
    if not re.fullmatch(r".+:\w+", name):
        group = f"kapelle.{kind.replace(' ', '_')}s"
        installed = {point.name: point for point in entry_points(group=group)}
        if name not in installed:
            raise ConfigError(f"Unknown {kind} '{name}'.{did_you_mean(name, [*builtin, *installed])}")
        target = f"{installed[name].module}:{installed[name].attr}"
    found = _checked(kind, name, find_object(target, kind, name))
    if not issubclass(found, pydantic.BaseModel) or found.__module__.startswith("kapelle."):
        return found
    field = found.model_fields.get("name")
    declared = None if field is None else field.annotation
    fits = declared is str or name in get_args(declared)
    return found if fits and not target.rpartition(":")[0].endswith(".py") else _named(found, name)


IN_MEMORY = "in-memory"
"""Module name for rows and functions that a program has passed as Python objects."""


def find_object(
    target: str, kind: str, called: str | None = None, held: Mapping[str, Any] | None = None
) -> Any:
    """Return the object that `module:name` or `path/file.py:name` refers to.

    Raises ConfigError if the object does not exist; in the message, the object is called a `kind`. The argument `called` is the name
    of the object in the settings, if it differs from `target`. The argument `held` contains the objects of this program for names of
    the form `in-memory:name`. Raises AbsentCode if such an object belongs to another program. A file is executed as user code. A
    module in the working directory is also executed, unless there is an installed module with the same name.
    """
    name = called or target
    module_name, attribute = split_target(target)
    if not module_name or not attribute:
        raise ConfigError(
            f"The {kind} '{name}' has no valid name. Write `module:name` or `path/file.py:name`."
        )
    if module_name == IN_MEMORY:
        if held and attribute in held:
            return held[attribute]
        raise AbsentCode(
            f"The {kind} `{attribute}` existed only in the memory of the program that made this run. Continue in that program, or put it into a module "
            f"and write `my_module:{attribute}` instead of '{target}'."
        )
    module = find_module(module_name, f"The {kind} '{name}'", attribute)
    if not hasattr(module, attribute):
        known = [word for word in vars(module) if not word.startswith("_")]
        what = "File" if module_name.endswith(".py") else "Module"
        hint = did_you_mean(attribute, known)
        raise ConfigError(f"{what} '{module_name}' has no '{attribute}', which was given as {kind}.{hint}")
    return getattr(module, attribute)


def split_target(target: str) -> tuple[str, str]:
    """Split `module:name`, `path/file.py:name`, `module` or `path/file.py` into the module or file and the name of the object."""
    module, colon, name = target.rpartition(":")
    return (module, name) if colon and not name.endswith(".py") else (target, "")


def find_module(name: str, what: str, attribute: str = "") -> ModuleType:
    """Import and return the module `package.module` or `path/file.py`.

    Raises ConfigError, with a message that starts with `what`, if the module is missing or cannot be imported. This function resolves
    all settings that refer to user code. The argument `attribute` is the name that the caller needs from the module, for the error
    message.
    """
    if name.endswith(".py"):
        return load_file(name, what)
    try:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            top = name.partition(".")[0]
            if error.name != top or not (Path(f"{top}.py").is_file() or Path(top, "__init__.py").is_file()):
                raise
        with importable_here():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything, SystemExit too
        why = f"{reason(error).removesuffix('.')}."
        if isinstance(error, ImportError):
            file = f"{name.replace('.', '/')}.py"
            here = f"A file of that name exists here: write '{file}{f':{attribute}' if attribute else ''}'."
            meant = Path(file).is_file() and f"{name}.".startswith(f"{error.name}.")
            why = f"{error}. {here if meant else 'Is its package installed?'}"
        raise ConfigError(f"{what} cannot be imported: {why}") from error


@contextmanager
def importable_here(folder: Path | None = None) -> Iterator[None]:
    """Allow imports of modules from the working directory and from `folder` inside the block.

    Installed modules take precedence. Python scripts and `python -m` find modules in the working directory, so commands that read
    their recipes must find the same modules. Python's options that prevent this (`-P`, PYTHONSAFEPATH) are respected.
    """
    here = [] if sys.flags.safe_path else list(map(str, dict.fromkeys([folder or Path.cwd(), Path.cwd()])))
    sys.path.extend(here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for each in here:
            with suppress(ValueError):  # the code may change the path itself
                # Remove the last occurrence, which is ours: the folder may have been in the path before.
                del sys.path[len(sys.path) - 1 - sys.path[::-1].index(each)]


def load_file(path: str, what: str) -> ModuleType:
    """Import a Python file and return its module.

    A process executes the file only once, unless the file changes. Raises ConfigError, with a message that starts with `what`, if the
    file is missing or cannot be imported.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise AbsentCode(
            f"{what}: the file '{path}' does not exist. Use an absolute path, or one relative to the current folder."
        )
    try:
        return _run_file(str(file.resolve()), file.stat().st_mtime_ns)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything, SystemExit too
        alone = " A file has no package: write `package.module`, from the folder above the package."
        hint = alone if "relative import" in str(error) else ""
        raise ConfigError(f"{what}: {path} cannot be imported: {reason(error)}.{hint}") from error


@lru_cache(maxsize=64)
def _run_file(path: str, changed_ns: int) -> ModuleType:
    name = f"kapelle_file_{hashlib.sha256(f'{path} {changed_ns}'.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic and dataclasses look up annotations there
    try:
        with importable_here(Path(path).parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@lru_cache(maxsize=64)
def _named(found: type[pydantic.BaseModel], name: str) -> type[pydantic.BaseModel]:
    """Return a subclass of a settings class in which the field `name` has the name by which the class was found."""
    if isinstance(vars(found).get("name"), property):
        raise ConfigError(
            f"The class of '{name}' defines `name` as a property, but recipes must set it. Define a field: `name: str = …`."
        )
    called: Any = Literal[name]
    return pydantic.create_model(
        found.__name__, __base__=found, __module__=found.__module__, name=(called, name)
    )


def _checked(kind: str, name: str, found: object) -> type[Any]:
    if not isinstance(found, type):
        raise ConfigError(f"The {kind} '{name}' is {type(found).__name__}, not a class.")
    return found
