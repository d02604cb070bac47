"""What eight described H100s send for a linear's training step, by how its sums travel. XLA's CPU compiler would widen
bfloat16 sums to float32. Skipped as test_described_gpu.py is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from jaxlowprec import traffic
from tests.cuda_without_gpu.described_gpu import compiled, described

TOKENS, K, N = 2048, 1024, 4096
PLACEMENTS = {  # x [TOKENS, K], kernel [K, N] and the gradient [TOKENS, N]; their gradients lie as they do
    "tensor": (P(None, "a"), P("a"), P()),
    "data": (P("a"), P(), P("a")),
    "FSDP": (P("a"), P("a"), P("a")),
}
MOST = {  # of the bytes that plain bfloat16 sends: what users are promised
    ("tensor", "bfloat16"): 1.0,
    ("tensor", "quantized"): 0.53,
    ("data", "bfloat16"): 1.0,
    ("data", "quantized"): 0.53,
    ("FSDP", "bfloat16"): 0.77,
    ("FSDP", "quantized"): 0.53,
}


def step(x, w, dy, key):
    y, pullback = jax.vjp(lambda x, w: jlp.linear(x, w, key=key), x, w)
    return y, *pullback(dy)


def sent(recipe, placement, devices):
    """The collectives of a step."""
    mesh = Mesh(np.array(devices), ("a",), axis_types=(AxisType.Auto,))
    specs = PLACEMENTS[placement]

    def at(spec):
        return NamedSharding(mesh, spec)

    def shape(dims, dtype, spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=at(spec))

    x, w, dy = (
        shape(dims, dtype, spec)
        for dims, dtype, spec in zip(
            ((TOKENS, K), (K, N), (TOKENS, N)), (jnp.bfloat16, jnp.float32, jnp.bfloat16), specs, strict=True
        )
    )
    key = shape((2,), jnp.uint32, P())
    shardings = tuple(at(spec) for spec in (specs[2], specs[0], specs[1]))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jlp.autocast(recipe, enabled=recipe is not None):
        return traffic.collectives(compiled(step, x, w, dy, key, devices=devices, out_shardings=shardings).text)


@pytest.mark.parametrize(("placement", "kind"), MOST)
def test_bytes_of_a_step(placement, kind):
    with described("H100", 8) as devices:
        plain = sum(c.wire_bytes for c in sent(None, placement, devices))
        found = sent(jlp.NVFP4BlockScaling(sums=kind), placement, devices)
    amaxes = 64  # bytes
    assert sum(c.wire_bytes for c in found) <= MOST[placement, kind] * plain + amaxes
    for c in found:
        large = [dtype for dtype, dims in c.results if np.prod(dims) > 64]
        in_bfloat16 = kind == "bfloat16" and c.kind in ("all-reduce", "reduce-scatter")
        assert set(large) <= ({"bf16"} if in_bfloat16 else {"u8", "f8e4m3fn", "f8e8m0fnu"})  # no high-precision gather
