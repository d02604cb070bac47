"""Low-rank adapters for trees of parameters."""

from jaxlowprec.models.lora import Adapter, LoRAKernel, apply, init, merge

__all__ = ["Adapter", "LoRAKernel", "apply", "init", "merge"]
