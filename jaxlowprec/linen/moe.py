"""The mixture-of-experts block of Linen."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jaxlowprec.layers.fused_mlp_product import Saved
from jaxlowprec.linen import grouped
from jaxlowprec.linen.layers import Dense, promoted_inputs
from jaxlowprec.moe.grouped_linear import common_inputs, fused_experts, hidden_activation
from jaxlowprec.moe.mixture import Exchange, Groups, MoEAux, Settings, check_block, mixture, own_experts
from jaxlowprec.moe.router import RouterConfig
from jaxlowprec.recipes.autocast import FROM_CONTEXT


class Experts(nn.Module):
    """An expert: the activation of gate_proj and up_proj, or of up_proj, then down_proj.

    Attributes:
        hidden: the hidden size.
        inits: initialisers of the kernels of gate_proj and up_proj, and of down_proj.
        saved: see `MoE`.
        num_experts: for `GroupedDense` layers over rows sorted by expert; None: `Dense` layers over tokens.
        options: options of each layer.
    """

    hidden: int
    activation: Any
    gated: bool | Literal["joint"]
    inits: tuple[Any, Any]
    options: Any
    saved: Saved
    num_experts: int | None = None

    @nn.compact
    def __call__(self, x: Array, *groups: Groups) -> Any:
        """Tokens [..., features] to outputs of that shape; with `groups`, what they make of tokens [T, features]."""

        def layer(features: int, init: Any, name: str) -> Any:
            if self.num_experts is None:
                return Dense(features, kernel_init=init, name=name, **self.options)
            return grouped.GroupedDense(self.num_experts, features, kernel_init=init, name=name, **self.options)

        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        activation = hidden_activation(self.activation, self.gated)
        layers = [layer(self.hidden, self.inits[0], name) for name in names]
        layers.append(layer(x.shape[-1], self.inits[1], "down_proj"))
        if groups and not self.is_initializing():
            inputs = common_inputs(
                x, [functools.partial(promoted_inputs, layer) for layer in layers], activation, self.hidden
            )
            if inputs is not None:
                sizes = [x.shape[-1]] * len(names) + [self.hidden]
                given = [
                    grouped.grouped_arguments(layer, inputs, size)[1] for layer, size in zip(layers, sizes, strict=True)
                ]
                options: Any = {"layers": given, "activation": activation, "saved": self.saved}
                return groups[0].run(functools.partial(fused_experts, "MoE", **options), inputs, given)

        def separate(x: Array, *group_sizes: Array) -> Array:
            hidden = [layer(x, *group_sizes) for layer in layers[:-1]]
            return layers[-1](activation(*hidden), *group_sizes)

        return groups[0].run(separate, x) if groups else separate(x)


class MoE(nn.Module):
    """A block of experts under a recipe: each token goes to top_k of them; no token is dropped, and nothing is padded.

    Attributes: those of `jaxlowprec.nnx.MoE`, with the same parts; the size of a token is taken from the input. A
    selection bias is the variable "bias" of the collection "selection_bias", which `init` makes and `apply` takes.

    >>> import jax, jax.numpy as jnp, jaxlowprec as jlp
    >>> moe, x = jlp.linen.MoE(4, 128, top_k=2), jnp.ones((2, 8, 64))
    >>> variables = moe.init(jax.random.key(0), x)
    >>> with jlp.autocast(jlp.MXFP8BlockScaling()):
    ...     y, aux = moe.apply(variables, x)
    ...     replayed, _ = moe.apply(variables, x, tape=aux.tape)
    >>> y.shape, aux.tape.shape, int(aux.group_sizes.sum()), bool((y == replayed).all())
    ((2, 8, 64), (2, 8, 2), 32, True)
    """

    num_experts: int
    hidden_features: int
    top_k: int
    shared_hidden_features: int = 0
    activation: Any = jax.nn.silu
    gated: bool | Literal["joint"] = True
    use_bias: bool = False
    routing: RouterConfig = RouterConfig()
    exchange: Exchange | None = None
    fsdp_axis: Any = None
    saved: Saved = "quantized"
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = grouped.default_kernel_init
    down_kernel_init: Any = None
    router_kernel_init: Any = nn.initializers.lecun_normal()
    shared_kernel_init: Any = nn.initializers.lecun_normal()
    shared_down_kernel_init: Any = None
    recipe: Any = FROM_CONTEXT

    @nn.compact
    def __call__(
        self, x: Float[Array, "*T D"], tape: Int[Array, "*T k"] | None = None
    ) -> tuple[Float[Array, "*T D"], MoEAux]:
        """Tokens [..., features] to outputs of the same shape, and a `MoEAux`.

        `tape`: [..., top_k], the experts to send tokens to, such as `aux.tape` of another pass; a row of -1 chooses
        afresh. Only the choice is frozen: weights are recomputed, and gradients flow. See `jaxlowprec.moe.route`.
        """
        settings = Settings(self.num_experts, self.top_k, self.routing, self.exchange)
        check_block(type(self).__name__, settings, self.gated, self.saved, use_bias=self.use_bias)
        options = {"use_bias": self.use_bias, "dtype": self.dtype, "param_dtype": self.param_dtype}
        options |= {"precision": self.precision, "recipe": self.recipe}
        router = Dense(
            self.num_experts,
            use_bias=self.routing.logit_bias,
            dtype=jnp.float32,
            precision=jax.lax.Precision.HIGHEST,
            kernel_init=self.router_kernel_init,
            recipe=None,
            name="router",
        )
        inits = self.kernel_init, self.down_kernel_init or self.kernel_init
        own = self.num_experts
        if self.exchange is not None and not self.is_initializing():
            own = own_experts(self.exchange, own)
        common = (self.activation, self.gated)
        of_experts = options | {"fsdp_axis": self.fsdp_axis}
        experts = Experts(self.hidden_features, *common, inits, of_experts, self.saved, own, name="experts")
        shared = None
        if self.shared_hidden_features:
            inits = self.shared_kernel_init, self.shared_down_kernel_init or self.shared_kernel_init
            shared = Experts(self.shared_hidden_features, *common, inits, options, self.saved, name="shared_experts")
        bias = None
        if self.routing.selection_bias:
            bias = self.variable("selection_bias", "bias", jnp.zeros, (self.num_experts,), jnp.float32).value
        return mixture(type(self).__name__, x, tape, settings, router, experts, shared, bias=bias)
