"""The place where a model goes wrong: the first layer with an infinite value, a NaN or a large error."""

from jaxlowprec.diagnostics.first_bad import Bad, first_bad, first_bad_step
from jaxlowprec.diagnostics.traces import Difference, Trace, compare, trace

__all__ = ["Bad", "Difference", "Trace", "compare", "first_bad", "first_bad_step", "trace"]
