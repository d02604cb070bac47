"""`jaxlowprec verify`: whether a device computes what the specification says.

inputs        numbers made of integers on the host
quantisers    ops whose results are defined to the byte, and their digests
products      GEMMs against float64, within their bounds
arithmetic    the float32 operations that all of it rests on
run           the items, one after the other or several at a time
"""

from jaxlowprec.diagnostics.verify.run import Report, verify

__all__ = ["Report", "verify"]
