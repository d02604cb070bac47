"""The GPUs on which `scripts/gpu_check.sh` passed, so that the CUDA kernels count as verified there.

A line here and benchmarks/results/gpu.json are added together: a test compares them.
"""

VERIFIED_ON_GPUS: tuple[str, ...] = ()
