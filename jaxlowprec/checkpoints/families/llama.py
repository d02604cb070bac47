"""Llama 2 and 3, and Mistral."""

from jaxlowprec.checkpoints.families.family import Family
from jaxlowprec.checkpoints.families.parts import ROTARY, attention, ends, gated_mlp, norms, with_stacked
from jaxlowprec.checkpoints.trees.mapping import TreeMapping

LAYERS = (*attention(), *gated_mlp(), *norms("input_layernorm", "post_attention_layernorm"))

LLAMA = TreeMapping((*ends(), *with_stacked(LAYERS)), left_out=(ROTARY,))
"""Llama, Mistral and dense Qwen, for a tree whose modules have Hugging Face's names without "model."."""

FAMILY = Family("Llama 2, Llama 3, Mistral", ("LlamaForCausalLM", "MistralForCausalLM"), LLAMA)
