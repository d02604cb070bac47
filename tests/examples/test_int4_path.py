"""From training to serving, the whole way: train_lm.py with INT4 quantisation-aware training, export and `jaxlowprec
convert`, loading, the same logits, and the same weights in transformers with compressed-tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serve_int4
from flax import nnx
from lm.inference import logits_of
from lm.names import DEMO

import jaxlowprec as jlp
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.schemes import by_name
from jaxlowprec.checkpoints.trees import trees
from jaxlowprec.cli.main import main
from tests.helpers import as_bytes

pytestmark = pytest.mark.slow

RECIPE = jlp.Int4QAT(group_size=128)
CONFIG = {"model_type": "jaxlowprec-demo", "dtype": "bfloat16"}
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 128), np.int32)
IN_BF16 = ("re:model.layers.3.",)  # train_lm.py leaves the last block in bf16


@pytest.fixture(scope="module")
def trained(trained_demo):
    """The model that train_lm.py leaves, its parameters rounded to bfloat16 as a served model's are."""
    model = serve_int4.trained_model(trained_demo, RECIPE)
    graph, parameters = nnx.split(model, nnx.Param)
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), parameters)
    return nnx.merge(graph, rounded)


@pytest.fixture(scope="module")
def converted(trained, tmp_path_factory):
    """What `jaxlowprec convert` makes of its plain checkpoint."""
    folder = tmp_path_factory.mktemp("converted")
    trees.save(folder / "plain", trained, DEMO, CONFIG, dtype=jnp.bfloat16)
    command = ["convert", str(folder / "plain"), str(folder / "int4"), "--scheme", "w4a16", "--group-size", "128"]
    assert main([*command, "--ignore", *IN_BF16, "--verify"]) == 0
    return folder / "int4"


def tensors(folder):
    with CheckpointFolder(folder) as source:
        return {name: source.read(name).copy() for name in source.shard_of}


def test_converting_gives_the_bytes_of_exporting(trained, converted, tmp_path):
    served = nnx.state(jlp.quantize_params(trained, RECIPE), nnx.Any(nnx.Param, jlp.nnx.Quantized))
    trees.save(tmp_path / "out", served, DEMO, CONFIG, scheme=by_name("w4a16", group_size=128), dtype=jnp.bfloat16)
    exported, found = tensors(tmp_path / "out"), tensors(converted)
    assert set(exported) == set(found) and sum(name.endswith("weight_packed") for name in found) == 3 * 4
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (exported[name].dtype, exported[name].shape)
        assert tensor.tobytes() == exported[name].tobytes(), name


def test_the_loaded_model_gives_the_logits_of_training(trained, converted):
    loaded = serve_int4.loaded_model(converted, trained.config)
    with jlp.autocast(RECIPE):
        expected = logits_of(trained, TOKENS)
    actual = logits_of(loaded, TOKENS)
    np.testing.assert_array_equal(as_bytes(actual), as_bytes(expected))
    plain = logits_of(trained, TOKENS)
    assert (np.asarray(plain) != np.asarray(expected)).mean() > 0.9  # it is the quantised weight that both multiply by


def test_transformers_loads_the_trained_weights(trained, converted):
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install jaxlowprec[oracles]")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from tests.examples.demo_in_torch import DemoConfig, DemoModel

    transformers.AutoConfig.register(DemoConfig.model_type, DemoConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(DemoConfig, DemoModel, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        converted,
        quantization_config=transformers.CompressedTensorsConfig(run_compressed=False),
        dtype=torch.bfloat16,
    )
    served = jax.tree.map(
        lambda leaf: leaf.dequantize(jnp.float32) if isinstance(leaf, jlp.QuantizedArray) else leaf,
        nnx.state(jlp.quantize_params(trained, RECIPE), nnx.Any(nnx.Param, jlp.nnx.Quantized)),
        is_leaf=lambda leaf: isinstance(leaf, jlp.QuantizedArray),
    )
    expected = DEMO.to_tensors(served, dtype=jnp.bfloat16)
    found = model.state_dict()
    assert set(expected) <= set(found)
    for name, tensor in expected.items():
        bits = found[name].contiguous().view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits, as_bytes(tensor), name)

    with torch.no_grad():
        theirs = model.float()(torch.from_numpy(TOKENS).long()).numpy()
    with jlp.autocast(RECIPE):
        ours = np.asarray(logits_of(trained, TOKENS))
    assert np.abs(theirs - ours).max() < 0.02 * np.abs(ours).max()  # ours rounds activations to bfloat16
