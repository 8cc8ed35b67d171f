"""A served model whose layers are placed: the command, plan files, what the server says of it."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from click.testing import CliRunner

from qrnn_protos.v1 import prediction_pb2 as pb
from qrnn_protos.v1 import prediction_pb2_grpc
from qrnn_serve import cli
from qrnn_serve.core.errors import ConfigError
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS
from qrnn_serve.scorers import placement
from qrnn_serve.server import config as server_config
from qrnn_serve.server.config import ServerConfig
from qrnn_serve.server.placing import replica_specs
from support.artefacts import CONFIGS, random_rows, scores_by_hand
from support.server_process import run_command, server_process
from support.servers import array, request

MIXED = """
[[replicas]]
stages = [{ device = "cpu", first = 0, last = 1 }, { device = "cpu", first = 2, last = 2 }]
[[replicas]]
stages = [{ device = "cpu", first = 0, last = 2 }]
"""


def stages_of(specs):
    return [[(s.device, s.first, s.last) for s in spec.stages] for spec in specs]


def settings(**changes):
    return ServerConfig(**{"device": "cpu,cpu", "threads": 1} | changes)


@pytest.mark.parametrize("processes", ["never", "always"])
def test_layers_on_two_devices_serve_the_references_scores(artefacts, tmp_path, processes):
    """Through the command and gRPC, in a thread and in a process; long rows are cut in time."""
    model = artefacts["causal"].model
    rows = random_rows(CONFIGS["causal"], [7, 1, 30, 2, 2, 1500])
    options = ("--device", "cpu,cpu", "--placement", "layers", "--prometheus-port", 0)
    with (
        server_process(
            artefacts["causal"].paths["native"],
            tmp_path / "log",
            *options,
            *("--replica-processes", processes),
        ) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        stub = prediction_pb2_grpc.PredictionServiceStub(channel)
        reply = stub.Predict(request(rows), timeout=30)
        listed = stub.ListModels(pb.ListModelsRequest(), timeout=30)
        port = re.search(r"metrics port=(\d+)", server.log)[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            metrics = page.read().decode()
        log = server.log

    np.testing.assert_allclose(
        array(reply.output), scores_by_hand(model, rows), rtol=0, atol=FLOAT32_MAX_ABS
    )
    assert reply.device == listed.models[0].devices[0] == "cpu+cpu"
    busy = re.findall(
        r'qrnn_stage_busy_seconds_total\{device="cpu",layers="(\d-\d)".*\} ([\d.e-]+)', metrics
    )
    assert [layers[0] for layers, _ in busy] == ["0", busy[1][0][0]]
    assert all(float(seconds) > 0 for _, seconds in busy)
    sizes = re.findall(r"qrnn_stage_weight_bytes\{.*\} ([\d.e+]+)", metrics)
    weights = sum(w.numel() * w.element_size() for w in model.state_dict().values())
    assert sum(map(float, sizes)) == weights
    assert "placement: # layers: one copy of the model, its layers over 2 devices" in log
    assert "placement: stages = [" in log


def test_plan_command_prints_a_plan_file_that_serves(artefacts, tmp_path):
    """What `plan` prints is what `--placement FILE` takes."""
    path = artefacts["causal"].paths["torchscript"]
    shown = CliRunner().invoke(
        cli.main, ["plan", str(path), "--device", "cpu,cpu,cpu", "--placement", "layers"]
    )
    assert shown.exit_code == 0, shown.output
    (tmp_path / "plan.toml").write_text(shown.stdout)

    config = settings(device="cpu,cpu,cpu", placement=str(tmp_path / "plan.toml"))

    assert stages_of(replica_specs(path, config)) == [[("cpu", n, n) for n in range(3)]]
    assert "layers over 3 devices" in shown.stdout


def test_plan_command_says_what_is_missing(artefacts):
    """A model that fits nowhere: bytes and what would do, exit status 2, no traceback."""
    shown = run_command(
        *("plan", artefacts["causal"].paths["native"], "--device", "cpu,cpu"),
        *("--model-memory-bytes", 3000),
    )

    assert shown.returncode == 2
    assert re.search(r"[\d,]+ bytes are missing on a device", shown.stderr)
    assert "Traceback" not in shown.stderr


def test_mixed_plans_are_replicas_of_several_stages_or_one(artefacts, tmp_path):
    """A replica of one stage is served by the engine that the file is for."""
    (tmp_path / "plan.toml").write_text(MIXED)
    path = artefacts["causal"].paths["torchscript"]

    specs = replica_specs(path, settings(placement=str(tmp_path / "plan.toml")))

    assert stages_of(specs) == [[("cpu", 0, 1), ("cpu", 2, 2)], []]


def test_auto_cuts_only_what_may_be_too_large(artefacts, monkeypatch):
    """Small files are replicated without a plan; others are measured, and cut if they must."""
    path = artefacts["causal"].paths["native"]
    assert stages_of(replica_specs(path, settings())) == [[], []]

    monkeypatch.setattr(server_config, "SURELY_FITS_BYTES", 10)
    assert stages_of(replica_specs(path, settings())) == [[], []]
    cut = replica_specs(path, settings(device="cpu,cpu,cpu", model_memory_bytes=12_000))
    assert [len(spec.stages) for spec in cut] in ([2], [3])
    assert stages_of(replica_specs(path, settings(placement="replicate"))) == [[], []]
    onnx = replica_specs(artefacts["causal"].paths["onnx"], settings())
    assert stages_of(onnx) == [[], []]


def test_a_plan_uses_devices_of_the_settings(artefacts, tmp_path):
    """Devices that --device does not name are refused before anything is loaded."""
    (tmp_path / "plan.toml").write_text(MIXED.replace("cpu", "cuda:1"))

    with pytest.raises(ConfigError, match="uses cuda:1, which --device does not name"):
        replica_specs(
            artefacts["causal"].paths["native"], settings(placement=str(tmp_path / "plan.toml"))
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.pt", "--placement", "row"), "expected auto, replicate, layers or the name of a .toml"),
        (("plan", "x.pt", "--placement", "none.toml"), "none.toml is a plan already"),
        (("plan", "x.pt", "--placement", "layers"), "x.pt: no such file"),
        ((".", "--placement", "plan.toml"), "a plan file is of one model"),
    ],
)
def test_wrong_placements_exit_with_2(arguments, message, tmp_path, monkeypatch):
    """One line that says what was expected."""
    monkeypatch.chdir(tmp_path)

    shown = CliRunner().invoke(cli.main, arguments)

    assert shown.exit_code == 2
    assert message in shown.output
    with pytest.raises(ConfigError, match=r"cannot read none\.toml: No such file"):
        replica_specs(Path("x.pt"), settings(placement="none.toml"))


def test_plan_help_names_the_settings():
    """The same options as serving has."""
    shown = CliRunner().invoke(cli.main, ["plan", "--help"])

    assert shown.exit_code == 0
    assert "--placement" in shown.output


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"placement": "replicate"}, 200),
        ({"placement": "auto"}, 200),
        ({"placement": "layers"}, 100),
        ({"placement": "auto", "model_memory_bytes": 60}, 100),
        ({"placement": "layers", "device": "cuda:0,cuda:1"}, 50),
        ({"placement": "replicate", "device": "cuda:0,cuda:1"}, 100),
    ],
)
def test_bytes_on_a_device_follow_the_placement(changes, counted):
    """Copies on one device add up; layers over several devices share."""
    assert settings(**changes).bytes_on_a_device(100) == counted


def test_environment_and_file_set_it(tmp_path):
    """As every setting."""
    (tmp_path / "serve.toml").write_text('placement = "layers"\n')
    shown = CliRunner().invoke(
        cli.main,
        ["config", "--config", str(tmp_path / "serve.toml")],
        env={"QRNN_SERVE_PLACEMENT": "replicate"},
    )

    assert 'placement = "replicate"  # QRNN_SERVE_PLACEMENT' in shown.output


def test_stage_is_data():
    """A spec with a plan goes to a replica's process as JSON and comes back."""
    from qrnn_serve.core.config import from_mapping, to_mapping
    from qrnn_serve.scorers import ScorerSpec

    spec = ScorerSpec(path="x", stages=(placement.Stage(device="cpu", first=0, last=3),))

    assert from_mapping(ScorerSpec, to_mapping(spec)) == spec
