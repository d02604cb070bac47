"""Checkpoints of a run by orbax: it goes on to the bytes of a run that nothing interrupted, on any mesh."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.helpers import assert_same_bytes
from tests.optim.test_meshes import elementwise, exact, gradients, params, placed, step_of
from tests.sharding.meshes import mesh_of, name_of

BEFORE, AFTER = 3, 2
PLACES = {  # sizes of a mesh, and how matrices are split on it
    "one device": ((1,), P()),
    "8x1": ((8, 1), P("a", None)),
    "2x4": ((2, 4), P("a", "b")),
    "FSDP": ((8,), P(None, "a")),
}


class Place:
    """A mesh, and where arrays are on it: matrices whose axes divide are split, and so are their codes."""

    def __init__(self, name):
        sizes, self.spec = PLACES[name]
        self.mesh = mesh_of(sizes)

    def sharding(self, x):
        spec = P(*[None] * (x.ndim - 2), *self.spec) if x.ndim > 1 else P()
        parts = [1 if axis is None else self.mesh.shape[axis] for axis in spec]
        fits = all(size % n == 0 for size, n in zip(x.shape[x.ndim - len(parts) :], parts, strict=True))
        return NamedSharding(self.mesh, spec if fits else P())

    def shapes(self, tree):
        """What orbax restores to."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding(x)), tree)

    def steps(self, tx, p, state, numbers):
        with jax.set_mesh(self.mesh):
            p, state = (jax.tree.map(lambda x: jax.device_put(x, self.sharding(x)), tree) for tree in (p, state))
            step = jax.jit(step_of(tx), donate_argnums=(1, 2))
            for number in numbers:
                p, state = step(placed(gradients(number), self.mesh, P()), state, p)
        return p, state


@pytest.fixture(scope="module", params=[24, 16])
def uninterrupted(request):
    tx = elementwise(request.param)
    return tx, jax.device_get(Place("one device").steps(tx, params(), tx.init(params()), range(BEFORE + AFTER)))


@pytest.mark.parametrize(
    ("first", "then"), [("one device", "2x4"), ("8x1", "one device"), ("2x4", "FSDP"), ("FSDP", "8x1")], ids=name_of
)
def test_a_run_goes_on_on_another_mesh(uninterrupted, first, then, tmp_path):
    tx, expected = uninterrupted
    p, state = Place(first).steps(tx, params(), tx.init(params()), range(BEFORE))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(BEFORE, args=ocp.args.StandardSave({"params": p, "state": state}))
        manager.wait_until_finished()
        like = jax.eval_shape(lambda p: {"params": p, "state": tx.init(p)}, params())
        back = manager.restore(BEFORE, args=ocp.args.StandardRestore(Place(then).shapes(like)))
    codes = back["state"].inner.codes[0].nu["w"]
    assert codes.dtype == np.uint8 and codes.sharding.is_equivalent_to(Place(then).sharding(codes), 2)
    found = Place(then).steps(tx, back["params"], back["state"], range(BEFORE, BEFORE + AFTER))
    assert_same_bytes(jax.device_get(found), expected)


def test_a_checkpoint_of_float32_goes_on_in_8_bits(tmp_path):
    """What docs/how-to/optimizer.md says: restored as it was saved, then converted, on a mesh."""
    tx, place = elementwise(24), Place("2x4")
    plain = exact()
    full = jax.tree.map(lambda x: np.asarray(x, np.float32), params())
    p, state = Place("8x1").steps(plain, full, plain.init(full), range(BEFORE))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"params": p, "state": state})
        checkpointer.wait_until_finished()
        like = jax.eval_shape(lambda p: {"params": p, "state": plain.init(p)}, full)
        back = checkpointer.restore(tmp_path / "run", place.shapes(like))
    new, converted = jlp.optim.convert_state(back["state"], back["params"], source=plain, target=tx, like=params())
    whole, expected = jlp.optim.convert_state(*jax.device_get((state, p)), source=plain, target=tx, like=params())
    assert_same_bytes(jax.device_get((new, converted)), jax.device_get((whole, expected)))
    found = place.steps(tx, new, converted, range(BEFORE, BEFORE + AFTER))
    assert_same_bytes(
        jax.device_get(found),
        jax.device_get(Place("one device").steps(tx, whole, expected, range(BEFORE, BEFORE + AFTER))),
    )
