"""From device to device within a process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlowprec.weight_sync import InProcess, Receiver, Refused, WeightSource, differences, push
from tests.eager import jlp
from tests.sharding.meshes import mesh_of
from tests.weight_sync.trees import synced

NUMBERS = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


def mesh():
    return mesh_of((4, 2))


def over(*spec):
    return NamedSharding(mesh(), PartitionSpec(*spec))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.int32, jnp.uint8, bool])
@pytest.mark.parametrize("spec", [None, (), ("a", "b"), (None, "a"), (("b", "a"),)])
def test_arrays_stay_jaxs_and_keep_their_shardings(dtype, spec):
    array = jax.device_put(NUMBERS.astype(dtype))
    array = array if spec is None else jax.device_put(array, over(*spec))
    live = synced({"x": array}).weights["x"]
    assert isinstance(live, jax.Array) and live.dtype == array.dtype and live.sharding == array.sharding
    assert np.asarray(live).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize("spec", [None, ("a", "b")])
@pytest.mark.parametrize("resharded", [False, True])
def test_the_trainer_may_donate_or_delete_its_arrays_afterwards(spec, resharded):
    array = jax.device_put(NUMBERS) if spec is None else jax.device_put(NUMBERS, over(*spec))
    receiver = Receiver(shardings=(lambda name: over("b")) if resharded else None)
    live = synced({"x": array}, receiver=receiver).weights["x"]
    for _ in range(3):
        array = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(array)
    array.delete()
    assert (np.asarray(live) == NUMBERS).all()


@pytest.mark.parametrize("kind", ["numpy", "one device", "sharded"])
def test_arrays_come_to_where_the_receiver_wants_them(kind):
    on_devices = {"one device": lambda: jax.device_put(NUMBERS), "sharded": lambda: jax.device_put(NUMBERS, over("b"))}
    array = on_devices.get(kind, lambda: NUMBERS)()
    other = jax.devices()[3]
    live = synced({"x": array, "y": array}, receiver=Receiver(shardings={"x": over(None, "a"), "y": other})).weights
    assert live["x"].sharding == over(None, "a") and live["y"].devices() == {other}
    assert (np.asarray(live["x"]) == NUMBERS).all() and (np.asarray(live["y"]) == NUMBERS).all()


@pytest.mark.parametrize("takes_arrays", [True, False])
def test_a_dtype_that_jax_would_change_is_refused(takes_arrays):
    receiver = Receiver(shardings=lambda name: over())
    transport = InProcess(receiver)
    transport.takes_arrays = takes_arrays
    with pytest.raises(Refused, match="JAX makes int32 of int64; set jax_enable_x64"):
        push(WeightSource({"x": NUMBERS.astype(np.int64)}), transport)
    assert (receiver.version, receiver.state) == (0, "serving")


def test_memory_is_used_again_only_when_nothing_reads_it():
    receiver, results = Receiver(), []
    compute = jax.jit(lambda x: jnp.stack([jnp.sin(x * 0 + i).sum() * 0 + x.min() + x.max() for i in range(8)]))
    for version in range(1, 30):  # results are not waited for, and old versions are not held
        synced({"x": jnp.full((400, 1000), version, jnp.float32)}, receiver=receiver)
        results.append(compute(receiver.weights["x"]))
    for version, result in enumerate(results, 1):
        assert (np.asarray(result) == 2 * version).all()


def test_a_held_array_survives_reuse_of_memory():
    receiver, held = Receiver(), []
    for version in range(1, 12):
        synced({"x": np.full(100_000, version), "y": np.full(100_000, -version)}, receiver=receiver)
        held.append(receiver.weights["x"][5:9])  # of the version no more than a view
    assert [part.tolist() for part in held] == [[version] * 4 for version in range(1, 12)]


def test_bytes_come_to_where_the_receiver_wants_them():
    class AsBytes(InProcess):
        takes_arrays = False

    receiver = Receiver(shardings=lambda name: over(None, "a"))
    push(WeightSource({"x": NUMBERS}), AsBytes(receiver))
    assert receiver.weights["x"].sharding == over(None, "a")
    assert (np.asarray(receiver.weights["x"]) == NUMBERS).all()


@pytest.mark.parametrize("takes_arrays", [True, False])
def test_a_quantised_array_travels_as_its_parts(takes_arrays):
    q = jlp.quantize(jax.device_put(NUMBERS), jlp.NVFP4(), axis=-2)
    source = WeightSource({"up": {"kernel": q}})
    receiver = Receiver()
    transport = InProcess(receiver)
    transport.takes_arrays = takes_arrays
    push(source, transport)
    assert differences(source, receiver) == []
    assert (np.asarray(receiver.weights["up.kernel.data"]) == np.asarray(q.data)).all()
