"""The GPUs on which `tests/gpu` ran and found the kernels right, so that they count as verified there.

docs/reference/platforms.md names the tests that did not pass or did not run. A line here and
benchmarks/results/gpu.json are added together: a test compares them.
"""

VERIFIED_ON_GPUS: dict[float, str] = {9.0: "NVIDIA H200"}
"""By compute capability: what runs differs with it."""
