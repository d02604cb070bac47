"""AdamW's and Lion's update in one pass, with defined bytes: states in 8 bits, master weights as remainders."""

from jaxlowprec.ops.optimizer_update.api import OptimizerUpdate, StateRounding, optimizer_update
from jaxlowprec.ops.optimizer_update.reference import Moment, Rule

__all__ = ["OptimizerUpdate", "Moment", "Rule", "StateRounding", "optimizer_update"]
