"""On which GPUs the CUDA kernels have been verified: what `scripts/gpu_check.sh` passed on, and no other.

A line here and benchmarks/results/gpu.json come together: a test holds one against the other.
"""

VERIFIED_ON_GPUS: tuple[str, ...] = ()
