"""NNX behind the interface of both libraries; `Linen` says what its methods do."""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxlowprec as jlp
from tests.flax.libraries.models import Model, numbers


def filled(make, seed=0):
    """The module that `make` gives, its parameters drawn by NumPy: each initialiser would be a program of its own."""
    module = nnx.eval_shape(make)
    nnx.update(module, jax.jit(lambda: nnx.state(make(), nnx.Not(nnx.Param)))())
    params = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(params, numbers(nnx.to_pure_dict(params), seed))
    nnx.update(module, params)
    return module


class NnxModel(Model):
    def __init__(self, module, tree=None):
        self.graph, self.state, self.rest = nnx.split(module, nnx.Param, ...)
        self.tree = nnx.to_pure_dict(self.state) if tree is None else tree

    def module_of(self, tree):
        state, rest = jax.tree.map(lambda leaf: leaf, (self.state, self.rest))  # variables of the current trace
        nnx.replace_by_pure_dict(state, tree)
        return nnx.merge(self.graph, state, rest)

    @property
    def module(self):
        return self.module_of(self.tree)

    def apply(self, tree, *inputs, sr=None, **options):
        module = self.module_of(tree)
        if sr is not None:
            nnx.reseed(module, sr=sr)
        return module(*inputs, **options)

    def gradients(self, loss, *inputs, wrap=lambda function: function):
        found = nnx.jit(nnx.grad(wrap(lambda module: loss(module(*inputs)))))(self.module)
        return nnx.to_pure_dict(found)

    def served(self, recipe, *inputs):
        return NnxModel(jlp.quantize_params(self.module, recipe))

    def explain(self, recipe, *inputs):
        return jlp.explain(self.module, recipe)

    def quantized_once(self, *inputs):
        module = self.module
        with jlp.nnx.quantized_kernels(module):
            return NnxModel(module)

    def changed(self, **attributes):
        module = self.module
        for name, value in attributes.items():
            setattr(module, name, value)
        return NnxModel(module)

    def kernel(self, *path):
        layer = self.module
        for name in path:
            layer = getattr(layer, name)
        return layer.kernel.get_value()


class Nnx:
    name = "nnx"
    flax, ours = nnx, jlp.nnx
    remat = staticmethod(nnx.remat)

    def maker(self, kind, *args, of=jlp.nnx, **options):
        if kind == "MoE":
            *args, options["top_k"] = args
        return lambda rngs: getattr(of, kind)(*args, **options, rngs=rngs)

    def composed(self, call, **makers):
        return lambda rngs: NnxComposed(makers, call, rngs)

    def stack(self, make, length, remat=False):
        return lambda rngs: NnxStack(make, length, remat, rngs)

    def scanned_sum(self, call, module, xs):
        def body(carry, x):
            total, module = carry
            return total + call(module, x), module

        scan = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan((jnp.zeros(xs.shape[1:]), module), xs)[0]

    def model(self, make, *inputs, seed=0, sr=False):
        module = make(nnx.Rngs(0, sr=0)) if sr else nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        jlp.nnx.name_layers(module)
        return NnxModel(module, numbers(nnx.to_pure_dict(nnx.state(module, nnx.Param)), seed))

    def like(self, model, make):
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        jlp.nnx.name_layers(module)
        return NnxModel(module, model.tree)

    def initial(self, make, *inputs):
        return jax.jit(lambda key: nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key))))).lower(jax.random.key(0))

    def moved(self, source, target):
        module = target.module
        nnx.update(module, nnx.state(source.module))
        return NnxModel(module)


class NnxComposed(nnx.Module):
    def __init__(self, makers, call, rngs):
        self.call = call
        for name, make in makers.items():
            setattr(self, name, make(rngs))

    def __call__(self, *inputs):
        return self.call(self, *inputs)


class NnxStack(nnx.Module):
    def __init__(self, make, length, remat, rngs):
        self.remat = remat
        self.blocks = nnx.split_rngs(splits=length)(nnx.vmap(make, in_axes=(0,), out_axes=0))(rngs)

    def __call__(self, x, *xs):
        def call(block, x, *xs):
            return block(x, *xs)

        call = nnx.remat(call) if self.remat else call
        out_axes = (nnx.Carry, 0) if xs else nnx.Carry
        return nnx.scan(call, in_axes=(0, nnx.Carry, *[0] * len(xs)), out_axes=out_axes)(self.blocks, x, *xs)
