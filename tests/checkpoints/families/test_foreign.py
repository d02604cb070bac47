"""Trees of MaxText, tunix and the gemma package: built by hand as their sources say, and compared with the file."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxlowprec.checkpoints import CheckpointError, mapping_for
from tests.checkpoints.families.trees import nested
from tests.helpers import assert_same_bytes
from tests.package.test_readme import programs

D, H, G, W, F, V, E = 16, 4, 2, 8, 24, 20, 3
SIZES = {
    "hidden_size": D,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": W,
    "vocab_size": V,
    "tie_word_embeddings": False,
}
WIDTHS = {"q_proj": H * W, "k_proj": G * W, "v_proj": G * W}
NORMS = ("input_layernorm", "post_attention_layernorm")
FOUR = (*NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def file_of(layers, norms=NORMS, experts=0, head_norms=False, biases=False):
    """Tensors with Hugging Face's names, in bfloat16."""
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{module}.weight": (width, D) for module, width in WIDTHS.items()}
        shapes |= {f"{at}.self_attn.o_proj.weight": (D, H * W)} | {f"{at}.{norm}.weight": (D,) for norm in norms}
        if biases:
            shapes |= {f"{at}.self_attn.{module}.bias": (width,) for module, width in WIDTHS.items()}
        if head_norms:
            shapes |= {f"{at}.self_attn.{p}_norm.weight": (W,) for p in "qk"}
        for inside in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            shapes |= {f"{at}.{inside}.{part}_proj.weight": (F, D) for part in ("gate", "up")}
            shapes |= {f"{at}.{inside}.down_proj.weight": (D, F)}
        if experts:
            shapes |= {f"{at}.mlp.gate.weight": (experts, D)}
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


def config(architecture, layers=2):
    return SIZES | {"architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": layers}


def assert_maps(mapping, leaves, tensors, dtype="bfloat16"):
    tree = nested(leaves)
    made = mapping.to_tensors({"params": tree}, dtype=dtype)
    assert_same_bytes(made, {name: tensors[name] for name in made})
    assert set(made) == set(tensors)
    back = mapping.from_tensors(tensors, tree)
    assert_same_bytes(back, jax.tree.map(jax.device_put, tree))


def heads(weight):
    """[D, heads, d] of a weight [heads * d, D]."""
    return weight.T.reshape(D, -1, W)


def in_turn(kernel):
    """The halves of each head in turn."""
    return np.stack(np.split(kernel, 2, -1), -1).reshape(kernel.shape)


class TestMaxText:
    """Source: the hooks and the order of axes in maxtext/checkpoint_conversion."""

    def of_layer(self, tensors, i, experts=0):
        at = f"model.layers.{i}."
        held = {name.removeprefix(at): tensor for name, tensor in tensors.items() if name.startswith(at)}
        made = {
            "self_attention.value.kernel": heads(held["self_attn.v_proj.weight"]),
            "self_attention.query.kernel": heads(held["self_attn.q_proj.weight"]),
            "self_attention.key.kernel": heads(held["self_attn.k_proj.weight"]),
            "self_attention.out.kernel": held["self_attn.o_proj.weight"].T.reshape(H, W, D),
        }
        for ours, theirs in (("wi_0", "gate"), ("wi_1", "up"), ("wo", "down")):
            if experts:
                each = [held[f"mlp.experts.{e}.{theirs}_proj.weight"].T for e in range(experts)]
                made[f"moe_block.{ours}"] = np.stack(each)
            else:
                made[f"mlp.{ours}.kernel"] = held[f"mlp.{theirs}_proj.weight"].T
        if experts:
            made["moe_block.gate.kernel"] = held["mlp.gate.weight"].T
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
            if f"self_attn.{theirs}_norm.weight" in held:
                made[f"self_attention.{ours}_norm.scale"] = held[f"self_attn.{theirs}_norm.weight"]
            if f"self_attn.{theirs}_proj.bias" in held:
                made[f"self_attention.{ours}.bias"] = held[f"self_attn.{theirs}_proj.bias"].reshape(-1, W)
        return made, held

    def ends(self, tensors):
        return {
            "token_embedder.embedding": tensors["model.embed_tokens.weight"],
            "decoder.decoder_norm.scale": tensors["model.norm.weight"],
            "decoder.logits_dense.kernel": tensors["lm_head.weight"].T,
        }

    def layers(self, tensors, count, scanned, experts=0, change=lambda made: made):
        each = []
        for i in range(count):
            made, held = self.of_layer(tensors, i, experts)
            for norm, name in (("pre", NORMS[0]), ("post", NORMS[1])):
                made[f"{norm}_self_attention_layer_norm.scale"] = held[f"{name}.weight"]
            each.append(change(made))
        if not scanned:
            return {f"decoder.layers_{i}.{path}": leaf for i, made in enumerate(each) for path, leaf in made.items()}
        return {f"decoder.layers.{path}": np.stack([made[path] for made in each], 1) for path in each[0]}

    @pytest.mark.parametrize("scanned", [True, False])
    @pytest.mark.parametrize("experts", [0, E])
    def test_qwen3(self, scanned, experts):
        tensors = file_of(2, experts=experts, head_norms=True, biases=True)
        leaves = self.ends(tensors) | self.layers(tensors, 2, scanned, experts)
        assert_maps(mapping_for(config("Qwen3Moe" if experts else "Qwen3"), "maxtext"), leaves, tensors)

    @pytest.mark.parametrize("scanned", [True, False])
    def test_llama(self, scanned):
        """Queries are divided by the root of the head's size, and halves of heads are in turn."""
        tensors = file_of(2)
        scale = np.float32(1 / np.sqrt(W))

        def change(made):
            made = {path: leaf.astype(np.float32) for path, leaf in made.items()}
            made["self_attention.query.kernel"] = in_turn(made["self_attention.query.kernel"] * scale)
            made["self_attention.key.kernel"] = in_turn(made["self_attention.key.kernel"])
            return made

        ends = {path: leaf.astype(np.float32) for path, leaf in self.ends(tensors).items()}
        leaves = ends | self.layers(tensors, 2, scanned, change=change)
        assert_maps(mapping_for(config("Llama"), "maxtext"), leaves, tensors)

    def test_gemma_3_scans_six_layers_at_once(self):
        tensors = file_of(14, FOUR, head_norms=True)
        leaves = {path: leaf.astype(np.float32) for path, leaf in self.ends(tensors).items()}
        leaves["token_embedder.embedding"] *= np.float32(ml_dtypes.bfloat16(np.sqrt(D)))
        leaves["decoder.decoder_norm.scale"] += 1
        each = []
        for i in range(14):
            made, held = self.of_layer(tensors, i)
            names = ("pre_self_attention_norm", "post_self_attention_norm", "pre_ffw_norm", "post_ffw_norm")
            made |= {f"{ours}.scale": held[f"{theirs}.weight"] for ours, theirs in zip(names, FOUR, strict=True)}
            each.append({p: leaf.astype(np.float32) + np.float32(p.endswith("scale")) for p, leaf in made.items()})
        for n in range(6):
            for path in each[0]:
                leaves[f"decoder.layers.layers_{n}.{path}"] = np.stack([each[n][path], each[6 + n][path]], 1)
        for n in (0, 1):
            leaves |= {f"decoder.layers_remainder.layers_{n}.{path}": leaf for path, leaf in each[12 + n].items()}
        assert_maps(mapping_for(config("Gemma3", 14), "maxtext"), leaves, tensors)


class TestTunix:
    """Source: the mappings of tunix/models."""

    @pytest.mark.parametrize("architecture, experts", [("Llama", 0), ("Qwen2", 0), ("Qwen3", 0), ("Qwen3Moe", E)])
    def test_decoders(self, architecture, experts):
        tensors = file_of(2, experts=experts, head_norms="3" in architecture, biases=architecture == "Qwen2")
        leaves = {
            "embedder.input_embedding": tensors["model.embed_tokens.weight"],
            "final_norm.w": tensors["model.norm.weight"],
            "lm_head.w": tensors["lm_head.weight"].T,
        }
        for name, tensor in tensors.items():
            path = name.removeprefix("model.").replace("self_attn", "attn").replace(".weight", ".w")
            if ".experts.0." in name:
                each = [tensors[name.replace("experts.0", f"experts.{e}")].T for e in range(experts)]
                leaves[path.replace("experts.0.", "").removesuffix(".w")] = np.stack(each)
            elif "o_proj" in name:
                leaves[path] = tensor.T.reshape(H, W, D)
            elif "attn" in path and path.endswith("proj.w"):
                leaves[path] = heads(tensor)
            elif path.endswith("proj.bias"):
                leaves[path.replace("_proj.bias", "_bias")] = tensor
            elif "mlp.gate.w" in path:
                leaves[path.replace("mlp.gate.w", "mlp.router.kernel")] = tensor.T
            elif "mlp" in path and "experts" not in path:
                leaves[path.removesuffix("w") + "kernel"] = tensor.T
            elif "layernorm" in path or "_norm" in path:
                leaves[path] = tensor
        assert_maps(mapping_for(config(architecture), "tunix"), leaves, tensors)


class TestFlaxGemma:
    """Source: gemma/gm/nn/_modules.py, and tunix/models/gemma3, which differs in the feed-forward layers."""

    @pytest.mark.parametrize("tree", ["flax_gemma", "tunix"])
    @pytest.mark.parametrize("architecture", ["Gemma2", "Gemma3"])
    def test_einsums(self, tree, architecture):
        tensors = file_of(2, FOUR, head_norms=architecture == "Gemma3")
        del tensors["lm_head.weight"]
        leaves = {
            "embedder.input_embedding": tensors["model.embed_tokens.weight"],
            "final_norm.scale": tensors["model.norm.weight"],
        }
        after = "post_attn_norm" if (tree, architecture) == ("tunix", "Gemma2") else "post_attention_norm"
        norms = dict(zip(("pre_attention_norm", after, "pre_ffw_norm", "post_ffw_norm"), FOUR, strict=True))
        for i in range(2):
            at = f"layer_{i}." if tree == "flax_gemma" else f"layers.{i}."
            held = {n.removeprefix(f"model.layers.{i}."): t for n, t in tensors.items() if f"layers.{i}." in n}
            q, k, v = (heads(held[f"self_attn.{p}_proj.weight"]).swapaxes(0, 1) for p in "qkv")
            leaves |= {f"{at}attn.q_einsum.w": q, f"{at}attn.kv_einsum.w": np.stack([k, v])}
            leaves[f"{at}attn.attn_vec_einsum.w"] = held["self_attn.o_proj.weight"].T.reshape(H, W, D)
            leaves |= {f"{at}{ours}.scale": held[f"{theirs}.weight"] for ours, theirs in norms.items()}
            if architecture == "Gemma3":
                leaves |= {f"{at}attn._{n}_norm.scale": held[f"self_attn.{n[0]}_norm.weight"] for n in ("query", "key")}
            gate, up, down = (held[f"mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
            if tree == "flax_gemma":
                leaves |= {f"{at}mlp.gating_einsum": np.stack([gate, up]), f"{at}mlp.linear": down.T}
            else:
                names = ("gate_proj", "up_proj", "down_proj")
                leaves |= {f"{at}mlp.{n}.kernel": w.T for n, w in zip(names, (gate, up, down), strict=True)}
        tied = config(architecture) | {"tie_word_embeddings": True}
        assert_maps(mapping_for(tied, tree), leaves, tensors)


def test_a_tree_that_is_not_known():
    with pytest.raises(CheckpointError, match=r"tree='maxtext' with Phi3ForCausalLM; known are .*maxtext: Qwen3"):
        mapping_for(config("Phi3"), "maxtext")


def test_a_config_without_the_sizes_that_factors_need():
    with pytest.raises(CheckpointError, match="hidden_size of the config is None; MaxText's layout follows from it"):
        mapping_for({"architectures": ["LlamaForCausalLM"]}, "maxtext")


def test_the_documents_examples():
    for program in programs("docs/how-to/models.md"):
        exec(program, {})
