"""Parameter trees and Hugging Face names."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen, nnx
from lm.model import Config, LanguageModel
from lm.names import DEMO

from jaxlowprec.checkpoints import LLAMA, QWEN3_MOE, schemes
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.trees import trees
from jaxlowprec.checkpoints.trees.leaf_tensors import contiguous
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping
from tests.checkpoints.weights import SCHEMES
from tests.eager import jlp
from tests.helpers import as_bytes, assert_same_bytes

pytestmark = pytest.mark.sampled(5)

CONFIG = Config(layers=2, width=128, heads=2, context=16)
over_schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (17, 33), (100, 5), (5, 100), (0, 4), (4, 0)])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.uint8, np.complex64, np.float64, np.complex128])
def test_a_transposed_matrix_is_copied_as_it_is(shape, dtype):
    matrix = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    for given in (matrix.T, matrix[::-1].T, matrix):
        copy = contiguous(given)
        assert copy.flags.c_contiguous and copy.dtype == given.dtype and copy.shape == given.shape
        assert copy.tobytes() == given.tobytes()


@functools.cache
def numbers_of_demo(seed):
    """By one program; there are dozens where a model is made without jit."""
    return jax.jit(lambda: jax.tree.leaves(nnx.state(LanguageModel(CONFIG, nnx.Rngs(seed)))))()


def demo(seed=0):
    model = nnx.eval_shape(lambda: LanguageModel(CONFIG, nnx.Rngs(0)))
    structure = jax.tree.structure(nnx.state(model))
    nnx.update(model, jax.tree.unflatten(structure, numbers_of_demo(seed)))
    return model


@pytest.mark.slow
def test_an_exported_model_is_stored_with_its_quantised_kernels():
    recipe = jlp.Int4QAT()
    served = jlp.quantize_params(demo(), recipe)
    scheme = schemes.by_name("w4a16", group_size=recipe.group_size)
    tensors = DEMO.to_tensors(served, scheme)
    assert tensors["model.layers.0.mlp.up_proj.weight_packed"].shape == (512, 16)
    filled = DEMO.from_tensors(tensors, served, scheme)
    kept = nnx.state(served, nnx.Any(nnx.Param, jlp.nnx.Quantized))
    assert_same_bytes(jax.tree.leaves(filled), jax.tree.leaves(kept))


def quantize_blocks(model, scheme):
    """The model with the linears of its blocks quantised, their kernels in bfloat16 first."""
    for block in model.blocks:
        for layer in (block.qkv, block.out, block.up, block.down):
            kernel = layer.kernel[...].astype(jnp.bfloat16)
            layer.kernel.set_value(jlp.quantize(kernel, scheme.format, axis=-2))
    return model


class LlamaBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        attention = LlamaAttention(name="self_attn")
        x = x + attention(linen.RMSNorm(name="input_layernorm")(x))
        return x + LlamaMLP(name="mlp")(linen.RMSNorm(name="post_attention_layernorm")(x))


class LlamaAttention(linen.Module):
    @linen.compact
    def __call__(self, x):
        q = linen.Dense(32, name="q_proj")(x)
        k, v = (linen.Dense(16, use_bias=False, name=name)(x) for name in ("k_proj", "v_proj"))
        return linen.Dense(32, use_bias=False, name="o_proj")(q * jnp.concatenate([k, v], axis=-1))


class LlamaMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        gate, up = (linen.Dense(64, use_bias=False, name=name)(x) for name in ("gate_proj", "up_proj"))
        return linen.Dense(32, use_bias=False, name="down_proj")(gate * up)


class Llama(linen.Module):
    def setup(self):
        self.embed_tokens = linen.Embed(11, 32)
        self.layers = [LlamaBlock() for _ in range(2)]
        self.norm = linen.RMSNorm()
        self.lm_head = linen.Dense(11, use_bias=False)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class TestNames:
    def test_the_demos(self):
        names = set(DEMO.names(demo()).values())
        assert {name for name in names if ".1." not in name} == {
            "model.embed_tokens.weight",
            "model.embed_positions.weight",
            "model.layers.0.input_layernorm.weight",
            "model.layers.0.self_attn.qkv_proj.weight",
            "model.layers.0.self_attn.o_proj.weight",
            "model.layers.0.post_attention_layernorm.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
            "model.norm.weight",
            "lm_head.weight",
        }

    def test_llamas_are_transformers_own(self):
        transformers = pytest.importorskip("transformers", reason="transformers is not installed")
        config = transformers.LlamaConfig(
            vocab_size=11, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
        theirs = set(transformers.LlamaForCausalLM(config).state_dict())
        parameters = Llama().init(jax.random.key(0), jnp.zeros((1, 4), int))
        ours = set(LLAMA.names(parameters).values())
        assert ours - theirs == {f"model.layers.{i}.self_attn.q_proj.bias" for i in (0, 1)}  # Qwen's, not Llama's
        assert theirs <= ours

    def test_a_leaf_that_no_rule_is_about(self):
        with pytest.raises(ValueError, match="no rule is about gate.kernel, rope.scale; there are rules for tokens"):
            DEMO.to_tensors({"gate": {"kernel": np.ones((2, 2))}, "rope": {"scale": np.ones(2)}})

    def test_two_leaves_of_one_name(self):
        mapping = TreeMapping((Rule("a.scale", "norm.weight"), Rule("b.scale", "norm.weight")))
        with pytest.raises(ValueError, match="several leaves are called norm.weight"):
            mapping.names({"a": {"scale": np.ones(2)}, "b": {"scale": np.ones(2)}})


class TestFloatTrees:
    def test_only_a_kernel_is_a_transposed_weight(self):
        model = demo()
        tensors = DEMO.to_tensors(model)
        np.testing.assert_array_equal(
            tensors["model.layers.0.self_attn.qkv_proj.weight"], np.asarray(model.blocks[0].qkv.kernel[...]).T
        )
        assert tensors["model.layers.0.self_attn.qkv_proj.weight"].shape == (384, 128)
        assert tensors["model.embed_tokens.weight"].shape == (256, 128)
        assert all(tensor.flags.c_contiguous for tensor in tensors.values())

    @pytest.mark.slow
    def test_nnx_there_and_back(self):
        model = demo()
        abstract = nnx.eval_shape(demo)
        state = DEMO.from_tensors(DEMO.to_tensors(model), abstract)
        assert_same_bytes(state, nnx.state(model, nnx.Param))
        other = demo(seed=1)
        nnx.update(other, state)
        tokens = jnp.arange(8)[None]
        logits = nnx.jit(lambda model: model(tokens))
        np.testing.assert_array_equal(logits(other), logits(model))

    @pytest.mark.slow
    def test_linen_there_and_back(self):
        model, tokens = Llama(), jnp.arange(4)[None]
        variables = jax.jit(model.init)(jax.random.key(0), tokens)
        tensors = LLAMA.to_tensors(variables)
        assert tensors["model.layers.1.mlp.gate_proj.weight"].shape == (64, 32)
        back = LLAMA.from_tensors(tensors, jax.eval_shape(model.init, jax.random.key(0), tokens))
        assert jax.tree.structure(back) == jax.tree.structure(variables)
        assert_same_bytes(back, variables)
        inner = LLAMA.from_tensors(tensors, variables["params"])
        assert_same_bytes(inner, variables["params"])

    def test_rounding_is_asked_for(self):
        model = demo()
        tensors = DEMO.to_tensors(model, dtype="bfloat16")
        assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
        state = DEMO.from_tensors(tensors, model)  # widened without loss
        expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), nnx.state(model, nnx.Param))
        assert_same_bytes(state, expected)
        narrow = jax.tree.map(lambda x: x.astype(jnp.float16), nnx.state(model, nnx.Param))
        with pytest.raises(
            ValueError, match="bfloat16 in the checkpoint and float16 in the model, which would round it"
        ):
            DEMO.from_tensors(tensors, narrow)

    def test_missing_and_unexpected_tensors_are_listed(self):
        model = demo()
        tensors = DEMO.to_tensors(model)
        del tensors["model.norm.weight"], tensors["lm_head.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        with pytest.raises(ValueError) as raised:
            DEMO.from_tensors(tensors, model)
        missing, unexpected = str(raised.value).split("; ")
        assert set(re.findall(r"[\w.]+\.weight", missing)) == {"lm_head.weight", "model.norm.weight"}
        assert unexpected == "unexpected tensors: model.layers.7.mlp.up_proj.weight"

    def test_a_tensor_too_many(self):
        model = demo()
        tensors = DEMO.to_tensors(model) | {"lm_head.bias": np.zeros(256, np.float32)}
        with pytest.raises(ValueError, match="from_tensors: unexpected tensors: lm_head.bias$"):
            DEMO.from_tensors(tensors, model)

    def test_other_shapes(self):
        model = demo()
        tensors = DEMO.to_tensors(model)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].T[:, :7]
        with pytest.raises(ValueError, match=r"head.kernel has shape \(7, 128\) in the checkpoint; the model has"):
            DEMO.from_tensors(tensors, model)

    def test_integers_are_no_weights(self):
        model = demo()
        tensors = DEMO.to_tensors(model)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int32)
        with pytest.raises(ValueError, match="head.kernel is int32 in the checkpoint"):
            DEMO.from_tensors(tensors, model)


class TestQuantizedTrees:
    @over_schemes
    def test_there_and_back(self, scheme):
        if scheme.name == "gptq" and scheme.version == 1 and not scheme.symmetric:
            pytest.skip("has no zero point of 0")
        model = quantize_blocks(demo(), scheme)
        tensors = DEMO.to_tensors(model, scheme)
        assert "model.layers.0.mlp.up_proj." + scheme.required[0] in tensors
        state = DEMO.from_tensors(tensors, nnx.eval_shape(demo), scheme)
        assert_same_bytes(state, nnx.state(model, nnx.Param))
        kernel = state["blocks"][0]["up"]["kernel"].get_value()
        assert (kernel.shape, kernel.axis, kernel.format) == ((128, 512), -2, scheme.format)

    def test_a_kernel_is_what_the_weight_of_a_checkpoint_is(self):
        scheme = schemes.by_name("w4a16", group_size=32)
        model = demo()
        weight = DEMO.to_tensors(model)["model.layers.0.mlp.up_proj.weight"]
        quantized = DEMO.to_tensors(quantize_blocks(demo(), scheme), scheme)
        for suffix, tensor in scheme.compress(weight).items():
            np.testing.assert_array_equal(
                as_bytes(quantized[f"model.layers.0.mlp.up_proj.{suffix}"].view(np.uint8)),
                as_bytes(tensor.view(np.uint8)),
            )

    def test_a_scheme_is_needed(self):
        scheme = schemes.by_name("w4a16")
        model = quantize_blocks(demo(), scheme)
        with pytest.raises(ValueError, match=r"blocks.0.down.kernel is quantised to Int4 1x128; pass scheme="):
            DEMO.to_tensors(model)
        with pytest.raises(
            ValueError, match="missing tensors: .*mlp.down_proj.weight.*unexpected tensors: .*weight_packed"
        ):
            DEMO.from_tensors(DEMO.to_tensors(model, scheme), demo())

    def test_another_scheme_names_the_leaf(self):
        model = quantize_blocks(demo(), schemes.by_name("w4a16"))
        with pytest.raises(ValueError, match=r"blocks.0.down.kernel: nvfp4.store: q has format Int4"):
            DEMO.to_tensors(model, schemes.by_name("nvfp4"))

    def test_a_tensor_of_a_module_that_is_missing(self):
        scheme = schemes.by_name("w4a16")
        tensors = DEMO.to_tensors(quantize_blocks(demo(), scheme), scheme)
        del tensors["model.layers.1.mlp.up_proj.weight_scale"]
        with pytest.raises(ValueError, match="blocks.1.up.kernel: w4a16.load: tensors weight_scale are missing"):
            DEMO.from_tensors(tensors, demo(), scheme)


class ExpertBlock(nnx.Module):
    def __init__(self, rngs):
        self.mlp = jlp.nnx.MoE(3, 64, 96, top_k=2, param_dtype=jnp.bfloat16, rngs=rngs)


class Experts(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = nnx.List([ExpertBlock(rngs) for _ in range(2)])


class TestExperts:
    """A leaf [E, K, N] is a weight [N, K] for each expert."""

    @pytest.mark.slow
    def test_each_has_its_weights(self):
        model = Experts()
        tensors = QWEN3_MOE.to_tensors(model)
        up = model.layers[1].mlp.experts.up_proj.kernel[...]
        assert len(tensors) == 2 * (1 + 3 * 3)
        assert tensors["model.layers.1.mlp.gate.weight"].shape == (3, 64)
        for e in range(3):
            assert_same_bytes(tensors[f"model.layers.1.mlp.experts.{e}.up_proj.weight"], np.asarray(up[e]).T)

    def test_there_and_back(self):
        model = Experts()
        filled = QWEN3_MOE.from_tensors(QWEN3_MOE.to_tensors(model), Experts(1))
        assert_same_bytes(jax.tree.leaves(filled), jax.tree.leaves(nnx.state(model, nnx.Param)))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "scheme, recipe",
        [
            (schemes.by_name("w4a16", group_size=32), jlp.Int4QAT(group_size=32)),
            (schemes.by_name("nvfp4"), jlp.WeightQAT(jlp.NVFP4())),
        ],
        ids=["w4a16", "nvfp4"],
    )
    def test_quantised_there_and_back(self, scheme, recipe):
        served = jlp.quantize_params(Experts(), recipe)
        tensors = QWEN3_MOE.to_tensors(served, scheme)
        filled = QWEN3_MOE.from_tensors(tensors, served, scheme)
        assert_same_bytes(
            jax.tree.leaves(filled), jax.tree.leaves(nnx.state(served, nnx.Any(nnx.Param, jlp.nnx.Quantized)))
        )
        assert QWEN3_MOE.float_modules(served) == [f"model.layers.{i}.mlp.gate" for i in range(2)]

    def test_a_quantised_expert_is_what_its_weight_alone_would_be(self):
        model, scheme = Experts(), schemes.by_name("w4a16", group_size=32)
        tensors = QWEN3_MOE.to_tensors(jlp.quantize_params(model, jlp.Int4QAT(group_size=32)), scheme)
        down = np.asarray(model.layers[0].mlp.experts.down_proj.kernel[...])
        for e in range(3):
            for part, tensor in scheme.compress(np.ascontiguousarray(down[e].T)).items():
                ours = tensors[f"model.layers.0.mlp.experts.{e}.down_proj.{part}"]
                assert (ours.dtype, ours.shape, ours.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())

    def test_an_expert_that_is_missing_is_named(self):
        tensors = QWEN3_MOE.to_tensors(Experts())
        del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
        with pytest.raises(ValueError, match=r"missing tensors: model.layers.1.mlp.experts.2.up_proj.weight"):
            QWEN3_MOE.from_tensors(tensors, Experts())

    def test_experts_of_different_shapes(self):
        tensors = QWEN3_MOE.to_tensors(Experts())
        name = "model.layers.1.mlp.experts.2.up_proj.weight"
        tensors[name] = tensors[name][:-1]
        with pytest.raises(ValueError, match="the experts' tensors differ in shape"):
            QWEN3_MOE.from_tensors(tensors, Experts())

    def test_a_rule_without_experts_says_how_to_write_one(self):
        mapping = TreeMapping((Rule("kernel", "weight"),))
        with pytest.raises(ValueError, match=r"has \{expert\} in its name"):
            mapping.stored({"kernel": np.ones((2, 3, 4))})[0].specs()


class TestFolders:
    @pytest.mark.parametrize("name", ["w4a16 groups of 32 float16", "nvfp4", "deepseek_fp8 ue8m0", "gptq"])
    def test_there_and_back(self, name, tmp_path):
        scheme = SCHEMES[name]
        model = quantize_blocks(demo(), scheme)
        folder = tmp_path / "checkpoint"
        trees.save(folder, model, DEMO, {"model_type": "demo"}, scheme=scheme)
        state = trees.load(folder, nnx.eval_shape(demo), DEMO)
        assert_same_bytes(state, nnx.state(model, nnx.Param))
        assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}

    def test_an_error_names_the_folder(self, tmp_path):
        trees.save(tmp_path / "a", demo(), DEMO, {})
        other = TreeMapping((Rule("head.kernel", "head.weight"),))
        with pytest.raises(CheckpointError, match=f"^{tmp_path / 'a'}: from_tensors: missing tensors: head.weight"):
            trees.load(tmp_path / "a", {"head": {"kernel": jnp.ones((2, 2))}}, other)

    def test_the_config_names_what_is_not_quantised(self, tmp_path):
        scheme = schemes.by_name("w4a16")
        trees.save(tmp_path / "a", quantize_blocks(demo(), scheme), DEMO, {}, scheme=scheme)
        config = (tmp_path / "a" / "config.json").read_text()
        assert schemes.from_config(json.loads(config)) == scheme
        assert '"lm_head"' in config
        assert "qkv_proj" not in config

    def test_shards(self, tmp_path):
        model = demo()
        trees.save(tmp_path / "a", model, DEMO, {}, shard_bytes=300_000)
        names = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
        assert len(names) > 2
        assert names[0] == f"model-00001-of-{len(names):05}.safetensors"
        assert_same_bytes(trees.load(tmp_path / "a", model, DEMO), nnx.state(model, nnx.Param))

    def test_a_folder_that_holds_something_is_left_alone(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(CheckpointError, match="holds something already"):
            trees.save(tmp_path, demo(), DEMO, {})
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_layers_that_only_the_config_has(self, tmp_path):
        with pytest.raises(ValueError, match=r"save: .* is 4, and the tree has no layer \[2, 3\]; give"):
            trees.save(tmp_path / "a", demo(), DEMO, {"num_hidden_layers": 4})
        assert not (tmp_path / "a").exists()
        trees.save(tmp_path / "a", demo(), DEMO, {"num_hidden_layers": CONFIG.layers})


def test_what_is_no_scheme_or_dtype_is_named(tmp_path):
    tree, mapping = {"up": {"kernel": np.ones((4, 8), np.float32)}}, TreeMapping((Rule("up.kernel", "up.weight"),))
    with pytest.raises(TypeError, match=r"to_tensors: scheme='nvfp4'; needs a scheme, such as .*by_name"):
        trees.save(tmp_path / "a", tree, mapping, {}, scheme="nvfp4")
    with pytest.raises(ValueError, match=r"to_tensors: dtype=int8; needs bfloat16, .*, or None"):
        trees.save(tmp_path / "a", tree, mapping, {}, dtype="int8")
    with pytest.raises(TypeError, match=r"from_tensors: scheme='nvfp4'; needs a scheme"):
        mapping.from_tensors({}, tree, "nvfp4")
    assert not (tmp_path / "a").exists()
