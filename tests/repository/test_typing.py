"""Editors and type checkers understand the interface without a plugin of pydantic's."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPECIFIERS = {"Field", "PrivateAttr"}


def positional_defaults(source: str) -> list[int]:
    """Return the lines in which a field's default stands by its place, where only pydantic's own plugin sees it."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and node.args)
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id in SPECIFIERS]


@pytest.mark.parametrize("folder", ["src", "examples"])
def test_every_default_of_a_field_is_named(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {file: positional_defaults(file.read_text(encoding="utf-8")) for file in files}
    assert {str(file): lines for file, lines in found.items() if lines} == {}, "write Field(default=…)"


BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("howto", "tutorials")
"""Folders of `docs` in which the blocks of a page are one program, and one that begins with `# name.py` is a file beside it."""


def shown() -> dict[str, str]:
    """Return the Python of README and the pages as files, by a name that says where each stands."""
    found: dict[str, str] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
        if page.parent.name in PROGRAMS:
            blocks = BLOCK.findall(text)
            files = {named[1]: block for block in blocks if (named := re.match(r"# (\w+\.py)\n", block))}
            found |= files
            found[f"{name}.py"] = one_program([block for block in blocks if block not in files.values()])
            continue
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 2
            found[f"{name}_line_{line}.py"] = block[1]
    return found


def one_program(blocks: list[str]) -> str:
    """Return a notebook's cells as one program; cells that await, which no other file may, as the body of a function."""
    program = "".join(blocks)
    try:
        compile(program, "page", "exec")
    except SyntaxError:
        return "async def page() -> None:\n" + textwrap.indent(program, "    ")
    return program


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The blocks as files, beside the examples' own."""
    folder = tmp_path_factory.mktemp("blocks")
    for name, text in shown().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.types
def test_mypy_takes_what_is_shown_without_a_plugin(written: Path) -> None:
    settings = written / "mypy.ini"
    silent = "ignore_missing_imports = true\nfollow_imports = silent"
    settings.write_text(f"[mypy]\npython_version = 3.11\n{silent}\nmypy_path = {ROOT / 'src'}\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(settings),
        "--cache-dir",
        str(ROOT / ".mypy_cache" / "shown"),
    ]
    examples = [*(ROOT / "examples").glob("*.py"), *(ROOT / "examples" / "mrlm").glob("*.py")]
    done = _run("mypy", [*command, *map(str, [*sorted(written.glob("*.py")), *sorted(examples)])])
    assert done.returncode == 0, done.stdout


@pytest.mark.types
def test_pyright_takes_what_is_shown(written: Path) -> None:
    settings = written / "pyrightconfig.json"
    environment = Path(sys.prefix)
    kept = {
        "include": [str(written), str(ROOT / "examples")],
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
        "reportMissingImports": False,  # programs of packages that are installed elsewhere, as for mypy
        "venvPath": str(environment.parent),
        "venv": environment.name,
    }
    settings.write_text(json.dumps(kept))
    done = _run("basedpyright", [sys.executable, "-m", "basedpyright", "-p", str(settings)])
    assert done.returncode == 0, done.stdout


def _run(package: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -c constraints.txt {package}")
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
