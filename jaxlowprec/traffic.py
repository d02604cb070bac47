"""What a compiled function sends between devices."""

from jaxlowprec.diagnostics.traffic import Collective, collectives

__all__ = ["Collective", "collectives"]
