"""Float8Rows and Int8Rows on meshes: what travels is amaxes of lines, and sums of integers are exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes, format_name, random_array
from tests.sharding.meshes import by_axis_type, mesh_of, name_of, on_mesh

FORMATS = (jlp.Float8Rows(), jlp.Int8Rows(), jlp.Int8Rows("bfloat16"))
RANDOM = {"rounding": "stochastic", "key": np.array([3, 5], np.uint32)}
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=format_name)


@every_format
@by_axis_type
@pytest.mark.parametrize("spec", [P("a", "b"), P("a"), P(None, "b"), P(("a", "b"))], ids=name_of)
@pytest.mark.parametrize("shape", [(128, 256), (40, 72)], ids=str)
def test_codes_do_not_depend_on_the_mesh(fmt, axis_type, spec, shape):
    x = random_array(shape, seed=1)

    def run(x):
        row, column = jlp.quantize_both(x, fmt)
        return row, column, jlp.quantize_both(x, fmt, **RANDOM), row.dequantize(), column.dequantize(jnp.float32)

    sizes = (2, 4)
    if axis_type is AxisType.Explicit and any(n % 8 for n in shape):
        return
    result, found = on_mesh(run, [x], [spec], mesh_of(sizes, axis_type))
    assert_same_bytes(result, jax.jit(run)(x))
    if shape == (128, 256):
        assert {kind for kind, _ in found} <= {"all-reduce"}
        assert sum(elements for _, elements in found) <= 2 * sum(shape)


@every_format
@pytest.mark.parametrize("spec", [P("a", "b"), P("b", None, "a"), P(None, "b", "a")], ids=name_of)
def test_split_rows(fmt, spec):
    x = random_array((4, 64, 96), seed=2)

    def run(x):
        return jlp.quantize_both(x, fmt, rows_split=True, **RANDOM)

    assert_same_bytes(on_mesh(run, [x], [spec], mesh_of((2, 2)))[0], jax.jit(run)(x))


@by_axis_type
@pytest.mark.parametrize(
    "specs", [(P("a"), P("b")), (P(None, "a"), P(None, "a")), (P("b", "a"), P(None, "a"))], ids=str
)
def test_sums_of_integers_are_exact_on_any_mesh(axis_type, specs):
    """Devices add up int32: partial sums in float32 would be rounded before they meet."""
    x, w = random_array((32, 4096), seed=1), random_array((16, 4096), seed=2)

    def run(x, w):
        a, b = jlp.quantize(x, jlp.Int8Rows()), jlp.quantize(w, jlp.Int8Rows())
        return jlp.scaled_matmul(a, b, preferred_element_type=jnp.float32)

    result, found = on_mesh(run, [x, w], list(specs), mesh_of((2, 4), axis_type))
    assert_same_bytes(result, jax.jit(run)(x, w))
    assert bool(found) == (specs[1] == P(None, "a"))


@pytest.mark.parametrize("recipe", [jlp.Float8RowScaling(), jlp.Int8RowScaling()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("specs", [(P("a"), P()), (P("a"), P(None, "b")), (P("a", None, "b"), P("b"))], ids=str)
def test_a_layer_on_a_mesh(recipe, specs):
    x, w = random_array((4, 16, 64), "float32", 1), random_array((64, 96), "float32", 2)

    def run(x, w):
        def loss(x, w):
            with jlp.autocast(recipe):
                y = jlp.linear(x, w, key=jnp.array([1, 2], jnp.uint32))
            return (y * jnp.arange(96)).sum(), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
        return y, gradients

    result, _ = on_mesh(run, [x, w], list(specs), mesh_of((2, 2)))
    expected = jax.jit(run)(x, w)
    if isinstance(recipe, jlp.Int8RowScaling):
        assert_same_bytes(result, expected)
    else:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), result, expected)
