"""Rows in groups times a weight per group, under a recipe: the products of a mixture of experts.

Each group is a tensor of its own, with its own amax, blocks and random bits, as if `linear` computed it by itself.
Where only the weights are quantised, the rules are those of `weight_only` for each group, and residuals have the same
checkpoint names.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxlowprec import wiring
from jaxlowprec.arguments import as_array, shown
from jaxlowprec.arrays.formats import BLOCK
from jaxlowprec.arrays.quantized_array import QuantizedArray
from jaxlowprec.layers import delayed_scaling, weight_only
from jaxlowprec.layers.layer_call import LayerCall, PreparedProduct, layer_call, randomness_of
from jaxlowprec.layers.linear import features_of
from jaxlowprec.layers.measured import measured_weight
from jaxlowprec.layers.options import GroupedMatmulOptions, LayerSettings
from jaxlowprec.layers.product import GemmOperands, GemmSpec, QuantizedKernel
from jaxlowprec.layers.quantized_matmul import quantized_matmuls
from jaxlowprec.layers.residuals import (
    QUANTIZED_WEIGHT,
    differentiated_once,
    dtype_marker,
    in_profiles,
    read,
    tag_product,
    tag_residual,
)
from jaxlowprec.layers.rows import RowsInGroups
from jaxlowprec.layers.watched import watched
from jaxlowprec.layers.weight_only import WeightServing, quantize_weight, through_estimator
from jaxlowprec.ops.checks import a_sharding, float_array, float_dtype, wider_dtype
from jaxlowprec.ops.grouped_matmul.groups import LEAST_TOO_LARGE, cut_to_rows
from jaxlowprec.ops.grouped_matmul.plain import rows_product
from jaxlowprec.ops.grouped_matmul.weight_only import grouped_weight_only
from jaxlowprec.recipes import silence
from jaxlowprec.recipes.autocast import FROM_CONTEXT, resolve
from jaxlowprec.recipes.fields import IN_FLOAT32
from jaxlowprec.recipes.roles import Recipe, Roles
from jaxlowprec.telemetry import probes
from jaxlowprec.wiring.sharding_rule import ShardingLike, resharded, sharding_of


@overload
def grouped_matmul(
    lhs: Float[Array, "T K"],
    rhs: Float[Array, "E K N"] | QuantizedArray | None,
    group_sizes: Int[Array, "E"],
    bias: Float[Array, "E N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    state: None = None,
    **options: Unpack[GroupedMatmulOptions],
) -> Float[Array, "T N"]: ...


@overload
def grouped_matmul(
    lhs: Float[Array, "T K"],
    rhs: Float[Array, "E K N"] | QuantizedArray | None,
    group_sizes: Int[Array, "E"],
    bias: Float[Array, "E N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    state: delayed_scaling.State,
    **options: Unpack[GroupedMatmulOptions],
) -> tuple[Float[Array, "T N"], delayed_scaling.State]: ...


def grouped_matmul(
    lhs: Float[Array, "T K"],
    rhs: Float[Array, "E K N"] | QuantizedArray | None,
    group_sizes: Int[Array, "E"],
    bias: Float[Array, "E N"] | None = None,
    recipe: Recipe | None = FROM_CONTEXT,
    *,
    key: jax.Array | None = None,
    quantized_kernel: QuantizedKernel | None = None,
    name: str = "",
    state: delayed_scaling.State | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "T N"] | tuple[Float[Array, "T N"], delayed_scaling.State]:
    """Each group of rows times its own kernel; operands of the three GEMMs are quantised as the recipe says.

    The rows of the groups lie one after the other, without padding; a group may be empty. The result of a group depends
    only on its rows, its kernel and its part of a state: quantised bytes included, it is that of
    `linear(lhs_e, rhs[e])`. Rows after the last group give zeros and get zero gradients.

    Arguments:
        lhs: the rows; bfloat16, float16 or float32: the dtype of the result.
        rhs: the kernels; any of those dtypes, quantised from its own dtype; a float32 master weight gets a float32
            gradient. Or a loaded QuantizedArray [E, K, N] quantised along K (axis=-2), see `linear`. None with
            `quantized_kernel`, for inference.
        group_sizes: integers of any width, on the device: they may change from call to call without a new compilation.
            Negative sizes count as 0, and the last groups are cut at the end of the rows. If sizes are known (numbers
            of Python or NumPy), a sum larger than the number of rows is an error.
        bias: one per group, added in float32.
        recipe: default: the context's (`autocast`). None: high precision, the kernels cast to the rows' dtype.
        key: for recipes that round gradients stochastically. The bits of group e are those of slice e in a batch of E
            slices of `linear`. None: the bits come from each group's gradient, see `linear`.
        quantized_kernel: `quantize_kernel(rhs, module_type="grouped_linear")`, so that they are not quantised
            again.
        name: the layer's name, for the bits without a key and for recipes that treat layers differently.
        state: the state of delayed scaling, of `jaxlowprec.delayed_scaling.init_state(recipe, num_experts=E)`: for each
            group that of a `linear`. Its gradient is its new value. A group without rows has seen the amax 0 of its
            rows and of their gradient, and the amax of its kernel.
        preferred_element_type: the dtype of the result; default: that of lhs.
        precision: precision of the three GEMMs, as for `jax.lax.dot`; for quantised ones see `scaled_matmul`.

    Returns:
        [T, N]. With `state`, a pair of that and the state for the layer's next call, see `linear`.

    Raises:
        TypeError: dtypes do not fit, or the recipe is not a recipe.
        ValueError: shapes do not fit; or a recipe that grouped activations cannot follow: square tiles for activations,
            rotations other than NVFP4's of size 16.

    Source: numerics.md 3, 4 and 9 for each group.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> x, kernels = jnp.ones((5, 32), jnp.bfloat16), jnp.ones((3, 32, 16))
    >>> y = jlp.grouped_matmul(x, kernels, jnp.array([2, 0, 3]), recipe=jlp.NVFP4BlockScaling())
    >>> y.shape, y.dtype, float(y[0, 0])
    ((5, 16), dtype(bfloat16), 32.0)
    """
    who = "grouped_matmul"
    x = float_array(who, "lhs", lhs)
    sizes = checked_sizes(who, group_sizes, x)
    settings: LayerSettings = {"recipe": recipe, "key": key, "name": name, "state": state, "precision": precision}
    weights, bias, call = checked_groups(who, x, sizes, rhs, bias, quantized_kernel, settings, names=("lhs", "rhs"))
    wanted = x.dtype if preferred_element_type is None else preferred_element_type
    dtype = float_dtype(who, "preferred_element_type", wanted)
    y, out_state = groups_product(call, x, weights, bias, sizes, dtype)
    return y if state is None else (y, out_state)


def checked_groups(
    who: str,
    x: Any,
    sizes: jax.Array,
    kernels: Any,
    bias: Any,
    quantized: Any,
    settings: LayerSettings,
    *,
    names: tuple[str, str] = ("x", "kernels"),
) -> tuple[jax.Array | None, jax.Array | None, LayerCall]:
    """The kernels in high precision and the bias of rows in groups, if they have them, and the call.

    `x`: its shape and dtype are what matters. `quantized`: the kernels, quantised before, or None. `settings`: what
    `layer_call` takes by name. `names`: of x and kernels, in errors.
    """
    if kernels is None and quantized is None:
        raise ValueError(f"{who}: {names[1]} is None; without quantized_kernel= there is no weight")
    if kernels is not None and not isinstance(kernels, QuantizedArray):
        kernels = float_array(who, names[1], kernels)
    kernels, call = layer_call(who, kernels, quantized, kind="grouped_linear", **settings)
    weight: Any = call.quantized if kernels is None else kernels
    shape, experts = weight.shape, sizes.shape[0]
    if x.ndim != 2 or len(shape) != 3 or shape[:2] != (experts, x.shape[1]) or experts == 0:
        raise ValueError(
            f"{who}: {names[0]} {x.shape}, {names[1]} {shape} and group_sizes {sizes.shape}: needs {names[0]} [T, K], "
            f"{names[1]} [E, K, N] and group_sizes [E], E at least 1; use jax.vmap for further axes"
        )
    features = shape[2]
    if bias is not None and (bias := float_array(who, "bias", bias)).shape != (experts, features):
        raise ValueError(f"{who}: bias has shape {bias.shape}; needs {(experts, features)}")
    return kernels, bias, call


def groups_product(
    call: LayerCall, x: jax.Array, kernels: jax.Array | None, bias: Any, sizes: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, Any]:
    """The product [T, N] of a checked call, and the state for the next one."""
    compute = functools.partial(_product, bias=bias, sizes=sizes, dtype=dtype)
    features = features_of(call, kernels)
    return watched(call, x, kernels, compute, lambda: x.size * features, sizes)


def _product(
    call: LayerCall, x: Any, kernels: Any, bias: Any, sizes: Any, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, Any]:
    """The product [T, N], and the state of delayed scaling if there is one."""
    who, name, precision = call.who, call.name, call.precision
    roles: Any = None if call.recipe is None else checked_roles(call)
    if call.in_high_precision(kernels):
        x, kernels, bias, sizes = wiring.align_varying(x, call.high_precision_weight(kernels), bias, sizes)
        wide = dtype if bias is None else jnp.dtype("float32")
        with in_profiles(name):
            y = rows_product(x, jnp.asarray(kernels, x.dtype), sizes, wide, precision)
            y = tag_product(RowsInGroups(sizes, precision).biased(y, bias).astype(dtype))
        return call.recorded(x, kernels, y, sizes) if call.calibrates else (y, call.state)
    loaded = None if call.quantized is None else call.quantized.columnwise
    if roles is None or (roles.ste is not None and roles.weight is not None):
        call.check_quantized(kernels)
        if loaded is None:
            weight_only.check_whole_blocks(who, name, kernels, roles.weight.format)
        served = weight_only.served_by(loaded, roles)
        spec = WeightOnlyGroupsSpec(served, dtype, _shardings(x, kernels, bias), precision)
        operands = wiring.align_varying(x, kernels, bias, loaded, sizes)
        with in_profiles(name):
            return weight_only_groups(spec, *operands, None if roles is None else _probe(who, name)), call.state
    prepared = prepared_groups(call, x, kernels, bias, sizes, dtype)
    x, of_groups = wiring.align_varying(x, prepared.product)
    with in_profiles(name):
        (y,), _ = quantized_matmuls((prepared.spec,), x, (of_groups,), (prepared.states,))
        return y, prepared.state


def _shardings(x: Any, kernels: Any, bias: Any) -> tuple[Any, Any, Any]:
    return sharding_of(x), sharding_of(kernels), sharding_of(bias)


def prepared_groups(
    call: LayerCall,
    x: Any,
    kernels: jax.Array | None,
    bias: jax.Array | None,
    sizes: jax.Array,
    dtype: jax.typing.DTypeLike,
    out_sharding: ShardingLike = None,
) -> PreparedProduct:
    """A product in which rows and weights are quantised. x may be abstract. Sums over devices are in float32."""
    call.check_quantized(kernels)
    roles = checked_roles(call)
    recipe: Any = call.recipe
    lines = 0, features_of(call, kernels)
    randomness = randomness_of(call.who, roles, call.key, sizes.shape, lines, call.name)
    shardings = _shardings(x, kernels, bias)
    result = jnp.dtype(dtype), shardings, out_sharding, False, call.precision
    spec = GemmSpec(roles, recipe.backward_override, IN_FLOAT32, recipe.delayed, *result)
    silence.warn_once(call.who, recipe, silence.of_roles(roles, recipe.backward_override), depth=2)
    product = call.accumulated(GemmOperands(kernels, bias, randomness, call.quantized, sizes=sizes))
    used, state = call.used_state(call.quantized if kernels is None else kernels)
    return PreparedProduct(spec, product, (used, _probe(call.who, call.name)), state)


def ragged_dot(
    lhs: Float[Array, "T K"],
    rhs: Float[Array, "E K N"] | QuantizedArray,
    group_sizes: Int[Array, "E"],
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    group_offset: Any = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Float[Array, "T N"]:
    """Drop-in for `jax.lax.ragged_dot`: `grouped_matmul` under the context's recipe.

    Arguments:
        lhs, rhs, group_sizes, precision: see `grouped_matmul`.
        preferred_element_type: the dtype of the result; default: what lhs and rhs promote to.
        group_offset: not supported, as in JAX.
        out_sharding: how the result is to be split, on a mesh of explicit axes.

    Raises:
        NotImplementedError: a group_offset.
        TypeError, ValueError: see `grouped_matmul`.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> with jlp.autocast(jlp.MXFP8BlockScaling()):
    ...     y = jlp.ragged_dot(jnp.ones((4, 64)), jnp.ones((2, 64, 8)), jnp.array([1, 3]))
    >>> y.shape
    (4, 8)
    """
    who = "ragged_dot"
    if group_offset is not None:
        raise NotImplementedError(f"{who}: group_offset is not supported; leave it out and slice the groups")
    a_sharding(who, "out_sharding", out_sharding)
    lhs = float_array(who, "lhs", lhs)
    rhs = rhs if isinstance(rhs, QuantizedArray) else float_array(who, "rhs", rhs)
    if preferred_element_type is None:
        preferred_element_type = lhs.dtype if isinstance(rhs, QuantizedArray) else wider_dtype(lhs.dtype, rhs.dtype)
    if not isinstance(rhs, QuantizedArray) and resolve("ragged_dot", FROM_CONTEXT, "") is None:
        wide = wider_dtype(lhs.dtype, rhs.dtype)
        lhs, rhs = lhs.astype(wide), rhs.astype(wide)
    y = grouped_matmul(lhs, rhs, group_sizes, preferred_element_type=preferred_element_type, precision=precision)
    return resharded(y, out_sharding)


def _probe(who: str, name: str) -> probes.Probe | None:
    """Telemetry's probe of the layer if it is measured, with its what_if roles checked; else None."""
    probe = probes.probe(who, name, "grouped_linear")
    for label, roles in () if probe is None else probe.what_if:
        _check_rows(f"{who}: telemetry's what_if {label!r}", roles)
    return probe


def integer_sizes(who: str, group_sizes: Any) -> Any:
    """The sizes as an array of integers, a NumPy array if they are known."""
    try:
        sizes = group_sizes if isinstance(group_sizes, jax.Array) else np.asarray(group_sizes)
    except (TypeError, ValueError):
        raise TypeError(f"{who}: group_sizes={shown(group_sizes)}; needs integers [E], one per group") from None
    if not jnp.issubdtype(sizes.dtype, jnp.integer) or sizes.ndim != 1:
        raise TypeError(
            f"{who}: group_sizes has dtype {sizes.dtype} and shape {sizes.shape}; needs integers [E], one per group"
        )
    return sizes


def checked_sizes(who: str, group_sizes: Any, x: jax.Array) -> jax.Array:
    """Sizes as int32 [E], limited to x's rows. Known sizes are checked as a whole, before JAX narrows them."""
    rows, sizes = x.shape[0] if x.ndim == 2 else 0, integer_sizes(who, group_sizes)
    if rows >= LEAST_TOO_LARGE:
        raise ValueError(f"{who}: there are {rows} rows; needs fewer than 2^31: split them into several calls")
    if isinstance(sizes, np.ndarray):
        if (total := sum(map(int, sizes))) > rows:
            raise ValueError(f"{who}: group_sizes sum up to {total}, and there are {rows} rows; needs at most that")
        sizes = as_array(np.clip(sizes, 0, min(rows, np.iinfo(sizes.dtype).max)).astype(np.int32))
    return cut_to_rows(sizes, rows)


def checked_roles(call: LayerCall) -> Roles:
    """The roles of a call with a recipe, if rows in groups can have them."""
    roles: Any = call.roles
    _check_rows(call.who, roles)
    return roles


def _check_rows(who: str, roles: Roles) -> None:
    """Raises ValueError unless rows in groups can have these roles."""
    rows = [(tensor, role) for tensor in ("input", "gradient") for role in roles.forms(tensor) if role is not None]
    for tensor, role in dict.fromkeys(rows):
        if role.format.tiles:
            raise ValueError(
                f"{who}: the recipe quantises the {tensor} to {role.format}, in square tiles, which would lie on two "
                "groups; use blocks of one row"
            )
        rotation = role.hadamard
        if rotation is not None and (role.format.scaling != "two_level" or not rotation.in_pass):
            raise ValueError(
                f"{who}: the recipe rotates the {tensor} ({role.format}) by {rotation}; rows in groups take only "
                f"NVFP4's rotation of size {BLOCK} with fixed signs"
            )
    for weight in roles.forms("weight"):
        if weight is not None and weight.hadamard is not None:
            raise ValueError(
                f"{who}: the recipe rotates the weight by {weight.hadamard} in dgrad; layers of experts rotate only "
                "wgrad's operands, the input and the gradient"
            )


@dataclasses.dataclass(frozen=True)
class WeightOnlyGroupsSpec:
    """The static description of a product with only its weights quantised; see `weight_only`.

    Attributes:
        served: how the weights are served.
        out_dtype, shardings: see `GemmSpec`.
        precision: precision of the backward GEMMs, checked; the forward GEMM always has float32 sums.
    """

    served: WeightServing
    out_dtype: jax.typing.DTypeLike
    shardings: tuple[Any, Any, Any]
    precision: jax.lax.PrecisionLike


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_only(
    spec: WeightOnlyGroupsSpec,
    x: jax.Array,
    w: jax.Array | None,
    bias: jax.Array | None,
    q: QuantizedArray | None,
    sizes: jax.Array,
    probe: probes.Probe | None,
) -> jax.Array:
    return _weight_only_fprop(spec, x, w, bias, q, sizes)[0]


def _weight_only_fprop(
    spec: WeightOnlyGroupsSpec,
    x: jax.Array,
    w: jax.Array | None,
    bias: jax.Array | None,
    q: QuantizedArray | None,
    sizes: jax.Array,
) -> tuple[jax.Array, QuantizedArray]:
    if q is None:
        assert w is not None
        with in_profiles("quantize weight"):
            q = quantize_weight(w, spec.served.format, spec.served.served_dtype)
    added = None if bias is None else bias.astype(jnp.float32)
    with in_profiles("fprop"):
        return grouped_weight_only(x, q.mT, sizes, added, spec.out_dtype), q


def _weight_only_forward(
    spec: WeightOnlyGroupsSpec,
    x: jax.Array,
    w: jax.Array | None,
    bias: jax.Array | None,
    q: QuantizedArray | None,
    sizes: jax.Array,
    probe: probes.Probe | None,
) -> tuple[jax.Array, Any]:
    x, w, bias = differentiated_once((x, w, bias))
    y, q = _weight_only_fprop(spec, x, w, bias, q, sizes)
    markers = tuple(dtype_marker(a) for a in (x, w, bias))
    kept = None if w is None else x, tag_residual(q, QUANTIZED_WEIGHT), w if spec.served.ste == "clipped" else None
    found = None if probe is None else measured_weight(probe, x, w, q, sizes=sizes)
    return tag_product(y), (kept, markers, sizes, found)


def _weight_only_backward(spec: WeightOnlyGroupsSpec, residuals: Any, dy: jax.Array) -> tuple[Any, ...]:
    (x, q, clipped), (x_marker, w_marker, bias_marker), sizes, found = residuals
    x_sharding, w_sharding, bias_sharding = spec.shardings
    rows = RowsInGroups(sizes, spec.precision)
    dy = differentiated_once(dy)
    with in_profiles("dgrad"):
        dx = rows.plain_by_weight(dy, jnp.swapaxes(read(q).dequantize(dy.dtype), -1, -2), x_marker.dtype, x_sharding)
    dw: Any = None
    if w_marker is not None:
        with in_profiles("wgrad"):
            dw = rows.plain_wgrad(x, dy, w_marker.dtype, None)
        if clipped is not None:
            dw = through_estimator(dw, clipped, spec.served)
        dw = resharded(dw, w_sharding)
    dbias = rows.bias_gradient(dy, bias_marker, bias_sharding)
    return dx, dw, dbias, None, None, found


_weight_only.defvjp(_weight_only_forward, _weight_only_backward)
weight_only_groups = jax.jit(_weight_only, static_argnums=0)
"""WeightOnlyGroupsSpec, x [T, K], w [E, K, N] or None, bias or None, QuantizedArray [E, K, N] or None, sizes,
telemetry's Probe or None -> [T, N]."""
