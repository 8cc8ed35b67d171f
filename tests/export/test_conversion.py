"""--dtype and --int8: what is written, what the proof lets through, what it says of the cost."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from qrnn_export import ExportOptions, ParityError, export, verify
from qrnn_export.artefact import read_artefact
from qrnn_export.cost import measure_cost
from qrnn_export.proof import answering, prove, questions, tolerance_of
from qrnn_serve import save
from qrnn_serve.core.errors import ConfigError, InputError
from qrnn_serve.core.proof_file import proof_path
from qrnn_serve.core.tolerances import FLOAT32_MAX_ABS, HALF_RELATIVE_NORM
from qrnn_serve.model.precision import convert
from qrnn_serve.scorers import load_scorer
from support.artefacts import packed, random_model, random_rows
from support.exported import MODELS, make_model, session, write

BOTH = ("torchscript", "onnx")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model of ids with logits, and 40 rows to calibrate on, in one folder."""
    folder = tmp_path_factory.mktemp("conversion")
    save(random_model("ids"), folder / "model.pt")
    rows = random_rows(random_model("ids").config, np.arange(1, 41))
    pq.write_table(pa.table({"ids": [row.tolist() for row in rows]}), folder / "rows.parquet")
    return folder / "model.pt"


@pytest.fixture(scope="module")
def int8(checkpoint):
    """The int8 artefacts of that model, measured on those rows."""
    rows = checkpoint.with_name("rows.parquet")
    options = ExportOptions(formats=BOTH, int8=True, calibrate=rows, column="ids")
    return export(checkpoint, checkpoint.with_name("int8"), options)


@pytest.fixture(scope="module")
def half(checkpoint):
    """The float16 artefacts of that model."""
    options = ExportOptions(formats=BOTH, dtype="float16")
    return export(checkpoint, checkpoint.with_name("half"), options)


def scores(path, rows):
    """What the server's engine for the file scores."""
    return load_scorer(path, threads=1).score(packed(rows)).output


def exact(model, rows):
    """What the model scores when everything but its weights is float64."""
    values = torch.from_numpy(np.concatenate(rows))
    offsets = torch.tensor(np.cumsum([0, *(len(row) for row in rows)]))
    with torch.inference_mode():
        return convert(model, "float64").forward_packed(values, offsets)[0].numpy()


@pytest.mark.parametrize("position", [0, 1])
def test_half_artefacts_take_and_give_float32(checkpoint, half, position):
    """The file holds float16; the wire and numpy see float32; the scores are near float64's."""
    written = half.artefacts[position]
    model = convert(random_model("ids"), "float16")
    rows = random_rows(model.config, [3, 1, 40, 129])
    manifest, read = read_artefact(written.path)

    got, want = scores(written.path, rows), exact(model, rows)

    assert manifest.precision == "float16"
    assert {s.dtype for s in (*manifest.inputs, *manifest.outputs)} == {"int64", "float32"}
    assert {t.dtype for t in read.state_dict().values()} == {torch.float16}
    assert got.dtype == np.float32
    # Two layers and a head, one after another.
    assert np.linalg.norm(got - want) <= 3 * HALF_RELATIVE_NORM["float16"] * np.linalg.norm(want)
    assert not verify(written.path, checkpoint).failures()


def test_bfloat16_is_served_as_torchscript_and_as_a_checkpoint(tmp_path):
    """numpy has no such type, and needs none: both engines give the same float32 numbers."""
    model = convert(random_model("features"), "bfloat16")
    save(model, tmp_path / "model.pt")
    options = ExportOptions(formats=("torchscript",), dtype="bfloat16")
    (written,) = export(tmp_path / "model.pt", options=options).artefacts
    rows = random_rows(model.config, [3, 1, 40])

    both = [scores(path, rows) for path in (written.path, tmp_path / "model.pt")]

    assert written.manifest.precision == "bfloat16"
    np.testing.assert_array_equal(*both)
    wanted = exact(model, [torch.from_numpy(r).bfloat16().double().numpy() for r in rows])
    # Two layers and a head, one after another.
    off = np.linalg.norm(both[0] - wanted) / np.linalg.norm(wanted)
    assert off <= 3 * HALF_RELATIVE_NORM["bfloat16"]


@pytest.mark.parametrize("position", [0, 1])
def test_int8_artefacts_hold_int8_and_score_its_numbers(checkpoint, int8, position):
    """As a module with the rounded weights does, to the tolerance of float32."""
    written = int8.artefacts[position]
    model = convert(random_model("ids"), "int8")
    rows = random_rows(model.config, [3, 1, 40, 129])
    manifest, read = read_artefact(written.path)
    with torch.inference_mode():
        values = torch.from_numpy(np.concatenate(rows))
        want, _ = model.forward_packed(values, torch.tensor([0, 3, 4, 44, 173]))

    assert manifest.precision == "int8"
    assert read.state_dict().keys() == model.state_dict().keys()
    assert read.state_dict()["head.weight"].dtype == torch.int8
    np.testing.assert_allclose(
        scores(written.path, rows), want.numpy(), rtol=0, atol=FLOAT32_MAX_ABS
    )
    assert not verify(written.path, checkpoint).failures()


def test_int8_onnx_keeps_every_matrix_in_int8(int8):
    """A quarter of the bytes; only the embedding, which is looked up, stays float32."""
    graph = onnx.load(int8.artefacts[1].path).graph
    kinds = {t.name: t.data_type for t in graph.initializer if t.name.endswith(".weight")}

    assert kinds.pop("embedding.weight") == onnx.TensorProto.FLOAT
    assert set(kinds.values()) == {onnx.TensorProto.INT8}
    assert len(kinds) == 3


def test_cost_on_the_users_rows_is_counted_and_kept(checkpoint, int8):
    """Largest difference, norm and changed classes as by hand; the same in every proof file."""
    model = random_model("ids")
    rows = [row["ids"] for row in pq.read_table(checkpoint.with_name("rows.parquet")).to_pylist()]
    arrays = [np.array(row) for row in rows]
    values = torch.from_numpy(np.concatenate(arrays))
    offsets = torch.tensor(np.cumsum([0, *map(len, arrays)]))
    with torch.inference_mode():
        before, after = (
            m.forward_packed(values, offsets)[0].double() for m in (model, convert(model, "int8"))
        )
    cost = int8.cost

    assert (cost.before, cost.after, cost.vectors) == ("float32", "int8", 40)
    assert cost.measured_on == "rows.parquet"
    assert cost.largest_difference == pytest.approx(float((after - before).abs().max()), rel=1e-3)
    norm = float((after - before).norm() / before.norm())
    assert cost.relative_norm == pytest.approx(norm, rel=1e-3)
    changed = (after.argmax(1) != before.argmax(1)).double().mean()
    assert cost.changed_argmax == pytest.approx(float(changed))
    assert 1 < cost.bytes_before / cost.bytes_after < 4
    for written in int8.artefacts:
        kept = json.loads(proof_path(written.path).read_text())["measured"]["cost"]
        assert kept["relative_norm"] == cost.relative_norm


def test_changed_classes_are_a_share_of_real_timesteps():
    """Padding is no row: with the head turned round every class changes."""
    model = make_model(MODELS["head at every timestep"])
    turned = make_model(MODELS["head at every timestep"])
    turned.load_state_dict(model.state_dict())
    turned.head.requires_grad_(False)
    turned.head.weight.neg_()
    turned.head.bias.neg_()
    cases = [c for c in questions(model) if c.lengths is not None]

    cost = measure_cost(model, turned, cases, "rows")

    assert cost.vectors == sum(int(case.lengths.sum()) for case in cases)
    assert cost.changed_argmax == 1.0
    assert cost.relative_norm == pytest.approx(2.0)


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_weights_off_by_a_little_are_not_proven(precision, tmp_path):
    """The tolerance of half precision lets rounding through, and nothing ten times as large."""
    torch.manual_seed(1611)
    model = convert(make_model(MODELS["stack windows"]), precision)
    (good,) = write(model, tmp_path, "torchscript")
    good = good.rename(tmp_path / "good.ts.pt")
    moved = {
        name: tensor * (1 + 10 * HALF_RELATIVE_NORM[precision])
        for name, tensor in model.state_dict().items()
    }
    model_moved = convert(model, precision)
    model_moved.load_state_dict(moved, assign=True)
    (bad,) = write(model_moved, tmp_path, "torchscript")

    with pytest.raises(ParityError) as caught:
        prove(model, [good, bad], tmp_path)

    assert {m.artefact for m in caught.value.proof.failures()} == {bad.name}


def test_half_is_measured_against_float32_of_the_same_rounded_numbers():
    """What is allowed is the module's own distance and the tolerance, as a relative norm."""
    model = convert(make_model(MODELS["stack joined"]), "bfloat16")
    wide = convert(model, "float64")
    case = answering(model)(next(c for c in questions(model) if c.state is not None))
    inputs = [torch.from_numpy(a).bfloat16().double() for a in (case.input, case.state)]

    with torch.inference_mode():
        want, _ = wide(inputs[0], None, inputs[1])
        own, _ = model(torch.from_numpy(case.input), None, torch.from_numpy(case.state))

    np.testing.assert_allclose(case.output, want.numpy(), rtol=0, atol=FLOAT32_MAX_ABS)
    off = float((own.double() - want).norm() / want.norm())
    assert case.relative_scale >= 1 + 0.99 * off / HALF_RELATIVE_NORM["bfloat16"]
    assert tolerance_of(model) == HALF_RELATIVE_NORM["bfloat16"]


def test_function_body_of_half_keeps_a_long_memory(tmp_path):
    """Standard operators alone: the recurrence is float32 inside, or 2,000 small steps are lost."""
    model = make_model(MODELS["stack one"])
    linear = model.qrnn.layers[0].linear
    linear.weight.data.mul_(0.1)
    linear.bias.data[4:8] = -6.2  # f near 0.002
    model = convert(model, "float16")
    (path,) = write(model, tmp_path, "onnx")
    values = np.random.default_rng(2).standard_normal((1, 2000, 4)).astype(np.float16)
    want = exact_features(model, values)

    (got,) = session(path, library=False).run(
        ["output"], {"input": values.astype(np.float32), "lengths": np.array([2000])}
    )

    assert np.linalg.norm(got - want) <= 2 * HALF_RELATIVE_NORM["float16"] * np.linalg.norm(want)


def exact_features(model, values):
    """The output in float64 for one row [1, T, I]."""
    with torch.inference_mode():
        return convert(model, "float64")(torch.from_numpy(values).double())[0].numpy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"int8": True, "dtype": "float16"}, "choose one of the two"),
        ({"dtype": "int4"}, "--dtype: expected float32, float16 or bfloat16, got 'int4'"),
        ({"calibrate": "rows.parquet"}, "--calibrate: nothing is converted"),
    ],
)
def test_options_that_contradict_each_other(options, message):
    """Said before a file is read."""
    with pytest.raises(ConfigError, match=message):
        ExportOptions(**options)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (torch.float32, {"dtype": "bfloat16"}, "ONNX with bfloat16.*--dtype float16"),
        (torch.float64, {"int8": True}, "int8: expected a float32 model, got float64"),
    ],
)
def test_conversions_that_a_format_cannot_hold(dtype, options, message, tmp_path):
    """Refused by name, with what to do, and nothing is written."""
    model = make_model(MODELS["stack one"], dtype)

    with pytest.raises(ConfigError, match=message):
        export(model, tmp_path / "out", ExportOptions(**options))
    assert not (tmp_path / "out").exists()


def test_rows_to_calibrate_on_must_fit(checkpoint, tmp_path):
    """As for verify: file, row, what was expected; nothing is written."""
    pq.write_table(pa.table({"ids": [[1, 99]]}), tmp_path / "rows.parquet")
    options = ExportOptions(int8=True, calibrate=tmp_path / "rows.parquet", column="ids")

    with pytest.raises(InputError, match="row 0: expected ids from 0 to 9"):
        export(checkpoint, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
