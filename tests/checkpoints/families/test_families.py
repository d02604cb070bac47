"""Every family: the tensors of transformers' own small random models, to trees of several layouts and back."""

import functools
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlowprec.checkpoints import CheckpointError, load, mapping_for, save, schemes
from jaxlowprec.checkpoints.families.families import FAMILIES
from jaxlowprec.checkpoints.trees.tree_paths import leaves
from jaxlowprec.nnx.moe import SelectionBias
from tests.checkpoints.families.trees import fused, leaves_of, nested, stacked, with_heads
from tests.checkpoints.small_models import read_config, read_tensors
from tests.eager import jlp
from tests.helpers import assert_same_bytes

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LATENT = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
}
MODELS = {  # the class of the config, and what of it is not as in BASE
    "Llama 3": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "Llama 3 tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Mistral": ("MistralConfig", {"head_dim": 24}),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 24}),
    "Gemma 2": ("Gemma2Config", {"head_dim": 24}),
    "Gemma 3": ("Gemma3TextConfig", {"head_dim": 24}),
    "Phi-3": ("Phi3Config", {}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "DeepSeek V2 Lite": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "DeepSeek V3": ("DeepseekV3Config", {**LATENT, "q_lora_rank": 32}),
    "GLM-4": ("Glm4Config", {"head_dim": 16, "attention_bias": True}),
    "GLM-4.5": (
        "Glm4MoeConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_hidden_layers": 3,
        },
    ),
    "GPT-OSS": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
}
over_models = pytest.mark.parametrize("model", MODELS)


@functools.cache
def published(model):
    """The tensors and the config of a folder that transformers wrote."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    name, changes = MODELS[model]
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(BASE | changes)))
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point() and not tensor.is_meta:
                tensor.normal_()
    with tempfile.TemporaryDirectory() as folder:
        made.to(torch.bfloat16).save_pretrained(folder)
        return read_tensors(folder), read_config(folder)


def assert_round_trip(mapping, leaves, tensors):
    """A tree has exactly the tensors of a file, and the file exactly the leaves of the tree."""
    tree = nested(leaves)
    made = mapping.to_tensors(tree)
    assert set(made) == set(tensors)
    assert_same_bytes({name: made[name] for name in tensors}, dict(tensors))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    assert_same_bytes(mapping.from_tensors(tensors, abstract), jax.tree.map(jax.device_put, tree))


@over_models
class TestEveryFamily:
    def test_a_matrix_for_each_linear(self, model):
        tensors, config = published(model)
        assert_round_trip(mapping_for(config), leaves_of(tensors), tensors)

    def test_heads_fused_and_stacked(self, model):
        """What trainers have: an axis of heads, fused projections where files split them, layers stacked."""
        tensors, config = published(model)
        flat, heads, groups = leaves_of(tensors), config["num_attention_heads"], config["num_key_value_heads"]
        if model == "Phi-3":  # the other way: the file fuses them
            flat = split_phi(flat, config)
        if "kv_lora_rank" not in config:
            flat = with_heads(flat, heads, groups)
        if model not in ("Phi-3",) and "kv_lora_rank" not in config:
            flat = fused(flat, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        if model == "GLM-4":
            flat = split_gate_up(flat)
        elif model not in ("Phi-3", "GPT-OSS"):
            flat = fused(flat, "gate_up_proj", ("gate_proj", "up_proj"), ("kernel",))
        dense = config.get("first_k_dense_replace")
        under = (lambda layer: "layers") if dense is None else lambda n: "dense_layers" if n < dense else "moe_layers"
        if model == "Llama 3":  # biases of gate and up have no fused form
            flat = leaves_of(tensors)
        assert_round_trip(mapping_for(config), stacked(flat, under), tensors)

    def test_a_padded_vocabulary(self, model):
        tensors, config = published(model)
        flat = leaves_of(tensors)
        flat["embed_tokens.embedding"] = np.pad(flat["embed_tokens.embedding"], [(0, 32), (0, 0)])
        flat["lm_head.kernel"] = np.ascontiguousarray(flat["embed_tokens.embedding"].T)
        if "lm_head.weight" in tensors:
            flat["lm_head.kernel"] = np.pad(tensors["lm_head.weight"].T, [(0, 0), (0, 32)])
        assert_round_trip(mapping_for(config), flat, tensors)

    def test_a_folder(self, model, tmp_path):
        tensors, config = published(model)
        tree, mapping = nested(leaves_of(tensors)), mapping_for(config)
        save(tmp_path / "a", tree, mapping, config)
        assert_same_bytes(read_tensors(tmp_path / "a"), {name: tensors[name] for name in sorted(tensors)})
        assert_same_bytes(load(tmp_path / "a", tree, mapping), jax.tree.map(jax.device_put, tree))


def split_gate_up(flat):
    made = {}
    for path, leaf in flat.items():
        if path.endswith("mlp.gate_up_proj.kernel"):
            at = path.removesuffix("gate_up_proj.kernel")
            made[f"{at}gate_proj.kernel"], made[f"{at}up_proj.kernel"] = np.split(leaf, 2, -1)
        else:
            made[path] = leaf
    return made


def split_phi(flat, config):
    size = config["hidden_size"] // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    made = {}
    for path, leaf in split_gate_up(flat).items():
        if path.endswith("qkv_proj.kernel"):
            parts = np.split(leaf, [queries, queries + keys], -1)
            made |= {path.replace("qkv", part): each for part, each in zip("qkv", parts, strict=True)}
        else:
            made[path] = leaf
    return made


@pytest.mark.parametrize("name", ["w4a16", "nvfp4"])
def test_stacked_experts_are_stored_quantised(name):
    """Kernels of all layers and experts in one QuantizedArray: the bytes of a tree without stacks."""
    tensors, config = published("Qwen3-MoE")
    scheme = schemes.by_name(name, group_size=32) if name == "w4a16" else schemes.by_name(name)
    mapping = mapping_for(config)

    def quantised(flat):
        tree = dict(flat)
        for path, leaf in flat.items():
            if ".experts." in path or "self_attn" in path and path.endswith("kernel"):
                amax = jnp.full(leaf.shape[:-2], 8.0) if name == "nvfp4" else None
                tree[path] = jlp.quantize(jax.device_put(leaf), scheme.format, axis=-2, amax=amax)
        return tree

    flat = leaves_of(tensors)
    separate, stack = (nested(quantised(each)) for each in (flat, stacked(flat)))
    ours, theirs = mapping.to_tensors(stack, scheme), mapping.to_tensors(separate, scheme)
    assert set(ours) == set(theirs)
    assert all(ours[n].tobytes() == theirs[n].tobytes() and ours[n].dtype == theirs[n].dtype for n in ours)
    assert_same_bytes(mapping.from_tensors(ours, stack, scheme), jax.tree.map(jax.device_put, stack))
    left = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert sorted(mapping.float_modules(stack)) == left


def test_heads_of_latent_attention():
    tensors, config = published("DeepSeek V3")
    flat, heads = leaves_of(tensors), config["num_attention_heads"]
    for path, leaf in flat.items():
        if path.endswith(("q_b_proj.kernel", "kv_b_proj.kernel")):
            flat[path] = leaf.reshape(leaf.shape[0], heads, -1)
        if path.endswith("o_proj.kernel"):
            flat[path] = leaf.reshape(heads, -1, leaf.shape[-1])
    assert_round_trip(mapping_for(config), flat, tensors)


def test_experts_in_the_arrays_of_the_file():
    tensors, config = published("GPT-OSS")
    flat = {path: leaf for path, leaf in leaves_of(tensors).items() if ".experts." not in path or "down" in path}
    for name, tensor in tensors.items():
        if "gate_up_proj" in name:
            path = name.removeprefix("model.").removesuffix("_bias")
            flat[f"{path}.{'bias' if name.endswith('bias') else 'kernel'}"] = tensor
    assert_round_trip(mapping_for(config), flat, tensors)


class TestConfigs:
    def test_an_unknown_architecture_names_the_known_ones(self):
        with pytest.raises(CheckpointError) as raised:
            mapping_for({"architectures": ["MambaForCausalLM"]})
        message = str(raised.value)
        assert all(name in message for family in FAMILIES for name in family.architectures)
        assert "['MambaForCausalLM']" in message
        assert "docs/how-to/models.md shows how" in message

    @pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": 3}, {"architectures": [["x"]]}])
    def test_a_config_without_one(self, config):
        with pytest.raises(CheckpointError, match="the config's architectures is"):
            mapping_for(config)

    @pytest.mark.parametrize("value", [0, -1, "8", 2.0, True, [4]])
    def test_sizes_that_are_none(self, value):
        with pytest.raises(CheckpointError, match="num_attention_heads of the config is .*; needs an integer from 1"):
            mapping_for({"architectures": ["LlamaForCausalLM"], "num_attention_heads": value})

    def test_other_heads_than_the_config(self):
        tensors, config = published("Qwen3")
        tree = nested(with_heads(leaves_of(tensors), 8, 2))
        with pytest.raises(ValueError, match=r"layers.0.self_attn.[qo]_proj.kernel has shape .* axis H has 8; needs 4"):
            mapping_for(config).to_tensors(tree)

    def test_kimi_k2_is_a_deepseek(self):
        config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2"}
        assert mapping_for(config).names({"layers": [{"mlp": {"selection_bias": np.ones(2)}}]}) == {
            "layers.0.mlp.selection_bias": "model.layers.0.mlp.gate.e_score_correction_bias"
        }

    def test_layers_that_predict_further_tokens(self):
        """A tree without them loads; a tree with them has their tensors."""
        tensors, config = published("DeepSeek V3")
        draft = {
            f"model.layers.3.{n}": np.ones((8, 8), np.float32) for n in ("eh_proj.weight", "shared_head.head.weight")
        }
        mapping, tree = mapping_for(config), nested(leaves_of(tensors))
        assert_same_bytes(mapping.from_tensors(tensors | draft, tree), jax.tree.map(jax.device_put, tree))
        with pytest.raises(ValueError, match="unexpected tensors: model.layers.2.eh_proj.weight"):
            mapping.from_tensors(tensors | {"model.layers.2.eh_proj.weight": np.ones((8, 8), np.float32)}, tree)
        whole = leaves_of(tensors | draft)
        assert_round_trip(mapping, whole, tensors | draft)

    def test_norms_with_one_added(self):
        tensors, config = published("Gemma 2")
        flat = {path: leaf.astype(np.float32) for path, leaf in leaves_of(tensors).items()}
        for path in flat:
            flat[path] = flat[path] + np.float32(1) * path.endswith("scale")
        mapping = mapping_for(config, norm_offset=1.0)
        made = mapping.to_tensors(nested(flat), dtype="bfloat16")
        assert_same_bytes({name: made[name] for name in tensors}, dict(tensors))
        assert_same_bytes(mapping.from_tensors(tensors, nested(flat)), jax.tree.map(jax.device_put, nested(flat)))


def test_a_routers_bias_is_among_the_leaves_of_a_module():
    """It is not a parameter, and still a tensor of the file."""
    routing = jlp.moe.RouterConfig(scoring="sigmoid", selection_bias=True)

    class Block(nnx.Module):
        def __init__(self):
            self.mlp = jlp.nnx.MoE(4, 8, 16, top_k=2, routing=routing, rngs=nnx.Rngs(0))

    class Model(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([Block()])

    mapping = mapping_for({"architectures": ["DeepseekV3ForCausalLM"]})
    model = Model()
    model.layers[0].mlp.selection_bias.set_value(jnp.arange(4.0))
    tensors = mapping.to_tensors(model)
    assert tensors["model.layers.0.mlp.gate.e_score_correction_bias"].tolist() == [0, 1, 2, 3]
    other = Model()
    nnx.update(other, mapping.from_tensors(tensors, other))
    assert_same_bytes(other.layers[0].mlp.selection_bias.get_value(), jnp.arange(4.0))
    assert "layers.0.mlp.selection_bias" in leaves(model)
    assert nnx.state(other, SelectionBias)


def test_configs_are_json():
    """`mapping_for` takes what a file has, and not transformers' objects."""
    config = json.loads('{"architectures": ["Qwen3ForCausalLM"], "head_dim": null, "tie_word_embeddings": true}')
    assert any(rule.tied_to for rule in mapping_for(config).rules)
