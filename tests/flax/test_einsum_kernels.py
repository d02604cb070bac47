"""Kernels of several axes in Einsum layers: whatever an equation contracts, they are served and adapted as matrices."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxlowprec as jlp
from jaxlowprec.layers.subscripts import kernel_axes
from tests.flax.libraries import LIBRARIES, filled
from tests.helpers import assert_same_bytes, random_array

RECIPES = {"int4": jlp.Int4QAT(group_size=16), "nvfp4": jlp.WeightQAT(jlp.NVFP4())}
PUBLISHED = (  # by sizes of the axes: of bonsai's and Flax's Gemma, of Qwen, and of others
    ("BTD,DNH->BTNH", {"D": 32, "N": 4, "H": 8}),
    ("BTNH,NHD->BTD", {"D": 24, "N": 4, "H": 8}),
    ("BTD,NDH->BTNH", {"D": 32, "N": 4, "H": 8}),
    ("TD,KNDH->KTNH", {"D": 32, "K": 2, "N": 3, "H": 8}),
    ("BTF,DF->BTD", {"F": 32, "D": 32}),
)


def drawn(seed):
    """An equation whose axes are in any order, and the sizes of its axes."""
    rng = np.random.default_rng(seed)
    batch, k, n, rows = ("b"[: seed % 2], "kl"[: rng.integers(1, 3)], "no"[: rng.integers(1, 3)], "tu"[: 1 + seed % 2])
    x, w, out = ("".join(rng.permutation([*axes])) for axes in (batch + rows + k, batch + k + n, batch + rows + n))
    return f"{x},{w}->{out}", {"b": 2, "k": 16, "l": 3, "n": 4, "o": 5}


EQUATIONS = (*PUBLISHED, *map(drawn, range(8)))


def shapes(equation, sizes):
    """The shapes of input and kernel."""
    return tuple(tuple(sizes.get(axis, 2) for axis in term) for term in equation.partition("->")[0].split(","))


def matrices(equation, kernel):
    """The kernel as [batch..., K, N], by what each axis is in the equation."""
    (x, w), out = equation.partition("->")[0].split(","), equation.partition("->")[2]
    order = [
        [a for a in w if a in x and a in out],
        [a for a in x if a in w and a not in out],
        [a for a in w if a not in x],
    ]
    sizes = dict(zip(w, kernel.shape, strict=True))
    k, n = (math.prod(sizes[a] for a in part) for part in order[1:])
    return kernel.transpose([w.index(a) for a in sum(order, [])]).reshape(*(sizes[a] for a in order[0]), k, n)


INPUTS = tuple(random_array(shapes(*case)[0], "float32", i) for i, case in enumerate(EQUATIONS))
NAMES = tuple(f"e{i}" for i in range(len(EQUATIONS)))


def call(model, *inputs):
    return tuple(getattr(model, name)(x) for name, x in zip(NAMES, inputs, strict=True))


def makers(library, **options):
    return {
        name: library.maker("Einsum", equation, shapes(equation, sizes)[1], **options)
        for name, (equation, sizes) in zip(NAMES, EQUATIONS, strict=True)
    }


@functools.cache
def model_of(library):
    library = LIBRARIES[library]
    return library.model(library.composed(call, **makers(library)), *INPUTS)


@pytest.mark.parametrize(("library", "recipe"), [("linen", "int4"), ("nnx", "nvfp4"), ("nnx", "int4")])
def test_every_layout_is_served_with_the_bits_of_training(library, recipe):
    model, recipe = model_of(library), RECIPES[recipe]
    served = model.served(recipe, *INPUTS)
    with jlp.autocast(recipe):
        trained = jax.jit(model.apply)(model.tree, *INPUTS)
    assert_same_bytes(jax.jit(served.apply)(served.tree, *INPUTS), trained)
    for name, (equation, _) in zip(NAMES, EQUATIONS, strict=True):
        kernel = served.kernel(name)
        assert (kernel.format, kernel.axis) == (recipe.weight_format, -2)
        assert kernel.shape == matrices(equation, np.asarray(model.kernel(name))).shape


def test_a_stack_of_such_layers_is_served(library):
    recipe, x = RECIPES["int4"], random_array((2, 4, 32), "float32")
    heads = library.maker("Einsum", "btd,ndh->btnh", (4, 32, 8))
    out = library.maker("Einsum", "btnh,nhd->btd", (4, 8, 32))
    block = library.composed(lambda m, x: x + m.out(m.heads(x)), heads=heads, out=out)
    model = library.model(library.stack(block, 3), x)
    served = model.served(recipe, x)
    assert served.kernel("blocks", "heads").shape == served.kernel("blocks", "out").shape == (3, 32, 32)
    with jlp.autocast(recipe):
        trained = jax.jit(model.apply)(model.tree, x)
    assert_same_bytes(jax.jit(served.apply)(served.tree, x), trained)


class TestRefused:
    x = random_array((4, 32), "float32")

    def model(self, library, *args):
        return library.model(library.composed(lambda m, x: m.e(x), e=library.maker("Einsum", *args)), self.x)

    def test_a_sum_of_the_kernel_is_an_error_that_names_the_layer(self, library):
        model = self.model(library, "td,dnh->tn", (32, 4, 8))
        with pytest.raises(ValueError, match=r"layer 'e' .*'td,dnh->tn' sums or repeats the axis 'h'.* with exclude="):
            model.served(RECIPES["int4"], self.x)

    def test_a_product_that_contracts_nothing_stays_and_is_said(self, library):
        model = self.model(library, "td,dn->tdn", (32, 4))
        (row,) = model.explain(RECIPES["int4"], self.x).layers
        assert (row.note, row.roles.weight) == ("contracts nothing: no matrix product", None)
        with pytest.raises(ValueError, match="no layer follows a recipe"):
            model.served(RECIPES["int4"], self.x)

    def test_a_loaded_kernel_is_not_multiplied_by_another_equation(self):
        layer = jlp.quantize_params(
            filled(lambda: jlp.nnx.Einsum("td,df->tf", (32, 32), rngs=nnx.Rngs(0))), RECIPES["int4"]
        )
        assert layer(self.x, "td,df->tf").shape == (4, 32)
        with pytest.raises(ValueError, match="einsum_str='td,fd->tf' contracts other axes than 'td,df->tf'"):
            layer(self.x, "td,fd->tf")

    def test_matrices_of_another_shape_do_not_fit(self):
        layer = filled(lambda: jlp.nnx.Einsum("td,dnh->tnh", (32, 4, 8), rngs=nnx.Rngs(0)))
        layer.kernel = jlp.nnx.Quantized(jlp.quantize(jnp.ones((4, 64)), jlp.NVFP4(), axis=-2))
        with pytest.raises(ValueError, match=r"shape \(4, 64\), .* needs its matrices .* \(32, 32\)"):
            layer(self.x)


def with_adapters(model):
    """The model with adapters as after training: b is not zero any more."""
    model = jlp.nnx.add_lora(model, rank=2, alpha=3, rngs=nnx.Rngs(1), param_dtype=jnp.float32)
    for name in NAMES:
        b = getattr(model, name).lora.lora_b
        b.set_value(random_array(b.get_value().shape, "float32", len(name)) / 8)
    return model


class TestAdapters:
    run = staticmethod(nnx.jit(lambda model, *inputs: model(*inputs)))

    @pytest.mark.parametrize("kernels", ["flax", "arrays", "quantised"])
    def test_every_layout_gets_one_of_its_matrices(self, kernels):
        options = {"of": nnx} if kernels == "flax" else {}
        make = LIBRARIES["nnx"].composed(call, **makers(LIBRARIES["nnx"], **options))
        model = filled(lambda: make(nnx.Rngs(0)))
        if kernels == "quantised":
            model = jlp.quantize_params(model, RECIPES["nvfp4"])
        model = with_adapters(model)
        for name, (equation, sizes) in zip(NAMES, EQUATIONS, strict=True):
            layer, shape = getattr(model, name), matrices(equation, np.zeros(shapes(equation, sizes)[1])).shape
            assert (layer.adapter.a.shape, layer.adapter.b.shape) == ((*shape[:-1], 2), (*shape[:-2], 2, shape[-1]))
        merged = jlp.nnx.merge_lora(model)
        assert {type(getattr(merged, name)) for name in NAMES} == {jlp.nnx.Einsum}
        results = self.run(model, *INPUTS), self.run(merged, *INPUTS)
        tolerance = 0.03 if kernels == "quantised" else 1e-4
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), *results)

    def test_trees_of_parameters_take_adapters_of_any_axes(self):
        """As `lora.merge` has it: the adapter's product has the kernel's elements in their order."""
        params, axes = {}, {}
        for i, (name, (equation, sizes)) in enumerate(zip(NAMES, EQUATIONS, strict=True)):
            shape = shapes(equation, sizes)[1]
            params[name] = random_array(shape, "float32", i)
            axes[name] = [(0, 1), (len(shape) - 2, 1), (0, len(shape) - 1)][i % 3]
        adapters = jlp.lora.init(jax.random.key(0), params, rank=2, axes=axes, dtype="float32")
        adapters = jax.tree.map(lambda leaf: random_array(leaf.shape, "float32", leaf.size) / 8, adapters)
        products = {name: equation for name, (equation, _) in zip(NAMES, EQUATIONS, strict=True)}

        def results(einsum, params, inputs):
            return [einsum(products[name], x, params[name]) for name, x in zip(NAMES, inputs, strict=True)]

        @jax.jit
        def compared(adapters, inputs):
            adapted = jlp.lora.apply(params, adapters)
            plain = jlp.quantize_matmuls(lambda params, inputs: results(jnp.einsum, params, inputs), None)
            expected = results(jnp.einsum, jlp.lora.merge(params, adapters), inputs)
            return results(jlp.einsum, adapted, inputs), plain(adapted, inputs), expected

        ours, plain, expected = compared(adapters, INPUTS)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
        jax.tree.map(close, ours, expected)
        jax.tree.map(close, plain, expected)

    def test_what_gets_none_is_named_in_a_warning(self):
        model = nnx.Dict(
            up=nnx.Linear(32, 32, rngs=nnx.Rngs(0)),
            conv=nnx.Conv(32, 32, (3,), rngs=nnx.Rngs(0)),
            scale=nnx.Einsum("td,dn->tdn", (32, 2), rngs=nnx.Rngs(0)),
            experts=jlp.nnx.GroupedLinear(2, 32, 32, rngs=nnx.Rngs(0)),
            tokens=nnx.Embed(32, 32, rngs=nnx.Rngs(0)),
            norm=nnx.RMSNorm(32, rngs=nnx.Rngs(0)),
        )
        with pytest.warns(
            UserWarning, match="these get no adapter, though include chooses them: 'conv', 'experts', 'sca"
        ):
            jlp.nnx.add_lora(model, rank=2, exclude=(), rngs=nnx.Rngs(1))
        assert type(model["scale"]) is nnx.Einsum

    def test_what_exclude_leaves_out_is_not(self, recwarn):
        model = nnx.Dict(up=nnx.Linear(32, 32, rngs=nnx.Rngs(0)), conv=nnx.Conv(8, 8, (3,), rngs=nnx.Rngs(0)))
        jlp.nnx.add_lora(model, rank=2, exclude=("conv",), rngs=nnx.Rngs(1))
        assert not [w for w in recwarn if "adapter" in str(w.message)]


@pytest.mark.parametrize("case", EQUATIONS, ids=[equation for equation, _ in EQUATIONS])
def test_a_kernel_comes_back_from_its_matrices(case):
    x, shape = shapes(*case)
    axes = kernel_axes("einsum", case[0], len(x), len(shape))
    stack = np.arange(2 * math.prod(shape)).reshape(2, *shape)
    made = axes.matrices(jnp.asarray(stack))
    assert made.shape[1:] == axes.sizes(shape)
    np.testing.assert_array_equal(made[1], matrices(case[0], stack[1]))
    np.testing.assert_array_equal(axes.kernel(made, shape), stack)
