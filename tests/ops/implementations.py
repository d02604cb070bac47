"""Whom the cases of an op run on. A class `...Cases` states what the op promises; these are inherited beside it.

`compiled` of a class, or of an implementation, makes of a function of arrays what is run: for the reference, and for a
GPU's kernels, a program of XLA's; for the CPU's kernels NumPy calls them, which needs no compiler. What the kernels are
called with and what is done with their results is the library's own in each. tests/wiring has them in programs.
"""

import functools
import os

import jax
import pytest

from tests.interpreted import interpreted

_natively = jax.jit if os.environ.get("JAXLOWPREC_TESTS_ON") == "cuda" else interpreted


def compiled(implementation):
    """How functions of arrays run on that implementation."""
    return jax.jit if implementation == "reference" else _natively


@functools.cache
def with_options(function, implementation, **options):
    """A function of arrays, compiled once for each set of options that can be hashed."""
    return compiled(implementation)(functools.partial(function, implementation=implementation, **options))


class ByReference:
    """Pure JAX."""

    implementation = "reference"
    compiled = staticmethod(jax.jit)


@pytest.mark.sampled(3)  # whatever the module says: a case is cheap
@pytest.mark.usefixtures("isa")
class ByKernels:
    """The native code under the best instruction set, which tests/cpp compares with the others; with
    JAXLOWPREC_TESTS_ON=cuda the GPU's."""

    implementation = "ffi"
    compiled = staticmethod(_natively)
