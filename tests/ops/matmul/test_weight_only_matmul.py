"""scaled_matmul of plain activations with a quantised weight: its bytes, and what does not change them."""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.sharding import PartitionSpec as P

from tests.against_oracle import weight_only_product
from tests.eager import jlp
from tests.helpers import FLOATS, assert_same_bytes, assert_same_numbers, often, python_environment, random_array
from tests.helpers import quantized_from_bytes as floats_from_bytes
from tests.ops.implementations import ByKernels, ByReference
from tests.products import epilogues_by_oracle, products, with_epilogues
from tests.sharding.meshes import by_axis_type, collectives, lengthened, mesh_of, place

pytestmark = pytest.mark.sampled(7)

INT4S = (
    jlp.Int4(128, pad=True),
    jlp.Int4(32, symmetric=False, pad=True),
    jlp.Int4(64, scale_dtype="float16", pad=True),
    jlp.Int4(96, symmetric=False, scale_dtype="float16", pad=True),
    jlp.Int4(16, pad=True),
    jlp.Int4(7, symmetric=False, pad=True),
    jlp.Int4(2, scale_dtype="float16", pad=True),
    jlp.Int4(1, symmetric=False, pad=True),
)
PACKED = (*INT4S, jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.MXFP4(), jlp.MXFP4((32, 32)))
BYTES = (
    jlp.MXFP8(),
    jlp.MXFP8("e5m2", (32, 32)),
    jlp.Float8Block(),
    jlp.Float8Block("e5m2", (128, 128), False),
    jlp.Float8Tensor(),
)
ONE_OF_EACH = (jlp.Int4(64), jlp.Int4(32, symmetric=False), jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.MXFP4(), jlp.MXFP8())
ONE_OF_EACH_PADDED = (*INT4S[:4], jlp.NVFP4(), jlp.NVFP4((16, 16)), jlp.MXFP4(), jlp.MXFP8(), jlp.Float8Tensor())
over_formats = pytest.mark.parametrize("fmt", (*PACKED, *BYTES), ids=str)
over_some = pytest.mark.parametrize("fmt", ONE_OF_EACH, ids=str)


def weight_from_bytes(shape, fmt, seed=0, **fields):
    """Any codes, scales and zero points."""
    if fmt.element != "int4":
        return floats_from_bytes(shape, fmt, seed, **fields)
    rng = np.random.default_rng(seed)
    *lines, length = shape
    groups = -(-length // fmt.group_size)
    data = rng.integers(0, 256, (*lines, -(-groups * fmt.group_size // 2)), np.uint8)
    scale = np.exp2(rng.uniform(-8, 8, (*lines, groups))).astype(jnp.dtype(fmt.scale_dtype))
    zero = None if fmt.symmetric else rng.integers(0, 16, scale.shape, np.uint8)
    return jlp.QuantizedArray(data, scale, None, zero, fmt, tuple(shape[-2:]), jnp.dtype("bfloat16"), -1, None)


def operands(sizes, fmt, dtype="bfloat16", seed=0, **fields):
    """x [batch..., M, K] and a weight [batch..., N, K]."""
    *batch, m, k, n = sizes
    return random_array((*batch, m, k), dtype, seed), weight_from_bytes((*batch, n, k), fmt, seed + 1, **fields)


def assert_multiplies(x, q, *implementations, **options):
    """The numbers are the oracle's."""
    wanted, before = weight_only_product(x, q, **options)
    for implementation in implementations:
        assert_same_numbers(jlp.scaled_matmul(x, q, implementation=implementation, **options), wanted)
        if options.get("activation") == "gelu":
            both = jlp.scaled_matmul(x, q, implementation=implementation, return_pre_activation=True, **options)
            assert_same_numbers(both[0], wanted)
            assert_same_numbers(both[1], before)


@functools.cache
def pairs_and_products(fmt, sizes, dtype):
    """Once for both implementations."""
    pairs = [operands(one, fmt, dtype) for one in sizes]
    return pairs, [weight_only_product(*pair, preferred_element_type=jnp.float32)[0] for pair in pairs]


ADDED = ((), ("bias",), ("accumulate",), ("bias", "accumulate"))


@functools.cache
def epilogues(fmt):
    """Operands, cases and the oracle's results."""
    x, q = operands((2, 5, 64, 21), fmt)
    x, cases = x * 0.01, tuple(itertools.product(ADDED, (None, "gelu", "dgelu"), FLOATS, FLOATS))
    cases = tuple(case for case in cases if case[2] == case[3])
    extras = {
        dtype: {
            "bias": random_array((2, 21), "float32", 3),
            "accumulate": random_array((2, 5, 21), dtype, 4),
            "activation_input": random_array((2, 5, 21), "bfloat16", 5),
        }
        for dtype in FLOATS
    }
    return x, q, extras, cases, epilogues_by_oracle(weight_only_product, x, q, extras, cases)


class WeightOnlyCases:
    """What every implementation promises."""

    implementation: str
    SIZES = {
        "bfloat16": (
            (1, 1, 1),
            (1, 512, 33),
            (3, 600, 21),
            (4, 48, 70),
            (5, 130, 50),
            (40, 1100, 55),
            (2, 3, 7, 80, 18),
        ),
        "float16": ((3, 200, 21), (9, 600, 50)),
        "float32": ((3, 200, 21), (9, 600, 50)),
    }

    @pytest.fixture(params=list(itertools.product((*PACKED, *BYTES), FLOATS)), ids=lambda case: f"{case[0]}-{case[1]}")
    def operand(self, request):
        """The weight's format and the activations' dtype."""
        return request.param

    def test_bytes_are_the_rules(self, operand):
        """Products of float32 are not exact: one rounding each."""
        fmt, dtype = operand
        pairs, wanted = pairs_and_products(fmt, self.SIZES[dtype], dtype)
        for y, w in zip(products(pairs, self.implementation), wanted, strict=True):
            assert_same_numbers(y, w)

    @pytest.mark.parametrize("scale", [0.0, 1e-5, 3e38, 65504.0, np.inf, np.nan])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_any_scale_of_int4(self, dtype, scale):
        """Numbers that the scale's type rounds, that are subnormal in it or overflow."""
        pairs, wanted = any_scale_of_int4(dtype, scale)
        for y, w in zip(products(pairs, self.implementation), wanted, strict=True):
            assert_same_numbers(y, w)


@functools.cache
def any_scale_of_int4(dtype, scale):
    pairs = []
    for symmetric, size in ((True, 32), (False, 32), (False, 6)):
        q = weight_from_bytes((20, 96), jlp.Int4(size, symmetric, dtype))
        scales = np.array(q.scale)
        with np.errstate(over="ignore"):
            scales[::2] = scale
        pairs.append((random_array((3, 96)), dataclasses.replace(q, scale=scales)))
    return pairs, [weight_only_product(*pair, preferred_element_type=jnp.float32)[0] for pair in pairs]


class TestByReference(ByReference, WeightOnlyCases):
    SIZES = dict.fromkeys(FLOATS, ((5, 130, 21),))
    FORMATS = (*PACKED, *BYTES[:3], BYTES[-1])
    OFTEN = (
        *itertools.product(FORMATS, ("bfloat16",)),
        *itertools.product((INT4S[0], INT4S[3], jlp.NVFP4(), jlp.MXFP8()), ("float16",)),
    )

    @pytest.fixture(
        params=often(OFTEN, list(itertools.product(FORMATS, ("bfloat16", "float16")))),
        ids=lambda case: f"{case[0]}-{case[1]}",
    )
    def operand(self, request):
        """Those whose products are exact. Each takes XLA a while to compile."""
        return request.param

    @pytest.mark.parametrize("fmt", often(ONE_OF_EACH_PADDED, (*PACKED, *BYTES)), ids=str)
    def test_float32_activations_are_within_a_rounding_a_product(self, fmt):
        """|y - y'| <= K 2^-23 |x||w|."""
        x, q = operands((5, 130, 21), fmt, "float32")
        (y,), native = products([(x, q)], "reference"), weight_only_product(x, q, preferred_element_type=jnp.float32)[0]
        w = np.abs(np.asarray(jlp.dequantize(q, dtype=jnp.float32), np.float64))
        difference = np.abs(np.asarray(y, np.float64) - native)
        assert (difference <= 130 * 2.0**-23 * (np.abs(np.asarray(x, np.float64)) @ w.T)).all()


class TestByKernels(ByKernels, WeightOnlyCases):
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_a_row_reads_no_scale_of_the_next(self, symmetric):
        """An odd number of codes ends in half a byte, which has no scale."""
        x, q = operands((2, 15, 3), jlp.Int4(1, symmetric=symmetric, pad=True))
        scale = np.array(q.scale)
        scale[1:, 0] = np.nan
        q = dataclasses.replace(q, scale=scale)
        y = np.asarray(jlp.scaled_matmul(x, q, implementation="ffi"))
        assert np.isfinite(y[:, 0]).all() and np.isnan(y[:, 1:]).all()

    @pytest.mark.parametrize("most", [0x7180, 0x7F00])
    def test_scales_of_int4_of_any_exponent(self, isa, most):
        """Zero and normal ones of either sign: up to the largest with which all tables of AVX-512 are made without
        branches, and above."""
        random = np.random.default_rng(0)
        scales = random.integers(0x80, most + 1, (128, 16)).astype(np.uint16)
        scales[0, :4] = 0, 0x80, most, 0x8000
        scales |= random.integers(0, 2, scales.shape).astype(np.uint16) << 15
        x, q = operands((2, 512, 128), jlp.Int4(32))
        q = dataclasses.replace(q, scale=scales.view(jnp.bfloat16.dtype))
        assert_multiplies(x * 2.0**-8, q, "ffi", preferred_element_type=jnp.float32)

    @over_some
    def test_epilogue(self, fmt):
        x, q, extras, cases, expected = epilogues(fmt)
        for found, wanted in zip(with_epilogues(x, q, extras, cases, "ffi"), expected, strict=True):
            for y, w in zip(found, wanted, strict=True):
                assert_same_numbers(y, w)

    @given(codes=st.binary(min_size=1, max_size=64), scales=st.lists(st.integers(0, 255), min_size=1, max_size=16))
    @pytest.mark.parametrize("fmt", [jlp.NVFP4(), jlp.MXFP4()], ids=str)
    def test_arbitrary_bytes(self, fmt, codes, scales):
        q = weight_from_bytes((20, 64), fmt, codes=list(codes), scales=scales)
        assert_multiplies(random_array((3, 64)), q, "ffi", preferred_element_type=jnp.float32)

    def test_values_that_are_not_finite(self):
        x = np.array(random_array((6, 70), "float32"))
        x[0, 3], x[1, 69], x[2] = np.inf, np.nan, 1e-40
        for fmt in ONE_OF_EACH[:1] + ONE_OF_EACH[2:]:
            fmt = dataclasses.replace(fmt, pad=True) if fmt.element == "int4" else fmt
            assert_multiplies(x, weight_from_bytes((20, 70), fmt), "ffi", preferred_element_type=jnp.float32)


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 700), st.integers(1, 140)),
    fmt=st.sampled_from(PACKED),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 999),
)
@settings(max_examples=20)  # each is traced
def test_kernels_of_arbitrary_sizes(sizes, fmt, dtype, seed):
    assert_multiplies(*operands(sizes, fmt, dtype, seed), "ffi", preferred_element_type=jnp.float32)


class TestWhatChangesNothing:
    @over_formats
    def test_a_row_is_the_same_among_any_number_of_rows(self, isa, fmt):
        x, q = operands((40, 330, 70), fmt, "float32")
        *some, whole = products([(x[:rows], q) for rows in (1, 2, 3, 4, 5, 17, 40)], "ffi")
        for y in some:
            assert_same_bytes(y, whole[: len(y)])

    @pytest.mark.slow
    def test_the_number_of_threads(self):
        code = (
            "import jax.numpy as jnp, jaxlowprec as jlp, hashlib, numpy as np\n"
            "from tests.helpers import random_array, digest\n"
            "q = jlp.quantize(random_array((2048, 1024), seed=1), jlp.Int4(128))\n"
            "for m in (1, 3, 80):\n"
            "    print(digest(np.asarray(jlp.scaled_matmul(random_array((m, 1024)), q)).view(np.uint16)))\n"
        )
        environment = python_environment()

        def digests(cpus):
            pinned = f"import os; os.sched_setaffinity(0, {cpus})\n"
            done = subprocess.run(
                [sys.executable, "-c", pinned + code], env=environment, capture_output=True, check=True
            )
            return done.stdout

        cpus = sorted(os.sched_getaffinity(0))
        assert len(cpus) > 1 and digests(set(cpus[:1])) == digests(set(cpus)) != b""

    @over_some
    def test_training_and_serving(self, fmt):
        """The kernel of a layer quantised along its inputs is the checkpoint's weight."""
        kernel = random_array((256, 96), seed=1)
        x = random_array((5, 256))
        assert_same_bytes(
            jlp.scaled_matmul(x, jlp.quantize(kernel, fmt, axis=-2).mT),
            jlp.scaled_matmul(x, jlp.quantize(kernel.T, fmt)),
        )

    @over_some
    def test_it_is_the_product_with_the_dequantised_weight(self, fmt):
        x, w = random_array((20, 512), seed=2), random_array((30, 512), seed=3)
        q = jlp.quantize(w, fmt)
        exact = np.asarray(x, np.float64) @ np.asarray(jlp.dequantize(q, dtype=jnp.float32), np.float64).T
        y = jlp.scaled_matmul(x, q, preferred_element_type=jnp.float32)
        np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())


class TestTransformations:
    @over_some
    def test_one_weight_for_all_batch_axes(self, fmt):
        x, q = operands((6, 64, 40), fmt)
        bias, onto = random_array((40,), "float32", 3), random_array((2, 3, 40), "float32", 4)
        x = x.reshape(2, 3, 64)
        assert_multiplies(x, q, None, bias=bias, accumulate=onto, activation="gelu")
        function = functools.partial(jlp.scaled_matmul, bias=bias, activation="gelu")
        mapped = jax.vmap(lambda x, onto: function(x, q, accumulate=onto))(x, onto)
        assert_same_bytes(mapped, function(x, q, accumulate=onto))

    @pytest.mark.parametrize("fmt", often([jlp.Int4(32, symmetric=False), jlp.NVFP4()], ONE_OF_EACH), ids=str)
    def test_one_weight_for_all_batch_axes_by_reference(self, fmt):
        x, q = operands((6, 64, 40), fmt)
        options = {"bias": random_array((40,), "float32", 3), "accumulate": random_array((2, 3, 40), "float32", 4)}
        assert_multiplies(x.reshape(2, 3, 64), q, "reference", activation="gelu", **options)

    def test_mapping_over_activations_copies_no_weight(self):
        x, q = operands((32, 64, 40), jlp.Int4(32))
        x = x[:, None]
        jaxpr = jax.jit(jax.vmap(lambda x: jlp.scaled_matmul(x, q))).lower(x).as_text()
        assert "32x40x32xui8" not in jaxpr
        assert_same_bytes(jax.vmap(lambda x: jlp.scaled_matmul(x, q))(x), jlp.scaled_matmul(x, q))

    @over_some
    def test_experts(self, fmt):
        """An axis of both, given or mapped over; of the weight alone; of more rows than that."""
        x, q = operands((3, 5, 64, 40), fmt)
        bias = random_array((3, 40), "float32", 3)

        @jax.jit
        def in_several_ways(x, q, bias):
            whole = jlp.scaled_matmul(x, q, bias)
            each = [jlp.scaled_matmul(x[i], jax.tree.map(lambda v, i=i: v[i], q), bias[i]) for i in range(3)]
            alone = jax.vmap(lambda q: jlp.scaled_matmul(x[0], q))(q)
            more = jax.vmap(lambda x, q: jlp.scaled_matmul(x, q))(jnp.stack([x, -x], 1), q)
            biases = jax.vmap(lambda b: jlp.scaled_matmul(x[0], jax.tree.map(lambda v: v[0], q), b))(bias)
            return (
                (whole, jnp.stack(each)),
                (jax.vmap(jlp.scaled_matmul)(x, q, bias), whole),
                (alone, jlp.scaled_matmul(jnp.broadcast_to(x[0], x.shape), q)),
                (more[:, 0], jlp.scaled_matmul(x, q)),
                (biases[0], whole[0]),
            )

        for found, wanted in in_several_ways(x, q, bias):
            assert_same_bytes(found, wanted)

    @over_some
    def test_jit_scan_and_export(self, fmt):
        x, q = operands((3, 64, 40), fmt)
        wanted = jlp.scaled_matmul(x, q)
        assert_same_bytes(jax.jit(jlp.scaled_matmul)(x, q), wanted)
        _, scanned = jax.lax.scan(lambda _, row: (None, jlp.scaled_matmul(row[None], q)[0]), None, x)
        assert_same_bytes(scanned, wanted)
        m, _ = export.symbolic_shape("m, 64")
        kernel = export.DisabledSafetyCheck.custom_call("jaxlowprec_weight_only_matmul")
        function = jax.jit(lambda x: jlp.scaled_matmul(x, q))
        exported = export.export(function, disabled_checks=[kernel])(jax.ShapeDtypeStruct((m, 64), x.dtype))
        assert_same_bytes(exported.call(x), wanted)

    @over_some
    def test_no_derivative_is_silently_zero(self, fmt):
        x, q = operands((3, 64, 40), fmt)
        for argument, values in (("accumulate", random_array((3, 40))), ("bias", jnp.ones(40))):
            with pytest.raises(NotImplementedError, match="no derivative of a product with a quantised weight"):
                jax.grad(lambda v, name=argument: jlp.scaled_matmul(x, q, **{name: v}).sum())(values)
        with pytest.raises(NotImplementedError, match="no derivative of a product with a quantised weight"):
            jax.grad(lambda x: jlp.scaled_matmul(x, q).sum())(x)

    @pytest.mark.parametrize("depth", [0, 64])
    def test_empty(self, depth):
        q = jlp.quantize(jnp.ones((4, depth)), jlp.NVFP4())
        assert jlp.scaled_matmul(jnp.ones((3, depth)), q, bias=jnp.ones(4)).shape == (3, 4)
        assert jlp.scaled_matmul(jnp.ones((0, depth)), q).shape == (0, 4)
        if not depth:
            assert not jlp.scaled_matmul(jnp.ones((3, 0)), q).any()


def split(q, mesh, spec):
    """A weight's matrices split alike, its amaxes whole."""

    def one(leaf):
        return place(leaf, mesh, lengthened(spec, leaf.ndim) if leaf.ndim == q.ndim else P())

    return jax.tree.map(one, q)


@pytest.mark.parametrize("fmt", often([jlp.Int4(32, symmetric=False), jlp.NVFP4(), jlp.MXFP8()], ONE_OF_EACH), ids=str)
class TestSharding:
    @by_axis_type
    def test_bytes_do_not_depend_on_how_rows_and_columns_are_split(self, fmt, axis_type):
        x, q = operands((4, 8, 128, 64), fmt)
        q = jax.tree.map(lambda v: v[0], q)
        mesh = mesh_of((2, 2), axis_type)
        wanted = jlp.scaled_matmul(x, q, jnp.ones(64), activation="gelu")
        with jax.set_mesh(mesh):
            placed = place(x, mesh, P("a", None, None)), split(q, mesh, P("b", None))
            y = jax.jit(lambda x, q: jlp.scaled_matmul(x, q, jnp.ones(64), activation="gelu"))(*placed)
        assert_same_bytes(y, wanted)

    def test_a_split_contraction_adds_the_epilogue_once(self, fmt):
        x, q = operands((8, 512, 64), fmt)
        mesh = mesh_of((4,))

        def function(x, q):
            return jlp.scaled_matmul(x, q, jnp.full(64, 100.0), activation="gelu", preferred_element_type=jnp.float32)

        with jax.set_mesh(mesh):
            compiled = jax.jit(function).lower(place(x, mesh, P(None, "a")), split(q, mesh, P(None, "a"))).compile()
            y = compiled(place(x, mesh, P(None, "a")), split(q, mesh, P(None, "a")))
        wanted = np.asarray(function(x, q))
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
        assert [kind for kind, _ in collectives(compiled)] == ["all-reduce"]

    def test_experts_stay_where_they_are(self, fmt):
        x, q = operands((4, 8, 64, 64), fmt)
        mesh = mesh_of((4,))
        with jax.set_mesh(mesh):
            placed = place(x, mesh, P("a")), jax.tree.map(lambda v: place(v, mesh, P("a")), q)
            compiled = jax.jit(jlp.scaled_matmul).lower(*placed).compile()
            assert_same_bytes(compiled(*placed), jlp.scaled_matmul(x, q))
        assert collectives(compiled) == []


class TestErrors:
    X = jnp.ones((4, 64), jnp.bfloat16)
    Q = jlp.NVFP4()

    @pytest.mark.parametrize(
        ("call", "error", "messages"),
        [
            (lambda x, w: (x, w), TypeError, ["rhs is a", "needs a QuantizedArray"]),
            (lambda x, w: (x.astype(int), jlp.quantize(w, jlp.NVFP4())), TypeError, ["lhs has dtype int32", "cast it"]),
            (lambda x, w: (x[0], jlp.quantize(w, jlp.NVFP4())), ValueError, ["lhs has shape (64,)", "two dimensions"]),
            (lambda x, w: (x, jlp.quantize(w[0], jlp.NVFP4())), ValueError, ["rhs has shape (64,)", "two dimensions"]),
            (
                lambda x, w: (x, jlp.quantize(w, jlp.NVFP4(), axis=-2)),
                ValueError,
                ["rhs of shape (32, 64) is quantised along axis -2", "quantise it with axis=-1, or pass rhs.mT"],
            ),
            (
                lambda x, w: (x, jlp.quantize(w, jlp.NVFP4(), hadamard=True)),
                ValueError,
                ["rhs has hadamard=Hadamard(16)", "quantise the weight without hadamard="],
            ),
            (lambda x, w: (x[:, :32], jlp.quantize(w, jlp.NVFP4())), ValueError, ["(4, 32)", "last axis: 32 and 64"]),
            (
                lambda x, w: (x[None], jlp.quantize(jnp.stack([w, w]), jlp.NVFP4())),
                ValueError,
                ["differ in their batch axes", "one weight [N, K]"],
            ),
        ],
    )
    def test_operands(self, call, error, messages):
        with pytest.raises(error) as raised:
            jax.eval_shape(lambda: jlp.scaled_matmul(*call(self.X, jnp.ones((32, 64)))))
        for message in ("scaled_matmul: ", *messages):
            assert message in str(raised.value)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"bias": jnp.ones((1, 32))}, ValueError, "needs (32,)"),
            ({"bias": jnp.ones(32, int)}, TypeError, "bias has dtype int32"),
            ({"accumulate": jnp.ones((4, 3))}, ValueError, "accumulate has shape (4, 3); needs (4, 32)"),
            ({"activation": "relu"}, ValueError, "activation='relu'"),
            ({"preferred_element_type": "int8"}, TypeError, "preferred_element_type=int8"),
            ({"implementation": "fast"}, ValueError, "implementation='fast'"),
        ],
        ids=lambda v: "-".join(v) if isinstance(v, dict) else None,
    )
    def test_options(self, options, error, message):
        q = jlp.quantize(jnp.ones((32, 64)), self.Q)
        with pytest.raises(error) as raised:
            jax.eval_shape(lambda: jlp.scaled_matmul(self.X, q, **options))
        assert f"scaled_matmul: {message}" in str(raised.value) or message in str(raised.value)


def test_every_combination_of_rows_and_formats_is_a_kernel():
    """implementation="ffi" serves all of them on the CPU."""
    pairs = [operands((m, 64, 20), fmt) for fmt, m in itertools.product((*PACKED, *BYTES), (1, 8))]
    assert [y.shape for y in products(pairs, "ffi")] == [(x.shape[0], 20) for x, _ in pairs]
