"""Decoders of every family from folders, and back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.checkpoints import TreeMapping, activation_scales, convert, decoders, dequantize, save, schemes
from jaxlowprec.checkpoints.families.known import mapping_for
from jaxlowprec.models.decoder.config import FAMILIES
from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push
from tests.checkpoints.small_models import read_config, read_tensors, write_checkpoint
from tests.helpers import assert_same_bytes, often
from tests.models.decoder import tiny


@pytest.mark.parametrize("family", often(("phi3", "gpt_oss", "deepseek_v3"), tiny.FAMILIES))
def test_an_export_has_the_bytes_of_the_source(family, tmp_path):
    source = tiny.folder(tmp_path / "source", family)
    decoder = decoders.load(source)
    decoders.export(source, tmp_path / "export", decoder)
    assert_same_bytes(read_tensors(tmp_path / "export"), read_tensors(source))
    assert read_config(tmp_path / "export") == read_config(source) | {"dtype": "bfloat16"}


def test_a_bias_that_chooses_experts_is_not_rounded(tmp_path):
    source = tiny.folder(tmp_path / "source", "deepseek_v3", num_nextn_predict_layers=1)
    decoder = decoders.load(source)
    bias = jnp.float32([0.1, 0.2, 0.3, 1 + 2**-20])
    decoder.layers[1].mlp.selection_bias.set_value(bias)
    decoders.export(source, tmp_path / "export", decoder)
    assert_same_bytes(decoders.load(tmp_path / "export").layers[1].mlp.selection_bias.get_value(), bias)
    assert read_config(tmp_path / "export")["num_nextn_predict_layers"] == 0


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    source = tiny.folder(tmp_path / "source", "glm4_moe")
    draft = {"model.layers.2.enorm.weight": np.ones(128, np.float32)}
    write_checkpoint(tmp_path / "whole", read_tensors(source) | draft, 1, read_config(source))
    assert_same_bytes(*(nnx.state(decoders.load(folder)) for folder in (tmp_path / "whole", source)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_quantised_parts_are_joined_and_taken_apart(family, tmp_path):
    """Files of these families have one matrix for queries, keys and values, or for gate and up."""
    source = tiny.folder(tmp_path / "source", family)
    quantized = jlp.quantize_params(decoders.load(source), jlp.Int4QAT(group_size=32))
    decoders.export(source, tmp_path / "export", quantized, schemes.by_name("w4a16", group_size=32))
    assert "model.layers.1.mlp.gate_up_proj.weight_packed" in read_tensors(tmp_path / "export")
    loaded = decoders.load(tmp_path / "export", param_dtype=jnp.bfloat16)
    ours, theirs = (arrays(decoder) for decoder in (quantized, loaded))
    assert len(ours) == 14
    for path, q in ours.items():
        assert_same_bytes((theirs[path].data, theirs[path].scale), (q.data, q.scale))


@pytest.mark.parametrize("activations", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["phi3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_float8_with_a_scale_per_row(family, activations, tmp_path):
    """It is served as it is, and the export has the bytes of the source."""
    source = tiny.folder(tmp_path / "source", family)
    scheme = schemes.by_name("fp8_channel", activations=activations, input_scale=0.5, scale_dtype="bfloat16")
    convert(source, tmp_path / "codes", scheme)
    dequantize(tmp_path / "codes", tmp_path / "decoded", dtype="float32")
    codes, decoded = (decoders.load(tmp_path / name) for name in ("codes", "decoded"))
    assert len(arrays(codes)) == 14 and not arrays(decoded)
    tokens = np.arange(12)[None]
    logits = nnx.jit(lambda decoder, tokens: decoder(tokens))
    np.testing.assert_allclose(logits(codes, tokens), logits(decoded, tokens), rtol=1e-4, atol=1e-4)
    decoders.export(tmp_path / "codes", tmp_path / "export", codes, scheme)
    assert_same_bytes(read_tensors(tmp_path / "export"), read_tensors(tmp_path / "codes"))


@pytest.mark.parametrize("name", ["fp8_tensor", "nvfp4_w4a4", "modelopt_nvfp4"])
def test_calibrated_scales_of_activations_are_kept(name, tmp_path):
    """Each module has its own, which no parameter of the decoder holds."""
    source = tiny.folder(tmp_path / "source", "qwen3_moe", num_hidden_layers=1)
    scheme = schemes.by_name(name, **({"activations": "static"} if name == "fp8_tensor" else {}))
    convert(source, tmp_path / "codes", scheme)
    tensors = read_tensors(tmp_path / "codes")
    scales = [n for n in tensors if n.endswith(("input_scale", "input_global_scale"))]
    tensors |= {n: np.full_like(tensors[n], 0.5 + i) for i, n in enumerate(scales)}
    assert len(scales) == 4 + 3 * 4
    calibrated = write_checkpoint(tmp_path / "calibrated", tensors, 1, read_config(tmp_path / "codes"))
    decoder = decoders.load(calibrated, param_dtype=jnp.bfloat16)
    decoders.export(calibrated, tmp_path / "export", decoder, scheme)
    assert_same_bytes(read_tensors(tmp_path / "export"), tensors)
    decoders.export(source, tmp_path / "plain", decoder, scheme)
    assert {read_tensors(tmp_path / "plain")[n].item() for n in scales} == {1.0}
    state, kept = nnx.state(decoder, nnx.Any(nnx.Param, jlp.nnx.Quantized)), activation_scales(calibrated, scheme)
    sent = WeightSource(state, decoders.mapping_of(decoder.config), scheme, jnp.bfloat16, activation_scales=kept)
    receiver = Receiver()
    push(sent, InProcess(receiver))
    assert_same_bytes({n: receiver.weights[n] for n in tensors}, tensors)


def test_scales_of_another_scheme_are_left_out(tmp_path):
    """FP8's are the amax over 448, NVFP4's over 2688, under one name."""
    source = tiny.folder(tmp_path / "source", "llama2", num_hidden_layers=1)
    convert(source, tmp_path / "codes", schemes.by_name("fp8_tensor", activations="static", input_scale=3.0))
    assert len(activation_scales(tmp_path / "codes", schemes.by_name("fp8_tensor"))) == 7
    assert activation_scales(tmp_path / "codes", schemes.by_name("modelopt_nvfp4")) == {}
    assert activation_scales(source, schemes.by_name("fp8_tensor")) == {}


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"m.weight_scale": np.ones(1, np.float32)}, "'m.weight_scale'; needs names that end with input_scale or"),
        ({"m.input_scale": np.ones(2, np.float32)}, r"'m.input_scale' of float32 \[2\]; needs one float number"),
        ({"m.input_scale": np.ones(1, np.int8)}, r"'m.input_scale' of int8 \[1\]; needs one float number"),
    ],
)
def test_what_is_no_scale_of_activations(scales, message, tmp_path):
    with pytest.raises(ValueError, match=f"save: activation_scales has {message}"):
        save(tmp_path / "m", {}, TreeMapping(()), {}, activation_scales=scales)
    with pytest.raises(ValueError, match="WeightSource: activation_scales has"):
        WeightSource({}, activation_scales=scales)
    assert not (tmp_path / "m").exists()


def arrays(decoder):
    def is_one(leaf):
        return isinstance(leaf, jlp.QuantizedArray)

    found = jax.tree.leaves_with_path(nnx.state(decoder), is_leaf=is_one)
    return {jax.tree_util.keystr(path): leaf for path, leaf in found if is_one(leaf)}


def test_experts_in_the_arrays_of_gpt_oss(tmp_path):
    """Codes of gate and up are taken apart and joined again."""
    source, scheme = tiny.folder(tmp_path / "source", "gpt_oss"), schemes.by_name("gpt_oss_mxfp4")
    convert(source, tmp_path / "codes", scheme)
    decoder = decoders.load(tmp_path / "codes", param_dtype=jnp.bfloat16)
    gate = read_tensors(source)["model.layers.1.mlp.experts.gate_up_proj"][..., ::2]
    found = arrays(decoder)
    assert len(found) == 6
    q = jlp.quantize(jnp.asarray(gate), scheme.format, axis=-2)
    held = next(leaf for path, leaf in found.items() if "'layers'][1]" in path and "gate_proj" in path)
    assert_same_bytes((held.data, held.scale), (q.data, q.scale))
    decoders.export(tmp_path / "codes", tmp_path / "export", decoder, scheme)
    assert_same_bytes(read_tensors(tmp_path / "export"), read_tensors(tmp_path / "codes"))


def test_adapters_of_parts_are_joined(tmp_path):
    decoder = jlp.nnx.add_lora(tiny.decoder("phi3"), rank=2, alpha=4.0, rngs=nnx.Rngs(0))
    layer = decoder.layers[0].self_attn
    for n, part in enumerate((layer.q_proj, layer.k_proj, layer.v_proj)):
        numbers = np.random.default_rng(n).standard_normal(part.lora.lora_b.shape, np.float32)
        part.lora.lora_b.set_value(jax.device_put(numbers))
    decoders.export_adapters(tmp_path, tmp_path / "adapters", decoder, 2, 4.0)
    from safetensors.numpy import load_file

    held = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    said = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert said["target_modules"] == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert said["rank_pattern"] == {"qkv_proj": 6, "gate_up_proj": 4}
    assert said["alpha_pattern"] == {"qkv_proj": 12.0, "gate_up_proj": 8.0}
    a, b = (held[f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{part}.weight"] for part in "AB")
    parts = (layer.q_proj, layer.k_proj, layer.v_proj)
    expected = [(np.asarray(p.lora.lora_a[...]) @ np.asarray(p.lora.lora_b[...])).T for p in parts]
    np.testing.assert_allclose(b @ a, np.concatenate(expected), atol=1e-6)


def test_every_family_has_a_mapping():
    for architecture in FAMILIES.values():
        assert mapping_for({"architectures": [architecture]}).rules
