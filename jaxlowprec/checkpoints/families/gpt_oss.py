"""GPT-OSS: attention sinks, and experts in whole arrays with the columns of gate and up in turn."""

from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.parts import IN_FILE, LAYER, attention, ends, linears, norms, with_stacked
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping

AT, INSIDE = f"{LAYER}mlp.experts", f"{IN_FILE}mlp.experts"

EXPERTS = (
    *linears("mlp.router"),
    Rule((f"{AT}.gate_proj.kernel", f"{AT}.up_proj.kernel"), f"{INSIDE}.gate_up_proj", "E D I -> E D (I +)"),
    Rule((f"{AT}.gate_proj.bias", f"{AT}.up_proj.bias"), f"{INSIDE}.gate_up_proj_bias", "E I -> E (I +)"),
    Rule(f"{AT}.gate_up_proj.kernel", f"{INSIDE}.gate_up_proj", "E D N -> E D N"),
    Rule(f"{AT}.gate_up_proj.bias", f"{INSIDE}.gate_up_proj_bias", "E N -> E N"),
    Rule(f"{AT}.down_proj.kernel", f"{INSIDE}.down_proj", "E I D -> E I D"),
    Rule(f"{AT}.down_proj.bias", f"{INSIDE}.down_proj_bias", "E D -> E D"),
)
SINKS = (Rule(f"{LAYER}self_attn.sinks", f"{IN_FILE}self_attn.sinks"),)
NORMS = norms("input_layernorm", "post_attention_layernorm")

MAPPING = TreeMapping((*ends(), *with_stacked((*attention(), *SINKS, *EXPERTS, *NORMS))))

FAMILY = Family("GPT-OSS", ("GptOssForCausalLM",), MAPPING)
