"""Static scales of caches in folders, in what a WeightSource sends, and in what engines are told."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec import checkpoints
from jaxlowprec.checkpoints import decoders, schemes
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.files.safetensors_file import write_tensors
from jaxlowprec.weight_sync import WeightSource
from jaxlowprec.weight_sync.engines.disk import LoadedShapes
from jaxlowprec.weight_sync.errors import Refused
from tests.models.decoder import tiny

STATIC = jlp.KVCache(jlp.Float8Tensor())
TOKENS = np.random.default_rng(0).integers(0, 256, (4, 32))
NAMES = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(2) for kind in "kv"]


@pytest.fixture
def decoder():
    return tiny.decoder("llama3")


def saved(folder, decoder, scheme=None):
    mapping = decoders.mapping_of(decoder.config)
    checkpoints.save(folder, decoder, mapping, tiny.config("llama3"), scheme=scheme, dtype=jnp.bfloat16)
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def scales(decoder):
    found = [getattr(layer.self_attn, f"{kind}_scale")[...] for layer in decoder.layers for kind in "kv"]
    return [np.asarray(scale).tolist() for scale in found]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("scheme", [None, "fp8_channel", "w4a16"])
def test_a_folder_has_them_in_float32(tmp_path, decoder, scheme, per_head):
    jlp.kv.calibrate(decoder, TOKENS, per_head=per_head, power_of_two=False)
    said = saved(tmp_path / "a", decoder, scheme and schemes.by_name(scheme))
    strategy = "attn_head" if per_head else "tensor"
    assert said["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    loaded = decoders.load(tmp_path / "a")
    assert scales(loaded) == scales(decoder)
    jlp.decoder.Generator(loaded, 8, STATIC)
    decoders.export(tmp_path / "a", tmp_path / "b", loaded)
    assert scales(decoders.load(tmp_path / "b")) == scales(decoder)


def test_a_folder_without_them_says_nothing(tmp_path, decoder):
    assert saved(tmp_path / "a", decoder, schemes.by_name("fp8_channel"))["kv_cache_scheme"] is None
    assert decoders.load(tmp_path / "a").layers[0].self_attn.k_scale is None


def test_modelopt_names_them_in_projections(tmp_path, decoder):
    jlp.kv.calibrate(decoder, TOKENS)
    assert saved(tmp_path / "a", decoder, schemes.by_name("modelopt_fp8"))["kv_cache_quant_algo"] == "FP8"
    saved(tmp_path / "b", decoder)
    with CheckpointFolder(tmp_path / "b") as source:
        tensors = {name: source.read(name) for name in source.shard_of}
    theirs = {re.sub(r"self_attn\.([kv])_scale", r"self_attn.\1_proj.\1_scale", n): t for n, t in tensors.items()}
    theirs = {name: t.reshape(()) if name.endswith("_scale") else t for name, t in theirs.items()}
    write_tensors(next((tmp_path / "b").glob("*.safetensors")), theirs)
    assert scales(decoders.load(tmp_path / "b")) == scales(decoder)


def test_scales_of_heads_with_further_axes(tmp_path, decoder):
    """compressed-tensors makes [key_heads, 1, 1]."""
    jlp.kv.calibrate(decoder, TOKENS, per_head=True, power_of_two=False)
    saved(tmp_path / "a", decoder)
    with CheckpointFolder(tmp_path / "a") as source:
        tensors = {name: source.read(name) for name in source.shard_of}
    theirs = {name: t.reshape(-1, 1, 1) if name in NAMES else t for name, t in tensors.items()}
    write_tensors(next((tmp_path / "a").glob("*.safetensors")), theirs)
    loaded = decoders.load(tmp_path / "a")
    assert scales(loaded) == scales(decoder)
    jlp.decoder.Generator(loaded, 8, STATIC)([[1, 2]], 2)


def test_a_source_sends_them_with_the_weights(decoder):
    mapping = decoders.mapping_of(decoder.config)
    with pytest.raises(ValueError, match=r"lacks model.layers.0.self_attn.k_scale; run jaxlowprec.kv.calibrate"):
        WeightSource(decoder, mapping, kv_cache=STATIC)
    WeightSource(decoder, mapping, kv_cache=jlp.KVCache())
    jlp.kv.calibrate(decoder, TOKENS)
    source = WeightSource(decoder, mapping, dtype=jnp.bfloat16, kv_cache=STATIC)
    entries = {entry.name: entry.dtype for entry in source.manifest.entries}
    assert [entries[name] for name in NAMES] == ["F32"] * 4
    sent = dict(source.arrays())
    assert [sent[name].tolist() for name in NAMES] == scales(decoder)
    assert source.quantization_config()["kv_cache_scheme"]["strategy"] == "tensor"
    with pytest.raises(Refused, match=r"k_scale' is a static scale of a cache; engines take it when they start"):
        LoadedShapes().begin(1, source.manifest)


class TestBadInput:
    def test_configurations_that_cannot_say_it(self, tmp_path, decoder):
        jlp.kv.calibrate(decoder, TOKENS)
        with pytest.raises(ValueError, match="one for each layer, and the configuration of the scheme gptq cannot say"):
            saved(tmp_path / "a", decoder, schemes.by_name("gptq"))
        jlp.kv.calibrate(decoder, TOKENS, per_head=True)
        with pytest.raises(ValueError, match="one for each head, and the configuration of the scheme modelopt_fp8"):
            saved(tmp_path / "b", decoder, schemes.by_name("modelopt_fp8"))

    def test_layers_that_differ(self, tmp_path, decoder):
        jlp.kv.calibrate(decoder, TOKENS)
        decoder.layers[0].self_attn.k_scale = nnx.data(jlp.nnx.KVScale(jnp.ones(2)))
        with pytest.raises(ValueError, match="some layers have one static scale for all heads, others one for each"):
            saved(tmp_path / "a", decoder)

    def test_latent_attention(self):
        decoder = tiny.decoder("deepseek_v3")
        jlp.kv.calibrate(decoder, TOKENS)
        with pytest.raises(ValueError, match=r"layers.0.self_attn.k_scale"):
            WeightSource(decoder, decoders.mapping_of(decoder.config))
