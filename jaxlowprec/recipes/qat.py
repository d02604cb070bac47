"""Recipes of quantisation-aware training: the forward pass uses the weight that will be served.

The weight is quantised as it is for serving, alone or with the activations, and multiplied by the product that serves
it, so a trained model and its export give the same bits. The backward pass reads what fprop has read, decoded, in high
precision, and wgrad reaches the master weight.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from jaxlowprec.arguments import one_of, shown
from jaxlowprec.arrays.formats import Format, Int4
from jaxlowprec.ops.scaled_matmul.api import check_pair
from jaxlowprec.recipes.fields import HEADS, ROUTERS, Use, check_patterns, environment_flag, is_chosen
from jaxlowprec.recipes.roles import Recipe, Role, Roles, StraightThrough

DEFAULT_EXCLUDE = (
    r"(?i)embed",
    r"(?i)(^|[/.])w[tp]e($|[/.])",
    r"(?i)norm",
    r"(?i)(^|[/.])ln(_\w+)?($|[/.])",
    r"(?i)router",
    ROUTERS,
    HEADS,
)
"""Layers that stay in high precision: embeddings, norms, routers (`gate` and `moe_gate`, not `w_gate` or `gate_proj`)
and heads (`lm_head`, `logits`, `classifier`).

Where a name cannot tell, shape and use decide, and `explain` shows it. `quantize_matmuls` sees what a result is used
for: what feeds a top-k, and what is as long as the vocabulary and multiplied no further, stays in high precision under
any name; a `gate` that feeds neither a top-k nor a softmax follows the recipe; an `output` or `fc` that feeds a softmax
does not. `convert` sees shapes: a `gate` follows the recipe if a layer beside it has its shape (NNX), or if it is not
narrower than its input; an `output` or `fc` outside numbered blocks that is as long as the vocabulary does not.
"""


class QAT(Recipe):
    """The common part of the recipes of quantisation-aware training.

    Attributes:
        weight_format: the format that kernels are quantised to, along K.
        ste: how the gradient passes the rounding to reach the master weight, see `fake_quantize`.
        dtype: the dtype that the master weight is first rounded to; None: none, or the format rounds itself.
        activation_format: what inputs are quantised to, each token by itself; None: they are in high precision.
        include, exclude: regular expressions, searched for in a layer's name: in Linen its path ("block_0/mlp/up"), in
            NNX the name that it was given (see `jaxlowprec.nnx.name_layers`). A layer follows the recipe if a pattern
            of `include` matches and none of `exclude` does; other layers are computed without a recipe.
    """

    weight_format: Any
    ste: StraightThrough
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    dtype: str | None = None
    activation_format: Format | None = None
    backward_override = None

    def applies_to(self, name: str) -> bool:
        """Whether a pattern of `include` matches and none of `exclude` does."""
        return is_chosen(name, self.include, self.exclude)

    def within(self, name: str, use: Use = Use.UNKNOWN) -> Recipe | None:
        """The recipe of a layer of this name and use, or None."""
        if not is_chosen(name, self.include, self.exclude, use):
            return None
        chosen: Any = self  # what is chosen by its use has a name that is left out
        return self if self.applies_to(name) else dataclasses.replace(chosen, include=(".*",), exclude=())

    def roles(self, module_type: str = "linear", name: str = "") -> Roles:
        """A role for the weight, and for the input of fprop, in the layers that the patterns choose."""
        if not self.applies_to(name):
            return Roles(None, None, None)
        if self.activation_format is not None:
            weight = Role(self.weight_format)
            own: Any = {"fprop": (Role(self.activation_format), weight), "dgrad": "dequantized", "wgrad": "dequantized"}
            return Roles(None, weight, None, served_dtype=self.dtype, **own)
        return Roles(None, Role(self.weight_format), None, self.ste, self.dtype)

    def _check(self) -> None:
        name = type(self).__name__
        one_of(name, "ste", self.ste, "identity", "clipped")
        for field in ("include", "exclude"):
            object.__setattr__(self, field, check_patterns(name, field, getattr(self, field)))


def _setting(variable: str, default: str) -> str:
    return os.environ.get(f"JAXLOWPREC_{variable}", "").strip() or default


def _group_size() -> int:
    text = _setting("INT4_QAT_GROUP_SIZE", "128")
    if not text.isdecimal() or not int(text):
        raise ValueError(f"JAXLOWPREC_INT4_QAT_GROUP_SIZE={text!r}; needs a whole number, 1 or more")
    return int(text)


def _choice(variable: str, *allowed: str) -> Any:
    """A field whose default is the first of those, unless the environment sets another one."""

    def read() -> str:
        if (value := _setting(variable, allowed[0])) not in allowed:
            raise ValueError(f"JAXLOWPREC_{variable}={value!r}; needs {' or '.join(allowed)}")
        return value

    return dataclasses.field(default_factory=read)


@dataclasses.dataclass(frozen=True)
class Int4QAT(QAT):
    """Training for weights served as 4-bit integers (W4A16): bit for bit with the weights that are served.

    Arguments:
        group_size: elements along K that share a scale; default 128, or JAXLOWPREC_INT4_QAT_GROUP_SIZE.
        symmetric: False for a zero point per group; default True, or JAXLOWPREC_INT4_QAT_SYMMETRIC.
        scale_dtype: "bfloat16" or "float16": the dtype of the served model, which the master weight is first rounded
            to; default "bfloat16", or JAXLOWPREC_INT4_QAT_SCALE_DTYPE.
        ste: "identity" or "clipped", see `fake_quantize`; default "identity", or JAXLOWPREC_QAT_STE.
        include, exclude: which layers, see `QAT`; by default all except `DEFAULT_EXCLUDE`. To leave out more:
            `exclude=(*jaxlowprec.DEFAULT_EXCLUDE, "attention/")`.

    Defaults are read from the environment when the recipe is made. `jaxlowprec.explain` shows what applies where, and
    `jaxlowprec.quantize_params` exports what was trained.

    Raises:
        TypeError, ValueError: a field or an environment variable has another value.

    Source: int4_qat.md 1.4.

    >>> import jaxlowprec as jlp
    >>> recipe = jlp.Int4QAT(group_size=32)
    >>> str(recipe.weight_format), recipe.applies_to("layers_0/mlp/up"), recipe.applies_to("lm_head")
    ('Int4 1x32', True, False)
    """

    group_size: int = dataclasses.field(default_factory=_group_size)
    symmetric: bool = dataclasses.field(
        default_factory=lambda: environment_flag("JAXLOWPREC_INT4_QAT_SYMMETRIC", default=True)
    )
    scale_dtype: str = _choice("INT4_QAT_SCALE_DTYPE", "bfloat16", "float16")
    ste: StraightThrough = _choice("QAT_STE", "identity", "clipped")
    include: tuple[str, ...] = (".*",)
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale_dtype", self.weight_format.scale_dtype)
        self._check()

    @property
    def weight_format(self) -> Int4:
        """`Int4` with these settings and the rule "deploy"."""
        return Int4(self.group_size, self.symmetric, self.scale_dtype)


@dataclasses.dataclass(frozen=True)
class WeightQAT(QAT):
    """Training for weights served in any format, with activations in high precision or quantised as they are served.

    Arguments:
        weight_format: NVFP4, MXFP4, MXFP8, Float8Block, Float8Tensor, Float8Rows, Int8Rows or Int4, for all chosen
            layers.
        activation_format: a format that a GEMM takes with the weight's (see `scaled_matmul`): fprop then is the product
            that serves. For example MXFP8() with MXFP4 weights (Kimi K3), Float8Block(power_of_two=False) with MXFP4
            weights (compressed-tensors' MXFP4XFP8), Int8Rows() with Int8Rows("bfloat16") (W8A8).
            A loaded weight under this recipe is multiplied by quantised inputs, too. None: inputs in high precision.
        ste, include, exclude: see `Int4QAT`.
        dtype: "bfloat16" or "float16": the dtype of the checkpoint whose weights will be quantised; the master weight
            is rounded to it first. None: the master weight itself is quantised. Int4 rounds to its own `scale_dtype`.

    Raises:
        TypeError, ValueError: a field has another value.

    >>> import jax.numpy as jnp, jaxlowprec as jlp
    >>> with jlp.autocast(jlp.WeightQAT(jlp.NVFP4())):
    ...     jlp.linear(jnp.ones((8, 64)), jnp.ones((64, 32))).shape
    (8, 32)
    """

    weight_format: Format
    ste: StraightThrough = _choice("QAT_STE", "identity", "clipped")
    include: tuple[str, ...] = (".*",)
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    dtype: str | None = "bfloat16"
    activation_format: Format | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight_format, Format):
            raise TypeError(f"WeightQAT: weight_format={shown(self.weight_format)}; needs a format such as NVFP4()")
        self._check_activations()
        one_of("WeightQAT", "dtype", self.dtype, "bfloat16", "float16", None)
        if self.weight_format.served_dtype is not None:
            object.__setattr__(self, "dtype", None)
        self._check()

    def _check_activations(self) -> None:
        """Raises unless a GEMM takes activations of this format with the weights'."""
        fmt = self.activation_format
        if fmt is None:
            return
        if not isinstance(fmt, Format):
            raise TypeError(f"WeightQAT: activation_format={shown(fmt)}; needs a format such as Int8Rows(), or None")
        if fmt.has_tensor_scale:
            raise ValueError(
                f"WeightQAT: activation_format={fmt}; its scale is that of the tensor, and a token's result would "
                "depend on the tokens beside it: use a format by rows or blocks, or row_scaled=True"
            )
        check_pair("WeightQAT", fmt, self.weight_format)
        if self.ste != "identity":
            raise ValueError(f'WeightQAT: ste={shown(self.ste)} with activation_format={fmt}; needs ste="identity"')
