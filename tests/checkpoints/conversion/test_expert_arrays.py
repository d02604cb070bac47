"""Arrays that hold all experts of a layer become the quantised weights of single experts."""

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.checkpoints.errors import CheckpointError
from tests.checkpoints.small_models import llama, read_config, read_tensors, same, write_checkpoint
from tests.helpers import assert_same_bytes
from tests.models.decoder import tiny

NVFP4, W4A16 = schemes.by_name("nvfp4"), schemes.by_name("w4a16", group_size=32)
EXPERTS = "model.layers.0.mlp.experts"
E, H, INNER = 3, 64, 32


def arrays(transposed):
    random = np.random.default_rng(0)
    scale = np.float32([1, 20, 3])[:, None, None]
    gate_up, down = (
        (random.standard_normal(shape, np.float32) * scale).astype(ml_dtypes.bfloat16)
        for shape in ((E, 2 * INNER, H), (E, H, INNER))
    )
    if transposed:
        gate_up, down = (np.ascontiguousarray(a.transpose(0, 2, 1)) for a in (gate_up, down))
    return {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down}


def single():
    """The same weights as matrices [N, K]."""
    gate_up, down = arrays(False).values()
    found = {}
    for e in range(E):
        parts = {"gate_proj": gate_up[e, :INNER], "up_proj": gate_up[e, INNER:], "down_proj": down[e]}
        found |= {f"{EXPERTS}.{e}.{name}": w for name, w in parts.items()}
    return found


def source_of(path, kind, transposed, nested=False):
    config = {"model_type": "a_vl_model", "text_config": {"model_type": kind}} if nested else {"model_type": kind}
    return write_checkpoint(path, llama(1) | arrays(transposed), config=config)


@pytest.mark.parametrize(
    ("kind", "transposed", "nested"),
    [
        ("qwen3_5_moe", False, False),
        ("gemma4_text", False, True),
        ("llama4", True, False),
        ("qwen3_vl_moe_text", True, True),
    ],
)
@pytest.mark.parametrize("scheme", [NVFP4, W4A16], ids=["nvfp4", "w4a16"])
def test_experts_are_those_of_single_weights(tmp_path, kind, transposed, nested, scheme):
    source = source_of(tmp_path / "source", kind, transposed, nested)
    report = convert(source, tmp_path / "low", scheme, options=ConvertOptions(verify=True))
    low, weights = read_tensors(tmp_path / "low"), single()
    assert set(weights) < set(report.changed) and not any("all experts" in entry.reason for entry in report.left)
    assert not set(arrays(transposed)) & set(low) and not any("experts" in rule for rule in report.ignore)
    for module, w in weights.items():
        parent, _, last = module.rpartition(".")
        fused = ("gate_proj", "up_proj") if last != "down_proj" else (last,)
        amax = max(float(np.abs(np.float32(weights[f"{parent}.{name}"])).max()) for name in fused)
        made = scheme.compress(np.ascontiguousarray(w), amax=amax if scheme.shares_global_scale else None)
        for part, tensor in made.items():
            assert same(low[f"{module}.{part}"], tensor)
    found = {module.name: module for module in inspect(tmp_path / "low", source).modules}
    assert all(found[module].error.sqnr_db > 15 for module in weights)
    dequantize(tmp_path / "low", tmp_path / "back")
    high = read_tensors(tmp_path / "back")
    assert {f"{module}.weight" for module in weights} < set(high)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3"])
def test_transformers_arrays_are_its_single_experts(tmp_path, family):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    said = tiny.config(family)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(said.pop("model_type"), **said)
    )
    made = {}
    for original in (True, False):
        source = tmp_path / f"source-{original}"
        model.to(torch.bfloat16).save_pretrained(source, save_original_format=original)
        convert(source, tmp_path / f"low-{original}", NVFP4)
        made[original] = read_tensors(tmp_path / f"low-{original}")
        assert any(name.endswith("experts.gate_up_proj") for name in read_tensors(source)) != original
    assert_same_bytes(made[False], made[True])


def test_they_may_have_a_scheme_of_their_own(tmp_path):
    source = source_of(tmp_path / "source", "llama4", True)
    report = convert(source, tmp_path / "low", schemes.by_name("fp8_channel"), overrides={"re:.*experts": NVFP4})
    assert report.formats == {"nvfp4": 3 * E, "fp8_channel": 7}
    groups = read_config(tmp_path / "low")["quantization_config"]["config_groups"].values()
    assert [r"re:model\.layers\.0\.mlp\.experts\."] in [group["targets"] for group in groups]


def test_rules_name_single_experts(tmp_path):
    source = source_of(tmp_path / "source", "llama4", True)
    report = convert(source, tmp_path / "low", NVFP4, ignore=["re:.*experts"])
    assert {entry.module: entry.reason for entry in report.left}[f"{EXPERTS}.down_proj"] == "rule re:.*experts"
    assert set(arrays(True)) < set(read_tensors(tmp_path / "low"))
    for rule in (r"re:.*experts\.1\.", "re:.*experts.*up_proj"):
        with pytest.raises(CheckpointError, match="engines hold them as one weight"):
            convert(source, tmp_path / "other", NVFP4, ignore=[rule])


def test_sizes_that_do_not_fit_are_an_error(tmp_path):
    source = source_of(tmp_path / "source", "llama4", True)
    coarse = schemes.by_name("w4a16", group_size=64)
    with pytest.raises(CheckpointError, match=r"w4a16 cannot hold 3 weights .*experts.0.down_proj: its 32 columns"):
        convert(source, tmp_path / "low", coarse)


@pytest.mark.parametrize("shape", [(0, 64, 64), (2, 64, 0), (1 << 15, 1, 2), (2, 64, 63)])
def test_arrays_of_no_experts_are_left_alone(tmp_path, shape):
    tensors = llama(1) | {f"{EXPERTS}.gate_up_proj": np.zeros(shape, ml_dtypes.bfloat16)}
    source = write_checkpoint(tmp_path / "source", tensors, config={"model_type": "llama4"})
    report = convert(source, tmp_path / "low", NVFP4)
    assert {entry.module: entry.reason for entry in report.left}[f"{EXPERTS}.gate_up_proj"].startswith("all experts'")


def test_nan_is_named(tmp_path):
    tensors = llama(1) | arrays(True)
    tensors[f"{EXPERTS}.down_proj"][1, 2, 3] = np.nan
    source = write_checkpoint(tmp_path / "source", tensors, config={"model_type": "llama4"})
    with pytest.raises(CheckpointError, match=f"tensor '{EXPERTS}.down_proj' holds NaN or infinity"):
        convert(source, tmp_path / "low", NVFP4)
