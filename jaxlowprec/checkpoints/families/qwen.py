"""Qwen2, Qwen2.5 and Qwen3, dense and with experts."""

from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.llama import LAYERS, LLAMA
from jaxlowprec.checkpoints.families.parts import ends, experts, with_stacked
from jaxlowprec.checkpoints.trees.mapping import TreeMapping

QWEN3_MOE = TreeMapping((*ends(), *with_stacked((*LAYERS, *experts()))))
"""Qwen3's mixtures of experts: as `LLAMA`, with `mlp` a `jaxlowprec.nnx.MoE` or Linen's, without biases."""

DENSE = Family("Qwen2, Qwen2.5, Qwen3", ("Qwen2ForCausalLM", "Qwen3ForCausalLM"), LLAMA)
MIXTURE = Family("Qwen3-MoE", ("Qwen3MoeForCausalLM",), QWEN3_MOE)
