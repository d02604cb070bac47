"""4-bit and 8-bit checkpoints as other programs write and read them: converted, inspected, saved and loaded.

>>> import jaxlowprec as jlp
>>> jlp.checkpoints.schemes.by_name("w4a16", group_size=32).name
'w4a16'
"""

from jaxlowprec.checkpoints import gguf, schemes
from jaxlowprec.checkpoints.conversion.convert import ConvertOptions, Report, convert, dequantize
from jaxlowprec.checkpoints.conversion.inspect import InspectedModule, Inspection, WeightError, inspect
from jaxlowprec.checkpoints.conversion.rules import DEFAULTS, Rules
from jaxlowprec.checkpoints.errors import CheckpointError
from jaxlowprec.checkpoints.families.families import LLAMA, QWEN3_MOE
from jaxlowprec.checkpoints.families.known import mapping_for
from jaxlowprec.checkpoints.trees.adapters import save_adapters
from jaxlowprec.checkpoints.trees.mapping import Rule, TreeMapping
from jaxlowprec.checkpoints.trees.trees import activation_scales, load, save

__all__ = [
    "DEFAULTS",
    "LLAMA",
    "QWEN3_MOE",
    "CheckpointError",
    "ConvertOptions",
    "InspectedModule",
    "Inspection",
    "Report",
    "Rule",
    "Rules",
    "TreeMapping",
    "WeightError",
    "activation_scales",
    "convert",
    "dequantize",
    "gguf",
    "inspect",
    "load",
    "mapping_for",
    "save",
    "save_adapters",
    "schemes",
]
