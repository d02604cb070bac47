"""AdamW's update in one pass, with defined bytes: states in 8 bits, master weights as remainders."""

from jaxlowprec.ops.adamw_update.api import AdamwUpdate, StateRounding, adamw_update
from jaxlowprec.ops.adamw_update.reference import Moment

__all__ = ["AdamwUpdate", "Moment", "StateRounding", "adamw_update"]
