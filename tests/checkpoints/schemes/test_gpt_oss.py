"""MXFP4 in GPT-OSS's arrays: transformers decodes the same bits, and conversion gives what it reads."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import inspect
from jaxlowprec.checkpoints.conversion.jobs import compare_shards
from jaxlowprec.checkpoints.conversion.quantizing import plan_quantization
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Choice, Rules
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from tests.checkpoints.small_models import llama, read_config, read_tensors, same, write_checkpoint
from tests.checkpoints.weights import FLOATS, assert_same_tensors
from tests.eager import jlp
from tests.helpers import as_bytes

SCHEME = schemes.by_name("gpt_oss_mxfp4")
CONFIG = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
EXPERTS = "model.layers.0.mlp.experts"


def array(shape=(3, 64, 48), dtype="bfloat16", seed=0):
    """[E, K, N] with blocks of many magnitudes, one of them zero."""
    random = np.random.default_rng(seed)
    w = random.standard_normal(shape, np.float32) * np.exp2(random.integers(-20, 4, (shape[0], 1, shape[2])))
    w[0, :32, 0] = 0
    return w.astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


def model():
    """Tensors with the names and orders of axes of GPT-OSS."""
    tensors = {name: w for name, w in llama(1).items() if ".mlp." not in name}
    return tensors | {
        "model.layers.0.mlp.router.weight": array((1, 3, 64))[0],
        f"{EXPERTS}.gate_up_proj": array((3, 64, 96)),
        f"{EXPERTS}.gate_up_proj_bias": array((1, 3, 96))[0],
        f"{EXPERTS}.down_proj": array((3, 64, 64), seed=1),
        f"{EXPERTS}.down_proj_bias": array((1, 3, 64))[0],
    }


@pytest.mark.parametrize("dtype", FLOATS)
def test_store_is_the_inverse_of_load_and_compress_quantises(dtype):
    w = array(dtype=dtype)
    tensors = SCHEME.compress(w)
    assert {n: (t.dtype.name, t.shape) for n, t in tensors.items()} == SCHEME.output_specs(w.shape, dtype)
    loaded = SCHEME.load(tensors, dtype)
    assert loaded.shape == (3, 48, 64) and SCHEME.shape_of(tensors) == w.shape
    assert_same_tensors(SCHEME.store(loaded), tensors)
    assert_same_tensors(SCHEME.store(jlp.quantize(w.transpose(0, 2, 1), SCHEME.format)), tensors)
    decoded = SCHEME.decompress(tensors, dtype)
    np.testing.assert_array_equal(as_bytes(decoded), as_bytes(np.asarray(loaded.dequantize().swapaxes(1, 2))))
    again = SCHEME.decompress(SCHEME.compress(decoded), dtype)
    np.testing.assert_array_equal(again, decoded)  # a zero may lose its sign


def test_transformers_decodes_the_same_bits():
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is not installed")
    random = np.random.default_rng(0)
    tensors = {
        "blocks": random.integers(0, 256, (2, 48, 2, 16), np.uint8),
        "scales": random.integers(1, 250, (2, 48, 2), np.uint8),
    }
    theirs = mxfp4.convert_moe_packed_tensors(*(torch.from_numpy(tensors[n]) for n in ("blocks", "scales")))
    ours = SCHEME.decompress(tensors)
    assert ours.shape == (2, 64, 48)
    np.testing.assert_array_equal(theirs.view(torch.int16).numpy().view(np.uint16), as_bytes(ours))


def test_a_checkpoint_and_back(tmp_path):
    source = write_checkpoint(tmp_path / "source", model(), config=CONFIG)
    report = convert(source, tmp_path / "low", SCHEME, options=ConvertOptions(verify=True))
    arrays = [f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"]
    assert report.changed == arrays and report.formats == {"gpt_oss_mxfp4": 2}
    reasons = {entry.module: entry.reason for entry in report.left}
    assert reasons["model.layers.0.self_attn.q_proj"] == "not an array of experts"
    assert reasons["model.layers.0.mlp.router"] == "default: routers"
    entry = read_config(tmp_path / "low")["quantization_config"]
    assert entry["quant_method"] == "mxfp4" and "model.layers.0.self_attn.q_proj" in entry["modules_to_not_convert"]
    assert not any("experts" in module for module in entry["modules_to_not_convert"])
    low, tensors = read_tensors(tmp_path / "low"), model()
    for name in arrays:
        for part, made in SCHEME.compress(tensors[name]).items():
            assert same(low[f"{name}_{part}"], made)
    assert same(low[f"{EXPERTS}.gate_up_proj_bias"], tensors[f"{EXPERTS}.gate_up_proj_bias"])

    found = {module.name: module for module in inspect(tmp_path / "low", source).modules}
    assert found[arrays[1]].shape == (3, 64, 96) and found[arrays[1]].bits == 4.25
    assert 15 < found[arrays[1]].error.sqnr_db < 25 and found[f"{arrays[1]}_bias"].error.sqnr_db is None

    dequantize(tmp_path / "low", tmp_path / "back", options=ConvertOptions(verify=True))
    high = read_tensors(tmp_path / "back")
    assert set(high) == set(tensors) and read_config(tmp_path / "back") == CONFIG
    for name in arrays:
        assert same(high[name], SCHEME.decompress(SCHEME.compress(tensors[name])))
    convert(tmp_path / "back", tmp_path / "again", SCHEME)  # a decoded model is held exactly
    dequantize(tmp_path / "again", tmp_path / "same")
    for name, tensor in read_tensors(tmp_path / "same").items():
        np.testing.assert_array_equal(tensor, high[name])


@pytest.mark.slow
@pytest.mark.parametrize("verify", [False, True])
def test_one_expert_is_in_memory(tmp_path, verify):
    """Converting and decoding take less than a seventh of an array of 64 experts, and so does comparing at the end."""
    whole = array((64, 128, 256), "float32")
    source = write_checkpoint(tmp_path / "source", {f"{EXPERTS}.down_proj": whole}, 1, CONFIG)
    convert(source, tmp_path / "warm", SCHEME)
    options = ConvertOptions(workers=1, verify=verify)
    assert peak_of(lambda: convert(source, tmp_path / "low", SCHEME, options=options)) < whole.nbytes / 8
    low = read_tensors(tmp_path / "low")
    for part, made in SCHEME.compress(whole).items():
        assert same(low[f"{EXPERTS}.down_proj_{part}"], made)
    back = tmp_path / "back"
    assert peak_of(lambda: dequantize(tmp_path / "low", back, dtype="float32", options=options)) < whole.nbytes / 8
    decoded = SCHEME.decompress(SCHEME.compress(whole), "float32")
    assert same(read_tensors(back)[f"{EXPERTS}.down_proj"], decoded)
    found = []
    assert peak_of(lambda: found.append(inspect(tmp_path / "low", source, workers=1))) < whole.nbytes / 2
    error = np.float64(whole) - decoded
    assert found[0].modules[0].error.max_abs == np.abs(error).max()
    sqnr = 10 * np.log10(np.square(np.float64(whole)).sum() / np.square(error).sum())
    assert found[0].modules[0].error.sqnr_db == pytest.approx(sqnr, rel=1e-9)


def peak_of(work):
    """The most bytes that Python's and numpy's arrays had at a time."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("part", ["blocks", "scales"])
def test_a_changed_bit_in_the_last_expert_is_found(tmp_path, part):
    source = write_checkpoint(tmp_path / "source", model(), 1, CONFIG)
    convert(source, tmp_path / "low", SCHEME)
    name, low = f"{EXPERTS}.down_proj_{part}", read_tensors(tmp_path / "low")
    low[name] = low[name].copy()
    low[name].reshape(-1)[-1] ^= 1
    with CheckpointFolder(source) as opened:
        plan = plan_quantization(opened, Choice(SCHEME), Rules(defaults=DEFAULTS))
        with CheckpointFolder(tmp_path / "low") as made:
            assert compare_shards(plan, opened, made, 1, None) == len(low)
        changed, differs = write_checkpoint(tmp_path / "changed", low, 1, CONFIG), f"'{name}' differs from the source's"
        with CheckpointFolder(changed) as made, pytest.raises(CheckpointError, match=differs):
            compare_shards(plan, opened, made, 1, None)


def test_an_expert_that_is_not_finite_is_named(tmp_path):
    tensors = {f"{EXPERTS}.down_proj_{part}": t for part, t in SCHEME.compress(array()).items()}
    tensors[f"{EXPERTS}.down_proj_scales"][2] = 200
    config = CONFIG | {"quantization_config": SCHEME.quantization_config([])}
    source = write_checkpoint(tmp_path / "low", tensors, 1, config)
    dequantize(source, tmp_path / "high", dtype="float32")
    with pytest.raises(CheckpointError, match=r"module '.*down_proj': its numbers reach .*, but float16 ends at 65504"):
        dequantize(source, tmp_path / "narrow", dtype="float16")


def test_a_model_of_transformers_loads_it(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    config = transformers.GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
    )
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "high")
    convert(tmp_path / "high", tmp_path / "low", SCHEME)
    dequantize(tmp_path / "low", tmp_path / "back")
    loaded, plain = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        for name in ("low", "back")
    )
    ours = plain.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, ours[name]), name


class TestRefused:
    def test_other_schemes_leave_its_arrays_alone(self, tmp_path):
        source = write_checkpoint(tmp_path / "source", model(), config=CONFIG)
        report = convert(source, tmp_path / "low", schemes.by_name("mxfp4"))
        reasons = {entry.module: entry.reason for entry in report.left}
        why = "all experts' weights in one array with gate and up in turns, which gpt_oss_mxfp4 holds"
        assert reasons[f"{EXPERTS}.gate_up_proj"] == why

    def test_a_model_without_arrays(self, tmp_path):
        source = write_checkpoint(tmp_path / "source", llama(1))
        with pytest.raises(CheckpointError, match="nothing to quantise.* not an array of experts"):
            convert(source, tmp_path / "low", SCHEME)

    def test_shapes(self):
        assert "2 dimensions; gpt_oss_mxfp4 holds the experts' arrays" in SCHEME.check((64, 64))
        assert SCHEME.check((2, 40, 64)) == "its K of 40 is not a multiple of the 32 that share a scale"
        assert SCHEME.check((0, 32, 64)) == "it is empty" and SCHEME.check((2, 64, 7)) is None

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_is_not_finite(self, bad):
        w = array()
        w[1, 2, 3] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            SCHEME.compress(w)

    def test_amax(self):
        with pytest.raises(ValueError, match="amax=1.0; its scales are those of blocks"):
            SCHEME.compress(array(), amax=1.0)

    @pytest.mark.parametrize("part", ["blocks", "scales"])
    def test_tensors_of_other_shapes_and_dtypes(self, tmp_path, part):
        tensors = SCHEME.compress(array())
        harms = (lambda a: a[:-1], lambda a: a[:, :, :1], lambda a: a[0], lambda a: a.view(np.int8), lambda a: a[None])
        for i, harm in enumerate(harms):
            changed = {**tensors, part: np.ascontiguousarray(harm(tensors[part]))}
            names = {f"{EXPERTS}.down_proj_{name}": tensor for name, tensor in changed.items()}
            config = CONFIG | {"quantization_config": SCHEME.quantization_config([])}
            path = write_checkpoint(tmp_path / str(i) / "low", names, shards=1, config=config)
            with pytest.raises(CheckpointError, match=f"module '{EXPERTS}.down_proj'"):
                inspect(path)

    def test_arrays_of_other_formats(self):
        with pytest.raises(ValueError, match="gpt_oss_mxfp4.store: q has format NVFP4"):
            SCHEME.store(jlp.quantize(array().transpose(0, 2, 1), jlp.NVFP4()))
        with pytest.raises(ValueError, match="cannot hold a weight of shape"):
            SCHEME.store(jlp.quantize(array()[0].T, SCHEME.format))
