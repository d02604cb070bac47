"""The use of a product's result, which identifies routers and heads where names cannot."""

from __future__ import annotations

from typing import Any

from jaxlowprec.models.transform.products import Product
from jaxlowprec.recipes.fields import Use, use_of

_CHOICES = ("top_k", "approx_top_k", "argmax")
_PRODUCTS = ("dot_general", "ragged_dot_general", "ragged_dot")

Tag = tuple[int, bool]
"""(a parameter's number, whether the value is an exponential): its last axis is the product's by that parameter."""
Tags = frozenset[Tag]
_NONE: Tags = frozenset()


class Uses:
    """Follows the results of products by parameters through a function's jaxpr, as long as their last axis stays.

    Attributes:
        chosen: the parameters whose product feeds a top-k or an argmax.
        normalised: those whose product is normalised along its last axis, by a softmax.
        contracted: those whose product is multiplied by a matrix again, along that axis.
    """

    def __init__(self, jaxpr: Any, products: dict[int, list[Product]]):
        """products: by the ids of their equations."""
        self.chosen: set[int] = set()
        self.normalised: set[int] = set()
        self.contracted: set[int] = set()
        self._products = products
        self._through(jaxpr, [_NONE] * len(jaxpr.invars))

    def of(self, product: Product, name: str, vocabulary: int) -> Use:
        """The use of one of the products; the name of one of its parameters decides where the trace does not.

        Arguments:
            vocabulary: the length of the longest table in which the function looks rows up, or 0.
        """
        leaves = {single.leaf for single in product.weight.singles}
        if leaves & self.chosen:
            return Use.ROUTER
        if not leaves & self.contracted and vocabulary in product.kept:
            return Use.HEAD
        return use_of(name, is_normalised=bool(leaves & self.normalised))

    def _through(self, jaxpr: Any, given: list[Tags]) -> list[Tags]:
        """The tags of an open jaxpr's results."""
        known = dict(zip(jaxpr.invars, given, strict=True))

        def tags(atom: Any) -> Tags:
            return _NONE if hasattr(atom, "val") else known.get(atom, _NONE)

        for eqn in jaxpr.eqns:
            operands = [tags(v) for v in eqn.invars]
            inner = _jaxprs(eqn)
            if inner:
                results = self._of_call(eqn, inner, operands)
            else:
                results = [self._of_equation(eqn, operands)] * len(eqn.outvars)
            known |= zip(eqn.outvars, results, strict=True)
        return [tags(v) for v in jaxpr.outvars]

    def _of_call(self, eqn: Any, jaxprs: list[Any], operands: list[Tags]) -> list[Tags]:
        """The tags of the results of an equation with jaxprs, whose arguments are its last operands."""
        found = [_NONE] * len(eqn.outvars)
        for jaxpr in jaxprs:
            missing = len(jaxpr.invars) - len(operands)
            given = operands[-missing:] if missing < 0 else [_NONE] * missing + operands
            for number, one in enumerate(self._through(jaxpr, given)[: len(found)]):
                found[number] |= one
        return found

    def _of_equation(self, eqn: Any, operands: list[Tags]) -> Tags:
        name, result = eqn.primitive.name, eqn.outvars[0].aval
        if name in _PRODUCTS:
            self._contract(eqn, operands)
            return frozenset((s.leaf, False) for p in self._products.get(id(eqn), ()) for s in p.weight.singles)
        if name in _CHOICES:
            self.chosen |= {leaf for leaf, _ in operands[0]}
        if name == "reduce_sum" and eqn.invars[0].aval.ndim - 1 in eqn.params["axes"]:
            self.normalised |= {leaf for leaf, is_exponential in operands[0] if is_exponential}
        last = getattr(result, "shape", ())[-1:]
        kept = [t for v, t in zip(eqn.invars, operands, strict=True) if t and last and v.aval.shape[-1:] == last]
        tags = frozenset[Tag]().union(*kept)
        return frozenset((leaf, True) for leaf, _ in tags) if name == "exp" else tags

    def _contract(self, eqn: Any, operands: list[Tags]) -> None:
        numbers = eqn.params.get("dimension_numbers")
        for side, tags in enumerate(operands[:2]):
            axes = numbers[0][side] if numbers is not None else (1,)  # a product in groups: [T, K] by [E, K, N]
            if tags and eqn.invars[side].aval.ndim - 1 in axes:
                self.contracted |= {leaf for leaf, _ in tags}


def _jaxprs(eqn: Any) -> list[Any]:
    """The open jaxprs that an equation runs."""
    found = []
    for name, value in eqn.params.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(one, "jaxpr", one)
            if name != "cond_jaxpr" and hasattr(inner, "eqns") and hasattr(inner, "invars"):
                found.append(inner)
    return found
