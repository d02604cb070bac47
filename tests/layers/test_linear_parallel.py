"""linear under every kind of parallelism: what travels, to the byte, and the numbers of one device.

Weights and activations travel quantised, never in high precision; sums travel in float32, each device keeping its part
where that is all it needs. Only a sum over a split axis is added up in another order than on one device: everything
else has its bytes.
"""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from tests.helpers import assert_same_bytes, often, random_array
from tests.low_precision import recipes, state_for, without_state
from tests.sharding.meshes import by_axis_type, lengthened, mesh_of, place

pytestmark = pytest.mark.sampled(5)

RECIPES = recipes("nvfp4", "nvfp4 row-scaled", "mxfp8", "fp8_block", "fp8_current", "fp8_delayed")
BATCH, TIME = 4, 512
WIDEN, NARROW = (512, 1024), (1024, 512)  # [K, N] of a kernel


@functools.cache
def operands(kernel):
    """X [batch, time, K], the kernel [K, N] and the gradient of the result [batch, time, N]."""
    k, n = kernel
    return (
        random_array((BATCH, TIME, k)),
        random_array((k, n), "float32", 1),
        random_array((BATCH, TIME, n), seed=2),
    )


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """How x [batch, time, K], the kernel and the result lie on the mesh axes a, b and c, and what that takes.

    Attributes:
        gathered: of which tensors the codes are gathered, rowwise and columnwise, each device having `share` of them.
        summed: of which results ("y", "dx", "dw") parts are added up: in which way.
        kernel: its shape: as a transformer's tensor-parallel layers, the larger side is the one that is split.
    """

    sizes: tuple[int, ...]
    x: P
    w: P
    y: P
    gathered: str = ""
    share: int = 1
    summed: tuple[tuple[str, str], ...] = ()
    kernel: tuple[int, int] = WIDEN


PARALLELISMS = {
    "data": Parallelism((4,), P("a"), P(), P("a"), summed=(("dw", "all-reduce"),)),
    "fsdp": Parallelism((4,), P("a"), P("a"), P("a"), "w", summed=(("dw", "reduce-scatter"),)),
    "fsdp by columns": Parallelism((4,), P("a"), P(None, "a"), P("a"), "w", summed=(("dw", "reduce-scatter"),)),
    "column": Parallelism((4,), P(), P(None, "a"), P(None, None, "a"), summed=(("dx", "all-reduce"),)),
    "row": Parallelism((4,), P(None, None, "a"), P("a"), P(), summed=(("y", "all-reduce"),), kernel=NARROW),
    "column, sequence": Parallelism(
        (4,), P(None, "a"), P(None, "a"), P(None, None, "a"), "x", summed=(("dx", "reduce-scatter"),)
    ),
    "row, sequence": Parallelism(
        (4,), P(None, None, "a"), P("a"), P(None, "a"), "dy", 1, (("y", "reduce-scatter"),), NARROW
    ),
    "context": Parallelism((4,), P(None, "a"), P(), P(None, "a"), summed=(("dw", "all-reduce"),)),
    "data, fsdp, tensor": Parallelism(
        (2, 2, 2),
        P(("a", "b")),
        P("b", "c"),
        P(("a", "b"), None, "c"),
        "w",
        2,
        (("dw", "reduce-scatter"), ("dw", "all-reduce"), ("dx", "all-reduce")),
    ),
}
over_parallelisms = pytest.mark.parametrize("parallelism", PARALLELISMS.values(), ids=PARALLELISMS)
over_both = pytest.mark.parametrize(  # NVFP4 everywhere, the others where a mesh has three axes
    ("recipe", "parallelism"),
    often(
        [*(("nvfp4", name) for name in PARALLELISMS), *((name, "data, fsdp, tensor") for name in RECIPES)],
        itertools.product(RECIPES, PARALLELISMS),
        2,
    ),
)


def step(recipe, x, w, dy, out_sharding=None, gradients=lambda x, w: (x, w), result=lambda y: y):
    """y, dx and dw; `gradients` and `result` say where they lie, in automatic mode."""
    state = state_for(recipe)

    def layer(x, w):
        return result(without_state(jlp.linear(x, w, recipe=recipe, state=state, out_sharding=out_sharding), state))

    y, pullback = jax.vjp(layer, x, w)
    return y, *gradients(*pullback(dy))


@functools.cache
def on_one_device(recipe, kernel=WIDEN):
    return jax.device_get(jax.jit(functools.partial(step, recipe))(*operands(kernel)))


def on_mesh(recipe, parallelism, axis_type):
    """Results on the mesh and the collectives they took."""
    p, mesh = parallelism, mesh_of(parallelism.sizes, axis_type)
    function = functools.partial(step, recipe)
    if axis_type == AxisType.Explicit:
        function = functools.partial(function, out_sharding=NamedSharding(mesh, p.y))
    else:
        at = jax.lax.with_sharding_constraint
        function = functools.partial(
            function, gradients=lambda x, w: (at(x, p.x), at(w, p.w)), result=lambda y: at(y, p.y)
        )
    with jax.set_mesh(mesh):
        placed = [place(v, mesh, s) for v, s in zip(operands(p.kernel), (p.x, p.w, p.y), strict=True)]
        compiled = jax.jit(function).lower(*placed).compile()
        results = compiled(*placed)
        if axis_type == AxisType.Explicit:
            for value, spec in zip(jax.eval_shape(function, *placed), (p.y, p.x, p.w), strict=True):
                assert value.sharding.spec == lengthened(spec, value.ndim)
    for value, spec in zip(results, (p.y, p.x, p.w), strict=True):
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)
    return jax.device_get(results), traffic.collectives(compiled)


def quantised_bytes(recipe, tensor, kernel=WIDEN):
    """Codes and block scales of a tensor, rowwise and columnwise."""
    roles, (x, w, dy) = recipe.roles(), operands(kernel)
    role, value = {"x": (roles.input, x), "w": (roles.weight, w), "dy": (roles.gradient, dy)}[tensor]
    encode = None if recipe.delayed is None else jnp.float32(1)
    both = jlp.quantize_both(value.reshape(-1, value.shape[-1]), role.format, encode_scale=encode)
    return sum(q.data.nbytes + (q.scale.nbytes if q.scale.ndim else 0) for q in both)


def check_traffic(recipe, parallelism, found):
    p, (k, n) = parallelism, parallelism.kernel
    sizes = {"y": BATCH * TIME * n, "dx": BATCH * TIME * k, "dw": k * n}
    by_kind = collections.defaultdict(list)
    for collective in found:
        by_kind[collective.kind].append(collective)
    assert set(by_kind) <= {"all-gather", "all-reduce", "reduce-scatter"}
    gathered = by_kind["all-gather"]
    row_scaled = recipe.roles().operand("input", "fprop").format.row_scaled
    amaxes = BATCH * TIME if row_scaled else 0  # of the rows of x
    of_operands = quantised_bytes(recipe, p.gathered, p.kernel) // p.share if p.gathered else 0
    assert sum(c.nbytes for c in gathered) == of_operands + (4 * amaxes if p.gathered == "x" else 0)
    for dtype, shape in (r for c in gathered for r in c.results):  # float32 are but those, and scales of blocks of 128
        assert dtype == "u8" or (dtype == "f32" and np.prod(shape) <= max(BATCH * TIME * n // 128, amaxes))
    wanted = collections.defaultdict(int)
    for result, kind in p.summed:
        devices = np.prod(p.sizes)
        held = {"all-reduce": 1, "reduce-scatter": p.sizes[0]}[kind]
        if len(p.sizes) == 3:  # dw: over b each keeps a part, [K / 2, N / 2], which is then added up over a
            held = devices // 2
        wanted[kind] += sizes[result] // held
    for kind in ("all-reduce", "reduce-scatter"):
        results = [(dtype, int(np.prod(shape))) for c in by_kind[kind] for dtype, shape in c.results]
        scalars = [n for _, n in results if n == 1]  # amaxes: of x, w and dy, plain and rotated
        assert len(scalars) <= 6
        largest = [n for dtype, n in results if n > 1 and dtype != "f32"]  # over parts of rows
        assert largest in ([], [amaxes])
        assert sum(n for dtype, n in results if n > 1 and dtype == "f32") == wanted[kind]


def check_numbers(parallelism, results, expected, order=1e-6):
    """`order`: what the order of a sum may change, relative to the largest result."""
    for name, actual, single in zip(("y", "dx", "dw"), results, expected, strict=True):
        if name not in dict(parallelism.summed):
            assert_same_bytes(actual, single)
            continue
        eps = float(jnp.finfo(single.dtype).eps)
        a, e = (np.asarray(v).astype(np.float64) for v in (actual, single))
        np.testing.assert_allclose(a, e, rtol=2 * eps, atol=order * np.abs(e).max())


@pytest.mark.slow
@over_both
def test_what_travels_and_the_numbers_of_one_device(recipe, parallelism):
    recipe, parallelism = RECIPES[recipe], PARALLELISMS[parallelism]
    results, found = on_mesh(recipe, parallelism, AxisType.Auto)
    check_traffic(recipe, parallelism, found)
    check_numbers(parallelism, results, on_one_device(recipe, parallelism.kernel))


@over_parallelisms
def test_explicit_mode(parallelism):
    recipe = RECIPES["nvfp4"]
    results, found = on_mesh(recipe, parallelism, AxisType.Explicit)
    check_traffic(recipe, parallelism, found)
    check_numbers(parallelism, results, on_one_device(recipe, parallelism.kernel))


@by_axis_type
@pytest.mark.parametrize("name", often(["fsdp"], ["fsdp", "column", "row", "data, fsdp, tensor"]))
def test_fprop_in_high_precision_leaves_the_other_gemms_bytes(name, axis_type):
    p, recipe = PARALLELISMS[name], jlp.NVFP4BlockScaling(forward_override="high_precision")
    (y, *gradients), _ = on_mesh(recipe, p, axis_type)
    expected = on_one_device(recipe, p.kernel)
    check_numbers(p, (expected[0], *gradients), expected)
    assert_same_bytes(expected[1:], on_one_device(RECIPES["nvfp4"], p.kernel)[1:])
    np.testing.assert_allclose(np.float32(y), np.float32(expected[0]), rtol=2**-7, atol=1e-4)


@by_axis_type
@pytest.mark.parametrize("recipe", [jlp.Int4QAT(group_size=128), jlp.WeightQAT(jlp.NVFP4())], ids=["int4", "nvfp4"])
@pytest.mark.parametrize("name", often(["fsdp"], ["fsdp", "column", "row"]))
def test_quantisation_aware_training_gathers_the_served_weight(recipe, name, axis_type):
    """Its codes, for the product and for its gradient: XLA may make one gather of both."""
    p = PARALLELISMS[name]
    results, found = on_mesh(recipe, p, axis_type)
    q = jlp.quantize(operands(p.kernel)[1], recipe.roles().weight.format, axis=-2)
    gathered = [r for c in found if c.kind == "all-gather" for r in c.results]
    codes = [np.prod(shape) for dtype, shape in gathered if dtype == "u8" and np.prod(shape) > q.scale.size]
    assert codes in ([[q.data.size], [q.data.size] * 2] if name == "fsdp" else [[]])
    assert all(np.prod(shape) <= max(q.scale.size, q.data.size) for _, shape in gathered)
    assert {c.kind for c in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    check_numbers(p, results, on_one_device(recipe, p.kernel), order=1e-5)  # XLA's sum of 2048 float32 products


def test_a_quantised_gather_moves_at_most_0_3_of_bf16():
    gathered = quantised_bytes(RECIPES["nvfp4"], "w") / 2
    assert gathered <= 0.3 * 2 * np.prod(WIDEN)
    _, found = on_mesh(RECIPES["nvfp4"], PARALLELISMS["fsdp"], AxisType.Auto)
    assert sum(c.nbytes for c in found if c.kind == "all-gather") == 2 * gathered


@by_axis_type
@pytest.mark.parametrize(
    ("shape", "spec"),
    [((8, 40, 96), P("a")), ((8, 40, 96), P("a", "b")), ((4, 2, 16, 64), P("a", None, "b"))],
    ids=str,
)
def test_activations_of_any_shape(shape, spec, axis_type):
    """Slices that end within a block, and more axes than batch and time."""
    recipe, mesh = RECIPES["nvfp4"], mesh_of((2, 2), axis_type)
    values = random_array(shape, seed=3), random_array((96, 48), "float32", 4), random_array((*shape[:-1], 48), seed=5)
    x, w, dy = values[0], values[1][: shape[-1]], values[2]
    with jax.set_mesh(mesh):
        placed = [place(v, mesh, s) for v, s in ((x, spec), (w, P()), (dy, spec))]
        if axis_type == AxisType.Explicit and shape[-2] % 16 and "b" in spec:
            with pytest.raises(ValueError, match="has 40 rows in a part, .* multiple of 16; reshard x to leave"):
                step(recipe, *placed)
            return
        y, dx, dw = jax.jit(functools.partial(step, recipe))(*placed)
    expected = step(recipe, x, w, dy)
    assert_same_bytes((y, dx), expected[:2])
    np.testing.assert_allclose(dw, expected[2], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@by_axis_type
def test_stochastic_rounding_where_three_dimensions_are_split(axis_type):
    """Batch, time and features on mesh axes of their own: the gradient's random bits are those of one device."""
    mesh, recipe = mesh_of((2, 2, 2), axis_type), RECIPES["nvfp4"]
    spec = P("a", "b", "c")
    x, w, dy = operands(WIDEN)
    quantize = functools.partial(
        jlp.quantize_both, fmt=jlp.NVFP4(), hadamard_columnwise=True, rounding="stochastic", rows_split=True
    )
    key = jax.random.key(7)
    with jax.set_mesh(mesh):
        on_the_mesh = jax.jit(lambda x: quantize(x, key=key))(place(dy, mesh, spec))
    assert_same_bytes(on_the_mesh, quantize(dy, key=key))
    split = Parallelism((2, 2, 2), P("a", "b"), P(None, "c"), spec, summed=(("dx", ""), ("dw", "")))
    with jax.set_mesh(mesh):
        placed = [place(v, mesh, s) for v, s in zip((x, w, dy), (split.x, split.w, split.y), strict=True)]
        results = jax.jit(functools.partial(step, recipe))(*placed)
    check_numbers(split, results, on_one_device(recipe))


@by_axis_type
class TestWithinTransformations:
    """A stack of column- and row-parallel layers with FSDP, scanned, rematerialised and donated."""

    recipe = RECIPES["nvfp4"]
    x, target = random_array((4, 32, 64), seed=6), random_array((4, 32, 64), seed=7)
    ups, downs = random_array((3, 64, 128), "float32", 8), random_array((3, 128, 64), "float32", 9)
    specs = P(None, "b", "c"), P(None, "c", "b")

    def loss(self, weights, x, target, mesh=None, explicit=False):
        def place_at(y, spec):
            return jax.lax.with_sharding_constraint(y, spec) if mesh and not explicit else y

        @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*jlp.CHECKPOINT_NAMES))
        def block(x, weights):
            up, down = weights
            out = {"out_sharding": NamedSharding(mesh, P(("a", "b")))} if explicit else {}
            h = jax.nn.gelu(jlp.linear(x, up / 8, recipe=self.recipe))
            y = jlp.linear(place_at(h, P(("a", "b"), None, "c")), down / 8, recipe=self.recipe, **out)
            return place_at(x + y, P(("a", "b"))), None

        y, _ = jax.lax.scan(block, x, weights)
        return jnp.mean((y - target).astype(jnp.float32) ** 2)

    @pytest.mark.slow
    def test_scan_remat_and_donation(self, axis_type):
        mesh, explicit = mesh_of((2, 2, 2), axis_type), axis_type == AxisType.Explicit
        weights = self.ups, self.downs

        def update(weights, x, target, **where):
            value, gradients = jax.value_and_grad(self.loss)(weights, x, target, **where)
            return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

        expected_value, expected = jax.jit(update)(weights, self.x, self.target)
        with jax.set_mesh(mesh):
            placed = tuple(place(w, mesh, s) for w, s in zip(weights, self.specs, strict=True))
            data = [place(v, mesh, P(("a", "b"))) for v in (self.x, self.target)]
            train = jax.jit(functools.partial(update, mesh=mesh, explicit=explicit), donate_argnums=0)
            value, updated = train(placed, *data)
        assert all(w.is_deleted() for w in placed)
        np.testing.assert_allclose(value, expected_value, rtol=1e-3)
        for u, e, spec in zip(updated, expected, self.specs, strict=True):
            assert u.sharding.is_equivalent_to(NamedSharding(mesh, spec), u.ndim)
            np.testing.assert_allclose(u, e, rtol=1e-4, atol=1e-3 * np.abs(e).max())
