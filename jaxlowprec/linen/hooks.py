"""The product of Flax's own layers, and of frameworks that take a module for it, under a recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from jaxlowprec.layers.dot_general import DimensionNumbers, dot_general
from jaxlowprec.layers.layer_call import uses_key
from jaxlowprec.linen.layers import _recipe, _state, handed_on
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.roles import Recipe


def flax_dot_general_cls(rules: Recipe | None = FROM_CONTEXT) -> Callable[[], nn.Module]:
    """The `dot_general_cls=` of Linen layers, and of frameworks such as MaxText: it makes the module of a product.

    The module's call has the arguments of `jax.lax.dot_general`, the layer's inputs first. Its `DelayedScaling` state
    is in the collection "_overwrite_with_gradient", which `init` makes. For rules by name, the layer's name is the path
    of the module that it is called in, or "" if it is called by itself, as in `flax.nnx.bridge.ToNNX`.

    Flax's layers cast the kernel first; `promote_dtype=jaxlowprec.linen.keep_kernel_dtype` hands it over in its own
    dtype. `linen.convert` needs neither.

    Arguments:
        rules: the recipe, a `PerLayer` of recipes, or None: high precision. Default: the context's (`autocast`).

    Raises:
        TypeError: rules is no recipe.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> from flax import linen as nn
    >>> layer = nn.Dense(32, dot_general_cls=jlp.flax_dot_general_cls(jlp.NVFP4BlockScaling()))
    >>> variables = layer.init(jax.random.key(0), jnp.ones((8, 64)))
    >>> layer.apply(variables, jnp.ones((8, 64))).shape
    (8, 32)
    """
    resolve("flax_dot_general_cls", rules)
    return _hook(rules)


@functools.cache  # so that modules with the same rules are equal
def _hook(rules: Any) -> Callable[[], nn.Module]:
    return functools.partial(DotGeneral, rules)


class DotGeneral(nn.Module):
    """A product of a layer, see `flax_dot_general_cls`."""

    rules: Any = FROM_CONTEXT

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Computes `jax.lax.dot_general` under the rules."""
        name = "/".join(self.path[:-1])
        recipe = _recipe(self, self.rules, name)
        state = None if recipe is None or recipe.delayed is None else _state(self, recipe.delayed)
        wanted = recipe is not None and uses_key(recipe.roles(name=name), recipe.sums) and self.has_rng("sr")
        y = dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            recipe=recipe,
            key=self.make_rng("sr") if wanted else None,
            name=name,
            state=state,
        )
        return handed_on(self, y, state)
