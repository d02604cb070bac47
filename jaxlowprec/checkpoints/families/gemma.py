"""Gemma 2 and 3, whose norms multiply by 1 + weight: leaves hold the weight."""

from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.parts import attention, ends, gated_mlp, norms, with_stacked
from jaxlowprec.checkpoints.trees.mapping import TreeMapping

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

MAPPING = TreeMapping((*ends(), *with_stacked((*attention(), *gated_mlp(), *norms(*NORMS)))))

FAMILY = Family("Gemma 2, Gemma 3 (text)", ("Gemma2ForCausalLM", "Gemma3ForCausalLM"), MAPPING, tied=True)
