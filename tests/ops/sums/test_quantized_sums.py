"""Sums over devices whose terms travel quantised: their bytes, their error, and that they are unbiased."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.ops.sums import quantized
from jaxlowprec.ops.sums.kinds import adder_of
from jaxlowprec.wiring import Partials
from tests.helpers import assert_same_bytes, often, random_array
from tests.numpy_oracle import sums as oracle
from tests.sharding.meshes import mesh_of, name_of

KEY = jax.random.key(7)
WORDS = np.asarray(jax.random.key_data(KEY))
MESHES = [((2,), ("a",)), ((4,), ("a",)), ((8,), ("a",)), ((2, 4), ("a", "b")), ((4, 2), ("b", "a"))]


def over_meshes(argument, shapes):
    """Each shape on the mesh of eight devices, and each mesh with two of the shapes."""
    every = [(*MESHES[2], shape) for shape in shapes]
    others = [(*mesh, shapes[(i + j) % len(shapes)]) for i, mesh in enumerate(MESHES) if i != 2 for j in (0, 2)]
    chosen = [*every, others[5]]
    return pytest.mark.parametrize(("sizes", "names", argument), often(chosen, [*every, *others], 3), ids=name_of)


def on_devices(function, terms, mesh, names, check_vma=False):
    """What each device has, in the order of the devices along the names. `terms`: [n, ...], one for each."""
    local = jax.shard_map(
        lambda x: function(x[0])[None], mesh=mesh, in_specs=P(names), out_specs=P(names), check_vma=check_vma
    )
    return np.asarray(jax.jit(local)(terms).astype(jnp.float32))


def terms_of(count, shape, dtype="float32"):
    return random_array((count, *shape), dtype, seed=3)


class TestBytes:
    """Those of an oracle in NumPy, on every mesh."""

    @over_meshes("where", [((64, 64), 0), ((16, 256), 1), ((24, 5), 0), ((48,), -1), ((3, 16, 7), 1)])
    def test_reduce_scatter(self, sizes, names, where):
        shape, axis = where
        mesh = mesh_of(sizes, names="".join(sorted(names)))
        terms = terms_of(mesh.size, shape)
        summed = functools.partial(jlp.reduce_scatter_quantized, axis_name=names, axis=axis, key=KEY)
        assert_same_bytes(on_devices(summed, terms, mesh, names), np.stack(oracle.reduce_scatter(terms, axis, WORDS)))

    @over_meshes("shape", [(64, 64), (24, 5), (), (1,), (9000,)])
    def test_all_reduce(self, sizes, names, shape):
        mesh = mesh_of(sizes, names="".join(sorted(names)))
        terms = terms_of(mesh.size, shape)
        summed = functools.partial(jlp.all_reduce_quantized, axis_name=names, key=KEY)
        expected = oracle.all_reduce(terms, WORDS)
        for held in on_devices(summed, terms, mesh, names):
            assert_same_bytes(held, expected)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("fmt", [jlp.MXFP8(), jlp.MXFP8("e5m2")], ids=str)
    def test_other_inputs_and_elements(self, dtype, fmt):
        mesh, terms = mesh_of((8,)), terms_of(8, (64, 64), dtype)
        summed = functools.partial(jlp.reduce_scatter_quantized, axis_name="a", key=KEY, fmt=fmt)
        expected = np.stack(oracle.reduce_scatter(terms, 0, WORDS, fmt=fmt))
        assert_same_bytes(on_devices(summed, terms, mesh, "a"), np.asarray(expected.astype(dtype), np.float32))

    def test_which_device_has_which_term_does_not_matter(self):
        terms = terms_of(8, (64, 64))
        summed = functools.partial(jlp.reduce_scatter_quantized, axis_name="a", key=KEY)
        found = [
            on_devices(summed, terms, mesh_of((8,), devices=[jax.devices()[i] for i in order]), "a")
            for order in (range(8), range(7, -1, -1), (3, 1, 4, 0, 5, 7, 2, 6))
        ]
        assert_same_bytes(found[1], found[0])
        assert_same_bytes(found[2], found[0])

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_a_mesh_axis_that_is_not_summed_over(self, check_vma):
        mesh, terms = mesh_of((2, 4)), terms_of(8, (64, 64))

        def summed(x):
            return jlp.reduce_scatter_quantized(x, "b", key=KEY)

        found = on_devices(summed, terms, mesh, ("a", "b"), check_vma)
        for row in range(2):
            expected = np.stack(oracle.reduce_scatter(terms[4 * row : 4 * row + 4], 0, WORDS))
            assert_same_bytes(found[4 * row : 4 * row + 4], expected)

    @pytest.mark.parametrize(("shape", "axis"), [((64, 64), 0), ((16, 256), 1), ((24, 5), 0)], ids=name_of)
    def test_scattered_over_one_axis_then_added_up_over_another(self, shape, axis):
        mesh, terms = mesh_of((2, 4)), terms_of(8, shape)
        where = Partials({axis: ("b",)}, ("a",), ())
        found = on_devices(lambda x: adder_of("quantized").add_up(x, where, WORDS), terms, mesh, ("a", "b"))
        expected = oracle.reduce_scatter_then_all_reduce(np.asarray(terms).reshape(2, 4, *shape), axis, WORDS)
        for held, part in zip(found, [*expected, *expected], strict=True):
            assert_same_bytes(held, part)


class TestHostileValues:
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_spoils_its_block_alone(self, value):
        terms = np.array(terms_of(8, (64, 64)))
        terms[5, 3, 40] = value
        parts = on_devices(lambda x: jlp.reduce_scatter_quantized(x, "a", key=KEY), terms, mesh_of((8,)), "a")
        spoilt = np.isnan(parts)
        assert spoilt[0, 3, 32:].all() and spoilt.sum() == 32 and np.isfinite(parts[~spoilt]).all()
        whole = on_devices(lambda x: jlp.all_reduce_quantized(x, "a", key=KEY), terms, mesh_of((8,)), "a")
        assert np.isnan(whole).sum() == 8 * 32 and np.isnan(whole[:, 3, 40]).all()

    @pytest.mark.parametrize("magnitude", [0.0, 1e-42, 1e-30, 3e38])
    def test_zeros_and_the_ends_of_the_range(self, magnitude):
        terms = np.zeros((8, 64, 64), np.float32)
        terms[2] = magnitude
        expected = np.stack(oracle.reduce_scatter(terms, 0, WORDS))
        found = on_devices(lambda x: jlp.reduce_scatter_quantized(x, "a", key=KEY), terms, mesh_of((8,)), "a")
        assert_same_bytes(found, expected)
        assert np.isfinite(found).all() and (found.max() > 0) == (magnitude > 1e-38)


def relative(actual, exact):
    return np.linalg.norm(actual - exact) / np.linalg.norm(exact)


def over_keys(summed, terms, draws, at_once=1000):
    """The mean over keys, and the mean square of what differs from the exact sum."""
    mesh, exact = mesh_of((8,)), np.asarray(terms, np.float64).sum(0)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), check_vma=False)
    def many(x, keys):
        return jax.vmap(lambda key: summed(x[0], key))(keys)[None]

    total, squares = np.zeros(exact.shape), np.zeros(exact.shape)
    for first in range(0, draws, at_once):
        keys = jax.vmap(jax.random.key)(jnp.arange(first, first + at_once))
        parts = np.asarray(many(terms, keys), np.float64)  # [device, key, ...]
        found = np.moveaxis(parts, 0, 1).reshape(at_once, *exact.shape)
        total += found.sum(0)
        squares += ((found - exact) ** 2).sum(0)
    return total / draws, squares / draws, exact


def root_mean_square_z(summed, terms, draws=10_000):
    """Of the mean's distances from the exact sum, in standard errors of the mean: 1 if it is unbiased."""
    mean, variance, exact = over_keys(summed, terms, draws)
    return float(np.sqrt(np.mean((mean - exact) ** 2 / np.maximum(variance / draws, 1e-30))))


class TestUnbiased:
    terms = random_array((8, 32, 32), "float32", seed=5)

    @pytest.mark.slow
    def test_reduce_scatter(self):
        z = root_mean_square_z(lambda x, key: jlp.reduce_scatter_quantized(x, "a", key=key), self.terms)
        assert 0.9 < z < 1.1

    @pytest.mark.slow
    def test_all_reduce(self):
        def part(x, key):
            whole = jlp.all_reduce_quantized(x, "a", key=key)
            return jax.lax.dynamic_slice_in_dim(whole, 4 * jax.lax.axis_index("a"), 4)

        assert 0.9 < root_mean_square_z(part, self.terms) < 1.1

    @pytest.mark.slow
    def test_nvfp4_would_be_biased(self):
        """Its block scales are rounded to nearest, and so half of the largest elements saturate: why it is refused."""

        def part(x, key):
            return quantized.reduce_scatter(x, ("a",), 0, jax.random.key_data(key), fmt=jlp.NVFP4())

        assert root_mean_square_z(part, self.terms) > 2

    def test_rounding_to_nearest_would_be_seen(self):
        def nearest(x, key):
            del key
            sent = jlp.quantize(x, jlp.MXFP8()).dequantize()
            return jax.lax.psum_scatter(sent, "a", scatter_dimension=0, tiled=True)

        mean, _, exact = over_keys(nearest, self.terms, 100, at_once=100)
        assert relative(mean, exact) > 0.02
        mean, _, exact = over_keys(lambda x, key: jlp.reduce_scatter_quantized(x, "a", key=key), self.terms, 100, 100)
        assert relative(mean, exact) < 0.006


class TestError:
    """Of terms that are normally distributed: what docs and docstrings say."""

    terms = random_array((8, 128, 512), "float32", seed=6)

    def exact(self):
        return np.asarray(self.terms, np.float64).sum(0)

    def test_reduce_scatter(self):
        parts = on_devices(lambda x: jlp.reduce_scatter_quantized(x, "a", key=KEY), self.terms, mesh_of((8,)), "a")
        assert 0.035 < relative(parts.reshape(128, 512), self.exact()) < 0.039

    def test_all_reduce(self):
        whole = on_devices(lambda x: jlp.all_reduce_quantized(x, "a", key=KEY), self.terms, mesh_of((8,)), "a")[0]
        assert 0.050 < relative(whole, self.exact()) < 0.056

    def test_devices_do_not_share_their_bits(self):
        """Equal terms with equal bits would have equal errors, which add up to the square root of 8 times as much."""
        equal = np.broadcast_to(self.terms[0], self.terms.shape)
        parts = on_devices(lambda x: jlp.reduce_scatter_quantized(x, "a", key=KEY), equal, mesh_of((8,)), "a")
        assert relative(parts.reshape(128, 512), 8.0 * np.asarray(equal[0], np.float64)) < 0.016


class TestGradients:
    """A sum without a rule of its own would have a gradient of zero, silently."""

    def pulled_back(self, summed, reference, check_vma):
        mesh, x = mesh_of((8,)), jnp.asarray(terms_of(8, (64, 32)))

        def gradient(function):
            def loss(x):
                y = function(x)
                weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32) + jax.lax.axis_index("a")).reshape(y.shape)
                return (y * weights).sum()

            return on_devices(jax.grad(loss), x, mesh, "a", check_vma)

        np.testing.assert_allclose(gradient(summed), gradient(reference), rtol=1e-6, atol=1e-6)
        assert np.abs(gradient(summed)).min() > 0

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_reduce_scatter(self, check_vma):
        def reference(x):
            return jax.lax.psum_scatter(x, "a", scatter_dimension=0, tiled=True)

        self.pulled_back(lambda x: jlp.reduce_scatter_quantized(x, "a", key=KEY), reference, check_vma)

    def test_all_reduce(self):
        self.pulled_back(lambda x: jlp.all_reduce_quantized(x, "a", key=KEY), lambda x: jax.lax.psum(x, "a"), False)

    def test_all_reduce_where_types_say_what_varies(self):
        mesh, x = mesh_of((8,)), jnp.asarray(terms_of(8, (64, 32)))

        def local(x):
            return jax.grad(lambda x: jlp.all_reduce_quantized(x, "a", key=KEY).sum())(x)

        np.testing.assert_array_equal(on_devices(local, x, mesh, "a", check_vma=True), 8.0)


def test_under_vmap_scan_and_remat():
    mesh, terms = mesh_of((8,)), jnp.asarray(terms_of(8, (4, 64, 32)))

    def one(x, key):
        return jlp.reduce_scatter_quantized(x, "a", key=key)

    def mapped(x):
        return jax.vmap(one, (0, None))(x, KEY)

    def scanned(x):
        return jax.lax.scan(lambda carry, x: (carry, jax.checkpoint(one)(x, KEY)), 0, x)[1]

    expected = on_devices(lambda x: jnp.stack([one(slice_, KEY) for slice_ in x]), terms, mesh, "a")
    assert_same_bytes(on_devices(scanned, terms, mesh, "a"), expected)
    assert_same_bytes(on_devices(mapped, terms, mesh, "a"), expected)


class TestErrors:
    def refused(self, error, message, call):
        mesh = Mesh(np.array(jax.devices()[:2]), ("a",), axis_types=(AxisType.Auto,))
        with pytest.raises(error, match=message):
            on_devices(call, jnp.ones((2, 6, 4)), mesh, "a")

    @pytest.mark.parametrize(
        "fmt",
        [jlp.NVFP4(), jlp.MXFP4(), jlp.MXFP8(block=(32, 32)), jlp.MXFP8(scale_rule="even"), None, "mxfp8"],
        ids=str,
    )
    def test_formats_whose_sums_are_biased(self, fmt):
        for summed in (jlp.reduce_scatter_quantized, jlp.all_reduce_quantized):
            call = functools.partial(summed, axis_name="a", key=KEY, fmt=fmt)
            self.refused(ValueError, "fmt=.*needs MXFP8 in blocks of 1x32 .*: sums in other formats are biased", call)

    def test_no_key(self):
        call = functools.partial(jlp.all_reduce_quantized, axis_name="a", key=None)
        self.refused(ValueError, "key=None; terms are rounded stochastically: pass one", call)

    def test_a_size_that_devices_do_not_divide(self):
        def call(x):
            return jlp.reduce_scatter_quantized(x[:5], "a", key=KEY)

        self.refused(ValueError, r"has 5 along axis 0, and there are 2 devices along 'a'; needs a multiple", call)

    def test_no_such_axis(self):
        call = functools.partial(jlp.reduce_scatter_quantized, axis_name="b", key=KEY)
        self.refused(ValueError, "axis_name='b'; needs an axis of the mesh", call)
        with pytest.raises(ValueError, match="needs an axis of the mesh, or a tuple of them, within jax.shard_map"):
            jlp.all_reduce_quantized(jnp.ones(4), "a", key=KEY)
