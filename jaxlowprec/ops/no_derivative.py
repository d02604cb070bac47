"""Identities whose derivative raises an error, where autodiff would compute a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def no_derivative(message: str) -> Callable[[Any], Any]:
    """A function that returns its argument, any tree of arrays; its derivative raises NotImplementedError(message)."""

    @jax.custom_jvp
    def identity(arrays):
        return arrays

    @identity.defjvp
    def _derivative(primals, tangents):
        raise NotImplementedError(message)

    return identity
