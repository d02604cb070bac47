"""Convolutions by a parameter that are matrix products, and their products of patches under a recipe."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxlowprec.layers.convolution import Windows
from jaxlowprec.layers.dot_general import dot_general
from jaxlowprec.layers.grouped_matmul import grouped_matmul
from jaxlowprec.layers.low_rank import LoRAKernel, is_quantized, without_adapter
from jaxlowprec.models.transform.weights import Weight
from jaxlowprec.ops.checks import FLOATS
from jaxlowprec.recipes.roles import Recipe

_GROUPED = ("ragged_dot_general", "ragged_dot")
_CONVOLUTION = "conv_general_dilated"
_PRODUCTS = ("dot_general", _CONVOLUTION, *_GROUPED)


def windows_of(eqn: Any) -> Windows:
    """How the equation of a convolution reads its input."""
    params, (lhs, rhs) = eqn.params, (v.aval for v in eqn.invars)
    of_lhs, of_rhs, _ = params["dimension_numbers"]
    return Windows(
        sizes=tuple(rhs.shape[axis] for axis in of_rhs[2:]),
        strides=tuple(params["window_strides"]),
        padding=tuple((low, high) for low, high in params["padding"]),
        input_dilation=tuple(params["lhs_dilation"]),
        kernel_dilation=tuple(params["rhs_dilation"]),
        features=lhs.shape[of_lhs[1]],
        groups=params["feature_group_count"],
        batch_groups=params["batch_group_count"],
        extents=tuple(lhs.shape[axis] for axis in of_lhs[2:]),
    )


def why_no_product(eqn: Any, weights: list[Weight | None]) -> str:
    """Why a convolution by a parameter stays in high precision, or ""."""
    if all(weights):
        return "both operands are parameters"
    if weights[1] is None:
        return "the parameter is the input of a convolution"
    if reason := windows_of(eqn).reason:
        return reason
    if weights[1].loaded:
        return "a convolution takes the parameter as an array"
    features_out = eqn.params["dimension_numbers"].rhs_spec[0]
    if eqn.invars[1].aval.shape[features_out] == 1:
        return "the parameter is contracted whole: no matrix"
    return ""


def convolve(eqn: Any, x: Any, kernel: Any, options: dict[str, Any]) -> Any:
    """The convolution as a product of patches, and the state of delayed scaling if the options have one.

    Contracted axes are the spatial ones in the order of the dimension numbers, then the features.

    Arguments:
        options: of `dot_general`, `out_sharding` that of its result [batch, spatial..., features].
    """
    of_lhs, of_rhs, _ = eqn.params["dimension_numbers"]
    patches = windows_of(eqn).patches(x.transpose(of_lhs[0], *of_lhs[2:], of_lhs[1]))
    contracted = range(patches.ndim - len(of_rhs) + 1, patches.ndim), (*of_rhs[2:], of_rhs[1])
    return dot_general(patches, kernel, ((tuple(contracted[0]), contracted[1]), ((), ())), **options)


def to_the_equations_order(eqn: Any) -> tuple[int, ...]:
    """The transposition from [batch, spatial..., features] to the layout of the equation's result."""
    batch, features, *spatial = eqn.params["dimension_numbers"].out_spec
    given = [batch, *spatial, features]
    return tuple(given.index(axis) for axis in range(len(given)))


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of the function one operand of which is a parameter.

    Attributes:
        weight: the parameter.
        side: which operand it is, 0 or 1.
        shape: the operand's shape.
        grouped: rows in groups, with a matrix per group.
        reason: why it cannot follow any recipe, or "".
        avoidable: it could, if the function did something else with the parameter before.
        convolution: a convolution, which follows a recipe as a product of patches.
        axis: the axis of the operand that it contracts, -1 or -2, if the operand consists of matrices with the batch
            axes in front; None otherwise.
        kept: the sizes of the operand's axes that the result has.
    """

    weight: Weight
    side: int
    shape: tuple[int, ...]
    grouped: bool
    reason: str = ""
    avoidable: bool = False
    convolution: bool = False
    axis: int | None = None
    kept: tuple[int, ...] = ()

    @property
    def loaded_axis(self) -> int | None:
        """The axis of a loaded parameter that it contracts: it is multiplied from its codes if quantised along that."""
        return self.axis if self.axis is None or not self.weight.turned else -3 - self.axis


def product_of(eqn: Any, weights: list[Weight | None]) -> Product | None:
    """The product that an equation is; None if none of its operands is a parameter."""
    if eqn.primitive.name not in _PRODUCTS or not any(weights[:2]):
        return None
    side = 1 if weights[1] is not None else 0
    weight: Any = weights[side]
    grouped, convolution = eqn.primitive.name in _GROUPED, eqn.primitive.name == _CONVOLUTION
    avoidable = False
    reason = why_no_product(eqn, weights) if convolution else ""
    if reason:
        pass
    elif weight.computed and not all(weights[:2]):
        reason, avoidable = f"computed from the parameter by {weight.computed}", True
    elif weight.ends:
        avoidable = True
        reason = "its stack of layers is not run by a scan, so its first and last layers are not known"
    elif convolution:
        reason = _why_no_floats(eqn)
    else:
        reason = (_why_no_grouped_product if grouped else _why_no_product)(eqn, side, weights)
    shape = eqn.invars[side].aval.shape
    contracted, axis = _contracted(eqn, side, len(shape))
    kept = tuple(n for i, n in enumerate(shape) if i not in contracted)
    return Product(weight, side, shape, grouped, reason, avoidable, convolution, None if reason else axis, kept)


def _contracted(eqn: Any, side: int, ndim: int) -> tuple[tuple[int, ...], int | None]:
    """The axes of the operand that a product contracts, none of a convolution; and `Product.axis`."""
    if eqn.primitive.name == _CONVOLUTION:
        return (), None
    if eqn.primitive.name in _GROUPED:
        return (ndim - 2,), -2
    contract, batch = (tuple(axes[side]) for axes in eqn.params["dimension_numbers"])
    is_matrix = batch == tuple(range(ndim - 2)) and len(contract) == 1
    return contract, contract[0] - ndim if is_matrix else None


def _why_no_product(eqn: Any, side: int, weights: list[Weight | None]) -> str:
    if all(weights[:2]):
        return "both operands are parameters"
    (contract, batch) = eqn.params["dimension_numbers"]
    aval = eqn.invars[side].aval
    if not contract[side]:
        return "it contracts nothing"
    free = [n for axis, n in enumerate(aval.shape) if axis not in (*contract[side], *batch[side])]
    if math.prod(free) == 1:
        return "the parameter is contracted whole: no matrix"
    return _why_no_floats(eqn)


def _why_no_grouped_product(eqn: Any, side: int, weights: list[Weight | None]) -> str:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contract, batch = numbers.dot_dimension_numbers
    plain = (
        side == 1
        and weights[0] is None
        and [v.aval.ndim for v in eqn.invars[:2]] == [2, 3]
        and (tuple(contract[0]), tuple(contract[1])) == ((1,), (1,))
        and not batch[0]
        and tuple(numbers.lhs_ragged_dimensions) == (0,)
        and tuple(numbers.rhs_group_dimensions) == (0,)
        and eqn.params.get("group_offset") is None
        and len(eqn.invars) == 3
    )
    return _why_no_floats(eqn) if plain else "a ragged product other than [T, K] by [E, K, N] in groups of rows"


def _why_no_floats(eqn: Any) -> str:
    dtypes = [v.aval.dtype for v in (*eqn.invars[:2], *eqn.outvars)]
    odd = next((d for d in dtypes if d not in FLOATS), None)
    return "" if odd is None else f"it has {odd} operands; needs bfloat16, float16 or float32"


def loaded_kernel(eqn: Any, product: Product, master: Any) -> Any:
    """A quantised or adapted parameter as a product takes it; None if this one needs its array.

    A quantised one has to be contracted along the axis that it is quantised along, its last or second last.
    """
    if not is_quantized(master):
        return master
    turned = master.mT if product.axis == -1 else master
    takes_adapter = not (product.grouped and isinstance(master, LoRAKernel))
    return turned if product.axis is not None and takes_adapter and without_adapter(turned).axis == -2 else None


def _fits(eqn: Any, product: Product, master: LoRAKernel) -> bool:
    """Whether `dot_general` takes an array with this adapter: it is [batch..., contracted..., free...], or turned."""
    if product.grouped:
        return False
    contract, batch = (axes[product.side] for axes in eqn.params["dimension_numbers"])
    in_front = sorted((*batch, *contract)) == list(range(len(batch) + len(contract)))
    if tuple(batch) != tuple(range(len(batch))) or not (in_front or product.axis == -1):
        return False
    k = math.prod(product.shape[a] for a in contract)
    adapter = master.adapter.mT if product.axis == -1 else master.adapter
    return adapter.a.shape[:-1] == (*product.shape[: len(batch)], k)


def _with_added(eqn: Any, product: Product, operands: list[Any], master: LoRAKernel, y: Any) -> Any:
    """y plus the product by an adapter whose factors do not fit it, as an array in high precision."""
    added = LoRAKernel(jnp.zeros_like(master.kernel), master.adapter).merged(eqn.invars[product.side].aval.dtype)
    operands = [added if i == product.side else operand for i, operand in enumerate(operands)]
    added = eqn.primitive.bind(*operands, **eqn.params)
    return (y.astype(jnp.float32) + added.astype(jnp.float32)).astype(y.dtype)


def multiply(eqn: Any, product: Product, operands: list[Any], master: Any, recipe: Recipe | None, state: Any) -> Any:
    """The result of a product's equation, computed under a recipe from the parameter in its own dtype.

    Arguments:
        state: the layer's state of delayed scaling, or None.
    """
    if isinstance(master, LoRAKernel) and not is_quantized(master) and not _fits(eqn, product, master):
        y = multiply(eqn, product, operands, master.kernel, recipe, state)
        return _with_added(eqn, product, operands, master, y)
    out_dtype, name = eqn.outvars[0].aval.dtype, product.weight.name
    options: Any = {"recipe": recipe, "name": name, "precision": eqn.params["precision"]}
    if product.grouped:
        y = grouped_matmul(operands[0], master, operands[2], preferred_element_type=out_dtype, state=state, **options)
        return y if state is None else y[0]
    if product.convolution:
        order = to_the_equations_order(eqn)
        out_sharding = _transposed(eqn.params["out_sharding"], order)
        options |= {"preferred_element_type": out_dtype, "out_sharding": out_sharding, "state": state}
        y = convolve(eqn, operands[0], master, options)
        return (y if state is None else y[0]).transpose(order)
    contract, batch = eqn.params["dimension_numbers"]
    x, other = operands[1 - product.side], 1 - product.side
    # Contracted axes in the input's order, as `einsum` and the layers have them: it decides what a block is.
    pairs = sorted(zip(contract[other], contract[product.side], strict=True))
    if is_quantized(master):  # as `loaded_kernel` has turned it
        pairs = [(pairs[0][0], master.ndim - 2)]
    dims: Any = (tuple(zip(*pairs, strict=True)), (batch[other], batch[product.side]))
    out_sharding, back = eqn.params["out_sharding"], None
    if product.side == 0:  # from [batch, input's free axes, weight's free axes] to the equation's order
        back = _exchanged(eqn, 1)
        out_sharding = _transposed(out_sharding, back)
    options |= {"preferred_element_type": out_dtype, "out_sharding": out_sharding, "state": state}
    y = dot_general(x, master, dims, **options)
    y = y if state is None else y[0]  # the state's gradient is its new value, however often the layer is called
    return y if back is None else y.transpose(back)


def with_transposition(eqn: Any, product: Product, reader: Any) -> tuple[Any, Product] | None:
    """The product of x and a parameter that is the transpose of one of the parameter and x, with its equation.

    `jax.vmap` over a function of one row, such as Equinox' linears, makes such a pair of equations.

    Arguments:
        reader: the only equation that reads the result of eqn.

    Returns:
        None if the reader is another equation, or the product one of a loaded parameter.
    """
    if eqn.primitive.name != "dot_general" or product.side or product.weight.loaded:
        return None
    if reader.primitive.name != "transpose" or tuple(reader.params["permutation"]) != _exchanged(eqn, 0):
        return None
    contract, batch = eqn.params["dimension_numbers"]
    params = eqn.params | {
        "dimension_numbers": (contract[::-1], batch[::-1]),
        "out_sharding": _transposed(eqn.params["out_sharding"], _exchanged(eqn, 1)),
    }
    eqn = eqn.replace(invars=eqn.invars[::-1], outvars=reader.outvars, params=params)
    return eqn, dataclasses.replace(product, side=1)


def _exchanged(eqn: Any, first: int) -> tuple[int, ...]:
    """The transposition of a product's result that exchanges its operands' free axes; `first`: the operand whose are
    first."""
    contract, batch = eqn.params["dimension_numbers"]
    batches, ndim = len(batch[0]), eqn.outvars[0].aval.ndim
    middle = eqn.invars[first].aval.ndim - len(contract[first])
    return (*range(batches), *range(middle, ndim), *range(batches, middle))


def _transposed(out_sharding: Any, back: tuple[int, ...]) -> Any:
    """The sharding of the array whose transpose by `back` has this one."""
    if out_sharding is None:
        return None
    named = isinstance(out_sharding, NamedSharding)
    given = out_sharding.spec if named else out_sharding
    axes = [*given, *[None] * (len(back) - len(given))]
    spec = PartitionSpec(*(axes[back.index(i)] for i in range(len(back))))
    return NamedSharding(out_sharding.mesh, spec) if named else spec
