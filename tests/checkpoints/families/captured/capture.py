"""Builds small models with other trainers' packages and writes down their parameter trees: capture.py TRAINER...

Runs in an environment that has the trainer, which scripts/capture_trees.sh makes; otherwise it imports only numpy and
ml_dtypes. Of each model, TRAINER.json has the config, shapes of the checkpoint's tensors, and of each leaf its path,
the shape and a digest of the numbers that the trainer's own converter reads from a checkpoint with `numbers`. The gemma
package has no converter: of its models the file has the logits that they compute with `numbers` as leaves.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import sys
import tempfile
import zlib

import ml_dtypes
import numpy as np

FOLDER = pathlib.Path(__file__).parent
D, H, G, W, F, V, E = 16, 4, 2, 8, 24, 20, 3
TOKENS = (3, 1, 4, 1, 5, 9, 2, 6)


def numbers(name, shape):
    """Numbers that bfloat16 holds, other ones for each name and for each place in a tensor."""
    return ((np.arange(np.prod(shape)) * 97 + zlib.crc32(name.encode())) % 509 - 254).reshape(shape) / 256


def digest(array):
    """Identifies an array's numbers and their order."""
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()[:16]


def config_of(architecture, layers=2, tied=False, **more):
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": layers,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": W,
        "vocab_size": V,
        "tie_word_embeddings": tied,
        **more,
    }


def file_of(config):
    """The shapes of a checkpoint's tensors by their names."""
    (name,), groups = config["architectures"], config["num_key_value_heads"]
    widths = {"q": H * W, "k": groups * W, "v": groups * W}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * name.startswith("Gemma")
    experts = config.get("num_experts", 0)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (V, D)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{part}_proj.weight": (width, D) for part, width in widths.items()}
        shapes |= {f"{at}.self_attn.o_proj.weight": (D, H * W)} | {f"{at}.{norm}.weight": (D,) for norm in norms}
        if name.startswith("Qwen2"):
            shapes |= {f"{at}.self_attn.{part}_proj.bias": (width,) for part, width in widths.items()}
        if name.startswith(("Qwen3", "Gemma3")):
            shapes |= {f"{at}.self_attn.{part}_norm.weight": (W,) for part in "qk"}
        for inside in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            shapes |= {f"{at}.{inside}.{part}_proj.weight": (F, D) for part in ("gate", "up")}
            shapes |= {f"{at}.{inside}.down_proj.weight": (D, F)}
        shapes |= {f"{at}.mlp.gate.weight": (experts, D)} if experts else {}
    return shapes


def dotted(path):
    """A leaf's path with dots, as jaxlowprec.checkpoints.TreeMapping has it."""
    parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    return ".".join(parts).removeprefix("params.")


def described(leaves):
    return {path: {"shape": list(leaf.shape), "digest": digest(leaf)} for path, leaf in sorted(leaves.items())}


# --- tunix


def tunix():
    """Each model as tunix's own loader reads it from a folder of safetensors."""
    import safetensors.numpy
    from flax import nnx
    from tunix.models.gemma import model as gemma2
    from tunix.models.gemma import params_safetensors as gemma2_loader
    from tunix.models.gemma3 import model as gemma3
    from tunix.models.gemma3 import params_safetensors as gemma3_loader
    from tunix.models.llama3 import model as llama3
    from tunix.models.llama3 import params as llama3_loader
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen2 import params as qwen2_loader
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params as qwen3_loader

    sizes = {"num_layers": 2, "embed_dim": D, "hidden_dim": F, "num_heads": H, "num_kv_heads": G, "head_dim": W}
    decoder = sizes | {"vocab_size": V, "rope_theta": 10000, "norm_eps": 1e-6}
    gemma = sizes | {"num_embed": V, "sliding_window_size": 4}
    gemma_2 = gemma | {
        "final_logit_softcap": 30.0,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "attention_types": (gemma2.AttentionType.LOCAL_SLIDING, gemma2.AttentionType.GLOBAL),
    }
    moe = {"num_experts": E, "num_experts_per_tok": 2}
    same_heads = {"num_key_value_heads": H}
    models = {
        "Llama": (config_of("Llama"), llama3_loader, llama3.ModelConfig(**decoder)),
        "Llama tied": (config_of("Llama", tied=True), llama3_loader, llama3.ModelConfig(**decoder, weight_tying=True)),
        "Qwen2": (config_of("Qwen2"), qwen2_loader, qwen2.ModelConfig(**decoder)),
        "Qwen3": (config_of("Qwen3"), qwen3_loader, qwen3.ModelConfig(**decoder)),
        "Qwen3-MoE": (config_of("Qwen3Moe", **moe), qwen3_loader, qwen3.ModelConfig(**decoder, **moe)),
        "Gemma 2": (config_of("Gemma2", tied=True), gemma2_loader, gemma2.ModelConfig(**gemma_2)),
        "Gemma 3": (config_of("Gemma3", tied=True), gemma3_loader, gemma3.ModelConfig(**gemma)),
        "Gemma 3, fused qkv": (
            config_of("Gemma3", tied=True, **same_heads),
            gemma3_loader,
            gemma3.ModelConfig(**gemma | {"num_kv_heads": H}),
        ),
    }
    captured = {}
    for title, (config, loader, own) in models.items():
        shapes = file_of(config)
        with tempfile.TemporaryDirectory() as folder:
            tensors = {name: numbers(name, shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
            safetensors.numpy.save_file(tensors, pathlib.Path(folder, "model.safetensors"))
            state = nnx.to_flat_state(nnx.state(loader.create_model_from_safe_tensors(folder, own), nnx.Param))
            leaves = {dotted(path): np.asarray(leaf.get_value()) for path, leaf in state}
        captured[title] = {"config": config, "file": shapes, "leaves": described(leaves)}
    return "google-tunix", captured


# --- MaxText


def maxtext():
    """Each model's abstract tree, filled by the tables, the hooks and the loader of MaxText's converter."""
    import jax
    import maxtext as package
    from flax import linen as nn
    from maxtext.checkpoint_conversion.utils.param_mapping import HOOK_FNS, PARAM_MAPPING
    from maxtext.checkpoint_conversion.utils.tensor_handling import get_hf_loading_function
    from maxtext.checkpoint_conversion.utils.utils import param_key_parts_from_path
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.models import models
    from maxtext.utils import maxtext_utils

    base = pathlib.Path(package.__file__).parent / "configs" / "base.yml"
    sizes = {"emb_dim": D, "num_query_heads": H, "num_kv_heads": G, "mlp_dim": F, "moe_mlp_dim": F}

    def captured_model(name, config, scanned):
        given = {f"base_{key}": size for key, size in sizes.items()} | {
            "base_num_decoder_layers": config["num_hidden_layers"],
            "head_dim": W,
            "vocab_size": V,
            "scan_layers": scanned,
            "model_name": name,
            "override_model_config": True,
            "run_name": "captured",
            "hardware": "cpu",
            "skip_jax_distributed_system": True,
            "enable_checkpointing": False,
            "weight_dtype": "float32",
            "logits_via_embedding": config["tie_word_embeddings"],
            "max_target_length": 16,
            "per_device_batch_size": 1,
        }
        given |= {"num_experts": E, "num_experts_per_tok": 2} if "num_experts" in config else {}
        own = pyconfig.initialize(["", str(base), *(f"{key}={value}" for key, value in given.items())])
        mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(own), own.mesh_axes)
        model = models.transformer_as_linen(own, mesh, quant=None, model_mode=MODEL_MODE_TRAIN)
        boxed = maxtext_utils.get_abstract_param(model, own)
        tree = jax.tree.map(nn.meta.unbox, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata))
        is_gemma = name.startswith("gemma")
        published = {"text_config": config, "vision_config": {"num_hidden_layers": 0}} if is_gemma else config
        table = PARAM_MAPPING[name](published, own, scanned)
        hooks = HOOK_FNS[name](published, own, scanned, saving_to_hf=False)
        shapes = file_of(config)

        def tensor(key):
            key = key.replace("model.language_model.", "model.")
            return numbers(key, shapes[key]).astype(np.float32)

        leaves = {}
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            key = "-".join(param_key_parts_from_path(path))
            read = get_hf_loading_function(table[key], tensor, hooks.get(key), tuple(leaf.shape), own, key)
            leaves[dotted(path)] = np.asarray(read())
        return {"config": config, "file": shapes, "leaves": described(leaves)}

    moe = {"num_experts": E}
    named = {
        "Llama": ("llama3.1-8b", config_of("Llama")),
        "Qwen2": ("qwen2.5-7b", config_of("Qwen2")),
        "Qwen3": ("qwen3-8b", config_of("Qwen3")),
        "Qwen3-MoE": ("qwen3-30b-a3b", config_of("Qwen3Moe", **moe)),
        "Gemma 3": ("gemma3-4b", config_of("Gemma3", layers=14, tied=True)),
    }
    captured = {}
    for title, (name, config) in named.items():
        captured[f"{title}, scanned"] = captured_model(name, config, True)
        captured[title] = captured_model(name, config, False)
    return "maxtext", captured


# --- gemma


def flax_gemma():
    """Each model's tree as `init` makes it, and the logits with `numbers` in its leaves."""
    import jax
    import jax.numpy as jnp
    from gemma import gm

    local, everywhere = gm.nn.AttentionType.LOCAL_SLIDING, gm.nn.AttentionType.GLOBAL

    def captured_model(config, **own):
        model = gm.nn.Transformer(
            config=gm.nn.config.TransformerConfig(
                num_embed=V,
                embed_dim=config["hidden_size"],
                hidden_dim=F,
                num_heads=H,
                head_dim=W,
                num_kv_heads=config["num_key_value_heads"],
                use_post_attn_norm=True,
                use_post_ffw_norm=True,
                attention_types=(local, everywhere),
                sliding_window_size=config["sliding_window"],
                **own,
            )
        )
        tokens = jnp.asarray([TOKENS])
        tree = model.init(jax.random.key(0), tokens)
        leaves = {dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
        filled = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jnp.asarray(numbers(dotted(path), leaf.shape), jnp.float32), tree
        )
        logits = np.asarray(model.apply(filled, tokens).logits, np.float64)
        return {
            "config": config,
            "leaves": {path: {"shape": list(leaf.shape)} for path, leaf in sorted(leaves.items())},
            "logits": logits[0].round(5).tolist(),
        }

    gemma2 = {
        "model_type": "gemma2",
        "sliding_window": 4,
        "query_pre_attn_scalar": W,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rope_theta": 10000.0,
    }
    gemma3 = {
        "model_type": "gemma3_text",
        "sliding_window": 4,
        "query_pre_attn_scalar": W,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    }
    caps = {"attn_logits_soft_cap": 50.0, "final_logit_softcap": 30.0}
    transposed = {"transpose_gating_einsum": True}
    third = {"final_logit_softcap": None, "use_qk_norm": True, "global_base_frequency": 1_000_000} | transposed
    return "gemma", {
        "Gemma 2": captured_model(config_of("Gemma2", tied=True, **gemma2), **caps, **transposed),
        "Gemma 3": captured_model(config_of("Gemma3", tied=True, **gemma3), **third),
        "Gemma 3, fused qkv": captured_model(
            config_of("Gemma3", tied=True, **gemma3 | {"num_key_value_heads": H}), **third
        ),
    }


def main(trainer):
    package, captured = {"tunix": tunix, "maxtext": maxtext, "flax_gemma": flax_gemma}[trainer]()
    models = ",\n".join(f"{json.dumps(name)}: {json.dumps(model)}" for name, model in captured.items())
    head = json.dumps({"package": package, "version": importlib.metadata.version(package)})
    (FOLDER / f"{trainer}.json").write_text(f'{head[:-1]}, "models": {{\n{models}\n}}}}\n')


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
