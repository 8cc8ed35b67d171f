"""`qrnn-serve MODEL` serves a model; `qrnn-serve doctor` checks the installation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from qrnn_serve.core.errors import QRNNError
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.options import options_of

EXIT_CANNOT_START = 2

_EXTRAS = {"torch", "onnxruntime", "safetensors", "grpc_health", "grpc_reflection", "google"}
_ENDINGS = (".ts.pt", ".pt", ".onnx", ".safetensors")


class ModelOrCommand(click.Group):
    """A group whose first argument is a command or, most often, the model to serve."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the name of the hidden command before a model and its options."""
        if args and args[0] not in {*self.commands, "--help"}:
            args = ["serve", *args]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Both ways to call it."""
        formatter.write_usage("qrnn-serve", "MODEL [OPTIONS]")
        formatter.write_usage("qrnn-serve", "doctor")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of serving, which are what people look for, and the commands."""
        self.commands["serve"].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.group(cls=ModelOrCommand)
def main() -> None:
    """Serve a QRNN model over gRPC.

    MODEL is a checkpoint of qrnn_serve.save (.pt, .safetensors) or a file of qrnn-export (.ts.pt,
    .onnx). Prints one line, `listening on HOST:PORT`, once the model serves; logs to stderr.
    SIGTERM and SIGINT stop it after the running calls.
    """


@main.command(hidden=True)
@click.argument("model", type=click.Path(path_type=Path))
@options_of(ServerConfig)
def serve(model: Path, **settings: Any) -> None:
    """Serve MODEL over gRPC."""
    with _errors_named():
        config = ServerConfig(**settings)
        _log_to_stderr(config.log_level)
        status = _serve(model, config)
    # Threads of replicas may still be in native code; how that ends with the interpreter is
    # undefined.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


@main.command()
@click.option("--device", default=None, help="Check this device only; left out, all of them.")
def doctor(device: str | None) -> None:
    """Show versions, devices and drivers, and check the kernels on each device."""
    with _errors_named():
        from qrnn_serve.server.doctor import examine

        report = examine(device)
    click.echo(report.text)
    sys.exit(0 if report.healthy else 1)


def _serve(model: Path, config: ServerConfig) -> int:
    # gRPC and torch take seconds to import; `--help` and wrong options need neither.
    from qrnn_serve.server.app import Identity
    from qrnn_serve.server.app import serve as serve_model
    from qrnn_serve.server.loading import replica_loaders

    keep_freed_memory()
    loaders = replica_loaders(model, config)
    identity = Identity(name=config.name or _name_of(model), version=config.model_version)
    return asyncio.run(
        serve_model(
            config, identity, loaders, lambda address: click.echo(f"listening on {address}")
        )
    )


def _name_of(model: Path) -> str:
    for ending in _ENDINGS:
        if model.name.endswith(ending) and model.name != ending:
            return model.name.removesuffix(ending)
    return model.name


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )


@contextlib.contextmanager
def _errors_named() -> Iterator[None]:
    """Errors that a user can mend as one line, with their own exit status."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _EXTRAS:
            raise
        message = (
            f"{error.name} is not installed; serving needs one of the extras: "
            "pip install 'qrnn-serve[cpu]', 'qrnn-serve[cuda12]' or 'qrnn-serve[cuda13]'"
        )
    except (QRNNError, OSError) as error:
        message = str(error)
    else:
        return
    click.echo(f"qrnn-serve: {message}", err=True)
    sys.exit(EXIT_CANNOT_START)


if __name__ == "__main__":
    main()
