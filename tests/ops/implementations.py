"""Whom the cases of an op run on. A class `...Cases` states what the op promises; these are inherited beside it."""

import pytest


class ByReference:
    """Pure JAX."""

    implementation = "reference"


@pytest.mark.usefixtures("isa")
class ByKernels:
    """The native code under each instruction set; with JAXLOWPREC_TESTS_ON=cuda the GPU's."""

    implementation = "ffi"
