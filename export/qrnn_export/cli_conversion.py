"""The flags of qrnn-export for what becomes of the numbers, and for cutting a model into stages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class StageCount(click.ParamType):
    """A number of stages, or auto."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Text to a number, or the word; the options check the number."""
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"expected a whole number or auto, got {value!r}", param, ctx)


def conversion_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flags for precision and stages."""
    options = (
        click.option(
            "--dtype",
            type=click.Choice(["float32", "float16", "bfloat16"]),
            help="Convert the weights. In half precision products and activations are rounded too; "
            "the recurrence stays float32, and so do inputs, outputs and state, which numpy and "
            "ONNX Runtime can hold. bfloat16 cannot be written as ONNX.",
        ),
        click.option(
            "--int8",
            is_flag=True,
            help="Keep the weights of the matrix products in int8, with a scale for each output: a "
            "quarter of their size, computed in float32, not faster. Embeddings stay as they are.",
        ),
        click.option(
            "--calibrate",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Measure what --dtype or --int8 costs on the first rows of this Parquet file; "
            "left out, on random rows.",
        ),
        click.option(
            "--column",
            default="features",
            show_default=True,
            help="The column of --calibrate with the rows.",
        ),
        click.option(
            "--stages",
            type=StageCount(),
            help="Cut the model into N artefacts of whole layers, to be run one after another, "
            "balanced by measured time and by bytes. auto: one for each GiB of weights, at "
            "least 2. MODEL.stages.json says how they belong together.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
