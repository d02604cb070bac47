"""Optimizer states in 8 bits and master weights as remainders, for any optax transformation.

`quantized_state` keeps the state of a transformation in codes (`codes.py`), which rules choose (`rules.py`), with
random bits of their own (`draws.py`). `master_weights` keeps float32 weights as bfloat16 parameters and what is left of
the bits. `adamw` and `lion` have defined bits; they update what both keep in one pass (`leafwise.py`). `convert_state`
takes a state of one transformation to that of another. optax is a dependency of training programs and not of this
library: it is imported when a transformation is made.
"""

from jaxlowprec.optim.codes import FixedCode, RelativeCode, StateCode
from jaxlowprec.optim.converting import convert_state
from jaxlowprec.optim.explaining import StateExplanation, StateLeaf, explain_state
from jaxlowprec.optim.leafwise import apply_gradients
from jaxlowprec.optim.masters import MasterState, master_weights
from jaxlowprec.optim.optimizers import adamw, lion
from jaxlowprec.optim.rules import FIXED, RULES, SIGNED, UNSIGNED
from jaxlowprec.optim.states import QuantizedState, quantized_state

__all__ = [
    "FIXED",
    "RULES",
    "SIGNED",
    "UNSIGNED",
    "FixedCode",
    "MasterState",
    "QuantizedState",
    "RelativeCode",
    "StateCode",
    "StateExplanation",
    "StateLeaf",
    "adamw",
    "apply_gradients",
    "convert_state",
    "explain_state",
    "lion",
    "master_weights",
    "quantized_state",
]
