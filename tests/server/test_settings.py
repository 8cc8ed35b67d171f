"""Settings from flags, environment and file: which one holds, and what is refused."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest
from click.testing import CliRunner

from qrnn_serve import cli
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.settings import gather


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text('port = 1\nthreads = 11\ngrace_s = 111\nhost = "file"\n')
    return path


def test_flags_stand_above_the_environment_above_the_file_above_defaults(file):
    """Each setting has the value of the first source that names it, and says which that was."""
    flags = {"port": 3, "threads": None}
    environ = {"QRNN_SERVE_PORT": "2", "QRNN_SERVE_THREADS": "22", "OTHER": "x"}

    settings = gather(flags, environ, file)

    config, origins = settings.config, settings.origins
    assert (config.port, config.threads, config.grace_s, config.host) == (3, 22, 111.0, "file")
    assert config.max_batch_rows == ServerConfig().max_batch_rows
    assert origins["port"] == "flag"
    assert origins["threads"] == "QRNN_SERVE_THREADS"
    assert origins["grace_s"] == origins["host"] == str(file)
    assert origins["max_batch_rows"] == "default"


def test_environment_names_the_file(file):
    """QRNN_SERVE_CONFIG is the file when no flag names one."""
    settings = gather({}, {"QRNN_SERVE_CONFIG": str(file)}, None)

    assert settings.config.threads == 11


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("ALLOW_UNPROVEN", "true", True),
        ("ALLOW_UNPROVEN", "0", False),
        ("REFLECTION", "no", False),
        ("GRACE_S", "1.5", 1.5),
        ("ENGINE", "onnx", "onnx"),
    ],
)
def test_environment_holds_every_type(variable, text, value):
    """Switches, numbers and choices are read from text."""
    settings = gather({}, {f"QRNN_SERVE_{variable}": text}, None)

    assert getattr(settings.config, variable.lower()) == value


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"QRNN_SERVE_PROT": "1"}, "'QRNN_SERVE_PROT'; did you mean 'QRNN_SERVE_PORT'"),
        ({"QRNN_SERVE_PORT": "tcp://10.0.0.1:8001"}, "QRNN_SERVE_PORT: 'tcp://10.0.0.1:8001'"),
        ({"QRNN_SERVE_ENGINE": "jax"}, "QRNN_SERVE_ENGINE"),
        ({"QRNN_SERVE_PORT": "70000"}, "port: expected 0 to 65535, got 70000"),
        ({"QRNN_SERVE_CONFIG": "none.toml"}, "none.toml: cannot read"),
    ],
)
def test_environment_that_is_wrong_is_refused(environ, message):
    """An unknown variable of ours names the nearest one; a wrong value names its variable."""
    with pytest.raises(ConfigError) as refused:
        gather({}, environ, None)

    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("queue_timestep = 5", "unknown setting 'queue_timestep'; did you mean 'queue_timesteps'"),
        ("queue-bytes = 5", "did you mean 'queue_bytes'"),
        ('port = "8001"', "port: expected int, got '8001'"),
        ('engine = "jax"', "engine: expected one of"),
        ("threads = true", "threads: expected int, got True"),
        ("port = ", "not a TOML file"),
        ("max_batch_rows = 0", "max_batch_rows: expected at least 1"),
    ],
)
def test_file_that_is_wrong_is_refused(tmp_path, text, message):
    """Unknown keys, wrong types, values and syntax are errors that say what is wrong and where."""
    path = tmp_path / "serve.toml"
    path.write_text(text)

    with pytest.raises(ConfigError) as refused:
        gather({}, {}, path)

    assert message in str(refused.value)


def test_config_command_shows_every_setting_with_its_origin(file, monkeypatch):
    """What it prints is a file with the same settings, and names where each comes from."""
    monkeypatch.setenv("QRNN_SERVE_THREADS", "2")

    shown = CliRunner().invoke(
        cli.main, ["config", "--config", str(file), "--max-batch-rows", "9", "--reflection"]
    )

    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert len(lines) == len(dataclasses.fields(ServerConfig))
    assert "threads = 2  # QRNN_SERVE_THREADS" in lines
    assert "max_batch_rows = 9  # flag" in lines
    assert f'host = "file"  # {file}' in lines
    assert "# name is left out  # default" in lines
    expected = ServerConfig(
        port=1, threads=2, grace_s=111.0, host="file", max_batch_rows=9, reflection=True
    )
    assert ServerConfig(**tomllib.loads(shown.output)) == expected


def test_config_command_names_what_is_wrong(monkeypatch):
    """A wrong setting is one line and exit status 2."""
    monkeypatch.setenv("QRNN_SERVE_TREADS", "2")

    shown = CliRunner().invoke(cli.main, ["config"])

    assert shown.exit_code == 2
    assert "did you mean 'QRNN_SERVE_THREADS'?" in shown.output
