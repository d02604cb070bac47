"""Rotations whose signs a key draws: the bytes are those of the same fixed signs, and another key compiles nothing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxlowprec
from tests.eager import jlp
from tests.helpers import FLOATS, ONE_OF_EACH, assert_same_bytes, compilations, format_name, often, random_array
from tests.ops.implementations import ByKernels, ByReference

SIZES = [16, 32, 64, 128]
KEY, OTHER = np.array([1, 2], np.uint32), np.array([3, 5], np.uint32)
WAYS = list(itertools.product(SIZES, FLOATS))
GOLDEN = np.array([0x90EF8F31, 0x828669D6, 0xE8191E81, 0x8C7FA70E], np.uint32)
NVFP4 = jlp.NVFP4()


def signs_from(words, size):
    """+1 or -1 for each element of a transform: what numerics.md 15 says of four words."""
    return tuple(1 - 2 * (int(words[i // 32]) >> i % 32 & 1) for i in range(size))


def drawn(size=16):
    return jlp.Hadamard(size, "drawn")


def quantize(x, key=KEY, fmt=NVFP4, axis=-1, size=16, **options):
    return jlp.quantize(x, fmt, axis=axis, hadamard=drawn(size), sign_key=key, **options)


def codes_of(q):
    """The bytes of a quantised array, whatever its rotation."""
    return [q.data, q.scale, q.amax]


def test_the_golden_words():
    assert_same_bytes(quantize(random_array((4, 32))).signs, GOLDEN)


def test_a_jax_key_is_its_two_words():
    key = jax.random.key(7)
    x = random_array((4, 32))
    assert_same_bytes(quantize(x, key), quantize(x, jax.random.key_data(key)))
    assert (quantize(x, key).signs != quantize(x).signs).any()


class DrawnCases:
    """What every implementation promises."""

    implementation: str

    @pytest.mark.parametrize(("size", "dtype"), often([*zip(SIZES, FLOATS, strict=False)], WAYS, 2))
    def test_the_transform_is_that_of_the_same_fixed_signs(self, size, dtype):
        ways = [((5, 3 * size), -1, False), ((2 * size, 37), -2, True), ((3, 2, size, 7), -2, False)]
        arrays = [random_array(shape, dtype, seed=size) for shape, *_ in ways]

        @self.compiled
        def both(arrays):
            options = {"size": size, "implementation": self.implementation}
            found = []
            for x, (_, axis, inverse) in zip(arrays, ways, strict=True):
                transform = functools.partial(jlp.hadamard_transform, x, axis=axis, inverse=inverse, **options)
                found.append((transform(signs="drawn", sign_key=KEY), transform(signs=signs_from(GOLDEN, size))))
            return found

        for found, wanted in both(arrays):
            assert_same_bytes(found, wanted)

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_each_matrix_has_its_keys_signs(self, axis):
        x, keys = random_array((2, 3, 128, 256)), jax.random.split(jax.random.key(0), (2, 3))
        transform = functools.partial(
            jlp.hadamard_transform, axis=axis, size=128, signs="drawn", implementation=self.implementation
        )
        y = transform(x, sign_key=keys)
        for i in np.ndindex(2, 3):
            assert_same_bytes(y[i], transform(x[i], sign_key=keys[i]))
        assert_same_bytes(jax.vmap(jax.vmap(lambda x, key: transform(x, sign_key=key)))(x, keys), y)
        assert_same_bytes(
            jax.vmap(lambda key: transform(x[0, 0], sign_key=key))(keys[0])[1], transform(x[0, 0], sign_key=keys[0, 1])
        )

    @pytest.mark.parametrize("size", [16, 128])
    def test_codes_are_those_of_the_same_fixed_signs(self, fmt, size):
        """The last transform is padded along either axis."""
        options = {"implementation": self.implementation}

        @self.compiled
        def both(x):
            fixed = jlp.Hadamard(size, signs_from(GOLDEN, size))
            return [
                (
                    quantize(x, KEY, fmt, axis, size, **options),
                    jlp.quantize(x, fmt, axis=axis, hadamard=fixed, **options),
                    jlp.dequantize(quantize(x, KEY, fmt, axis, size, **options), **options),
                    jlp.dequantize(jlp.quantize(x, fmt, axis=axis, hadamard=fixed, **options), **options),
                )
                for axis in (-1, -2)
            ]

        for q, like, decoded, wanted in both(random_array((2, 40, 150))):
            assert_same_bytes(codes_of(q), codes_of(like))
            assert_same_bytes(q.signs, np.broadcast_to(GOLDEN, (2, 4)))
            assert_same_bytes(decoded, wanted)

    def test_stochastic_codes_are_those_of_the_same_fixed_signs(self):
        x, options = random_array((48, 80)), {"rounding": "stochastic", "implementation": self.implementation}
        fixed = jlp.Hadamard(16, signs_from(GOLDEN, 16))
        found = jlp.quantize_both(x, NVFP4, hadamard_columnwise=drawn(), key=OTHER, sign_key=KEY, **options)
        for q, like in zip(
            found, jlp.quantize_both(x, NVFP4, hadamard_columnwise=fixed, key=OTHER, **options), strict=True
        ):
            assert_same_bytes(codes_of(q), codes_of(like))


class TestByReference(ByReference, DrawnCases):
    @pytest.fixture(params=[NVFP4, jlp.NVFP4((16, 16)), jlp.MXFP8(), jlp.Float8Tensor()], ids=format_name)
    def fmt(self, request):
        """Rotated with the cast, and before it; a NaN keeps its sign in the last."""
        return request.param


class TestByKernels(ByKernels, DrawnCases):
    @pytest.fixture(params=ONE_OF_EACH, ids=format_name)
    def fmt(self, request):
        return request.param


class TestArrays:
    def test_other_signs_are_given_as_a_key(self):
        """As another array has them, for each matrix or one for all."""
        q = jax.vmap(quantize)(random_array((2, 48, 32)), np.stack([KEY, OTHER]))
        x = random_array((2, 64, 32), seed=1)
        assert_same_bytes(quantize(x, q.signs), jax.vmap(quantize)(x, np.stack([KEY, OTHER])))
        assert_same_bytes(quantize(x, q.signs[1]), quantize(x, OTHER))

    def test_a_vector_is_one_row(self):
        x = random_array((100,))
        q, row = quantize(x), quantize(x[None])
        assert_same_bytes([q.data, q.signs, jlp.dequantize(q)], [row.data[0], row.signs, jlp.dequantize(row)[0]])

    @pytest.mark.parametrize("axis", [-1, -2])
    def test_parts_of_a_tensor_have_the_same_signs(self, axis):
        x = random_array((2, 3, 128, 48))
        keys = np.stack([KEY, OTHER])
        q = quantize(x, keys, axis=axis, size=128 if axis == -2 else 16, rows_split=True)
        whole = quantize(x.reshape(2, 384, 48), keys, axis=axis, size=128 if axis == -2 else 16)
        assert_same_bytes(q.signs, np.repeat(np.asarray(whole.signs)[:, None], 3, axis=1))
        assert_same_bytes(jlp.dequantize(q).reshape(2, 384, 48), jlp.dequantize(whole))
        again = quantize(x, q.signs, axis=axis, size=128 if axis == -2 else 16, rows_split=True)
        assert_same_bytes(again, q)

    def test_the_transpose_and_a_slice_keep_them(self):
        q = jax.vmap(quantize)(random_array((2, 48, 32)), np.stack([KEY, OTHER]))
        assert_same_bytes(jlp.dequantize(q.mT), jnp.swapaxes(jlp.dequantize(q), -1, -2))
        assert_same_bytes(jax.tree.map(lambda leaf: leaf[1], q).dequantize(), jlp.dequantize(q)[1])

    def test_only_they_have_signs_among_their_leaves(self):
        """Checkpoints of other arrays stay as they were."""
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(quantize(jnp.ones(32)))]
        assert names == [".data", ".scale", ".amax", ".signs"]
        others = jax.tree_util.tree_flatten_with_path(jlp.quantize(jnp.ones(32), NVFP4), is_leaf=lambda x: x is None)[0]
        assert [jax.tree_util.keystr(path) for path, _ in others][:4] == [".data", ".scale", ".amax", ".zero_point"]
        assert len(others) == 5

    def test_repr(self):
        assert "Hadamard(16, drawn)" in repr(quantize(jnp.ones((4, 32))))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"signs": None}, r"q.signs is None; .* needs uint32\[4\]"),
            ({"signs": GOLDEN[:2]}, r"q.signs is uint32\[2\]; .* needs uint32\[4\]"),
            ({"hadamard": jlp.Hadamard()}, r"q.signs is uint32\[4\]; .* needs None"),
        ],
    )
    def test_signs_that_do_not_fit(self, changes, message):
        q = dataclasses.replace(quantize(jnp.ones((4, 32))), **changes)
        with pytest.raises(ValueError, match=message):
            q.dequantize()


class TestTransformations:
    def test_another_key_compiles_nothing(self, monkeypatch):
        """Fixed signs are static: other ones do compile. Here the library's ops are called as they are."""
        monkeypatch.setitem(globals(), "jlp", jaxlowprec)
        x = random_array((32, 48))
        keys = [jnp.asarray([i, i + 1], jnp.uint32) for i in range(4)]

        @jax.jit
        def product(x, key):
            q = quantize(x, key)
            return jlp.dequantize(q), jlp.scaled_matmul(q, q)

        def step(x, key):
            q = quantize(x, key)
            return jlp.hadamard_transform(x, signs="drawn", sign_key=key), jlp.dequantize(q), product(x, key)

        first = step(x, keys[0])
        with compilations() as found:
            others = [step(x, key) for key in keys[1:]]
        assert found == []
        assert all((other[0] != first[0]).any() for other in others)
        with compilations() as found:
            jlp.quantize(x, NVFP4, hadamard=jlp.Hadamard(16, signs_from(GOLDEN, 16)[::-1]))
        assert found

    def test_scan_over_keys(self):
        x, keys = random_array((32, 48)), jax.random.split(jax.random.key(0), 3)
        _, found = jax.lax.scan(lambda carry, key: (carry, quantize(x, key, axis=-2, size=128)), 0, keys)
        for i, key in enumerate(keys):
            assert_same_bytes(jax.tree.map(lambda leaf, i=i: leaf[i], found), quantize(x, key, axis=-2, size=128))

    def test_export_takes_any_key(self):
        def run(x, key):
            q = quantize(x, key, size=128)
            return q, jlp.dequantize(q)

        names = ("amax", "quantize", "dequantize", "hadamard")
        checks = [export.DisabledSafetyCheck.custom_call(f"jaxlowprec_{name}") for name in names]
        x = random_array((32, 100))
        exported = export.export(jax.jit(run), platforms=("cpu", "cuda"), disabled_checks=checks)(x, KEY)
        for key in (KEY, OTHER):
            assert_same_bytes(jax.tree.leaves(exported.call(x, key)), jax.tree.leaves(run(x, key)))

    def test_the_gradient_is_the_transpose(self):
        x, dy = random_array((16, 128), "float32", 1), random_array((16, 128), "float32", 2)
        transform = functools.partial(jlp.hadamard_transform, size=128, signs="drawn", sign_key=KEY)
        for inverse in (False, True):
            _, pull = jax.vjp(functools.partial(transform, inverse=inverse), x)
            assert_same_bytes(pull(dy)[0], transform(dy, inverse=not inverse))


class TestProducts:
    @staticmethod
    def one_of_each_transform(rows, columns, size, seed):
        """Each transform has one element, which is quantised exactly before and after the rotation."""
        random = np.random.default_rng(seed)
        x = np.zeros((rows, columns // size, size))
        place = random.integers(0, size, (rows, columns // size, 1))
        np.put_along_axis(x, place, random.choice([-4.0, 4.0], place.shape), axis=-1)
        return x.reshape(rows, columns)

    @pytest.mark.parametrize("size", [16, 64])
    def test_the_rotation_cancels_exactly_where_nothing_rounds(self, size):
        """64 elements share the square root 8 of their size: all of it is exact in float64 and in the product."""
        a, b = (self.one_of_each_transform(rows, 256, size, rows) for rows in (8, 24))
        qa, qb = (quantize(jnp.asarray(x, jnp.float32), size=size) for x in (a, b))
        y = jlp.scaled_matmul(qa, qb, preferred_element_type=jnp.float32)
        np.testing.assert_array_equal(np.asarray(y, np.float64), a @ b.T)
        other = quantize(jnp.asarray(b, jnp.float32), OTHER, size=size)
        assert (np.asarray(jlp.scaled_matmul(qa, other, preferred_element_type=jnp.float32)) != a @ b.T).any()

    @pytest.mark.parametrize("fmt", [NVFP4, jlp.MXFP8(), jlp.Float8Tensor()], ids=format_name)
    @pytest.mark.parametrize("size", often([16, 128], SIZES))
    def test_it_cancels_within_rounding(self, fmt, size):
        a, b = (random_array((rows, 1000), "float32", rows) for rows in (32, 48))
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T

        def error(qa, qb):
            y = jlp.scaled_matmul(qa, qb, preferred_element_type=jnp.float32)
            return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)

        plain = error(jlp.quantize(a, fmt), jlp.quantize(b, fmt))
        rotated = quantize(a, KEY, fmt, size=size)
        assert error(rotated, quantize(b, KEY, fmt, size=size)) < 1.5 * plain
        assert error(rotated, quantize(b, OTHER, fmt, size=size)) > 0.5

    def test_drawn_by_fixed_is_refused(self):
        a, b = random_array((32, 64)), random_array((48, 64))
        message = r"lhs has hadamard=Hadamard\(16, drawn\) and rhs has Hadamard\(16\); a rotation cancels only if both"
        with pytest.raises(ValueError, match=message):
            jlp.scaled_matmul(quantize(a), jlp.quantize(b, NVFP4, hadamard=True))
        with pytest.raises(ValueError, match=r"Hadamard\(16, drawn\) and rhs has Hadamard\(32, drawn\)"):
            jlp.scaled_matmul(quantize(a), quantize(b, size=32))
