"""Linen behind the interface of both libraries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import serialization

import jaxlowprec as jlp
from jaxlowprec.layers.delayed_scaling import OVERWRITE_WITH_GRADIENT
from tests.flax.libraries.models import Model, numbers


def split(tree):
    """Linen's collections of a tree: the parameters, and the states of delayed scaling."""
    parameters, states = {}, {}
    for name, part in tree.items():
        if name == OVERWRITE_WITH_GRADIENT:
            states |= part
        elif isinstance(part, dict):
            parameters[name], inner = split(part)
            states |= {name: inner} if inner else {}
        else:
            parameters[name] = part
    return parameters, states


def joined(parameters, states):
    """The reverse of `split`."""
    if "input_scale" in states:
        return {**parameters, OVERWRITE_WITH_GRADIENT: states}
    return {name: joined(part, states[name]) if name in states else part for name, part in parameters.items()}


@dataclasses.dataclass
class LinenModel(Model):
    module: nn.Module
    tree: Any
    further: dict[str, Any] = dataclasses.field(default_factory=dict)  # collections

    def variables(self, tree=None):
        parameters, states = split(self.tree if tree is None else tree)
        return {"params": parameters} | ({OVERWRITE_WITH_GRADIENT: states} if states else {}) | self.further

    def apply(self, tree, *inputs, sr=None, **options):
        """The output, a pure function of the tree and the inputs; `sr`: a key for stochastic rounding."""
        rngs = None if sr is None else {"sr": sr}
        return self.module.apply(self.variables(tree), *inputs, rngs=rngs, **options)

    def gradients(self, loss, *inputs, wrap=lambda function: function):
        """Of a loss of the output by the tree; `wrap` may replace the function that is differentiated."""
        return jax.jit(jax.grad(wrap(lambda tree: loss(self.apply(tree, *inputs)))))(self.tree)

    def served(self, recipe, *inputs):
        """The model that `quantize_params` exports."""
        return LinenModel(self.module, jlp.quantize_params(self.module, recipe, self.variables(), *inputs)["params"])

    def explain(self, recipe, *inputs):
        return jlp.explain(self.module, recipe, self.variables(), *inputs)

    def quantized_once(self, *inputs):
        """The model with kernels that were quantised for many calls."""
        _, quantized = jax.jit(lambda v, *x: self.module.apply(v, *x, mutable="quantized"))(self.variables(), *inputs)
        return LinenModel(self.module, self.tree, quantized)

    def changed(self, **attributes):
        """The model of one layer that has these attributes instead."""
        return dataclasses.replace(self, module=self.module.clone(**attributes))

    def kernel(self, *path):
        """A layer's kernel, quantised or not."""
        layer = self.tree
        for name in path:
            layer = layer[name]
        return layer["kernel"]


class Linen:
    name = "linen"
    flax, ours = nn, jlp.linen
    remat = staticmethod(nn.remat)
    names = {"Linear": "Dense", "LinearGeneral": "DenseGeneral", "GroupedLinear": "GroupedDense"}

    def maker(self, kind, *args, of=jlp.linen, **options):
        """A function that makes a layer; `of` is the library or Flax's."""
        if kind in ("Linear", "LinearGeneral"):
            args = args[1:]  # Linen takes the size from the input
        if kind == "LinearGeneral":
            options["batch_dims"] = tuple(options.pop("batch_axis", ()))
        if kind == "Einsum":
            subscripts, shape, *bias = args
            args, options["use_bias"] = (shape, subscripts), bool(bias)
        if kind in ("GroupedLinear", "MoE"):
            args = args[:1] + args[2:]
        return lambda *_: getattr(of, self.names.get(kind, kind))(*args, **options)

    def composed(self, call, **makers):
        """A function that makes a module of named layers, which `call(module, x)` uses."""
        return lambda *_: LinenComposed(makers, call)

    def stack(self, make, length, remat=False):
        """A function that makes a module of blocks with arrays of their own, one after the other, by scan.

        With further inputs, whose first axis is that of the blocks, a block gives a second output, too.
        """
        return lambda *_: LinenStack(make, length, remat)

    def scanned_sum(self, call, module, xs):
        """The sum of call(module, x), by the library's scan."""

        def body(module, total, x):
            return total + call(module, x), None

        shared = ["params", OVERWRITE_WITH_GRADIENT]
        scan = nn.scan(body, variable_broadcast=shared, split_rngs={"params": False})
        return scan(module, jnp.zeros(xs.shape[1:]), xs)[0]

    def model(self, make, *inputs, seed=0, sr=False):
        """A model for inputs of these shapes; `sr`: with a stream of keys for stochastic rounding."""
        module = make()
        shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
        assert set(shapes) <= {"params", OVERWRITE_WITH_GRADIENT}
        return LinenModel(module, numbers(joined(shapes["params"], shapes.get(OVERWRITE_WITH_GRADIENT, {})), seed))

    def like(self, model, make):
        """The model of another module with the same arrays."""
        return LinenModel(make(), model.tree)

    def initial(self, make, *inputs):
        """What makes the arrays, as a program that is not compiled yet."""
        module = make()

        def init(key):
            variables = module.init(key, *inputs)
            assert set(variables) <= {"params", OVERWRITE_WITH_GRADIENT}
            return joined(variables["params"], variables.get(OVERWRITE_WITH_GRADIENT, {}))

        return jax.jit(init).lower(jax.random.key(0))

    def moved(self, source, target):
        """The target with the source's checkpoint."""
        restored = serialization.from_bytes(target.variables(), serialization.to_bytes(source.variables()))
        return LinenModel(target.module, joined(restored["params"], restored.get(OVERWRITE_WITH_GRADIENT, {})))


class LinenComposed(nn.Module):
    makers: Any
    call: Any

    def setup(self):
        for name, make in self.makers.items():
            setattr(self, name, make())

    def __call__(self, *inputs):
        return self.call(self, *inputs)


class LinenStack(nn.Module):
    make: Any
    length: int
    remat: bool

    def setup(self):
        self.blocks = self.make()

    def __call__(self, x, *xs):
        def call(block, x, *xs):
            return block(x, *xs) if xs else (block(x), None)

        call = nn.remat(call, prevent_cse=False) if self.remat else call
        axes = {"params": 0, OVERWRITE_WITH_GRADIENT: 0, "quantized": 0}
        keys = {"params": True, "sr": True}
        scanned = nn.scan(call, variable_axes=axes, split_rngs=keys, length=self.length)(self.blocks, x, *xs)
        return scanned if xs else scanned[0]
