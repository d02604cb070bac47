"""The names of the model's parameters in a Hugging Face checkpoint."""

from jaxlowprec.checkpoints import Rule, TreeMapping

DEMO = TreeMapping(
    (
        Rule("tokens.embedding", "model.embed_tokens.weight"),
        Rule("positions.embedding", "model.embed_positions.weight"),
        *(
            Rule(f"blocks.{{i}}.{ours}", f"model.layers.{{i}}.{theirs}")
            for ours, theirs in (
                ("norm1.scale", "input_layernorm.weight"),
                ("qkv.kernel", "self_attn.qkv_proj.weight"),
                ("out.kernel", "self_attn.o_proj.weight"),
                ("norm2.scale", "post_attention_layernorm.weight"),
                ("up.kernel", "mlp.up_proj.weight"),
                ("down.kernel", "mlp.down_proj.weight"),
            )
        ),
        Rule("norm.scale", "model.norm.weight"),
        Rule("head.kernel", "lm_head.weight"),
    )
)
