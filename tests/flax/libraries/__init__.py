"""Flax's two layer libraries behind one interface: what both promise is tested once, for both.

Layers have NNX's names and arguments. A `maker` is a function that makes a module, a `model` a module and its arrays.
"""

from tests.flax.libraries.linen import Linen, LinenModel, joined
from tests.flax.libraries.models import numbers, weighted, weights_of
from tests.flax.libraries.nnx import Nnx, NnxModel, filled

__all__ = ["LIBRARIES", "LinenModel", "NnxModel", "filled", "joined", "numbers", "weighted", "weights_of"]

LIBRARIES = {"linen": Linen(), "nnx": Nnx()}
