"""Functions of JAX evaluated by NumPy, with the compiled kernels called directly: nothing is compiled.

A program for a few kernels takes XLA 25 to 200 ms to compile and the function 5 ms to trace, once for each shape; the
kernels of a test run in microseconds. What surrounds them in the library's ops is padding, reshaping and casting, which
NumPy does as XLA does. A function with a primitive that this file does not know, or of arrays without elements, is
compiled after all.
"""

from unittest import mock

import jax
import numpy as np

from tests import native_calls


def interpreted(function):
    """The function of trees of arrays, evaluated by NumPy and the kernels. One that `jax.jit` made is traced once for
    each shape."""
    jitted = function if hasattr(function, "trace") else jax.jit(function)

    def run(*args):
        traced = jitted.trace(*args)
        if not _is_known(traced.jaxpr.jaxpr):
            return jitted(*args)
        with np.errstate(all="ignore"), mock.patch.object(jax.ffi, "ffi_call", _ffi_call):
            found = _evaluate(traced.jaxpr, [_as_numpy(leaf) for leaf in jax.tree.leaves(args)])
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), found)

    return run


def _as_numpy(leaf):
    """Keys stay JAX's: NumPy has no such dtype."""
    return leaf if jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key) else np.asarray(leaf)


def _ffi_call(name, results, **_):
    return lambda *operands, **attributes: native_calls.call(name, results, operands, attributes)


def _evaluate(closed, args):
    jaxpr = closed.jaxpr
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(_as_numpy, closed.consts), *args], strict=True))

    def value(atom):
        return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        operands = [value(atom) for atom in eqn.invars]
        found = _run(eqn, operands)
        known.update(zip(eqn.outvars, found, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _kernel(eqn):
    """The call of the CPU's kernel that an equation is lowered to, or None."""
    return getattr(eqn.primitive, "native", {}).get("cpu")


def _is_known(jaxpr):
    """Whether all that a function does is known here."""
    for eqn in jaxpr.eqns:
        inner = _inner(eqn)
        if inner is not None:
            known = _is_known(inner.jaxpr)
        elif _kernel(eqn):
            known = eqn.invars[0].aval.size > 0
        elif eqn.primitive.name == "cond":
            known = all(_is_known(branch.jaxpr) for branch in eqn.params["branches"])
        elif _is_loop(eqn):
            known = _is_known(eqn.params["jaxpr"].jaxpr)
        else:
            known = eqn.primitive.name in _PRIMITIVES
        if not known:
            return False
    return True


def _is_loop(eqn):
    """Whether an equation is a loop of a fixed length that reads and stacks nothing."""
    return eqn.primitive.name == "scan" and eqn.params["num_carry"] == len(eqn.invars)


def _inner(eqn):
    """The function that an equation calls, or None."""
    names = ("jaxpr", "call", "call_jaxpr", "fun_jaxpr") if eqn.primitive.name in _CALLS else ()
    return next((eqn.params[name] for name in names if name in eqn.params), None)


def _run(eqn, operands):
    """The results of one equation."""
    name, params, inner = eqn.primitive.name, eqn.params, _inner(eqn)
    if inner is not None:
        return _evaluate(inner, operands)
    if body := _kernel(eqn):
        found = list(body(*operands))
    elif name == "cond":
        found = _evaluate(params["branches"][int(operands[0])], operands[1:])
    elif _is_loop(eqn):
        found = operands
        for _ in range(params["length"]):
            found = _evaluate(params["jaxpr"], found)
    else:
        found = [_PRIMITIVES[name](*operands, **params)]
    found = [x if isinstance(x, np.ndarray | jax.Array) else np.asarray(x) for x in found]
    for x, var in zip(found, eqn.outvars, strict=True):
        assert (x.shape, x.dtype) == (var.aval.shape, var.aval.dtype), eqn
    return found


_CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")


def _bitcast(x, new_dtype):
    old, new = x.dtype.itemsize, np.dtype(new_dtype).itemsize
    x = np.asarray(x, order="C")  # ascontiguousarray gives a scalar an axis
    if old == new:
        return x.view(new_dtype)
    return x[..., None].view(new_dtype) if old > new else x.view(new_dtype)[..., 0]


def _broadcast_in_dim(x, shape, broadcast_dimensions, **_):
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _pad(x, value, padding_config):
    assert all(low >= 0 and high >= 0 and not within for low, high, within in padding_config)
    return np.pad(x, [pair[:2] for pair in padding_config], constant_values=value)


def _iota(dtype, shape, dimension, **_):
    sizes = [1] * len(shape)
    sizes[dimension] = shape[dimension]
    return np.broadcast_to(np.arange(shape[dimension]).astype(dtype).reshape(sizes), shape)


def _select(which, *cases):
    return np.choose(which, cases) if which.dtype != bool else np.where(which, cases[1], cases[0])


def _slice(x, start_indices, limit_indices, strides):
    return x[tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))]


def _platform_index(platforms):
    return np.int32(next(i for i, names in enumerate(platforms) if names is None or "cpu" in names))


def _shift_right_logical(x, places):
    bits = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(bits) >> places.view(bits)).view(x.dtype)


def _same(x, **_):
    return x


def _div(x, y):
    return x // y if x.dtype.kind == "u" else x / y


def _reduce(function):
    return lambda x, axes, **_: function(x, axis=axes)


def _plain(function):
    return lambda *operands, **_: function(*operands)


_PRIMITIVES = {
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier", "sharding_constraint"), _same),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda *x, dimension: np.concatenate(x, dimension),
    "convert_element_type": lambda x, new_dtype, **_: x.astype(new_dtype),
    "iota": _iota,
    "pad": _pad,
    "platform_index": _platform_index,
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes),
    "select_n": _select,
    "shift_right_logical": _shift_right_logical,
    "slice": _slice,
    "random_unwrap": lambda key: np.asarray(jax.random.key_data(key)),
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
    "stack": lambda *x, axis: np.stack(x, axis),
    "transpose": lambda x, permutation: x.transpose(permutation),
    "div": _div,
    "is_finite": np.isfinite,
    **{
        name: _plain(function)
        for name, function in {
            "abs": np.abs,
            "add": np.add,
            "and": np.bitwise_and,
            "eq": np.equal,
            "ge": np.greater_equal,
            "gt": np.greater,
            "le": np.less_equal,
            "lt": np.less,
            "max": np.maximum,
            "min": np.minimum,
            "mul": np.multiply,
            "ne": np.not_equal,
            "neg": np.negative,
            "not": np.invert,
            "or": np.bitwise_or,
            "shift_left": np.left_shift,
            "sub": np.subtract,
            "xor": np.bitwise_xor,
        }.items()
    },
}
