"""Where the compiler calls no partitioning rules, as on TPUs, XLA partitions the bodies of ops: the bytes are the same.

Here that lowering is forced on CPUs, and the bodies are those of platforms without kernels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec.wiring import defining
from tests.cuda_without_gpu.claiming_cuda import forget_ops
from tests.helpers import assert_same_bytes, random_array
from tests.sharding.meshes import by_axis_type, collectives, mesh_of, on_mesh, place

PORTABLE = {"implementation": "portable"}
RANDOM = {"rounding": "stochastic", "key": np.array([3, 5], np.uint32)}
QUANTIZERS = {
    "nvfp4": lambda x: jlp.quantize_both(x, jlp.NVFP4(), hadamard_columnwise=True, **RANDOM, **PORTABLE),
    "nvfp4-tiles": lambda x: jlp.quantize_both(x, jlp.NVFP4((16, 16)), **PORTABLE),
    "nvfp4-eden": lambda x: jlp.quantize(x, jlp.NVFP4(), rounding="eden", key=RANDOM["key"], hadamard=True, **PORTABLE),
    "mxfp8": lambda x: jlp.quantize_both(x, jlp.MXFP8(), **PORTABLE),
    "mxfp4": lambda x: jlp.quantize_both(x, jlp.MXFP4(), **RANDOM, **PORTABLE),
    "float8-block": lambda x: jlp.quantize_both(x, jlp.Float8Block(block=(128, 128)), **PORTABLE),
    "float8-tensor": lambda x: jlp.quantize_both(x, jlp.Float8Tensor(), **PORTABLE),
    "int4": lambda x: jlp.quantize(x, jlp.Int4(32), **PORTABLE),
}
PLACED = [((2, 4), P("a", "b")), ((8,), P("a")), ((4,), P(None, "a")), ((2, 2), P(("a", "b")))]


@pytest.fixture(autouse=True, scope="module")
def unpartitioned():
    """CPUs lower ops as TPUs do."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defining, "UNPARTITIONED", ("cpu",))
        yield
    jax.clear_caches()


@pytest.fixture
def portable(monkeypatch):
    monkeypatch.setenv("JAXLOWPREC_IMPLEMENTATION", "portable")
    forget_ops()
    yield
    forget_ops()


def test_no_rule_is_called(monkeypatch):
    """The lowering under test is the one that runs."""
    x = random_array((64, 256), seed=0)
    mesh = mesh_of((8,))
    text = jax.jit(QUANTIZERS["mxfp8"]).lower(place(x, mesh, P("a"))).as_text()
    assert "CustomSPMDPartitioning" not in text


@by_axis_type
@pytest.mark.parametrize(
    "placement", [*PLACED[:2], *(pytest.param(p, marks=pytest.mark.slow) for p in PLACED[2:])], ids=str
)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantised_bytes_do_not_depend_on_the_mesh(name, placement, axis_type):
    sizes, spec = placement
    x = random_array((64, 512))
    found, _ = on_mesh(QUANTIZERS[name], [x], [spec], mesh_of(sizes, axis_type))
    assert_same_bytes(found, jax.jit(QUANTIZERS[name])(x))


def test_an_amax_is_reduced_as_an_integer():
    """The maximum of floats would let NaN win or lose as the platform pleases."""
    x = jnp.asarray(random_array((64, 512), seed=2)).at[3, 5].set(jnp.nan)
    function = lambda x: jlp.quantize(x, jlp.NVFP4(), **PORTABLE)  # noqa: E731
    with jax.set_mesh(mesh_of((8,))):
        compiled = jax.jit(function).lower(place(x, mesh_of((8,)), P("a"))).compile()
    assert [kind for kind, _ in collectives(compiled)].count("all-reduce") == 1
    reduced = next(line for line in compiled.as_text().splitlines() if " all-reduce(" in line)
    assert "u32[" in reduced or "s32[" in reduced


@by_axis_type
@pytest.mark.parametrize("recipe", [jlp.Float8CurrentScaling(), jlp.MXFP8BlockScaling(), jlp.NVFP4BlockScaling()])
@pytest.mark.parametrize("specs", [(P("a"), P(None, "b")), (P("a", "b"), P("b"))], ids=["column", "row"])
def test_a_parallel_linear_has_the_numbers_of_one_device(recipe, specs, axis_type, portable):
    """Column- and row-parallel, forwards and backwards."""
    x, w = random_array((64, 256), seed=3), random_array((256, 128), seed=4)
    key = jax.random.key(0)

    def step(x, w):
        def loss(x, w):
            y = jlp.linear(x, w, recipe=recipe, key=key)
            return (y.astype(jnp.float32) ** 2).mean()

        return jax.value_and_grad(loss, argnums=(0, 1))(x, w)

    found, _ = on_mesh(step, [x, w], specs, mesh_of((2, 4), axis_type))
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(x, w)), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())


def test_sums_in_another_dtype_are_refused():
    """XLA adds up there, in float32: another kind of sum would be ignored."""
    x, w = random_array((64, 256), seed=5), random_array((256, 128), seed=6)
    recipe = jlp.MXFP8BlockScaling(sums="bfloat16") if hasattr(jlp.MXFP8BlockScaling(), "sums") else None
    assert recipe is not None
    with pytest.raises(NotImplementedError, match=r"remove `sums=`"):
        on_mesh(
            lambda x, w: jlp.linear(x, w, recipe=recipe), [x, w], [P(None, "a"), P("a")], mesh_of((8,), AxisType.Auto)
        )
