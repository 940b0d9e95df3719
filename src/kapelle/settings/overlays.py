"""Merges nested settings and records the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from kapelle.errors import ConfigError, did_you_mean

COMMAND_LINE = "command line"
"""The origin of settings that were given on the command line."""
PLUGGED = (
    "environment",
    "workflow",
    "algorithm",
    "engine",
    "train_engine",
    "algorithm.order",
    "algorithm.base.order",
)
"""The sections whose keys belong to the class that their `name` selects. If the name changes, the section starts empty."""

MOST_VALUES = 100_000
MOST_CHARACTERS = 10_000_000
"""The maximum number of characters of a YAML document after its aliases are expanded."""
MOST_DIGITS = 3000
"""The maximum number of digits of a number, because parsing a number in base 60 (`1:30:00`) takes quadratic time."""
MOST_OTHER_KEYS = 1000
"""The maximum number of keys of a mapping that are not strings, because the hashes of numeric keys may collide."""
_TEXT = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def parse_setting(setting: str) -> dict[str, Any]:
    """Parse `key.path=value` into nested mappings. Raises ConfigError if the setting has any other form."""
    if not isinstance(setting, str):
        raise ConfigError(
            f"{setting!r} is not a setting. Write it as a string, such as 'training.steps=100'."
        )
    key, equals, raw = setting.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"'{setting}' is not a setting. Write key.path=value, for example training.steps=100."
        )
    return nested(key, raw, setting)


def nested(key: str, raw: str, setting: str) -> dict[str, Any]:
    """Return nested mappings with the parsed value at the dotted path `key`.

    Raises ConfigError with a message that quotes `setting` if the value is not valid YAML.
    """
    try:
        value = parse_yaml(raw)
    except ValueError:
        raise ConfigError(f"The value of '{setting}' is not valid YAML. Quote it: {key}='\"…\"'.") from None
    # YAML 1.1 reads 1e-3 as a string; a numeric setting accepts such a string.
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


class _QuickLoader(Composer, SafeConstructor, Resolver):
    """A loader that is six times as fast as `yaml.SafeLoader`: libyaml parses the document, and Python builds the nested values.

    Values are not built by libyaml, because deeply nested values would overflow the C stack.
    """

    def __init__(self, text: str) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        events = yaml.CSafeLoader(text)
        self.check_event, self.peek_event, self.get_event = (
            events.check_event,
            events.peek_event,
            events.get_event,
        )


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raises ValueError with a one-line reason if the document is invalid."""
    try:
        if yaml.__with_libyaml__ and "\t" not in text:  # libyaml accepts tabs that YAML forbids
            try:
                return _value(_QuickLoader(text), text)
            except (yaml.YAMLError, UnicodeEncodeError):
                pass  # Python's parser has better error messages
        return _value(yaml.SafeLoader(text), text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        raise ValueError(_describe(error, text)) from None
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        # The library raises many kinds of errors for invalid dates, numbers and keys.
        raise ValueError(" ".join(str(error).split())) from None


def _value(loader: yaml.SafeLoader | _QuickLoader, text: str) -> Any:
    root = loader.get_single_node()
    _bound(root, len(text))
    return None if root is None else loader.construct_document(root)


def _describe(error: yaml.MarkedYAMLError, text: str) -> str:
    """Describe an error in a YAML document, with the number and content of the line."""
    mark, problem = error.problem_mark or error.context_mark, " ".join(str(error.problem or error).split())
    if mark is None:
        return problem
    lines = text.splitlines()
    quoted = lines[mark.line].strip()[:60] if mark.line < len(lines) else ""
    return f"line {mark.line + 1}{f' (`{quoted}`)' if quoted else ''}: {problem}"


def _once(node: yaml.MappingNode) -> None:
    """Raise ValueError if a mapping contains the same key twice, because one of the two values would be lost."""
    seen: dict[str, int] = {}
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            line = key.start_mark.line + 1
            if key.value in seen:
                raise ValueError(
                    f"`{key.value}` appears twice in one mapping, in line {seen[key.value]} and in line {line}; remove one"
                )
            seen[key.value] = line


def _bound(root: yaml.Node | None, length: int) -> None:
    """Raise ValueError for a short YAML document that would take a very long time to read.

    Such a document may contain aliases that repeat earlier values, numbers with many digits, or numeric keys whose
    hashes collide.
    """
    left: list[yaml.Node] = [] if root is None else [root]
    most = max(MOST_CHARACTERS, length)
    for _ in range(MOST_VALUES):
        if not left:
            return
        node = left.pop()
        if isinstance(node, yaml.ScalarNode):
            most -= len(node.value)
            if most < 0:
                break
            if node.tag in _NUMBERS and len(node.value) > MOST_DIGITS:
                raise ValueError(f"it contains a number of more than {MOST_DIGITS:,} digits")
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            if sum(key.tag != _TEXT for key, _ in node.value) > MOST_OTHER_KEYS:
                raise ValueError(
                    f"it contains a mapping with more than {MOST_OTHER_KEYS:,} keys that are not strings"
                )
            _once(node)
            left += [part for pair in node.value for part in pair]
    raise ValueError(
        f"with expanded aliases it contains more than {MOST_VALUES:,} values or {MOST_CHARACTERS:,} characters"
    )


def merge(
    into: dict[str, Any], over: Mapping[str, Any], source: str, origin: dict[str, str], at: str = ""
) -> None:
    """Merge the mapping `over` into the mapping `into`, in place. The argument `at` is the dotted path of both, with a trailing dot."""
    if at[:-1] in PLUGGED and over.get("name", into.get("name")) != into.get("name"):
        # A different class does not have the settings of the old class.
        forget_origin(origin, at[:-1])
        into.clear()
    for key, value in over.items():
        path = f"{at}{key}"
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value, source, origin, f"{path}.")
        elif isinstance(value, Mapping) and _has_entries(into.get(key), value):
            _merge_items(into[key], value, source, origin, path)
        else:
            into[key] = _plain(value)
            replace_origin(origin, path, into[key], source)


def _has_entries(items: object, over: Mapping[str, Any]) -> bool:
    """Return whether the keys of a mapping refer to entries of a list, either by index (from 0) or by name."""
    if not isinstance(items, list) or not over:
        return False
    named = all(isinstance(each, dict) for each in items) and all(
        isinstance(each, Mapping) for each in over.values()
    )
    return named or all(str(key).isdigit() for key in over)


def _merge_items(
    items: list[Any], over: Mapping[str, Any], source: str, origin: dict[str, str], path: str
) -> None:
    for key, value in over.items():
        index = _place(items, str(key), path)
        if isinstance(value, Mapping) and isinstance(items[index], dict):
            merge(items[index], value, source, origin, f"{path}.{index}.")
        else:
            items[index] = _plain(value)
            replace_origin(origin, f"{path}.{index}", items[index], source)


def _place(items: Sequence[Any], key: str, path: str) -> int:
    if key.isdigit():
        if int(key) >= len(items):
            raise ConfigError(
                f"{path} has {len(items)} entries, counted from 0, so {path}.{key} does not exist."
            )
        return int(key)
    names = [str(item.get("name")) for item in items]
    if key not in names:
        raise ConfigError(f"{path} has no entry named '{key}'.{did_you_mean(key, names)}")
    return names.index(key)


def replace_origin(origin: dict[str, str], path: str, value: Any, source: str) -> None:
    """Record `source` as the origin of all values in `value` at the given path, and remove earlier records of the path."""
    forget_origin(origin, path)
    origin.update(dict.fromkeys(leaves(value, path), source))


def forget_origin(origin: dict[str, str], path: str) -> None:
    """Remove the recorded origins of the given path and of all paths below it."""
    for key in [key for key in origin if key == path or key.startswith(f"{path}.")]:
        del origin[key]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def leaves(value: Any, path: str = "") -> list[str]:
    """Return the dotted keys of all values in nested settings that are not mappings or lists."""
    if isinstance(value, Mapping) and value:
        return [
            leaf
            for key, item in value.items()
            for leaf in leaves(item, f"{path}.{key}" if path else str(key))
        ]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [leaf for k, item in enumerate(value) for leaf in leaves(item, f"{path}.{k}")]
    return [path]
