"""Forms in which a receiver holds weights."""

from __future__ import annotations

NAMES = ("published",)
"""Of all forms."""
