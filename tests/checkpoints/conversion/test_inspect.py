"""What a checkpoint holds, and how far it is from its copy in high precision."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import convert
from jaxlowprec.checkpoints.conversion.inspect import (
    InspectedModule,
    Inspection,
    WeightError,
    error_of,
    inspect,
    layer_of,
    plot_sqnr,
    sqnr_by_kind,
)
from jaxlowprec.checkpoints.errors import CheckpointError
from tests.checkpoints.small_models import llama, read_tensors, write_checkpoint

MXFP4 = schemes.by_name("mxfp4")
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, and the same in MXFP4."""
    path = tmp_path_factory.mktemp("models")
    write_checkpoint(path / "high", llama())
    convert(path / "high", path / "low", MXFP4)
    return path / "high", path / "low"


def named(inspection):
    return {module.name: module for module in inspection.modules}


def test_formats_shapes_and_sizes(folders):
    high, low = folders
    found, tensors = inspect(low), read_tensors(low)
    assert found.scheme == "mxfp4"
    up = named(found)[UP]
    assert (up.format, up.shape, up.error) == ("mxfp4", (256, 128), None)
    assert up.nbytes == tensors[f"{UP}.weight_packed"].nbytes + tensors[f"{UP}.weight_scale"].nbytes
    assert up.bits == 4.25
    assert named(found)["lm_head"].format == "BF16"
    assert sum(m.nbytes for m in found.modules) == sum(a.nbytes for a in tensors.values())
    assert found.by_format["mxfp4"][0] == 14 and inspect(high).scheme is None


def test_errors_are_those_of_the_decoded_weights(folders):
    high, low = folders
    found = named(inspect(low, high))
    w = read_tensors(high)[f"{UP}.weight"].astype(np.float64)
    stored = {s: read_tensors(low)[f"{UP}.{s}"] for s in MXFP4.required}
    noise = w - MXFP4.decompress(stored, "float32").astype(np.float64)
    assert found[UP].error.sqnr_db == pytest.approx(10 * np.log10((w**2).sum() / (noise**2).sum()), rel=1e-9)
    assert found[UP].error.max_abs == np.abs(noise).max()
    assert found["lm_head"].error == WeightError(None, 0.0)
    assert 15 < found[UP].error.sqnr_db < 25


def test_pieces_add_up(monkeypatch):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((7, 11)).astype(ml_dtypes.bfloat16) for _ in range(2))
    whole = error_of(a, b)
    monkeypatch.setattr("jaxlowprec.checkpoints.conversion.inspect._CHUNK", 10)
    assert error_of(a, b).sqnr_db == pytest.approx(whole.sqnr_db) and error_of(a, b).max_abs == whole.max_abs
    assert error_of(np.ones(3, np.float32), np.zeros(3, np.float32)) == WeightError(-np.inf, 1.0)


def test_layers_are_in_their_order(tmp_path):
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": np.ones((1, 32), np.float32) for i in (10, 9, 2)}
    found = inspect(write_checkpoint(tmp_path / "x", tensors))
    assert [m.name.split(".")[2] for m in found.modules] == ["2", "9", "10"]


def test_digits_that_are_no_numbers_are_names(tmp_path):
    odd = ["²", "٣", "௧", "9" * 5000, "1" * 10]
    tensors = {f"m.{part}.up.weight": np.ones((1, 32), np.float32) for part in (*odd, "007", "8")}
    found = inspect(write_checkpoint(tmp_path / "x", tensors, shards=1))
    parts = [m.name.split(".")[1] for m in found.modules]
    assert parts == ["007", "8", *sorted(odd)]
    assert [layer_of(m.name) for m in found.modules] == [7, 8] + [None] * 5


def test_a_picture_of_names_with_such_digits():
    assert sqnr_by_kind(modules("m.².up", "m." + "9" * 5000 + ".up", "m.3.²")) == {
        "m.².up": {None: [20.0]},
        "m." + "9" * 5000 + ".up": {None: [21.0]},
        "²": {3: [22.0]},
    }


def test_json_holds_the_same(folders):
    found = inspect(folders[1], folders[0])
    content = json.loads(json.dumps(found.as_json()))
    assert content["scheme"] == "mxfp4" and content["formats"]["mxfp4"]["modules"] == 14
    up = next(m for m in content["modules"] if m["name"] == UP)
    assert up["bits_per_element"] == 4.25 and up["error"]["sqnr_db"] == named(found)[UP].error.sqnr_db


def test_a_reference_that_does_not_fit_is_refused(folders, tmp_path):
    tensors = read_tensors(folders[0])
    name = f"{UP}.weight"
    fewer = write_checkpoint(tmp_path / "fewer", {n: a for n, a in tensors.items() if n != name})
    with pytest.raises(CheckpointError, match=f"has no '{name}' to compare with"):
        inspect(folders[1], fewer)
    other = write_checkpoint(tmp_path / "other", tensors | {name: tensors[name][:8]})
    with pytest.raises(CheckpointError, match=r"is \[8, 128\], in .* it is \[256, 128\]"):
        inspect(folders[1], other)
    with pytest.raises(CheckpointError, match="to compare with"):
        inspect(folders[1], folders[1])


def test_half_a_module_is_an_error(folders, tmp_path):
    tensors = {n: a for n, a in read_tensors(folders[1]).items() if n != f"{UP}.weight_scale"}
    config = json.loads((folders[1] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"module '{UP}' has weight_packed; mxfp4 also needs weight_scale"):
        inspect(write_checkpoint(tmp_path / "x", tensors, config=config))


@pytest.mark.parametrize(
    "entry",
    [{"quant_method": "unheard-of"}, {"quant_method": "compressed-tensors", "config_groups": []}, {"quant_method": 7}],
)
def test_a_config_that_names_no_known_format_is_an_error(tmp_path, entry):
    path = write_checkpoint(tmp_path / "x", llama(1), config={"quantization_config": entry})
    with pytest.raises(CheckpointError, match="config.json: "):
        inspect(path)


def modules(*names, sqnr=20.0):
    return Inspection(
        "x",
        "mxfp4",
        tuple(InspectedModule(n, "mxfp4", (2, 2), 4, WeightError(sqnr + i, 0.1)) for i, n in enumerate(names)),
    )


def test_series_of_the_picture():
    found = modules(
        "m.layers.0.mlp.up", "m.layers.1.mlp.up", "m.layers.0.experts.0.w1", "m.layers.0.experts.7.w1", "lm_head"
    )
    assert sqnr_by_kind(found) == {
        "mlp.up": {0: [20.0], 1: [21.0]},
        "experts.w1": {0: [22.0, 23.0]},
        "lm_head": {None: [24.0]},
    }


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(folders, tmp_path, ending):
    pytest.importorskip("matplotlib")
    plot_sqnr(inspect(folders[1], folders[0]), tmp_path / f"x.{ending}")
    head = (tmp_path / f"x.{ending}").read_bytes()[:8]
    assert head.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_what_no_picture_can_be_drawn_of(folders, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(CheckpointError, match="no module has an error to draw"):
        plot_sqnr(inspect(folders[1]), tmp_path / "x.png")
    with pytest.raises(CheckpointError, match="x.xyz: cannot be drawn"):
        plot_sqnr(modules("m.layers.0.up"), tmp_path / "x.xyz")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CheckpointError, match="needs matplotlib: pip install"):
        plot_sqnr(modules("m.layers.0.up"), tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
