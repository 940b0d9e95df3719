"""Creates errors about invalid settings, which state the key, the source of its value and the closest known key."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, get_args, get_origin

import pydantic

from kapelle.algorithm import algorithm_class
from kapelle.errors import IN_PYTHON_OR_COMMAND, ConfigError, KapelleError, did_you_mean, raise_all
from kapelle.runtime.credentials import without_secrets
from kapelle.settings.aliases import ARGUMENTS, ROOTS, TABLE
from kapelle.settings.base import Settings, fields_at, known_keys, models_in
from kapelle.settings.overlays import COMMAND_LINE, PLUGGED
from kapelle.settings.schema import RunConfig

_MAPPINGS = ("dict_type", "model_type", "model_attributes_type", "mapping_type")
_LISTS = ("tuple_type", "list_type")
_PLAIN = {
    "int_type": "write an integer",
    "int_parsing": "write an integer",
    "int_from_float": "write an integer",
    "float_type": "write a number",
    "float_parsing": "write a number",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "string_type": "write a string, in quotes if YAML would interpret it as another type",
    **dict.fromkeys(_MAPPINGS, "write a mapping of keys to values"),
    **dict.fromkeys(_LISTS, "write a list, such as [a, b]"),
}
"""Mapping from the kind of an error to advice on how to fix it. For all other kinds, pydantic's message is used."""
_RARELY_MEANT = ("warmup", "trackers", "ray")
"""The sections that are suggested last if a key is given without its section."""
_NAMES = ("name", "path")
"""The keys whose value users often write in place of a whole section."""


MISSING = " is missing. Add it to the recipe."
"""The end of the message about a missing key."""
S = TypeVar("S", bound=Settings)


def checked(
    model: type[S],
    values: Mapping[str, Any],
    origin: Mapping[str, str],
    faults: list[ConfigError],
    at: str = "",
) -> S | None:
    """Create settings from values, or return None if the values are invalid. Every error is added to `faults`.

    Invalid values are removed so that the remaining values can be validated. A null in place of a mapping that has
    defaults is removed too.
    """
    left: Any = dict(values)
    taken: list[str] = []
    while True:
        try:
            made = model.model_validate(left)
        except pydantic.ValidationError as error:
            reset = _reset(model, left, error)
            if reset:
                left = without(left, reset)
                continue
            keys, message = _likeliest(model, left, error, origin, at)
            missing = message.endswith(MISSING)
            # A key does not count as missing if it, or a (perhaps misspelt) key next to it, was removed.
            if not missing or not any(_beside(key, ".".join(keys)) for key in taken):
                faults.append(ConfigError(message))
            # A mapping that lacks a key is removed, and an entry of a list with its list, so that indices stay valid.
            place = keys[:-1] if missing else keys
            while place and place[-1].isdigit():
                place = place[:-1]
            shorter = without(left, [".".join(place)])
            if shorter == left:
                return None
            left = shorter
            taken.append(".".join(place))
        else:
            return None if taken else made


def _reset(model: type[Settings], values: Any, error: pydantic.ValidationError) -> list[str]:
    """Return the dotted keys that are null although a mapping with defaults is expected."""
    kinds: dict[tuple[str, ...], set[str]] = {}
    for problem in error.errors(include_url=False):
        if problem["input"] is None:
            keys = tuple(_keys(problem["loc"], values, missing=False))
            kinds.setdefault(keys, set()).add(problem["type"])
    return [
        ".".join(keys)
        for keys, found in kinds.items()
        if keys and found <= {*_MAPPINGS} and not _is_required(model, keys)
    ]


def _is_required(model: type[Settings], keys: Sequence[str]) -> bool:
    """Return whether the field at a path is required (has no default)."""
    models: list[type[Settings]] = [model]
    for part in keys[:-1]:
        if not part.isdigit():
            models = [inner for found in fields_at(models, part) for inner in models_in(found)]
    return all(one.model_fields[keys[-1]].is_required() for one in models if keys[-1] in one.model_fields)


def _beside(one: str, other: str) -> bool:
    """Return whether the dotted key `other` is in the same section as the key `one`, or below it."""
    return other.startswith(f"{one}.") or one.rpartition(".")[0] == other.rpartition(".")[0]


def without(values: Any, keys: Collection[str], at: str = "") -> Any:
    """Return nested values without the values at the given dotted keys."""
    if not keys:
        return values
    if isinstance(values, Mapping):
        kept = {key: value for key, value in values.items() if f"{at}{key}" not in keys}
        return {key: without(value, keys, f"{at}{key}.") for key, value in kept.items()}
    if isinstance(values, list):
        return [without(value, keys, f"{at}{k}.") for k, value in enumerate(values)]
    return values


def made(model: type[S], values: Mapping[str, Any], at: str) -> S:
    """Create settings from values. Raises a single ConfigError that lists all errors."""
    faults: list[ConfigError] = []
    settings = checked(model, values, {}, faults, at)
    raise_all(faults)
    assert settings is not None, "if there are no faults, there are settings"
    return settings


def _likeliest(
    model: type[Settings],
    values: Mapping[str, Any],
    error: pydantic.ValidationError,
    origin: Mapping[str, str],
    at: str,
) -> tuple[list[str], str]:
    """Return the keys and the message of the most likely error, because pydantic reports errors for every member of a union.

    The most likely member of the union is the one whose errors are deepest in `values`, and among those the one with
    the fewest errors. Among the errors of the most likely member, an unknown key comes first.
    """
    found = error.errors(include_url=False)
    beside = Counter(problem["loc"][:-1] for problem in found)
    ranked = [
        (_keys(p["loc"], values, missing=p["type"] == "missing"), -beside[p["loc"][:-1]], p) for p in found
    ]
    # If one member knows the key, its value is invalid.
    known = {tuple(reached) for reached, _, p in ranked if p["type"] != "extra_forbidden"}
    keys, _, problem = max(
        ranked,
        key=lambda one: (
            len(one[0]),
            one[1],
            one[2]["type"] == "extra_forbidden" and tuple(one[0]) not in known,
            one[2]["type"] != "extra_forbidden",
        ),
    )
    first = str(problem["loc"][0]) if problem["loc"] else ""
    if not keys and first in model.model_fields:
        value = without_secrets(repr(problem["input"]))
        return [
            first
        ], f"The default of `{first}` in the class {model.__name__} cannot be {value}: {_fix(problem)}."
    path = ".".join([at, *keys] if at else keys)
    source = next((name for key, name in origin.items() if key == path or key.startswith(f"{path}.")), "")
    where = _set_by(source)
    if problem["type"] == "extra_forbidden":
        return keys, unknown_key(
            path, where, known_keys(model, keys[:-1]), [] if at else settings_named(keys[-1])
        )
    if problem["type"] == "missing":
        return keys, f"'{path}'{MISSING}"
    value = without_secrets(repr(problem["input"]))
    kinds = {str(p["type"]) for reached, _, p in ranked if reached == keys}
    words = [
        p["ctx"]["expected"] for reached, _, p in ranked if reached == keys and p["type"] == "literal_error"
    ]
    if words and isinstance(problem["input"], str):
        close = did_you_mean(problem["input"], re.findall(r"'([^']*)'", words[0]))
        return (
            keys,
            f"'{path}' cannot be {value}{where}: it must be {words[0]}.{close if 'mean' in close else ''}",
        )
    advice = _advice(path, problem["input"], _fields(model, keys), kinds) or _fix(problem)
    return keys, f"'{path}' cannot be {value}{where}: {advice.rstrip('.')}."


def _set_by(source: str) -> str:
    return f" (set {'on the' if source == COMMAND_LINE else 'in'} {source})" if source else ""


def unknown_key(path: str, where: str, known: Sequence[str], elsewhere: Sequence[str] = ()) -> str:
    """Return the message about an unknown key. The list `elsewhere` contains settings of other sections that have the same name."""
    key = path.rpartition(".")[2]
    hint = did_you_mean(key, known)
    if elsewhere and not hint.startswith(" Did you mean"):
        named = " or ".join(f"'{name}'" for name in elsewhere)
        hint = f" Did you mean {named}?"
    theirs = next((alias for alias in TABLE if alias.name in (path, key)), None)
    if theirs and not elsewhere and key.removesuffix("s") not in known:
        hint = (
            f" Write `{theirs.ours[0]}=…`." if theirs.ours else _sentence(theirs.unsupported or theirs.says)
        )
    elif "." not in path and not hint.startswith(" Did you mean"):
        hint = did_you_mean(key, [alias.name for alias in TABLE if "." not in alias.name])
        if not hint.startswith(" Did you mean"):
            hint = " `kapelle train RECIPE --dry-run` prints all settings."
    return f"Unknown key '{path}'{where}.{hint}"


def _sentence(phrase: str) -> str:
    """Return a phrase as a separate sentence, with a leading space."""
    return f" {phrase[0].upper()}{phrase[1:]}."


def settings_named(key: str, most: int = 2) -> list[str]:
    """Return at most `most` dotted settings of a run that end with the given key, starting with those nearest to the top level."""
    from kapelle.settings.schema import RunConfig

    left: list[tuple[str, type[Settings]]] = [("", RunConfig), ("algorithm.", algorithm_class("grpo"))]
    found: list[str] = []
    while left and len(found) < most:
        at, model = left.pop(0)
        fields = model.model_fields
        found += [f"{at}{key}"] if at and key in fields else []
        if not at and key in fields:
            inside = ["name"] if key in PLUGGED else _inside(fields[key].annotation)
            found += [f"{key}.{name}" for name in _NAMES if name in inside] or ([] if inside else [key])
        left += [
            (f"{at}{name}.0." if _is_list(fields[name].annotation) else f"{at}{name}.", inner)
            for name in sorted(fields, key=_RARELY_MEANT.__contains__)
            for inner in models_in(fields[name].annotation)[:1]
        ]
    return found[:most]


def _inside(annotation: Any) -> list[str]:
    return [key for model in models_in(annotation) for key in model.model_fields]


def _fix(problem: Any) -> str:
    advice = _PLAIN.get(problem["type"])
    if advice is None:
        advice = str(problem["msg"]).removeprefix("Value error, ").replace("Input should be", "it must be")
    if problem["type"] == "string_pattern_mismatch" and "A-Za-z" in advice:
        advice = "use letters, digits and _, and begin with a letter"
    return advice


def _advice(path: str, value: object, annotations: Sequence[Any], kinds: set[str]) -> str:
    """Return the correct form of the value that the user probably meant, or an empty string if it is unknown."""
    if "string_type" in kinds and isinstance(value, bool):
        return "YAML reads yes, no, on and off as true and false. Put the string in quotes"
    models = [model for annotation in annotations for model in models_in(annotation)]
    if not models or not kinds & {*_LISTS, *_MAPPINGS, "int_type"}:
        return ""
    key = next((name for name in _NAMES if name in models[0].model_fields), "")
    if not any(map(_is_list, annotations)):
        if isinstance(value, str) and key:
            return f"write `{path}.{key}={value}`"
        return f"it is a section. Write its keys, such as `{path}.{next(iter(models[0].model_fields))}=…`"
    if not key or not isinstance(value, Mapping | str):
        return ""
    if isinstance(value, str) and path.rpartition(".")[2].isdigit():
        return f"write it as a mapping, `{{{key}: {value}}}`"
    counted = any(int in get_args(annotation) for annotation in annotations)
    entry = (
        value if isinstance(value, str) else next((each for each in value if not str(each).isdigit()), "…")
    )
    return f"write a list with a `{key}` in each entry, `{path}: [{{{key}: {entry}, …}}]`{', or an integer' * counted}"


def _keys(location: Sequence[int | str], values: object, *, missing: bool) -> list[str]:
    """Return the keys in the location of an error. The other parts of the location are members of a union."""
    keys: list[str] = []
    for part in location[:-1] if missing else location:
        if isinstance(values, Mapping) and part in values:
            values = values[part]
        elif isinstance(values, list | tuple) and str(part).isdigit():
            values = values[int(part)]
        else:
            continue
        keys.append(str(part))
    return [*keys, str(location[-1])] if missing else keys


def _fields(model: type[Settings], path: Sequence[str]) -> list[Any]:
    """Return the types of the field at a path. If the path ends with an index, return the types of the list entry."""
    models: list[type[Settings]] = [model]
    found: list[Any] = []
    for part in path:
        if not part.isdigit():
            found = fields_at(models, part)
        models = [inner for annotation in found for inner in models_in(annotation)]
    return found


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, list) or any(map(_is_list, get_args(annotation)))


def unknown_sections(values: Mapping[str, Any], origin: Mapping[str, str]) -> dict[str, ConfigError]:
    """Return an error for each top-level key that is not a section of a run, by key."""
    known = list(RunConfig.model_fields)
    found = {}
    for key in values:
        if key not in known:
            source = next((name for at, name in origin.items() if at.partition(".")[0] == key), "")
            found[key] = ConfigError(unknown_key(str(key), _set_by(source), known, settings_named(str(key))))
    return found


# -------- Unknown keywords of `Trainer` and `kapelle.train`.

ONE_CALL = ("agents", "dataset", "eval_dataset", "reward", "rewards", "steps")
"""The arguments of `kapelle.train` that `Trainer` does not have."""


def unknown_keywords(call: Callable[..., Any], name: str, words: Iterable[str]) -> dict[str, ConfigError]:
    """Return an error for each keyword that is not a section of a run, an argument of the call, or a setting's name in another library."""
    kinds = inspect.signature(call).parameters.values()
    own = [each.name for each in kinds if each.kind is not each.VAR_KEYWORD and each.name != "self"]
    known = {*RunConfig.model_fields, *ROOTS, *(alias.name for alias in TABLE)}
    return {
        word: ConfigError(f"`{name}` has no keyword '{word}'.{_meant(word, own)}")
        for word in words
        if word in ONE_CALL or (word not in known and word.partition(".")[0] not in ROOTS)
    }


def names_settings(word: str) -> bool:
    """Return whether a keyword is a section of a run, or a name for settings in another call or another library."""
    return (
        word in RunConfig.model_fields
        or word.partition(".")[0] in ROOTS
        or word in (*ONE_CALL, *ARGUMENTS)
        or bool(settings_named(word))
    )


def _meant(word: str, own: Collection[str]) -> str:
    """Return a hint about what an unknown keyword probably means, given the parameters `own` of the call."""
    inside = " or ".join(f"`{_as_keyword(key)}`" for key in settings_named(word))
    if ARGUMENTS.get(word) in own:
        return f" Did you mean `{ARGUMENTS[word]}`?"
    if "dataset" not in own and word in (*ONE_CALL, *ARGUMENTS):
        return f" `kapelle.train(model, dataset, reward)` takes it{f', or {inside}' if inside else ''}."
    hint = did_you_mean(word, [*own, *RunConfig.model_fields])
    if not hint.startswith(" Did you mean"):
        theirs = did_you_mean(word, [alias.name for alias in TABLE if "." not in alias.name])
        hint = (
            theirs if theirs.startswith(" Did you mean") else f" Did you mean {inside}?" if inside else hint
        )
    return hint


def _as_keyword(setting: str) -> str:
    """Return a dotted setting as a keyword argument; for example, `optimizer.lr` becomes `optimizer={'lr': …}`."""
    section, *inner = setting.split(".")
    before = "".join(f"{{'{key}': " for key in inner)
    return f"{section}={before}…{'}' * len(inner)}"


# -------- Errors of calls in Python mention arguments instead of settings and options.

_ARGUMENTS = {
    "--resume": "`resume=True`",
    "--run-dir": "`run_dir`",
    "--real": "`real=True`",
    "--output": "`output`",
    "--environment": "`environment`",
}
"""Mapping from an option of the command line to the corresponding argument in Python."""
_OPTION = re.compile(rf"`kapelle [^`]*`|(?<![\w`])({'|'.join(_ARGUMENTS)})(?![\w-])")


@contextmanager
def in_python(arguments: Mapping[str, str] | None = None) -> Iterator[None]:
    """Return a context manager that makes errors mention the "call" instead of the "command line".

    If calls are nested, the outermost call of this function or of `for_command` determines the wording. The mapping
    `arguments` contains settings that have a different name in the call, such as `steps` for `training.steps`.
    """
    if IN_PYTHON_OR_COMMAND.get():
        yield
        return
    mark = IN_PYTHON_OR_COMMAND.set(True)
    try:
        yield
    except KapelleError as error:
        if error.args and isinstance(error.args[0], str):
            message = error.args[0].replace(f"(set on the {COMMAND_LINE})", "(set in the call)")
            message = _OPTION.sub(lambda found: _ARGUMENTS.get(found[0], found[0]), message)
            for setting, name in (arguments or {}).items():
                message = re.sub(rf"(?<=[`']){re.escape(setting)}(?=[`'.:=])", name, message)
            error.args = (message, *error.args[1:])
        raise
    finally:
        IN_PYTHON_OR_COMMAND.reset(mark)
