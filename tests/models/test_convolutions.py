"""quantize_matmuls: a convolution with disjoint windows has the bytes of its patches times the kernel."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxlowprec as jlp
from jaxlowprec.layers.convolution import Windows
from tests.helpers import assert_same_bytes, random_array
from tests.interpreted import interpreted

MXFP8, NVFP4 = jlp.MXFP8BlockScaling(), jlp.NVFP4BlockScaling()
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")

CASES = {  # recipe, dimension numbers, sizes of kernel, strides, sizes of input, dtypes of input, kernel and result
    "1x1": (NVFP4, NHWC, (1, 1), (1, 1), (4, 4), "bfloat16", "float32", None),
    "1x1 of torch": (MXFP8, NCHW, (1, 1), (1, 1), (4, 4), "float32", "float32", None),
    "1x1 with strides": (MXFP8, NHWC, (1, 1), (2, 3), (5, 7), "bfloat16", "bfloat16", None),
    "patches": (NVFP4, NHWC, (2, 4), (2, 4), (8, 8), "bfloat16", "float32", "float32"),
    "patches of torch, cut": (MXFP8, NCHW, (2, 2), (2, 2), (5, 8), "float32", "bfloat16", None),
    "mixed layouts": (NVFP4, ("HWNC", "OHWI", "CNHW"), (4, 2), (4, 2), (9, 5), "bfloat16", "float32", None),
    "one axis": (NVFP4, ("NCW", "WIO", "NWC"), (4,), (4,), (18,), "float16", "float32", None),
    "three axes": (MXFP8, ("NDHWC", "DHWIO", "NCDHW"), (2, 1, 2), (2, 3, 2), (4, 4, 5), "bfloat16", "float32", None),
}
BATCH, FEATURES, OUT = 8, 16, 32


def arranged(spec, sizes):
    """The shape of an operand in a layout; sizes by letters."""
    return tuple(sizes[letter] for letter in spec)


def by_hand(recipe, numbers, sizes, strides, result, precision):
    """The convolution as patches that are cut one element of the window after the other."""

    def call(params, x):
        x_spec, k_spec, y_spec = numbers
        spatial = [letter for letter in x_spec if letter not in "NC"]
        x = x.transpose([x_spec.index(letter) for letter in ("N", *spatial, "C")])
        kernel = params["conv"]["kernel"].transpose([k_spec.index(letter) for letter in (*spatial, "I", "O")])
        counts = [(n - size) // stride + 1 for n, size, stride in zip(x.shape[1:], sizes, strides, strict=False)]
        elements = []
        for offsets in itertools.product(*map(range, sizes)):
            cut = zip(offsets, strides, counts, strict=True)
            elements.append(x[(slice(None), *(slice(o, o + (n - 1) * s + 1, s) for o, s, n in cut))])
        patches = jnp.stack(elements, -2).reshape(*elements[0].shape[:-1], -1)
        dims = (((patches.ndim - 1,), (0,)), ((), ()))
        kernel = kernel.reshape(-1, kernel.shape[-1])
        options = {"recipe": recipe, "name": "conv", "preferred_element_type": result, "precision": precision}
        y = jlp.dot_general(patches, kernel, dims, **options)
        return y.transpose([("N", *spatial, "C").index(letter) for letter in y_spec])

    return call


def convolution(numbers, strides, result=None, precision=None, padding="VALID", **more):
    def call(params, x):
        kernel = params["conv"]["kernel"].astype(x.dtype)
        options = {"preferred_element_type": result, "precision": precision, "dimension_numbers": numbers} | more
        return lax.conv_general_dilated(x, kernel, strides, padding, **options)

    return call


def operands(numbers, sizes, extents, x_dtype, k_dtype):
    spatial = [letter for letter in numbers[0] if letter not in "NC"]
    of_x = {"N": BATCH, "C": FEATURES} | dict(zip(spatial, extents, strict=True))
    of_k = {"I": FEATURES, "O": OUT} | dict(zip(spatial, sizes, strict=True))
    x, kernel = arranged(numbers[0], of_x), arranged(numbers[1], of_k)
    return {"conv": {"kernel": random_array(kernel, k_dtype, 1)}}, random_array(x, x_dtype, 2)


def with_gradients(function):
    def loss(params, x):
        y = function(params, x)
        return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)), y

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_patches_by_hand(case):
    recipe, numbers, sizes, strides, extents, x_dtype, k_dtype, result = CASES[case]
    params, x = operands(numbers, sizes, extents, x_dtype, k_dtype)
    precision = ("highest", "highest") if case == "patches" else None
    theirs = convolution(numbers, strides, result, precision)
    quantized = jlp.quantize_matmuls(theirs, recipe)
    ours = by_hand(recipe, numbers, sizes, strides, result, precision)
    found = interpreted(with_gradients(quantized))(params, x)
    assert_same_bytes(found, interpreted(with_gradients(ours))(params, x))
    exact = jax.jit(theirs)(params, x).astype(jnp.float32)
    (_, y), (of_params, _) = found
    assert y.dtype == jnp.dtype(result or x_dtype) and of_params["conv"]["kernel"].dtype == k_dtype
    error = np.linalg.norm(np.asarray(y, np.float32) - exact) / np.linalg.norm(exact)
    assert 0.001 < error < (0.5 if recipe is NVFP4 else 0.1)


def read(windows, extents):
    """Which elements each window reads, by the definition; None if one of them is none of the input's."""
    axes = []
    for axis, (low, high) in enumerate(windows.padding):
        size, stride, extent = windows.sizes[axis], windows.strides[axis], extents[axis]
        dilation, spread = windows.kernel_dilation[axis], windows.input_dilation[axis]
        whole = (extent - 1) * spread + 1 + low + high
        count = max(0, (whole - (size - 1) * dilation - 1) // stride + 1)
        places = [[o * stride + k * dilation - low for k in range(size)] for o in range(count)]
        if any(n % spread or not 0 <= n < (extent - 1) * spread + 1 for window in places for n in window):
            return None
        axes.append(np.array(places, int).reshape(count, size) // spread)
    grid = np.arange(math.prod(extents)).reshape(extents)
    counts, sizes = zip(*(a.shape for a in axes), strict=True)
    found = grid[np.ix_(*(a.ravel() for a in axes))].reshape([n for a in axes for n in a.shape])
    rank = len(axes)
    return found.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2)).reshape(*counts, *sizes)


def test_of_random_convolutions_those_are_products_that_can_be():
    rng = np.random.default_rng(0)
    products = others = 0
    for _ in range(600):
        rank = int(rng.integers(1, 4))

        def draw(rank, values):
            return tuple(int(n) for n in rng.choice(values, rank))

        sizes = draw(rank, [1, 1, 2, 3])
        strides = sizes if rng.random() < 0.7 else draw(rank, [1, 2, 3])
        padding = tuple(zip(draw(rank, [0] * 9 + [1, -1]), draw(rank, [0] * 6 + [1, -1]), strict=True))
        dilations = draw(rank, [1] * 9 + [2]), draw(rank, [1] * 5 + [2])
        extents = draw(rank, range(3, 8))
        windows = Windows(sizes, strides, padding, *dilations, 4, extents=extents)
        elements = read(windows, extents)
        once = elements is not None and np.unique(elements).size == elements.size
        if windows.reason:
            others += 1
            alike = all(stride == size or size == 1 for stride, size in zip(strides, sizes, strict=True))
            plain = all(low == 0 for low, _ in padding) and set(itertools.chain(*dilations)) == {1}
            assert not (once and alike and plain and elements.size), windows
        else:
            products += 1
            assert once, windows
            grid = np.arange(math.prod(extents), dtype=np.int32).reshape(1, *extents, 1)
            if elements.size:
                found = np.asarray(interpreted(windows.patches)(grid))[0, ..., 0]
                assert found.shape == elements.shape and (found == elements).all(), windows
    assert products > 100 and others > 100


class TestWhatStays:
    KINDS = {
        "overlap": ((3, 3, 4, 8), {"strides": (1, 1), "padding": "SAME"}, "a convolution with overlapping windows"),
        "gaps": ((2, 2, 4, 8), {"strides": (3, 3)}, "a convolution with gaps between its windows"),
        "pad": ((3, 3, 4, 8), {"strides": (3, 3), "padding": "SAME"}, "a padded convolution"),
        "groups": ((1, 1, 2, 8), {"strides": (1, 1), "feature_group_count": 2}, "a grouped convolution"),
        "depthwise": ((2, 2, 1, 8), {"strides": (2, 2), "feature_group_count": 4}, "a depthwise convolution"),
        "batches": ((1, 1, 4, 8), {"strides": (1, 1), "batch_group_count": 2}, "a convolution in groups of the batch"),
        "transposed": (
            (1, 1, 4, 8),
            {"strides": (1, 1), "padding": ((0, 0),) * 2, "lhs_dilation": (2, 2)},
            "a transposed convolution",
        ),
        "dilated": ((2, 2, 4, 8), {"strides": (2, 2), "rhs_dilation": (2, 2)}, "a dilated convolution"),
        "whole": ((2, 2, 4, 1), {"strides": (2, 2)}, "the parameter is contracted whole: no matrix"),
    }

    @pytest.mark.filterwarnings("ignore:quantize_matmuls. no layer followed")
    @pytest.mark.parametrize("kind", KINDS)
    def test_explain_says_why_and_nothing_changes(self, kind):
        shape, options, note = self.KINDS[kind]
        theirs = convolution(NHWC, **options)
        params, x = {"conv": {"kernel": jnp.ones(shape)}}, jnp.ones((2, 8, 8, 4))
        (row,) = jlp.explain(theirs, MXFP8, params, x).layers
        assert (row.path, row.kernel, row.note, row.roles.weight) == ("conv", shape, note, None)
        found = jax.make_jaxpr(jlp.quantize_matmuls(theirs, MXFP8))(params, x)
        assert str(found) == str(jax.make_jaxpr(theirs)(params, x))

    def test_a_parameter_as_the_input_and_two_parameters(self):
        def function(params, x):
            by_activations = lax.conv(params["image"], x, (1, 1), "VALID")
            return by_activations + lax.conv(params["image"], params["k"], (1, 1), "VALID")

        params, x = {"image": jnp.ones((2, 4, 8, 8)), "k": jnp.ones((8, 4, 1, 1))}, jnp.ones((8, 4, 1, 1))
        notes = [(row.path, row.note) for row in jlp.explain(function, MXFP8, params, x).layers]
        assert ("image", "the parameter is the input of a convolution") in notes
        assert ("k", "both operands are parameters") in notes

    def test_same_padding_that_adds_nothing_is_a_product(self):
        params, x = operands(NHWC, (2, 2), (8, 8), "bfloat16", "float32")
        for padding in ("SAME", "VALID", ((0, 0), (0, 1))):  # no window reaches the last column
            (row,) = jlp.explain(convolution(NHWC, (2, 2), padding=padding), MXFP8, params, x).layers
            assert row.note == "" and row.roles.weight is not None

    def test_without_a_recipe_the_program_is_the_functions(self):
        params, x = operands(NHWC, (2, 2), (8, 8), "bfloat16", "float32")
        theirs = convolution(NHWC, (2, 2))
        found = jax.make_jaxpr(jlp.quantize_matmuls(theirs, None))(params, x)
        assert str(found) == str(jax.make_jaxpr(theirs)(params, x))


class TestInFunctions:
    STACK = random_array((3, 1, 1, 16, 16), "float32", 3)
    X = random_array((2, 4, 4, 16), seed=4)

    @pytest.mark.parametrize("unrolled", [False, True])
    def test_a_scan_of_remat(self, unrolled):
        def theirs(stack, x):
            layer = lambda x, k: (jnp.tanh(convolution(NHWC, (1, 1))({"conv": {"kernel": k}}, x)), None)  # noqa: E731
            return lax.scan(jax.checkpoint(layer), x, stack["conv"]["kernel"], unroll=unrolled)[0]

        def ours(stack, x):
            layer = lambda x, k: (jnp.tanh(jlp.linear(x, k[0, 0], recipe=NVFP4, name="conv")), None)  # noqa: E731
            return lax.scan(jax.checkpoint(layer), x, stack["conv"]["kernel"], unroll=unrolled)[0]

        args = {"conv": {"kernel": self.STACK}}, self.X
        found, expected = (jax.jit(with_gradients(f))(*args) for f in (jlp.quantize_matmuls(theirs, NVFP4), ours))
        assert_same_bytes(found, expected)

    def test_delayed_scaling_has_a_state_for_each_product(self):
        recipe = jlp.DelayedScaling(amax_history_len=3)

        def theirs(params, x):
            y = lax.conv_general_dilated(x, params["patch"]["kernel"], (2, 2), "VALID", dimension_numbers=NHWC)
            return lax.conv_general_dilated(y, params["mid"]["kernel"], (1, 1), "SAME", dimension_numbers=NHWC)

        patch, mid = random_array((2, 2, 16, 16), "float32", 1), jnp.ones((3, 3, 16, 16))
        params = {"patch": {"kernel": patch}, "mid": {"kernel": mid}}
        x, function = self.X.astype(jnp.float32), jlp.quantize_matmuls(theirs, recipe)
        state = function.init_state(params, x)
        (states,) = state.values()
        assert states.keys() == {"patch"}
        (new,) = jax.jit(jax.grad(lambda s: function(params, x, scaling_state=s).sum()))(state).values()
        assert new["patch"]["kernel_amax_history"][0] == jnp.abs(patch).max()

    @pytest.mark.parametrize("recipe", [None, MXFP8])
    @pytest.mark.filterwarnings("ignore:quantize_matmuls. no layer followed")
    def test_a_packed_parameter_is_an_array(self, recipe):
        params, theirs = {"conv": {"kernel": random_array((1, 1, 32, 16), "float32", 5)}}, convolution(NHWC, (1, 1))
        quantized, x = jlp.quantize_matmuls(theirs, recipe), random_array((2, 4, 4, 32))
        codes = jlp.quantize(params["conv"]["kernel"], jlp.Int4(16), axis=-2)
        adapted = jlp.lora.apply(params, jlp.lora.init(jax.random.key(0), params, rank=2))["conv"]["kernel"]
        for kernel, dense in ((codes, codes.dequantize()), (adapted, adapted.merged())):
            found = jax.jit(quantized)({"conv": {"kernel": kernel}}, x)
            assert_same_bytes(found, jax.jit(theirs)({"conv": {"kernel": dense}}, x))
            (row,) = jlp.explain(quantized, jlp.FROM_CONTEXT, {"conv": {"kernel": kernel}}, x).layers
            assert row.note
