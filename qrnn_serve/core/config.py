"""Frozen dataclasses to and from plain mappings, so that configuration is data.

Unknown keys, missing keys and wrong types are errors that name the key: a setting is never ignored.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, Union

from qrnn_serve.core.errors import ConfigError

Config = TypeVar("Config")


def to_mapping(config: object) -> dict[str, Any]:
    """Return a nested dict of JSON types with every field of the dataclass `config`."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"expected a dataclass instance, got {type(config).__name__}")
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def from_mapping(cls: type[Config], mapping: object, where: str = "") -> Config:
    """Build `cls` from a nested mapping as `to_mapping` makes it.

    Args:
        cls: A dataclass type; its annotations say what each value must be.
        mapping: Field name to value. Fields with a default may be absent.
        where: What the mapping describes, for error messages.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type.
    """
    place = where or cls.__name__
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{place}: expected a mapping, got {type(mapping).__name__}")
    mapping = typing.cast("Mapping[str, Any]", mapping)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    if unknown := sorted(set(mapping) - set(fields)):
        raise ConfigError(f"{place}: unknown keys {unknown}; known keys are {sorted(fields)}")
    required = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(mapping)):
        raise ConfigError(f"{place}: missing keys {missing}")
    hints = typing.get_type_hints(cls)
    return cls(**{k: _convert(v, hints[k], f"{place}.{k}") for k, v in mapping.items()})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_mapping(value)
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in typing.cast("list[Any]", value)]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in typing.cast("Mapping[str, Any]", value).items()}
    return value


def _convert(value: Any, hint: Any, place: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        inner = next(a for a in args if a is not type(None))
        return None if value is None else _convert(value, inner, place)
    if origin is typing.Literal:
        if value not in args:
            raise ConfigError(f"{place}: expected one of {list(args)}, got {value!r}")
        return value
    if origin in (tuple, dict):
        return _convert_items(value, origin, args, place)
    if dataclasses.is_dataclass(hint):
        return from_mapping(typing.cast("type[Any]", hint), value, place)
    return value if hint is Any else _convert_scalar(value, hint, place)


def _convert_items(value: Any, origin: type, args: tuple[Any, ...], place: str) -> Any:
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place}: expected a mapping, got {value!r}")
        pairs = typing.cast("Mapping[str, Any]", value).items()
        return {k: _convert(v, args[1], f"{place}.{k}") for k, v in pairs}
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{place}: expected a list, got {value!r}")
    items = typing.cast("list[Any]", value)
    return tuple(_convert(v, args[0], f"{place}[{i}]") for i, v in enumerate(items))


def _convert_scalar(value: Any, hint: type, place: str) -> Any:
    # bool is an int in Python, but a window of True is a mistake.
    if isinstance(value, bool) and hint is not bool:
        raise ConfigError(f"{place}: expected {hint.__name__}, got {value!r}")
    if hint is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, hint):
        raise ConfigError(f"{place}: expected {hint.__name__}, got {value!r}")
    return value
