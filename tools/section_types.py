"""Write `settings/dictionaries.py`: every section of the settings as a TypedDict, so that editors complete plain dicts.

    python tools/section_types.py

A test compares the file with what this writes. `Trainer(team={…})` and the settings' own classes have the same keys; what a
value must be is checked by the settings alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import cast

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "src" / "kapelle" / "settings"
TARGET = SETTINGS / "dictionaries.py"
LEFT_OUT = {"Timed", "RunConfig"}
"""What is no section of its own."""

HEAD = '''"""Sections of the settings as plain dictionaries, for editors and type checkers. Made by `tools/section_types.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

{imports}
'''


def classes(file: str) -> list[ast.ClassDef]:
    """Return the settings classes of a module, in order."""
    tree = ast.parse((SETTINGS / file).read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for node in found if [ast.unparse(base) for base in node.bases] == ["Settings"]]


class Plain(ast.NodeTransformer):
    """Turns a field's annotation into what a dictionary may hold."""

    def __init__(self, known: set[str]) -> None:
        self._known = known

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Drop `Annotated`, and take any sequence for a tuple of any length."""
        name = ast.unparse(node.value)
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Annotated":
            return self._seen(inner[0])
        if name == "Literal":
            return node
        if name == "tuple" and len(inner) == 2 and ast.unparse(inner[1]) == "...":
            return ast.Subscript(ast.Name("Sequence"), self._seen(inner[0]))
        if name == "tuple":
            parts = {ast.unparse(self._seen(each)) for each in inner}
            return ast.Subscript(ast.Name("Sequence"), ast.Name(" | ".join(sorted(parts))))
        if name == "dict":
            return ast.Subscript(node.value, ast.Tuple([self._seen(each) for each in inner]))
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Take a dictionary where settings are taken; the types of one module stand under their own names."""
        if node.id in self._known:
            return ast.parse(f"{node.id} | {dictionary(node.id)}", mode="eval").body
        names = {"Address": "str", "Weights": "Weights", "TestSet": "object"}
        return ast.Name(names.get(node.id, node.id))

    def _seen(self, node: ast.expr) -> ast.expr:
        return cast("ast.expr", self.visit(node))


def dictionary(name: str) -> str:
    """Return the name of a class's dictionary."""
    return f"{name.removesuffix('Config')}Dict"


def theirs() -> str:
    """Return the dictionary of the names that other libraries have for settings, as keywords."""
    import kapelle
    from kapelle.settings.aliases import ROOTS, TABLE

    flat = {alias.name: alias for alias in TABLE if "." not in alias.name and alias.ours}
    nested = {alias.name.partition(".")[0] for alias in TABLE if "." in alias.name}
    lines = [
        "class TheirNames(TypedDict, total=False):",
        '    """Settings by the names of other libraries: `settings.aliases`."""\n',
    ]
    own = signature(kapelle.train).parameters.keys()
    for name in sorted(ROOTS & (flat.keys() | nested) - own):
        alias = flat.get(name)
        lines.append(f"    {name}: {'Mapping[str, object]' if alias is None else 'object'}")
        read = ", ".join(f"`{path}`" for path in alias.ours) if alias else ""
        says = f"Of {alias.library}: {read or 'left out'}." if alias else "Of verl, nested as there."
        lines.append(f'    """{says}"""')
    return "\n".join(lines) + "\n"


def written() -> str:
    """Return the module's text."""
    files = sorted(path.name for path in SETTINGS.glob("*.py") if path != TARGET)
    modules = {file: [node for node in classes(file) if node.name not in LEFT_OUT] for file in files}
    known = {node.name for nodes in modules.values() for node in nodes}
    plain = Plain(known)
    parts: list[str] = []
    kinds = ("OwnModel", "NamedAdapter", "PerTurn", "PastAdapter", "EndpointConfig")
    populations = (
        "SelfPlayPopulation",
        "FictitiousPopulation",
        "PfspPopulation",
        "PsroPopulation",
        "FcpPopulation",
    )
    members = ("PastAdapter", "OwnModel", "EndpointConfig")
    unions = {
        "Weights": ['Literal["shared", "lora", "frozen"]', *kinds, *map(dictionary, kinds)],
        "Population": [
            'Literal["self_play", "fictitious", "pfsp", "psro"]',
            *populations,
            *map(dictionary, populations),
        ],
        "MemberConfig": ["str", *members, *map(dictionary, members)],
    }
    for node in (each for nodes in modules.values() for each in nodes):
        lines = [f"class {dictionary(node.name)}(TypedDict, total=False):"]
        lines.append(f'    """{(ast.get_docstring(node) or "").splitlines()[0]}"""\n')
        before: ast.stmt | None = None
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                kind = ast.unparse(plain.visit(each.annotation))
                for union, parts_of_it in unions.items():
                    kind = re.sub(rf"\b{union}\b", " | ".join(parts_of_it), kind)
                lines.append(f"    {each.target.id}: {kind}")
            elif (
                isinstance(before, ast.AnnAssign)
                and isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                lines.append(f'    """{each.value.value}"""')
            before = each
        parts.append("\n".join(lines) + "\n")
    body = "\n\n".join([*parts, theirs()])
    types = {"schema.py": ("DType", "Schedule")}
    imports = []
    for file, nodes in modules.items():
        # In ruff's order: without regard to case.
        names = sorted({*types.get(file, ()), *(node.name for node in nodes)}, key=str.lower)
        used = [name for name in names if re.search(rf"\b{name}\b", body)]
        if used:
            imports.append(f"from kapelle.settings.{file.removesuffix('.py')} import {', '.join(used)}")
    return HEAD.format(imports="\n".join(imports)) + "\n\n" + body


if __name__ == "__main__":
    TARGET.write_text(written(), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(TARGET)], check=True)
