"""XLA's own compiler for NVIDIA GPUs, on a machine that has none: it takes a description of the GPU."""

import collections
import contextlib
import re
import types

import jax
import pytest
from jax.experimental import topologies

from jaxlowprec.wiring import native
from tests.cuda_without_gpu.claiming_cuda import claiming_cuda

_SAME_EVERYWHERE = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_vendor: "NVIDIA Corporation" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
"""

# From NVIDIA's data sheets: name, compute capability, multiprocessors; bytes of shared memory of each, of L2 and of all
# memory; bytes per second, GHz.
GPUS = {
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 40 << 20, 80 << 30, 2039 * 10**9, 1.41),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 50 << 20, 80 << 30, 3352 * 10**9, 1.98),
    "B200": ("NVIDIA B200", (10, 0), 148, 233472, 126 << 20, 180 << 30, 8000 * 10**9, 1.96),
}


def _description(gpu):
    name, (major, minor), cores, shared, cache, memory, bandwidth, clock = GPUS[gpu]
    return f"""gpu_device_info {{ {_SAME_EVERYWHERE}
      name: "{name}" cuda_compute_capability {{ major: {major} minor: {minor} }} core_count: {cores}
      shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared - 1024} l2_cache_size: {cache}
      device_memory_size: {memory} memory_bandwidth: {bandwidth} clock_rate_ghz: {clock}
    }}
    platform_name: "CUDA" device_description_str: "{name}"
    dnn_version_info {{ major: 9 minor: 10 patch: 0 }}"""


def why_not():
    """Why nothing can be compiled for a described GPU here, or None."""
    module = native.library().module
    if not module or module.no_cuda:
        return "the library was built without CUDA"
    try:
        devices_of("H100", 1)
    except Exception as error:  # no plugin, or one that wants a driver
        return f"no compiler for GPUs: {str(error).splitlines()[0]}"
    return None


def devices_of(gpu, count):
    """Descriptions of so many GPUs, to compile for."""
    shape = f"1x1x{count}"
    return topologies.get_topology_desc(
        platform="cuda", topology_name=shape, topology=shape, target_config=_description(gpu)
    ).devices


@contextlib.contextmanager
def described(gpu, count=1):
    """Compiles as where `count` of these GPUs are; gives the devices."""
    if reason := why_not():
        pytest.skip(reason)
    major, minor = GPUS[gpu][1]
    with claiming_cuda(major + minor / 10):
        assert native._register_cuda(native.library().module) is None
        yield devices_of(gpu, count)


def compiled(function, *args, devices=None, **options):
    """What XLA makes of a function: `calls`, how many of each custom call; `kinds`, of each other instruction.

    Arguments are arrays or shapes; those without a sharding of their own are on the first device.
    """
    single = jax.sharding.SingleDeviceSharding(devices[0])

    def shape(leaf):
        sharding = leaf.sharding if isinstance(getattr(leaf, "sharding", None), jax.sharding.NamedSharding) else single
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    traced = jax.jit(function, **options).trace(*jax.tree.map(shape, args))
    text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    calls = re.findall(r'custom_call_target="([^"]+)"', text)
    kinds = re.findall(r"^\s*(?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", text, re.MULTILINE)
    return types.SimpleNamespace(text=text, calls=collections.Counter(calls), kinds=collections.Counter(kinds))
