"""What of the suite says something about a GPU, when all of it is run on one (JAXLOWPREC_TESTS_ON=cuda)."""

ABOUT_PROCESSES = (
    "tests/wiring/test_native.py",
    "tests/package/test_build.py",
    "tests/package/test_package.py",
    "tests/package/test_readme.py",
    "tests/package/test_spec.py",
    "tests/cli",
    "tests/scripts",
)
ABOUT_LOWERING = ("tests/wiring", "tests/sharding")
CPU_BYTES = (
    "TestBytes",
    "TestWhatDoesNotChangeTheBytes",
    "test_kernels_of_arbitrary",
)  # of a GEMM: the CPU's order of additions (numerics.md 9)


def why_only_on_the_cpu(item) -> str | None:
    """Why a test is about the CPU, or None."""
    name = item.nodeid
    if name.startswith(ABOUT_PROCESSES):
        return "about processes that run on the CPU"
    takes_a_mesh = "mesh" in item.fixturenames or "mesh_of" in item.function.__code__.co_names
    if name.startswith(ABOUT_LOWERING) or hasattr(item.module, "mesh_of") or takes_a_mesh:
        return "needs the eight devices that the CPU pretends to be"
    if "scaled_matmul" in name and any(group in name for group in CPU_BYTES):
        return "the bytes of a GEMM are defined on the CPU; tests/gpu has its error on a GPU"
    if "reference" in name.lower():
        return (
            "the reference defines bytes on the CPU: XLA's division on a GPU is not correctly rounded (numerics.md 10)"
        )
    return None
