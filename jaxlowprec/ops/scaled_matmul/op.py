"""The op of the GEMM of two quantised operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from jaxlowprec import wiring
from jaxlowprec.formats import Format
from jaxlowprec.ops.epilogue import Epilogue
from jaxlowprec.ops.implementation import Implementation, choose
from jaxlowprec.ops.scaled_matmul import cuda, reference


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """One variant of the op.

    Attributes:
        a_format, b_format: of the operands.
        ragged_rows, ragged_columns: M or N is no multiple of the operand's square tiles.
        ragged_depth: K, as stored, is no multiple of the block.
        epilogue: what follows the sums.
    """

    a_format: Any
    b_format: Any
    ragged_rows: bool
    ragged_columns: bool
    ragged_depth: bool
    epilogue: Epilogue

    @property
    def two_level(self) -> bool:
        """Whether the operands have amaxes."""
        return self.a_format.scaling == "two_level"


def _rule(spec: MatmulSpec) -> wiring.Rule:
    """M and N split (with tiles in whole ones), K splits in whole blocks and is then summed over."""
    whole: list[str] = []
    length = spec.a_format.length
    per_tensor = spec.a_format.scaling == "tensor"

    def operand(factor: str, fmt: Format, ragged: bool) -> tuple[str, list[str]]:
        """The name of its lines, and its data and scale."""
        line = scale_line = factor
        if fmt.tiles and ragged:
            scale_line = f"{factor}blocks"
            whole.extend((line, scale_line))
        elif fmt.tiles:
            line = f"({factor} b)"
        if per_tensor:
            return line, [f"... {line} k", "..."]
        if spec.ragged_depth:
            code, blocks = "kbytes" if fmt.packed else "kcodes", "kblocks"
            whole.extend((code, blocks))
        else:
            code, blocks = f"(k {'h' if fmt.packed else 'b'})", "k"
        return line, [f"... {line} {code}", f"... {scale_line} {blocks}"]

    m, a = operand("m", spec.a_format, spec.ragged_rows)
    n, b = operand("n", spec.b_format, spec.ragged_columns)
    operands = a + b + ["..."] * 2 * spec.two_level + spec.epilogue.operands(m, n)
    results = spec.epilogue.results(m, n)
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    sizes: dict[str, Any] = {f: size for f, size in (("b", length), ("h", length // 2)) if f" {f})" in text}
    reductions = () if spec.ragged_depth else ("k",)
    return wiring.Rule(text, reductions=reductions, whole=tuple(dict.fromkeys(whole)), **sizes)


@functools.cache
def matmul_op(spec: MatmulSpec, implementation: Implementation):
    """a and b as data and scale; then, where the spec has them, both amaxes, bias float32 [..., N], accumulate
    [..., M, N] and the activation's input [..., M, N] -> [..., M, N], and the pre-activation."""

    def outputs(a_data, a_scale, b_data, *_):
        return spec.epilogue.outputs((*a_data.shape[:-1], b_data.shape[-2]))

    amaxes = 2 * spec.two_level

    def run_reference(a_data, a_scale, b_data, b_scale, *rest):
        y = reference.products(a_data, a_scale, spec.a_format, b_data, b_scale, spec.b_format)
        y = reference.apply_amaxes(y, *rest[:2]) if spec.two_level else y
        return spec.epilogue.finish(y, rest[amaxes:])

    def run_native(*operands):
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs(*operands)]
        return jax.ffi.ffi_call("jaxlowprec_scaled_matmul", results)(
            *operands,
            a_format=spec.a_format.attributes,
            b_format=spec.b_format.attributes,
            **spec.epilogue.attributes,
        )

    def run_cuda(*operands):
        a_data, _, b_data, *_ = operands
        if 0 in (*a_data.shape, *b_data.shape):
            return run_reference(*operands)  # nothing to multiply
        if problem := cuda.why_not(spec, a_data, b_data):
            if implementation == "ffi":
                raise NotImplementedError(f'scaled_matmul: implementation="ffi": {problem}')
            return run_reference(*operands)
        return cuda.matmul(spec, *operands)

    def when_reduced(add_up, *operands):
        """With K split, partial sums (their scales applied) meet in float32 before the rest of the epilogue."""
        plain = dataclasses.replace(spec, epilogue=spec.epilogue.sums_only)
        (partial,) = matmul_op(plain, implementation)(*operands[: 4 + amaxes])
        return spec.epilogue.finish(add_up(partial), operands[4 + amaxes :])

    return wiring.define(
        "jaxlowprec_scaled_matmul",
        rule=_rule(spec),
        outputs=outputs,
        reference=run_reference,
        native={"cpu": run_native, "cuda": run_cuda},
        when_reduced=when_reduced,
        out_spec=spec.epilogue.out_spec,
        **choose("scaled_matmul", implementation),
    )
