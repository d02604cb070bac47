"""transformers and compressed-tensors load what is written here: every weight has the bits that were trained."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlowprec.checkpoints import schemes
from jaxlowprec.checkpoints.files.dtypes import file_dtype
from jaxlowprec.checkpoints.files.safetensors_file import SafetensorsWriter
from jaxlowprec.checkpoints.files.safetensors_header import TensorSpec
from jaxlowprec.checkpoints.schemes.mixed import ConfigGroup, Mixed
from tests.checkpoints.weights import weight
from tests.eager import jlp
from tests.helpers import as_bytes

torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
decompress_module = pytest.importorskip("compressed_tensors.compressors").decompress_module
pytest.importorskip("accelerate", reason="accelerate is not installed")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def write_checkpoint(folder, scheme):
    """A tiny Llama whose linears, but for the head, are compressed; and the weights that should be served."""
    config = transformers.LlamaConfig(**SIZES)
    shapes = {name: tuple(t.shape) for name, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    tensors, served = {}, {}
    for seed, (name, shape) in enumerate(shapes.items()):
        module = name.removesuffix(".weight")
        w = weight(shape, seed=seed) if len(shape) == 2 else np.ones(shape, jnp.bfloat16)
        own = scheme.of_module(module) if module.endswith("_proj") else None
        if own is None:
            tensors[name] = served[name] = w
            continue
        made = own.compress(w)
        tensors |= {f"{module}.{suffix}": t for suffix, t in made.items()}
        if own.has_format:
            fmt = own.of_shape(w.shape).format
            served[name] = np.asarray(jlp.quantize(jax.device_put(w), fmt).dequantize(jnp.bfloat16))
        else:
            served[name] = own.decompress(made)
    specs = {name: TensorSpec(file_dtype(t.dtype), t.shape) for name, t in tensors.items()}
    with SafetensorsWriter(folder / "model.safetensors", specs) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    entry = {"architectures": ["LlamaForCausalLM"], "quantization_config": scheme.quantization_config(["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config.to_dict() | entry))
    return served


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("w4a16", {"group_size": 32}),
        ("w4a16", {}),
        ("w4a16_asym", {"group_size": 32}),
        ("nvfp4", {}),
        ("nvfp4_w4a4", {"input_global_scale": 500.0}),
        *(("nvfp4", {"scale_rule": rule}) for rule in ("four_over_six", "four_over_six_mse", "search")),
        ("mxfp4", {}),
        ("mxfp8", {}),
        ("fp8_block", {}),
        ("w4a16", {"group_size": -1}),
        ("w4a16_asym", {"group_size": -1}),
        ("fp8_channel", {}),
        ("fp8_channel", {"activations": "static"}),
        ("fp8_tensor", {}),
        ("fp8_tensor", {"activations": "static"}),
        ("int8_channel", {}),
    ],
)
def test_every_weight_is_the_trained_one(name, options, tmp_path):
    assert_loads(tmp_path, schemes.by_name(name, **options))


def assert_loads(tmp_path, scheme):
    served = write_checkpoint(tmp_path, scheme)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
        dtype=torch.bfloat16,
    )
    assert_holds(model, served)
    logits = model(torch.arange(8)[None]).logits
    assert torch.isfinite(logits).all()


def test_the_scale_of_activations_is_read(tmp_path):
    """The presets of compressed-tensors call this format NVFP4, and weights only NVFP4A16."""
    write_checkpoint(tmp_path, schemes.by_name("nvfp4_w4a4", input_global_scale=500.0))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = [t for name, t in model.state_dict().items() if name.endswith("input_global_scale")]
    assert len(found) == 7 * SIZES["num_hidden_layers"] and all(scale.float().tolist() == [500.0] for scale in found)


def assert_holds(model, served):
    loaded = {n: t for n, t in model.state_dict().items() if n in served}
    assert set(loaded) == set(served)
    for tensor_name, tensor in loaded.items():
        assert tensor.dtype == torch.bfloat16
        bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, as_bytes(served[tensor_name]), tensor_name)


def test_every_weight_of_a_mixture_is_the_trained_one(tmp_path):
    """transformers decodes while loading only where there is one scheme; compressed-tensors decodes each module."""
    groups = {
        "re:.*self_attn.*": schemes.by_name("fp8_channel"),
        "re:.*(gate|up)_proj": schemes.by_name("nvfp4"),
        "model.layers.0.mlp.down_proj": schemes.by_name("int8_channel"),
        "Linear": schemes.by_name("w4a16", group_size=32),
    }
    mixed = Mixed(tuple(ConfigGroup((target,), scheme) for target, scheme in groups.items()))
    served = write_checkpoint(tmp_path, mixed)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = set()
    for module in model.modules():
        if scheme := getattr(module, "quantization_scheme", None):
            found.add(scheme.format)
            decompress_module(module)
    assert found == {"float-quantized", "nvfp4-pack-quantized", "int-quantized", "pack-quantized"}
    assert_holds(model, served)
