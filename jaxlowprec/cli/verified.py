"""The GPUs on which `tests/gpu` passed, so that the CUDA kernels count as verified there.

A line here and benchmarks/results/gpu.json are added together: a test compares them.
"""

VERIFIED_ON_GPUS: dict[float, str] = {9.0: "NVIDIA H200"}
"""By compute capability: what runs differs with it."""
