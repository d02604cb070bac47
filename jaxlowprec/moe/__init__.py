"""Mixture of experts without Flax: routing and its replay, dispatch by sorting."""

from jaxlowprec.moe.balancing import update_selection_bias
from jaxlowprec.moe.dispatching import Dispatch, combine, dispatch, scatter_to_experts
from jaxlowprec.moe.mixture import Exchange, MoEAux
from jaxlowprec.moe.router import RouterConfig, Routing, route
from jaxlowprec.moe.tape import Overlap, RoutingTape, overlap
from jaxlowprec.moe.tape_dtype import AFRESH

__all__ = [
    "AFRESH",
    "Dispatch",
    "Exchange",
    "MoEAux",
    "Overlap",
    "RouterConfig",
    "Routing",
    "RoutingTape",
    "combine",
    "dispatch",
    "overlap",
    "route",
    "scatter_to_experts",
    "update_selection_bias",
]
