"""Where each setting comes from: flag, environment, TOML file or default, in that order.

The environment names a setting QRNN_SERVE_ and its name in capitals; the file has it as a key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from qrnn_serve.core.config import from_mapping
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.options import kind_of

PREFIX = "QRNN_SERVE_"
CONFIG_FILE = f"{PREFIX}CONFIG"
# Read by others.
_NO_SETTINGS = {CONFIG_FILE, f"{PREFIX}CACHE_DIR"}
_NAMES = tuple(field.name for field in dataclasses.fields(ServerConfig))


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings and where they come from.

    Attributes:
        config: Their values.
        origins: "flag", the name of a variable, the path of a file, or "default", by name.
    """

    config: ServerConfig
    origins: Mapping[str, str]

    def as_toml(self) -> str:
        """A file with these settings, each with its origin as a comment."""
        lines: list[str] = []
        for name, origin in self.origins.items():
            value = getattr(self.config, name)
            # TOML writes these types of ours as JSON does, and has no null.
            line = f"# {name} is left out" if value is None else f"{name} = {json.dumps(value)}"
            lines.append(f"{line}  # {origin}")
        return "\n".join(lines)


def gather(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Settings:
    """The settings that hold.

    Args:
        flags: Value by name; None is not given.
        environ: The environment; names without our prefix are not looked at.
        file: The TOML file; None is the one that the environment names, if any.

    Raises:
        ConfigError: A name is unknown, a value has the wrong type or is out of range, or the file
            cannot be read.
    """
    if file is None and CONFIG_FILE in environ:
        file = Path(environ[CONFIG_FILE])
    values: dict[str, Any] = {}
    origins = dict.fromkeys(_NAMES, "default")
    sources = [
        _of_environment(environ),
        {k: (v, "flag") for k, v in flags.items() if v is not None},
    ]
    if file is not None:
        sources.insert(0, _of_file(file))
    for source in sources:
        for name, (value, origin) in source.items():
            values[name], origins[name] = value, origin
    return Settings(config=ServerConfig(**values), origins=origins)


def _of_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the settings: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    _check_names(content, _NAMES, str(path))
    from_mapping(ServerConfig, content, str(path))
    return {name: (value, str(path)) for name, value in content.items()}


def _of_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    ours = [name for name in environ if name.startswith(PREFIX) and name not in _NO_SETTINGS]
    known = [PREFIX + name.upper() for name in _NAMES]
    _check_names(ours, known, "environment")
    hints = typing.get_type_hints(ServerConfig)
    found: dict[str, tuple[Any, str]] = {}
    for variable in ours:
        name = variable.removeprefix(PREFIX).lower()
        kind = click.types.convert_type(kind_of(hints[name]))
        try:
            found[name] = kind.convert(environ[variable], None, None), variable
        except click.BadParameter as error:
            raise ConfigError(f"environment: {variable}: {error.message}") from error
    return found


def _check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            raise ConfigError(f"{where}: unknown setting {name!r}; did you mean {nearest!r}?")
