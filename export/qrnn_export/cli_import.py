"""The flags of qrnn-export for what a foreign checkpoint does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from qrnn_export.options import ImportHints


class NumberList(click.ParamType):
    """N or N,N,..."""

    name = "N[,N..]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to a tuple of numbers."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"expected whole numbers separated by commas, got {value!r}", param, ctx)


def import_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags for what a foreign checkpoint does not hold."""
    options = (
        click.option(
            "--trust-pickle",
            is_flag=True,
            help="Load files that hold Python objects. This RUNS CODE from the file: only for "
            "files that you made, or whose author you trust.",
        ),
        click.option(
            "--layout",
            metavar="NAME",
            help="How the file names its tensors: salesforce, awd_lstm_lm, fastai_v1, fastai_v2, "
            "pase, pytorch_ehr or pqrnn, found by the names themselves; or paper, for a bare stack "
            "whose f multiplies the old state.",
        ),
        click.option(
            "--hidden",
            type=NumberList(),
            default=(),
            help="Hidden size: one for the layers that the file leaves open, or one for each.",
        ),
        click.option("--window", type=NumberList(), default=(), help="Window, in the same way."),
        click.option(
            "--output-gate/--no-output-gate",
            default=None,
            help="Whether layers that the file leaves open have an output gate.",
        ),
        click.option(
            "--zoneout",
            type=float,
            metavar="P",
            help="Zoneout that the model was trained with; 0 for none.",
        ),
        click.option(
            "--zoneout-rule",
            type=click.Choice(["salesforce", "fastai"]),
            help="What zoneout does when evaluating: salesforce scales f by 1 - P (the layout's "
            "default), fastai does nothing.",
        ),
        click.option(
            "--bidirectional",
            type=click.Choice(["per_layer", "stacks"]),
            help="How two directions are joined: after each layer (nn.LSTM) or only after the last "
            "(fastai).",
        ),
        click.option(
            "--ids-per-timestep",
            type=int,
            metavar="K",
            help="Ids of one timestep, for models that sum their embeddings (pytorch_ehr).",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def hints(facts: dict[str, Any]) -> ImportHints:
    """What the flags say."""
    return ImportHints(
        layout=facts["layout"],
        hidden_size=facts["hidden"],
        window=facts["window"],
        output_gate=facts["output_gate"],
        zoneout=facts["zoneout"],
        zoneout_rule=facts["zoneout_rule"],
        bidirectional=facts["bidirectional"],
        ids_per_timestep=facts["ids_per_timestep"],
    )
