"""Command-line options made from a configuration class: each default stands in one place.

An option that is left out has the value None: what then holds is for `settings` to say.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


def options_of(config: type) -> Callable[[Command], Command]:
    """One option for each field of a dataclass whose fields have `help` in their metadata.

    A field that is a switch, or may be None for "as fits", becomes --name/--no-name.
    """
    hints = typing.get_type_hints(config)

    def decorate(command: Command) -> Command:
        for field in reversed(dataclasses.fields(config)):
            kind = kind_of(hints[field.name])
            name = field.name.replace("_", "-")
            flag = f"--{name}/--no-{name}" if kind is bool else f"--{name}"
            default = "" if field.default is None else str(field.default).lower()
            help_text = field.metadata["help"] + (f"  [default: {default}]" if default else "")
            option = click.option(flag, type=kind, default=None, help=help_text)
            command = option(command)
        return command

    return decorate


def kind_of(hint: Any) -> Any:
    """The click type for a field's annotation: without None, a Literal as a choice."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return click.Choice(typing.get_args(hint))
    return hint
