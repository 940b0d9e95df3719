"""The rules that every source file keeps, each a function from a file's text to what breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

NAMELESS = {"utils", "util", "helpers", "helper", "misc", "common", "stuff"}
FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"),
    # Their answers are bounded neither in bytes nor in time: take `runtime/http.py`, or the tools' `web.py`.
    *("requests", "aiohttp", "urllib3", "urllib.request", "ftplib", "xmlrpc"),
}
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    "torch.load": "reads pickles; take safetensors",
    "torch.save": "writes pickles; take safetensors",
    "numpy.load": "may read pickles; take safetensors",
    "np.load": "may read pickles; take safetensors",
    "yaml.load": "builds any object; take parse_yaml",
    "yaml.unsafe_load": "builds any object; take parse_yaml",
    "yaml.full_load": "builds objects; take parse_yaml",
    "yaml.safe_load": "has no bounds; take parse_yaml",
    "yaml.safe_load_all": "has no bounds; take parse_yaml",
    "yaml.full_load_all": "builds objects; take parse_yaml",
    "yaml.unsafe_load_all": "builds any object; take parse_yaml",
    "yaml.Loader": "builds any object; take parse_yaml",
    "yaml.CLoader": "builds any object; take parse_yaml",
    "yaml.FullLoader": "builds objects; take parse_yaml",
    "yaml.UnsafeLoader": "builds any object; take parse_yaml",
    "torch.hub.load": "runs a repository's code",
    "torch.jit.load": "runs what a file holds; take safetensors",
    "torch.hub.load_state_dict_from_url": "reads pickles; take safetensors",
    "pandas.read_pickle": "reads pickles",
    "transformers.pipeline": "may run a folder's code; take an `Auto…` class with its flags",
    "shutil.unpack_archive": "writes where an archive says; read its members",
    "tempfile.mktemp": "leaves its name to others; take mkstemp",
    "yaml.load_all": "builds any object; take parse_yaml",
    "os.system": "runs a shell; take subprocess.run with a list",
    "os.popen": "runs a shell; take subprocess.run with a list",
    "subprocess.getoutput": "runs a shell; take subprocess.run with a list",
    "subprocess.getstatusoutput": "runs a shell; take subprocess.run with a list",
}
FORBIDDEN_FLAGS = {"shell", "trust_remote_code"}
"""Keywords that may not be passed unless literally False."""
LOADERS = {"from_pretrained", "from_config"}
"""Methods that run a folder's own code, or read its pickles, by default."""
WITHOUT_WEIGHTS = re.compile(
    r"Auto(Config|Tokenizer|Processor|ImageProcessor|FeatureExtractor)|GenerationConfig"
)
"""Classes whose `from_pretrained` reads no weights."""
CLIENTS = {
    "get",
    "post",
    "put",
    "patch",
    "delete",
    "head",
    "options",
    "request",
    "stream",
    "Client",
    "AsyncClient",
}
"""Names of httpx that send; only `runtime/http.py` bounds what comes back."""
EXTRACTS = {"extractall"}
"""Methods that write where an archive says."""


def generated(path: PurePath) -> bool:
    """Return whether a file is made by `tools/generate_wire.py`; what it makes is no one's style."""
    return path.parent.name == "wire" and "_pb2" in path.stem


def nameless(path: PurePath) -> Iterator[str]:
    """Yield a module or package name that does not say what lives there."""
    for part in (*path.parent.parts, path.stem):
        if part in NAMELESS:
            yield f"'{part}' does not say what lives there"


def forbidden(text: str) -> Iterator[str]:
    """Yield what executes or unpickles what someone else wrote, by whatever name it was imported."""
    tree = ast.parse(text)
    origin = dict(_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules(node):
                if {module, module.split(".")[0]} & FORBIDDEN_MODULES:
                    yield f"line {node.lineno}: imports {module}"
        if isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield f"line {node.lineno}: {node.id}"
        if isinstance(node, ast.Name | ast.Attribute):
            name = _dotted(node, origin)
            if name in FORBIDDEN_ATTRIBUTES:
                yield f"line {node.lineno}: {name} {FORBIDDEN_ATTRIBUTES[name]}"
        yield from _flagged(node)
        if isinstance(node, ast.Call):
            yield from _trusting(node, origin)
    yield from _taken(tree)


def _flagged(node: ast.AST) -> Iterator[str]:
    """Yield dangerous keywords and keys that are not literally False."""
    given: list[tuple[object, ast.expr]] = []
    if isinstance(node, ast.keyword):
        given = [(node.arg, node.value)]
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        given = [(key.value, value) for key, value in pairs if isinstance(key, ast.Constant)]
    for name, value in given:
        if name in FORBIDDEN_FLAGS and not _is_false(value):
            yield f"line {value.lineno}: {name} that is not literally False"


def _trusting(call: ast.Call, origin: dict[str, str]) -> Iterator[str]:
    """Yield what a call of a loader leaves to a folder or to whoever sits at the terminal."""
    function = call.func
    if not (isinstance(function, ast.Attribute) and function.attr in LOADERS):
        return
    holder = _dotted(function.value, origin).rpartition(".")[2] or "a class"
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if not ("trust_remote_code" in given and _is_false(given["trust_remote_code"])):
        yield f"line {call.lineno}: {holder}.{function.attr} without `trust_remote_code=False`"
    if function.attr == "from_pretrained" and not WITHOUT_WEIGHTS.fullmatch(holder):
        safe = given.get("use_safetensors")
        if not (isinstance(safe, ast.Constant) and safe.value is True):
            yield f"line {call.lineno}: {holder}.{function.attr} without `use_safetensors=True`"


def _taken(tree: ast.AST) -> Iterator[str]:
    """Yield loaders that are taken without being called, so that no one sees their flags, and archives that say where to write."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in LOADERS and id(node) not in called:
            yield f"line {node.lineno}: {node.attr} is taken, not called"
        if isinstance(node, ast.Attribute) and node.attr in EXTRACTS and id(node) in called:
            yield f"line {node.lineno}: {node.attr} writes where an archive says"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            names = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            yield from (
                f"line {node.lineno}: {name} is taken by its name" for name in names if name in LOADERS
            )


def unbounded(text: str) -> Iterator[str]:
    """Yield requests whose answers have no bounds."""
    if "httpx" not in text:
        return
    tree = ast.parse(text)
    origin = dict(_imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            module, _, name = _dotted(node, origin).partition(".")
            if module == "httpx" and name in CLIENTS:
                yield f"line {node.lineno}: httpx.{name}; take `post` or `get` of runtime/http.py"


def shallow(text: str) -> Iterator[str]:
    """Yield places that read someone's JSON and catch what is not JSON, but not what is nested too deeply."""
    if "json" not in text or "ValueError" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Try):
            continue
        inside = [part for statement in node.body for part in ast.walk(statement)]
        reads = any(
            isinstance(part, ast.Attribute)
            and part.attr in {"loads", "load"}
            and ast.unparse(part.value) == "json"
            for part in inside
        )
        caught = {
            name.id
            for handler in node.handlers
            if handler.type
            for name in ast.walk(handler.type)
            if isinstance(name, ast.Name)
        }
        if (
            reads
            and "ValueError" in caught
            and not caught & {"RecursionError", "Exception", "BaseException", "RuntimeError"}
        ):
            yield f"line {node.lineno}: JSON that is nested too deeply raises RecursionError"


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (local name, dotted origin) of every import, so that an alias hides nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    # `from urllib import request` imports a module, too.
    return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]


def _dotted(node: ast.expr, origin: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return origin.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, origin)}.{node.attr}"
    return ""


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
