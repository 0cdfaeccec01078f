"""Reads a configuration file and explains what is wrong with it.

Invariants:
- An unknown key is an error that names the key, the file and the nearest known
  key; every wrong key is named, not only the first.
- What this module raises on bad input is a `ConfigurationError`, whatever the
  input was.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rl.config import CampaignConfig
from rl.errors import ConfigurationError
from rl.screen_config import ScreenConfig

_INTEGER_BITS = 63  # and a sign: what TOML promises to hold
_SHOWN_CHARACTERS = 100  # of a wrong value in a message: enough to find it in the file
_SHORTEN = "write a number that fits the key"


def load_config[T: BaseModel](
    path: Path,
    overrides: dict[str, Any] | None = None,
    *,
    model: type[T] = CampaignConfig,
) -> T:
    """Read and validate the configuration file at `path`.

    Args:
        path: a TOML file; or a `.json` file of the same tree, as frozen.json holds one.
        overrides: values by dotted key that replace the file's, such as
            `{"seed": 3, "engine.replicas": 1}`.
        model: what kind of configuration it is.

    Raises:
        ConfigurationError: the file is missing or can't be read, a key is unknown or
            has the wrong type, or the values contradict each other.
    """
    if not path.exists():
        raise ConfigurationError(
            "no such configuration file", str(path), "see configs/ for the shipped ones"
        )
    read = read_json if path.suffix == ".json" else read_toml
    data = replaced(read(path), overrides or {})
    return parse_config(data, where=str(path), model=model)


def replaced(data: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy of `data` with values by dotted key in the place of its own.

    Raises:
        ConfigurationError: a key goes through what is no table.
    """
    copy = deepcopy(data)
    for key, value in values.items():
        _set_dotted(copy, key, value)
    return copy


def read_toml(path: Path, refusal: type[ConfigurationError] = ConfigurationError) -> dict[str, Any]:
    """The tables of a TOML file, with no integer beyond TOML's 64 bits.

    Raises:
        ConfigurationError: of type `refusal`; it can't be read, or is no TOML.
    """
    where = str(path)
    text = _text(path, refusal, "TOML")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        what = "not valid TOML: nested too deeply"
        raise refusal(what, where, "remove the nested brackets") from None
    except tomllib.TOMLDecodeError as error:
        what = f"not valid TOML: {error}"
        raise refusal(what, where, "correct the file at that place") from None
    except ValueError:  # Python's own limit on the digits of an integer
        raise refusal("not valid TOML: an integer is too long", where, _SHORTEN) from None
    return _bounded(data, where, refusal)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigurationError: it can't be read, or holds no JSON object.
    """
    where = str(path)
    try:
        data: Any = json.loads(_text(path, ConfigurationError, "JSON"))
    except RecursionError:
        what = "not valid JSON: nested too deeply"
        raise ConfigurationError(what, where, "remove the nested brackets") from None
    except ValueError as error:
        what = f"not valid JSON: {error}"
        raise ConfigurationError(what, where, "correct the file at that place") from None
    if not isinstance(data, dict):
        raise ConfigurationError("holds no object", where, "write a configuration as an object")
    return _bounded(typing.cast(dict[str, Any], data), where, ConfigurationError)


def _text(path: Path, refusal: type[ConfigurationError], kind: str) -> str:
    """What a configuration file holds."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise refusal(what, str(path), f"name a {kind} file that this user may read") from None
    except UnicodeDecodeError as error:
        what = f"cannot be read: no UTF-8 text ({error.reason} at byte {error.start})"
        raise refusal(what, str(path), "save the file as UTF-8") from None


def _bounded(data: dict[str, Any], where: str, refusal: type[ConfigurationError]) -> dict[str, Any]:
    """`data`, which has no integer beyond what TOML allows."""
    key = _oversized(data)
    if key is not None:
        raise refusal(f"'{key}': an integer beyond 64 bits", where, _SHORTEN)
    return data


def parse_config[T: BaseModel](
    data: dict[str, Any], where: str, *, model: type[T] = CampaignConfig
) -> T:
    """Validate `data`; `where` names its origin in errors.

    Raises:
        ConfigurationError: naming every wrong key, its value and the nearest right one.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = [_explain(item, model) for item in error.errors()]
        lister = "rl.screen" if model is ScreenConfig else "rl.final"
        what = lines[0] if len(lines) == 1 else "\n  - ".join(["several keys are wrong", *lines])
        raise ConfigurationError(
            what, where, f"correct it there; `python -m {lister} --describe-config` lists every key"
        ) from None


def describe(model: type[BaseModel] = CampaignConfig, prefix: str = "") -> list[tuple[str, str]]:
    """Every dotted key with its description, in the tree's order."""
    rows: list[tuple[str, str]] = []
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        child = _section_of(field.annotation)
        rows.append((key, field.description or ""))
        if child is not None:
            rows.extend(describe(child, prefix=f"{key}."))
    return rows


def _oversized(data: dict[str, Any]) -> str | None:
    """The key of the first integer beyond 64 bits, however deep it lies."""
    waiting: list[tuple[str, Any]] = list(data.items())
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            table = typing.cast(dict[str, Any], value)
            waiting.extend((f"{key}.{name}", child) for name, child in table.items())
        elif isinstance(value, list):
            waiting.extend((key, child) for child in typing.cast(list[Any], value))
        elif isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
            return key
    return None


def _set_dotted(data: dict[str, Any], key: str, value: Any) -> None:
    *tables, last = key.split(".")
    node: Any = data
    for table in tables:
        node = node.setdefault(table, {})
        if not isinstance(node, dict):
            raise ConfigurationError(
                f"'{table}' is not a table",
                f"override {key}",
                "`python -m rl.final --describe-config` lists every key",
            )
    node[last] = value


def _explain(item: Any, root: type[BaseModel]) -> str:
    """One line for one validation error, with the nearest key for an unknown one."""
    loc = tuple(part for part in item["loc"])
    dotted = ".".join(str(part) for part in loc) or "(whole file)"
    if item["type"] != "extra_forbidden":
        message = str(item["msg"]).removeprefix("Value error, ")
        given = item.get("input")
        shown = f" (given: {_short(given)})" if isinstance(given, str | int | float) else ""
        return f"'{dotted}': {message}{shown}"
    model: type[BaseModel] | None = root
    for part in loc[:-1]:
        if model is not None and isinstance(part, str) and part in model.model_fields:
            model = _section_of(model.model_fields[part].annotation)
    known = list(model.model_fields) if model is not None else []
    near = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
    elsewhere = [key for key, _ in describe(root) if key.split(".")[-1] == str(loc[-1])]
    if near:
        hint = f"did you mean '{near[0]}'?"
    elif elsewhere:
        hint = f"did you mean '{elsewhere[0]}'?"
    else:
        hint = f"known here: {', '.join(known)}"
    return f"unknown key '{dotted}'; {hint}"


def _short(value: str | int | float) -> str:
    """A value for a message, whatever its size."""
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The `Section` inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = _section_of(argument)
        if found is not None:
            return found
    return None
