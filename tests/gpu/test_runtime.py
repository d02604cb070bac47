"""How kernels meet the machine: command buffers, streams, threads, several GPUs, large arrays, too little memory."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlowprec as jlp
from tests.gpu.sides import ON_A_GPU, assert_same_bytes_on, environment, run_on
from tests.helpers import assert_same_bytes, digest, random_array, run_python
from tests.sharding import meshes

COMMAND_BUFFERS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
}


def every_operation(x, w, key):
    """Bytes that are the same everywhere, and a product that is not."""
    row, column = jlp.quantize_both(
        x, jlp.NVFP4(), hadamard_columnwise=True, rounding="stochastic", key=key, implementation="ffi"
    )
    others = [jlp.quantize(x, f, implementation="ffi") for f in (jlp.MXFP8(), jlp.Float8Block(), jlp.Float8Tensor())]
    rotated = jlp.hadamard_transform(x, axis=-1, size=64, implementation="ffi")
    product = jlp.scaled_matmul(row, jlp.quantize(w, jlp.NVFP4((16, 16))), implementation="ffi")
    return (row, column, *others, jlp.dequantize(row, implementation="ffi"), rotated), product


def operands(seed=0, rows=128):
    x, w = random_array((rows, 256), "bfloat16", seed), random_array((64, 256), "bfloat16", 1)
    return x, w, np.array([seed, 7], np.uint32)


def digests():
    """Of three calls of one compiled function: a graph is recorded by the first and replayed by the others."""
    device = jax.devices("cuda" if ON_A_GPU else "cpu")[0]
    function = jax.jit(every_operation)
    with jax.default_device(device):
        return [[digest(leaf) for leaf in jax.tree.leaves(function(*operands(seed))[0])] for seed in (0, 1, 2)]


@pytest.mark.parametrize("flags", COMMAND_BUFFERS.values(), ids=COMMAND_BUFFERS)
def test_with_and_without_command_buffers(cpu, flags):
    code = "from tests.gpu.test_runtime import digests; print(digests())"
    printed = run_python("-c", code, **environment(XLA_FLAGS=flags)).stdout.strip().splitlines()[-1]
    with jax.default_device(cpu):
        function = jax.jit(every_operation)
        expected = [[digest(leaf) for leaf in jax.tree.leaves(function(*operands(seed))[0])] for seed in (0, 1, 2)]
    assert printed == str(expected)


def test_a_loop_on_the_device(cpu, gpu):
    def loop(x):
        def body(x, key):
            q = jlp.quantize(x, jlp.NVFP4(), rounding="stochastic", key=key, implementation="ffi")
            return jlp.dequantize(q, implementation="ffi"), q.scale

        return jax.lax.scan(body, x, jnp.arange(20, dtype=jnp.uint32).reshape(10, 2))

    assert_same_bytes_on((cpu, gpu), loop, operands()[0])


def test_threads_that_call_at_once(cpu, gpu):
    """Each thread's calls are launched as XLA schedules them; the kernels keep nothing between calls."""
    function = jax.jit(every_operation)
    expected = [run_on(cpu, every_operation, *operands(seed))[0] for seed in range(4)]

    def work(thread):
        with jax.default_device(gpu):
            args = jax.device_put(operands(thread), gpu)
            return [jax.tree.map(np.asarray, function(*args)) for _ in range(10)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for thread, results in enumerate(pool.map(work, range(4))):
            for quantised, product in results:
                assert_same_bytes(quantised, expected[thread])
                assert_same_bytes(product, results[0][1])


def on_stream(number, *args):
    """The operations' defined bytes, computed on a stream of its own."""
    stream = f"gpu_stream:{number}"

    def function(*args):
        return every_operation(*args)[0]

    if jax.__version_info__ < (0, 11):
        with compute_on(stream):
            return jax.jit(function)(*args)
    # In JAX 0.11.2 XLA finds no stream for a function that is jitted within, and ends the process over constants.
    return compute_on(function, compute_type=stream, out_memory_spaces=jax.memory.Space.Device)(*args)


def test_two_streams_of_one_program(cpu, gpu):
    """Two halves without a dependence between them, each on a stream of its own."""

    def both(*args):
        return [on_stream(1, *args[:3]), on_stream(2, *args[3:])]

    args = (*operands(0, 1024), *operands(1, 1024))
    expected = [run_on(cpu, every_operation, *args[:3])[0], run_on(cpu, every_operation, *args[3:])[0]]
    function = jax.jit(both)
    with jax.default_device(gpu):
        placed = jax.device_put(args, gpu)
        pending = [function(*placed) for _ in range(5)]
    for found in pending:
        assert_same_bytes(jax.tree.map(np.asarray, found), expected)


class TestSeveralDevices:
    @pytest.fixture
    def two(self, gpus):
        if len(gpus) < 2:
            pytest.skip("one device")
        return gpus[:2]

    def test_each_runs_on_its_own(self, cpu, two):
        function = jax.jit(every_operation)
        pending = [function(*jax.device_put(operands(i), device)) for i, device in enumerate(two)]
        for i, (device, (quantised, product)) in enumerate(zip(two, pending, strict=True)):
            assert product.devices() == {device}
            assert_same_bytes(jax.tree.map(np.asarray, quantised), run_on(cpu, every_operation, *operands(i))[0])

    def test_a_mesh(self, cpu, two):
        x = random_array((256, 512), "bfloat16")
        placed = jax.device_put(x, NamedSharding(meshes.mesh_of((2,), devices=two), P("a")))
        for fmt in (jlp.NVFP4(), jlp.MXFP8(), jlp.Float8Block()):
            found = jax.jit(lambda x, fmt=fmt: jlp.quantize_both(x, fmt))(placed)
            expected = run_on(cpu, lambda x, fmt=fmt: jlp.quantize_both(x, fmt), x)
            assert_same_bytes(jax.tree.map(np.asarray, found), expected)


@pytest.mark.slow
class TestLargeArrays:
    """More than 2^31 elements: 8 GiB of bfloat16. Made on the device, a slice of it compared with the CPU's."""

    ROWS, COLUMNS = (1 << 19) + 128, 8192

    @pytest.fixture
    def x(self, gpu):
        if ON_A_GPU and (gpu.memory_stats() or {}).get("bytes_limit", 0) < 40 << 30:
            pytest.skip("needs 40 GiB of the device's memory")
        rows = self.ROWS if ON_A_GPU else 256

        @jax.jit
        def make():
            row = jax.lax.broadcasted_iota(jnp.uint32, (rows, self.COLUMNS), 0)
            column = jax.lax.broadcasted_iota(jnp.uint32, (rows, self.COLUMNS), 1)
            bits = (row * jnp.uint32(2654435761)) ^ (column * jnp.uint32(2246822519))
            return (((bits >> 8).astype(jnp.float32) - 2.0**23) * 2.0**-21).astype(jnp.bfloat16)

        with jax.default_device(gpu):
            return make()

    @pytest.mark.parametrize("fmt", [jlp.MXFP8(), jlp.Float8Block(), jlp.NVFP4()], ids=str)
    def test_the_last_rows(self, cpu, gpu, x, fmt):
        last = np.asarray(x[-128:])
        with jax.default_device(gpu):
            q = jax.jit(lambda x: jlp.quantize(x, fmt, implementation="ffi"))(x)
            found = np.asarray(q.data[-128:]), np.asarray(q.scale[-128:])
            amax = None if q.amax is None else np.asarray(q.amax)
        expected = run_on(cpu, lambda x: jlp.quantize(x, fmt, amax=amax, implementation="ffi"), last)
        assert_same_bytes(found, (expected.data, expected.scale))

    @pytest.mark.parametrize("fmt", [jlp.MXFP8(), jlp.Float8Block()], ids=str)
    def test_the_last_columns_of_the_transposed(self, cpu, gpu, x, fmt):
        last = np.asarray(x[-128:])
        with jax.default_device(gpu):
            q = jax.jit(lambda x: jlp.quantize(x, fmt, axis=-2, implementation="ffi"))(x)
            found = np.asarray(q.data[:, -128:])
        assert_same_bytes(found, run_on(cpu, lambda x: jlp.quantize(x, fmt, axis=-2, implementation="ffi"), last).data)

    def test_hadamard(self, cpu, gpu, x):
        def transform(x):
            return jlp.hadamard_transform(x, axis=-1, size=256, implementation="ffi")

        last = np.asarray(x[-128:])
        with jax.default_device(gpu):
            found = np.asarray(jax.jit(transform)(x)[-128:])
        assert_same_bytes(found, run_on(cpu, transform, last))


@pytest.mark.slow  # it takes the whole memory: not beside other tests
@pytest.mark.skipif(not ON_A_GPU, reason="a machine without memory would end the process")
def test_too_little_memory_is_an_error_and_later_calls_work(cpu, gpu):
    limit = gpu.memory_stats()["bytes_limit"]
    rows = limit // 8192  # its quantised form does not fit beside it
    with jax.default_device(gpu), pytest.raises(Exception, match="RESOURCE_EXHAUSTED|[Oo]ut of memory"):
        x = jnp.ones((rows, 4096), jnp.bfloat16)
        jax.block_until_ready([jlp.quantize_both(x, jlp.MXFP8(), implementation="ffi") for _ in range(4)])
    assert_same_bytes_on((cpu, gpu), lambda *a: every_operation(*a)[0], *operands())
