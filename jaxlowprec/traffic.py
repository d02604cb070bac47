"""The traffic of a compiled function between devices."""

from jaxlowprec.diagnostics.traffic import Collective, collectives

__all__ = ["Collective", "collectives"]
