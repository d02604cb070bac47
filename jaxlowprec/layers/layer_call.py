"""One call of a layer: the common part of `linear`, `dot_general` and `einsum`, and the product that they compute.

The product is `quantized_matmul`, or `weight_only` if only the weight is quantised. Residuals and products have
checkpoint names (`residuals`) for `jax.checkpoint` and the policies of `checkpoint_policies`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxlowprec import wiring
from jaxlowprec.arguments import a_text, shown
from jaxlowprec.arrays.formats import Format
from jaxlowprec.arrays.quantized_array import QuantizedArray, check_quantized
from jaxlowprec.layers import delayed_scaling, weight_only
from jaxlowprec.layers.accumulating import Total, total_for
from jaxlowprec.layers.operands import Shard, weight_both_ways
from jaxlowprec.layers.product import GemmOperands, GemmSpec, QuantizedKernel, States
from jaxlowprec.layers.quantized_matmul import quantized_matmuls, recording
from jaxlowprec.layers.residuals import in_profiles
from jaxlowprec.ops.checks import checked_precision
from jaxlowprec.ops.quantize.checks import part_unit
from jaxlowprec.ops.quantize.random_bits import Randomness, check_key, key_words, keyless_seed, slice_words
from jaxlowprec.ops.split_rows import merged_rows, split_rows
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import resolve
from jaxlowprec.recipes.fields import IN_FLOAT32, Sums
from jaxlowprec.recipes.roles import Recipe, Roles
from jaxlowprec.recipes.transformer_engine import Calibrating
from jaxlowprec.telemetry import probes
from jaxlowprec.wiring.sharding_rule import ShardingLike, dimensions_of, resharded, sharding_of, sharding_of_product


class PreparedProduct(NamedTuple):
    """The arguments of a product whose operands are quantised.

    Attributes:
        spec, product, states: see `quantized_matmuls`.
        state: that of delayed scaling for the layer's next call.
    """

    spec: GemmSpec
    product: GemmOperands
    states: States
    state: delayed_scaling.State | None


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer's call, checked and resolved once.

    Attributes:
        who: the name of the function, for messages.
        name: the layer's name.
        recipe: the recipe that the layer follows in this call; None for high precision, and for a loaded weight that is
            multiplied by inputs in high precision.
        key: the key of stochastic rounding and of drawn signs, or None.
        quantized: the weight if it is quantised already, or None.
        state: the state of delayed scaling, or None.
        precision: precision of the three GEMMs.
        total: what the kernel's gradient is added to, see `watching.accumulating`; or None.
        kind: of the layer, for recipes: "linear", or "grouped_linear" for a weight per group of rows.
        layouts: what makes the weight [..., K, N] of the kernel that the layer was given, one after the other; known
            only where `total` is.
        transposed: the weight [..., K, N] is a transposition of a kernel [..., N, K], see `GemmSpec`.
    """

    who: str
    name: str
    recipe: Recipe | None
    key: jax.Array | None
    quantized: QuantizedKernel | None
    state: delayed_scaling.State | None
    precision: jax.lax.PrecisionLike
    total: Total | None = None
    kind: str = "linear"
    layouts: tuple[Callable[[jax.Array], jax.Array], ...] = ()
    transposed: bool = False

    @functools.cached_property
    def roles(self) -> Roles | None:
        """The recipe's roles for the layer; the recipe is asked once per call."""
        return None if self.recipe is None else self.recipe.roles(self.kind, self.name)

    @property
    def calibrates(self) -> bool:
        """Whether the product is in high precision while its amaxes are recorded."""
        return isinstance(self.recipe, Calibrating)

    def in_high_precision(self, w: Any) -> bool:
        """Whether nothing is quantised; a loaded weight counts as quantised even without a recipe."""
        loaded = w is None and self.quantized is not None and self.quantized.weight_only
        return self.calibrates or (self.recipe is None and not loaded)

    def loaded(self, w: Any) -> QuantizedArray | None:
        """The weight if it was loaded quantised, for inputs in high precision; else None."""
        if w is not None or self.recipe is not None or self.quantized is None or not self.quantized.weight_only:
            return None
        return self.quantized.columnwise

    def high_precision_weight(self, w: jax.Array | None) -> jax.Array:
        """The weight of a product in high precision."""
        if w is None or self.quantized is not None:
            raise ValueError(
                f"{self.who}: quantized_kernel= without a recipe that quantises; pass the recipe it was quantised for"
            )
        return w

    def recorded(
        self, x: jax.Array, w: jax.Array, y: jax.Array, sizes: jax.Array | None = None
    ) -> tuple[jax.Array, delayed_scaling.State | None]:
        """A product and its state (calibrating): x, w and the gradient of y give the state's gradient.

        `sizes`: of the groups of x's rows, if they are in groups.
        """
        recipe: Any = self.recipe
        used, state = self.used_state(w)
        x, w, y, sizes = wiring.align_varying(x, w, y, sizes)
        return recording(recipe.delayed, x, w, y, used, sizes), state

    def matmul(
        self,
        x: Float[Array, "*B T K"],
        w: Float[Array, "*B K N"] | None,
        bias: Float[Array, "N"] | None,
        out_dtype: jax.typing.DTypeLike,
        out_sharding: ShardingLike = None,
        rows_split: bool = False,
    ) -> tuple[Float[Array, "*B T N"], delayed_scaling.State | None]:
        """x in the input's role times w in the weight's, and the state for the layer's next call.

        Without a recipe `quantized` is a loaded weight. `rows_split`: x is [..., S, T, K] for a weight without S, and
        so is the result; because S and T stay two axes, a mesh can split both. If a block would lie on two parts, they
        are merged.
        """
        weight: Any = w if w is not None else self.quantized
        if rows_split and must_merge(self.who, x, weight, self.roles):
            y, state = self.matmul(merged_rows(x), w, bias, out_dtype)
            return resharded(split_rows(y, *x.shape[-3:-1]), out_sharding), state
        result = out_dtype, out_sharding, rows_split
        if self.recipe is None or self.roles is None:
            loaded = weight.columnwise
            return self._weight_only(x, None, bias, loaded, weight_only.served_by(loaded, None), result), self.state
        if self.roles.ste is not None and self.roles.weight is not None:
            _, state = self.used_state(weight)
            loaded = None if self.quantized is None else self.quantized.columnwise
            served = weight_only.served_by(loaded, self.roles)
            probe = probes.probe(self.who, self.name)
            return self._weight_only(x, w, bias, loaded, served, result, probe), state
        prepared = self.prepared(x, w, bias, result)
        x, product = wiring.align_varying(x, prepared.product)
        with in_profiles(self.name):
            (y,), _ = quantized_matmuls((prepared.spec,), x, (product,), (prepared.states,))
        return y, prepared.state

    def prepared(
        self, x: Any, w: jax.Array | None, bias: jax.Array | None, result: tuple[Any, Any, bool]
    ) -> PreparedProduct:
        """The product in which input and weight are quantised. x may be abstract.

        `result`: its dtype, its sharding in explicit mode, and `rows_split`, see `matmul`.
        """
        self.check_quantized(w)
        recipe: Any = self.recipe
        roles: Any = self.roles
        weight: Any = w if w is not None else self.quantized
        out_dtype, out_sharding, rows_split = result
        out_sharding = self._out_sharding(x, w, out_sharding)
        shardings = sharding_of(x), sharding_of(w), sharding_of(bias)
        of_recipe = recipe.backward_override, recipe.sums, recipe.delayed
        drawn = roles.draws_for_weight or recipe.sums.drawn  # by positions in [K, N]
        as_it_lies = self.transposed and not (drawn or roles.requantized or shardings[1])
        of_call: Any = jnp.dtype(out_dtype), shardings, out_sharding, rows_split, self.precision, as_it_lies
        spec = GemmSpec(roles, *of_recipe, *of_call)
        silence.warn_once(self.who, recipe, silence.of_roles(roles, recipe.backward_override), depth=2)
        batch = x.shape[: -3 if rows_split else -2]
        tokens = math.prod(x.shape[len(batch) : -1])
        randomness = randomness_of(self.who, roles, self.key, batch, (tokens, weight.shape[-1]), self.name)
        signs = signs_for(self.who, roles, self.key, (tokens, x.shape[-1]), self.name)
        used, state = self.used_state(weight)
        states = used, probes.probe(self.who, self.name)
        of_weight = weight_randomness(self.who, roles, self.key, weight.shape, self.name)
        of_sums = sum_randomness(self.who, recipe.sums, self.key, (*x.shape[-1:], *weight.shape[-1:]), self.name)
        sources: Any = {"signs": signs, "of_weight": of_weight, "of_sums": of_sums}
        product = GemmOperands(w, bias, randomness, self.quantized, **sources)
        return PreparedProduct(spec, self.accumulated(product), states, state)

    def laid_out(self, layout: Callable[[jax.Array], jax.Array], transposed: bool = False) -> LayerCall:
        """The call of a layer whose product takes `layout` of its kernel, a linear function of it.

        So the kernel can be quantised, and its gradients added up, as the product has it. `transposed`: see above.
        """
        layouts = self.layouts if self.total is None else (*self.layouts, layout)
        return dataclasses.replace(self, layouts=layouts, transposed=transposed)

    def matrices(self, kernel: jax.Array) -> jax.Array:
        """The weight [..., K, N] of the product that the layer makes of its kernel."""
        return functools.reduce(lambda w, layout: layout(w), self.layouts, kernel)

    def accumulated(self, product: GemmOperands) -> GemmOperands:
        """The call's product, with the sum that its kernel's gradient is added to, if there is one."""
        if self.total is None or self.quantized is not None:
            return product
        self.total.calls.append(self)
        return product._replace(quantized=self.total.quantized, total=self.total.array)

    def _out_sharding(self, x: Any, w: jax.Array | None, given: Any) -> Any:
        """The sharding of the product in explicit mode: the same type, whatever is kept for the backward pass."""
        if given is not None or not sharding_of(x):
            return given
        return sharding_of_product(x, self.dimension_of_features(w))

    def dimension_of_features(self, w: jax.Array | None) -> Any:
        """The mesh axes that split N of the weight [..., K, N], in explicit mode."""
        quantized: Any = self.quantized
        return dimensions_of(w)[-1] if w is not None else dimensions_of(quantized.columnwise.data)[-2]

    def used_state(self, w: Any) -> tuple[delayed_scaling.State | None, delayed_scaling.State | None]:
        """The state of delayed scaling for the call, None if its recipe has none, and for the layer's next call.

        `w`: the weight [..., K, N].
        """
        recipe: Any = self.recipe
        if recipe.delayed is None:
            return None, self.state
        experts = w.shape[0] if self.kind == "grouped_linear" else None
        state = delayed_scaling.check_state(self.who, recipe.delayed, self.state, experts)
        return delayed_scaling.used_and_handed_on(state)

    def _weight_only(
        self,
        x: jax.Array,
        w: jax.Array | None,
        bias: jax.Array | None,
        loaded: QuantizedArray | None,
        served: weight_only.WeightServing,
        result: tuple[Any, Any, bool],
        probe: probes.Probe | None = None,
    ) -> jax.Array:
        """The product if only the weight is quantised."""
        self.check_quantized(w)
        out_dtype, out_sharding, rows_split = result
        result = out_dtype, self._out_sharding(x, w, out_sharding), rows_split
        if loaded is None:
            weight_only.check_whole_blocks(self.who, self.name, w, served.format)
        with in_profiles(self.name):
            return weight_only.matmul(x, w, bias, loaded, served, result, self.precision, probe=probe)

    def check_quantized(self, w: jax.Array | None) -> None:
        """Raises ValueError unless a weight quantised before fits the call's roles and the master weight's shape."""
        quantized: Any = self.quantized
        roles = self.roles
        if quantized is None or roles is None:
            return
        row, column = roles.forms("weight")
        has = _formats(quantized.rowwise, quantized.columnwise), quantized.weight_only
        wants = _formats(None if roles.ste is not None else row, column), roles.ste is not None
        if has != wants:
            raise ValueError(
                f"{self.who}: quantized_kernel is {_kernel_forms(*has)} but the recipe wants {_kernel_forms(*wants)}; "
                "quantise it again under this recipe"
            )
        if w is None and column is None:
            raise ValueError(
                f"{self.who}: kernel is None and quantized_kernel is {_kernel_forms(*has)}, but fprop is in high "
                "precision; pass the kernel, too"
            )
        if w is not None and quantized.shape != w.shape:
            raise ValueError(f"{self.who}: quantized_kernel has shape {quantized.shape}, the kernel {w.shape}")


def layer_call(
    who: str,
    kernel: Any,
    quantized: Any,
    *,
    recipe: Any,
    key: Any,
    name: Any,
    state: Any,
    precision: jax.lax.PrecisionLike,
    kind: str = "linear",
) -> tuple[jax.Array | None, LayerCall]:
    """The kernel in high precision, if one was given, and the call. A loaded kernel becomes the call's `quantized`.

    Raises:
        TypeError, ValueError: an argument is invalid, or a loaded kernel does not fit the recipe.
    """
    a_text(who, name=name)
    check_key(who, key)
    precision = checked_precision(who, precision)
    if state is not None:
        delayed_scaling.check_mapping(who, state)
    if quantized is not None:
        check_kernel(who, quantized)
    own = resolve(who, recipe, name)
    if not isinstance(kernel, QuantizedArray):
        return kernel, LayerCall(who, name, own, key, quantized, state, precision, total_for(kernel), kind)
    if quantized is not None:
        raise ValueError(f"{who}: kernel is quantised and quantized_kernel= is given; needs one of them")
    weight_only.check_loaded(who, name, kernel, resolve(who, recipe))
    with_inputs = own is not None and own.roles(kind, name).serves_inputs
    held = QuantizedKernel(None, kernel, weight_only=not with_inputs)
    return None, LayerCall(who, name, own if with_inputs else None, key, held, state, precision, kind=kind)


def check_kernel(who: str, quantized: Any) -> None:
    """Raises unless the argument is what `quantize_kernel` makes."""
    if not isinstance(quantized, QuantizedKernel):
        raise TypeError(f"{who}: quantized_kernel={shown(quantized)}; needs what jaxlowprec.quantize_kernel makes")
    if quantized.columnwise is not None or quantized.rowwise is None:
        check_quantized(who, "quantized_kernel.columnwise", quantized.columnwise)
    if quantized.rowwise is not None:
        check_quantized(who, "quantized_kernel.rowwise", quantized.rowwise)


def must_merge(who: str, x: jax.Array, weight: Any, roles: Roles | None) -> bool:
    """Whether parts [..., S, T, K] have to be merged because a block of x or of its gradient would lie on two.

    Raises ValueError if they cannot be merged: two split axes would become strided.
    """
    if roles is None or roles.ste is not None:  # x is not quantised
        return len(weight.shape) > 2  # a weight per further axis needs matrices
    together = 1
    for tensor in ("input", "gradient"):
        row, column = roles.forms(tensor)
        if row is not None:
            together = math.lcm(together, part_unit(row.format, None, row.rounding, columnwise=False))
        if column is not None:
            together = math.lcm(together, part_unit(column.format, column.hadamard, column.rounding, columnwise=True))
    if x.size > 0 and x.shape[-2] % together == 0:
        return False
    rows = dimensions_of(x)[-2] if sharding_of(x) else ()
    if rows and x.shape[-3] > 1:
        raise ValueError(
            f"{who}: x {x.shape} is split over {rows} along its second last axis and has {x.shape[-2]} rows in a "
            f"part, where blocks need a multiple of {together}; reshard x to leave that axis whole, or pad it"
        )
    return True


def _formats(*forms: Any) -> tuple[Format | None, ...]:
    """The formats of a kernel's forms, or of their roles."""
    return tuple(None if form is None else form.format for form in forms)


def _kernel_forms(formats: tuple[Format | None, ...], weight_only: bool) -> str:
    """The formats of a kernel's rowwise and columnwise forms and the GEMMs that read them, in words."""
    row, column = formats
    to = [f"{fmt} in {gemm}" for fmt, gemm in ((column, "fprop"), (row, "dgrad")) if fmt is not None]
    if not to:
        return "high precision"
    if weight_only or row == column:
        to = [str(column)]
    return f"{' and '.join(to)} for {'high-precision' if weight_only else 'quantised'} inputs"


def uses_key(roles: Roles, sums: Sums = IN_FLOAT32) -> bool:
    """Whether a key would have an effect. `sums`: of the recipe, where devices add them up."""
    return roles.drawn or roles.draws_signs or roles.draws_for_weight or sums.drawn


def randomness_of(
    who: str, roles: Roles, key: jax.Array | None, batch: tuple[int, ...], gradient: tuple[int, int], name: str
) -> Randomness | None:
    """The source of a layer's random bits, if any of its operands takes some. Its gradient is [*batch, *gradient]."""
    if not roles.drawn:
        return None
    if key is not None:
        return Randomness(words=slice_words(key_words(who, key, ()), batch))
    return Randomness(seed=keyless_seed(*gradient, name))


def signs_for(who: str, roles: Roles, key: jax.Array | None, tokens: tuple[int, int], name: str) -> Randomness | None:
    """The source of the signs of wgrad's rotation, if they are drawn (numerics.md 15). `tokens`: the input's sizes."""
    if not roles.draws_signs:
        return None
    return Randomness(seed=keyless_seed(*tokens, name)) if key is None else Randomness(words=key_words(who, key, ()))


def sum_randomness(who: str, sums: Sums, key: jax.Array | None, shape: tuple[int, int], name: str) -> Randomness | None:
    """The source of what sums over devices draw, if they draw something (numerics.md 16). `shape`: K and N."""
    if not sums.drawn:
        return None
    return Randomness(seed=keyless_seed(*shape, name)) if key is None else Randomness(words=key_words(who, key, ()))


def weight_randomness(
    who: str, roles: Roles, key: jax.Array | None, shape: tuple[int, ...], name: str
) -> Randomness | None:
    """The source of what quantising a weight [..., K, N] draws, if it draws something (numerics.md 15)."""
    if not roles.draws_for_weight:
        return None
    if key is not None:
        return Randomness(words=key_words(who, key, ()))
    rows, columns = shape[-2:]
    return Randomness(seed=keyless_seed(rows, columns, name))


def quantized_weight(
    who: str,
    roles: Roles,
    kernel: jax.Array,
    key: jax.Array | None,
    name: str,
    encode: jax.Array | None = None,
    shard: Shard | None = None,
) -> QuantizedKernel:
    """A kernel [..., K, N] in the forms that GEMMs with these roles read.

    `encode`: of delayed scaling. `shard`: how the kernel is one.
    """
    randomness = weight_randomness(who, roles, key, kernel.shape, name)
    options: Any = {"requantized": "weight" in roles.requantized, "randomness": randomness, "encode": encode}
    options |= {"shard": shard, "served_dtype": roles.served_dtype}
    return QuantizedKernel(*weight_both_ways(kernel, *roles.forms("weight"), **options))
