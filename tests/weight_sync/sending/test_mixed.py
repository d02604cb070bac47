"""A version whose modules are in different formats: what arrives is what an export and a conversion write."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlowprec.checkpoints import QWEN3_MOE, convert, decoders, schemes
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Rules
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed
from jaxlowprec.checkpoints.trees import trees
from jaxlowprec.weight_sync import DirectoryTransport, InProcess, Manifest, Receiver, Refused, WeightSource, push
from jaxlowprec.weight_sync.manifest import described, scheme_of
from tests.checkpoints.small_models import read_config, read_tensors
from tests.eager import jlp
from tests.helpers import assert_same_bytes
from tests.models.decoder import tiny

NVFP4 = schemes.by_name("nvfp4")
ATTENTION = ("fp8_tensor", "fp8_channel")
LAYER = "model.layers.0"


@pytest.fixture(scope="module", params=ATTENTION)
def source(request, tmp_path_factory):
    """A folder with NVFP4 experts, FP8 attention and the rest in bfloat16, and its scheme."""
    path = tmp_path_factory.mktemp("mixed")
    tiny.folder(path / "high", "qwen3_moe", num_hidden_layers=1)
    attention = schemes.by_name(request.param)
    convert(path / "high", path / "low", NVFP4, overrides={"re:.*self_attn": attention}, ignore=["re:.*lm_head"])
    scheme = schemes.from_config(read_config(path / "low"))
    assert isinstance(scheme, Mixed) and set(scheme.schemes) == {NVFP4, attention}
    return path / "low", scheme


def received(source, **options):
    receiver = Receiver(**options)
    push(source, InProcess(receiver))
    return receiver


def test_a_push_gives_the_bytes_and_the_config_of_an_export(source, tmp_path):
    folder, scheme = source
    decoder = decoders.load(folder, param_dtype=jnp.bfloat16)
    decoders.export(folder, tmp_path / "export", decoder, scheme)
    mapping, state = decoders.mapping_of(decoder.config), nnx.state(decoder, nnx.Any(nnx.Param, jlp.nnx.Quantized))
    sent = WeightSource(state, mapping, scheme, jnp.bfloat16)
    receiver = received(sent)
    exported = read_tensors(tmp_path / "export")
    assert_same_bytes({name: receiver.weights[name] for name in exported}, exported)
    assert len(receiver.weights) == len(exported) == len(read_tensors(folder))
    assert_same_bytes(exported, read_tensors(folder))
    entry = read_config(tmp_path / "export")["quantization_config"]
    assert sent.quantization_config() == entry
    manifest = Manifest.from_json(receiver.weights.manifest.to_json())
    assert scheme_of(manifest.scheme).quantization_config(entry["ignore"]) == entry


def test_a_published_folder_is_an_export(source, tmp_path):
    folder, scheme = source
    decoder = decoders.load(folder, param_dtype=jnp.bfloat16)
    state = nnx.state(decoder, nnx.Any(nnx.Param, jlp.nnx.Quantized))
    transport = DirectoryTransport(tmp_path / "versions", files=[folder / "config.json"])
    push(WeightSource(state, decoders.mapping_of(decoder.config), scheme, jnp.bfloat16), transport)
    assert_same_bytes(nnx.state(decoders.load(tmp_path / "versions" / "v000001")), nnx.state(decoders.load(folder)))


def test_decoded_weights_and_back(source):
    folder, scheme = source
    decoder = decoders.load(folder, param_dtype=jnp.bfloat16)
    state = nnx.state(decoder, nnx.Any(nnx.Param, jlp.nnx.Quantized))
    sent = WeightSource(state, decoders.mapping_of(decoder.config), scheme, jnp.bfloat16)
    receiver, stored = received(sent, form="plain"), read_tensors(folder)
    for module in (f"{LAYER}.self_attn.q_proj", f"{LAYER}.mlp.experts.1.down_proj"):
        own = scheme.of_module(module)
        parts = {name.rpartition(".")[2]: t for name, t in stored.items() if name.startswith(f"{module}.")}
        assert_same_bytes(receiver.weights[f"{module}.weight"], own.decompress(parts))
    assert_same_bytes(receiver.dump(), stored)


def tree_of_experts():
    random = np.random.default_rng(0)

    def kernel(*shape):
        return {"kernel": jax.device_put(random.standard_normal(shape).astype(jnp.bfloat16))}

    experts = {"gate_proj": kernel(3, 64, 128), "up_proj": kernel(3, 64, 128), "down_proj": kernel(3, 128, 64)}
    attention = {f"{p}_proj": kernel(64, 64) for p in "qkvo"}
    mlp = {"router": {"kernel": np.ones((64, 3), np.float32)}, "experts": experts}
    return {"layers": [{"self_attn": attention, "mlp": mlp}]}


def targeting(attention, experts=NVFP4):
    return Mixed((ConfigGroup(("re:.*self_attn",), attention), ConfigGroup((r"re:.*experts\.",), experts)))


@pytest.mark.parametrize("attention", ATTENTION)
def test_kernels_are_quantised_on_the_way_as_a_conversion_does(attention, tmp_path):
    tree, scheme = tree_of_experts(), targeting(schemes.by_name(attention))
    trees.save(tmp_path / "high", tree, QWEN3_MOE, {"model_type": "qwen3_moe"})
    convert(tmp_path / "high", tmp_path / "low", NVFP4, overrides={"re:.*self_attn": schemes.by_name(attention)})
    receiver = received(WeightSource(tree, QWEN3_MOE, scheme, quantize=Rules(defaults=DEFAULTS)))
    assert_same_bytes(dict(receiver.weights), read_tensors(tmp_path / "low"))


def test_kernels_that_no_target_names_are_sent_as_they_are():
    tree, attention = tree_of_experts(), schemes.by_name("fp8_tensor")
    scheme = Mixed((ConfigGroup(("re:.*self_attn",), attention), ConfigGroup(("lm_head",), NVFP4)))
    source = WeightSource(tree, QWEN3_MOE, scheme, quantize=Rules(defaults=DEFAULTS))
    assert source.manifest.by_name[f"{LAYER}.mlp.experts.0.up_proj.weight"].dtype == "BF16"
    assert source.manifest.by_name[f"{LAYER}.self_attn.q_proj.weight"].dtype == "F8_E4M3"
    assert f"{LAYER}.mlp.experts.2.up_proj" in source.quantization_config()["ignore"]


class TestRefused:
    def test_two_formats_in_one_matrix_of_an_engine(self):
        scheme = Mixed((ConfigGroup(("re:.*q_proj",), NVFP4), *targeting(schemes.by_name("fp8_tensor")).groups))
        with pytest.raises(ValueError, match=r"k_proj would be .* and .*q_proj .*engines hold them as one weight"):
            WeightSource(tree_of_experts(), QWEN3_MOE, scheme, quantize=Rules(defaults=DEFAULTS))

    def test_an_array_in_another_format_than_its_target(self):
        tree, scheme = tree_of_experts(), targeting(schemes.by_name("fp8_tensor"))
        tree["layers"][0]["self_attn"] = jax.tree.map(
            lambda leaf: jlp.quantize(leaf, jlp.NVFP4(), axis=-2), tree["layers"][0]["self_attn"]
        )
        with pytest.raises(ValueError, match=r"self_attn.[a-z]_proj.kernel: fp8_tensor.store: q has format NVFP4"):
            dict(WeightSource(tree, QWEN3_MOE, scheme).arrays())

    def test_a_quantised_array_without_a_target(self):
        tree = tree_of_experts()
        tree["layers"][0]["mlp"]["experts"]["down_proj"]["kernel"] = jlp.quantize(
            tree["layers"][0]["mlp"]["experts"]["down_proj"]["kernel"], jlp.NVFP4(), axis=-2
        )
        scheme = Mixed((ConfigGroup(("re:.*self_attn",), schemes.by_name("fp8_tensor")), ConfigGroup(("m",), NVFP4)))
        with pytest.raises(ValueError, match=r"down_proj.*is quantised: no target of the configuration names it"):
            WeightSource(tree, QWEN3_MOE, scheme)

    def test_layouts_of_4_bit_integers(self):
        source = WeightSource(
            tree_of_experts(), QWEN3_MOE, targeting(schemes.by_name("fp8_tensor")), quantize=Rules(defaults=DEFAULTS)
        )
        with pytest.raises(Refused, match="holds no 4-bit integers"):
            received(source, form="marlin")

    @pytest.mark.parametrize(
        "change",
        [
            {"groups": []},
            {"groups": {}},
            {"groups": [3]},
            {"groups": [{"targets": ["m"]}]},
            {"groups": [{"targets": "m", "scheme": {"name": "nvfp4"}}]},
            {"groups": [{"targets": ["re:("], "scheme": {"name": "nvfp4"}}]},
            {"groups": [{"targets": [["m"]], "scheme": {"name": "nvfp4"}}]},
            {"groups": [{"targets": ["m"], "scheme": {"name": "mixed", "groups": []}}]},
            {"groups": [{"targets": ["m"], "scheme": {"name": "nvfp4", "3": 4}}]},
            {"groups": [{"targets": ["m"], "scheme": {}}]},
            {"more": 1},
        ],
    )
    def test_descriptions_that_are_none(self, change):
        good = described(targeting(schemes.by_name("fp8_tensor")))
        assert scheme_of(good) == targeting(schemes.by_name("fp8_tensor"))
        source = WeightSource(tree_of_experts(), QWEN3_MOE)
        source.manifest = dataclasses.replace(source.manifest, scheme=good | change)
        receiver = Receiver(form="plain")
        with pytest.raises(Refused):
            push(source, InProcess(receiver))
        assert receiver.state == "serving" and receiver.version == 0
