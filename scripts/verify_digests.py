"""Writes the digests that `jaxlowprec verify` compares with, from the CPU's kernels.

    JAX_PLATFORMS=cpu .venv/bin/python scripts/verify_digests.py

Rules do not change: a digest that changes is a fault, unless its inputs or its item did.
tests/diagnostics/test_verify.py compares the file with tests/numpy_oracle, tests/cli/test_verify.py with the library.
"""

import json

import jax

from jaxlowprec.diagnostics.verify import quantisers


def main() -> None:
    """Runs every item by the kernels."""
    cpu = jax.local_devices(backend="cpu")[0]
    found = {
        item.name: {name: quantisers.digest(x) for name, x in sorted(item.run(cpu, "ffi").items())}
        for item in quantisers.items()
    }
    quantisers.EXPECTED.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{quantisers.EXPECTED}: {len(found)} items, {sum(map(len, found.values()))} arrays")


if __name__ == "__main__":
    main()
