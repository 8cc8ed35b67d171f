"""`qrnn-serve MODEL` serves; `plan`, `config` and `doctor` show what it would do with what."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from qrnn_serve.core.errors import ConfigError, QRNNError
from qrnn_serve.core.first_process import leave_process_1
from qrnn_serve.core.malloc import keep_freed_memory
from qrnn_serve.server.config import PLACEMENTS, ServerConfig
from qrnn_serve.server.event_loop import run
from qrnn_serve.server.options import options_of
from qrnn_serve.server.repository import ARTEFACT_ENDINGS
from qrnn_serve.server.settings import CONFIG_FILE, PREFIX, gather

EXIT_CANNOT_START = 2

_EXTRAS = {"torch", "onnxruntime", "safetensors", "grpc_health", "grpc_reflection", "google"}


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
        formatter.write_usage("qrnn-serve", "plan MODEL [OPTIONS]")
        formatter.write_usage("qrnn-serve", "config [OPTIONS]")
        formatter.write_usage("qrnn-serve", "doctor")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of serving, which are what people look for, and the commands."""
        self.commands["serve"].format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


_config_file = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    default=None,
    help=f"TOML file with settings, for what neither flags nor {PREFIX}... variables say; also "
    f"named by {CONFIG_FILE}.",
)


@click.group(cls=ModelOrCommand)
def main() -> None:
    """Serve QRNN models over gRPC.

    MODEL is a checkpoint of qrnn_serve.save (.pt, .safetensors), a file of qrnn-export (.ts.pt,
    .pt2, .onnx), or a folder of models, MODEL/NAME/VERSION/FILE, of which the highest versions are
    served. Prints one line, `listening on HOST:PORT`, once they serve; logs to stderr.
    SIGTERM and SIGINT stop it after the running calls.
    """


@main.command(hidden=True)
@click.argument("model", type=click.Path(path_type=Path))
@_config_file
@options_of(ServerConfig)
def serve(model: Path, config_file: Path | None, **flags: Any) -> None:
    """Serve MODEL over gRPC."""
    leave_process_1()
    with _errors_named():
        config = gather(flags, os.environ, config_file).config
        _log_to_stderr(config.log_level)
        status = _serve(model, config)
    # Threads of replicas may still be in native code; how that ends with the interpreter is
    # undefined.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


@main.command()
@_config_file
@options_of(ServerConfig)
def config(config_file: Path | None, **flags: Any) -> None:
    """Show every setting that would hold, and where it comes from, as a TOML file."""
    with _errors_named():
        click.echo(gather(flags, os.environ, config_file).as_toml())


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@_config_file
@options_of(ServerConfig)
def plan(model: Path, config_file: Path | None, **flags: Any) -> None:
    """Show where the layers of MODEL would be, and why, as a plan file; serves nothing."""
    with _errors_named():
        config = gather(flags, os.environ, config_file).config
        _log_to_stderr(config.log_level)
        from qrnn_serve.server.placing import plan_of

        click.echo(plan_of(model, config).as_toml())


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
    from qrnn_serve.server.app import Repository
    from qrnn_serve.server.app import serve as serve_models
    from qrnn_serve.server.lifecycle import ModelSource
    from qrnn_serve.server.loading import replica_loaders

    keep_freed_memory()
    loaders_of = functools.partial(replica_loaders, config=config)
    served: ModelSource | Repository
    if model.is_dir():
        if config.name is not None:
            raise ConfigError("name: models of a repository are named by their folders, got a name")
        if config.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement: a plan file is of one model, and {model} is a repository; expected "
                f"{', '.join(PLACEMENTS)}, got {config.placement!r}"
            )
        served = Repository(folder=model, loaders_of=loaders_of)
    else:
        served = ModelSource(
            name=config.name or _name_of(model),
            version=config.model_version,
            loaders=functools.partial(loaders_of, model),
        )
    main = serve_models(config, served, lambda address: click.echo(f"listening on {address}"))
    return run(main, config.event_loop)


def _name_of(model: Path) -> str:
    for ending in ARTEFACT_ENDINGS:
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
