"""Mixture of experts without Flax: routing and its replay, dispatch by sorting."""

from jaxlowprec.moe.dispatching import Dispatch, combine, dispatch, scatter_to_experts
from jaxlowprec.moe.mixture import MoEAux
from jaxlowprec.moe.overlapping import Overlap, overlap
from jaxlowprec.moe.router import AFRESH, Routing, route
from jaxlowprec.moe.tape import RoutingTape

__all__ = [
    "AFRESH",
    "Dispatch",
    "MoEAux",
    "Overlap",
    "Routing",
    "RoutingTape",
    "combine",
    "dispatch",
    "overlap",
    "route",
    "scatter_to_experts",
]
