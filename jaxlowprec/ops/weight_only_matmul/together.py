"""The GEMMs of the same activations with several quantised weights as one op.

On CPUs it is one call, whose products share a start and its threads: with one row a product takes some 100 us, waking a
thread a third of that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from jaxlowprec import wiring
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.weight_only_matmul.op import (
    WeightOnlySpec,
    by_cuda,
    by_reference,
    weight_factors,
    weight_only_op,
)


def _rule(spec: WeightOnlySpec, count: int) -> wiring.ShardingRule:
    """As that of `weight_only_op` with shared weights; each has an N of its own."""
    columns = [f"n{i}" for i in range(count)]
    weights = [weight_factors(spec.format, spec.ragged_columns, spec.ragged_depth, "", n) for n in columns]
    operands = [operand for w in weights for operand in (*w.operands, *[w.n] * spec.epilogue.bias)]
    text = f"{', '.join([f'... m {weights[0].k}', *operands])} -> {', '.join(f'... m {w.n}' for w in weights)}"
    whole = dict.fromkeys(factor for w in weights for factor in w.whole)
    reductions = ("k",) if weights[0].depth_splits else ()
    rule = wiring.ShardingRule(text, reductions=reductions, whole=[*whole], **weights[0].sizes)
    return rule.with_alike(columns)


@functools.cache
def weight_only_together_op(spec: WeightOnlySpec, count: int, implementation: Implementation):
    """x [..., M, K]; then `count` times a weight as data [N, bytes], scale and, where its format has them, amax and
    zero points, and its bias [N] where the epilogue has one -> a [..., M, N] of each weight.

    The bytes are those of `weight_only_op` with each of them. `spec` says that weights are shared, and its epilogue
    takes no operand but a bias.
    """
    alone, each = weight_only_op(spec, implementation), spec.weights + spec.epilogue.bias

    def of_each(operands):
        return [operands[at : at + each] for at in range(0, count * each, each)]

    def outputs(x, *operands):
        return [((*x.shape[:-1], data.shape[-2]), spec.epilogue.out_dtype) for data, *_ in of_each(operands)]

    def one_by_one(body):
        return lambda x, *operands: [body(spec, x, *own)[0] for own in of_each(operands)]

    def run_native(x, *operands):
        lead = x.shape[:-1]
        x = x.reshape(math.prod(lead), x.shape[-1])
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(x, *operands)]
        attributes: dict[str, Any] = {"format": spec.format.attributes, "asymmetric": spec.format.has_zero_point}
        out = jax.ffi.ffi_call("jaxlowprec_weight_only_matmuls", results)(
            x, *operands, bias=spec.epilogue.bias, **attributes
        )
        return [y.reshape(*lead, y.shape[-1]) for y in out]

    def when_reduced(add_up, x, *operands):
        """As that of `weight_only_op`."""
        plain = dataclasses.replace(spec, epilogue=spec.epilogue.sums_only)
        weights = [own[: spec.weights] for own in of_each(operands)]
        partial = weight_only_together_op(plain, count, implementation)(x, *[leaf for w in weights for leaf in w])
        extras = [own[spec.weights :] for own in of_each(operands)]
        return [spec.epilogue.finish(add_up(y), e)[0] for y, e in zip(partial, extras, strict=True)]

    wired = wiring.define(
        "jaxlowprec_weight_only_matmuls",
        rule=_rule(spec, count),
        outputs=outputs,
        reference=one_by_one(by_reference),
        native={"cpu": run_native, "cuda": one_by_one(lambda spec, *own: by_cuda(spec, implementation, *own))},
        when_reduced=when_reduced,
        **choose("scaled_matmul", implementation),
    )
    op = custom_vmap(lambda *operands: wired(*operands))

    @op.def_vmap
    def _(size, batched, x, *operands):
        """A mapped axis of x alone holds more rows; mapped weights are multiplied one by one."""
        if not any(batched[1:]):
            out = op(x, *operands)
        else:
            axes = [0 if mapped else None for mapped in batched]
            own = zip(of_each(operands), of_each(axes[1:]), strict=True)
            out = tuple(jax.vmap(alone, (axes[0], *at), axis_size=size)(x, *values)[0] for values, at in own)
        return out, (True,) * count

    return op
