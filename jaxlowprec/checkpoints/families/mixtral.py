"""Mixtral."""

from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.parts import attention, ends, experts, norms, with_stacked
from jaxlowprec.checkpoints.trees.mapping import TreeMapping

EXPERTS = experts(names=("w1", "w3", "w2"), module="block_sparse_moe")
NORMS = norms("input_layernorm", "post_attention_layernorm")

MAPPING = TreeMapping((*ends(), *with_stacked((*attention(), *EXPERTS, *NORMS))))

FAMILY = Family("Mixtral", ("MixtralForCausalLM",), MAPPING)
