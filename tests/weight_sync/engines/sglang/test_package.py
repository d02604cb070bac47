"""SGLang's own code, in an environment of its own, without a server: it reads payloads, and restores INT4 experts."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxlowprec import checkpoints
from jaxlowprec.checkpoints.schemes import marlin
from jaxlowprec.checkpoints.schemes.codes import AWQ_ORDER, pack_words
from jaxlowprec.checkpoints.schemes.gptq import GPTQ
from jaxlowprec.weight_sync import SGLangTensors
from tests.weight_sync.engines.engine_stubs import serving
from tests.weight_sync.engines.sglang import live
from tests.weight_sync.engines.sglang.stub import TensorsStub
from tests.weight_sync.syncing import sync

pytestmark = pytest.mark.slow

FLOAT8 = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu)
EXPERTS, HIDDEN, INTERMEDIATE = 3, 256, 128


def compressed(scheme, seed):
    """The tensors of one module, by their names."""
    weight = np.random.default_rng(seed).standard_normal((128, 256)).astype(np.float32)
    stored = checkpoints.schemes.by_name(scheme).compress(weight)
    return {f"model.experts.{seed}.{scheme}.{part}": tensor for part, tensor in stored.items()}


def arrays():
    """Tensors of every quantised format, of every dtype of 1 byte, a scalar, an empty one."""
    made = {}
    for seed, scheme in enumerate(("w4a16", "w4a16_asym", "nvfp4", "mxfp4", "fp8_block", "int8_channel", "mxfp8")):
        made |= compressed(scheme, seed)
    rng = np.random.default_rng(0)
    made |= {dtype.__name__: rng.integers(0, 256, (7, 3)).astype(np.uint8).view(dtype) for dtype in FLOAT8}
    made |= {name: rng.integers(0, 2, 5).astype(name) for name in ("bool", "float16", "bfloat16", "uint16", "int64")}
    return made | {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4), np.int32), "ä.weight": np.ones(3)}


class Reading(TensorsStub):
    """Gives each body to SGLang's own code, in another process, while the sender waits for the answer."""

    def __init__(self, place):
        super().__init__(ranks=2)
        self.place, self.ranks = place, ({}, {})

    def take(self, body, query):
        answer = super().take(body, query)
        file = self.place / f"{len(self.bodies)}.json"
        file.write_text(json.dumps(body))
        for held, payload in zip(self.ranks, json.loads(live.run("decode.py", file)), strict=True):
            held |= {name: tuple(described) for name, *described in payload}
        return answer


@pytest.mark.parametrize("memory", ["shared", "copied"])
def test_sglang_reads_every_format_byte_for_byte(memory, tmp_path):
    live.interpreter()
    stub = Reading(tmp_path)
    with serving(stub) as url:
        sync(SGLangTensors(url, memory=memory), 1, arrays(), timeout=120, buckets=1)
    assert not stub.errors
    expected = {
        name: (f"torch.{array.dtype.name}", list(array.shape), array.tobytes().hex())
        for name, array in arrays().items()
    }
    assert stub.ranks[0] == expected and stub.ranks[1] == expected


def loaded(seed, group_size):
    """INT4 experts as SGLang loads them, w13 side by side, and as it has to hold them then."""
    rng = np.random.default_rng(seed)
    scheme = GPTQ(group_size, True, "bfloat16", 1)

    def stored(n, k):
        made = [scheme.compress(rng.standard_normal((n, k)).astype(np.float32)) for _ in range(EXPERTS)]
        return {name: np.stack([one[name] for one in made]) for name in ("qweight", "scales")}

    gate, up, down = stored(INTERMEDIATE, HIDDEN), stored(INTERMEDIATE, HIDDEN), stored(HIDDEN, INTERMEDIATE)
    names = {"qweight": "weight_packed", "scales": "weight_scale"}
    both = {name: np.concatenate([gate[name], up[name]], -1) for name in names}
    given = {f"{w}_{names[name]}": of[name] for w, of in (("w13", both), ("w2", down)) for name in names}
    return given, marlin.fuse_experts(gate, up, down, group_size=group_size)


@pytest.mark.parametrize("group_size", [32, 128])
def test_sglang_restores_and_repacks_experts_as_marlin_py(group_size, tmp_path):
    live.interpreter()
    versions = [loaded(seed, group_size) for seed in (0, 1, 2)]
    given = {f"{name}{i}": tensor for i, (tensors, _) in enumerate(versions) for name, tensor in tensors.items()}
    as_numpy = {
        name: tensor if tensor.dtype == np.int32 else tensor.astype(np.float32) for name, tensor in given.items()
    }
    np.savez(tmp_path / "versions.npz", group_size=group_size, **as_numpy)
    live.run("experts.py", tmp_path / "versions.npz", tmp_path / "answer.npz")
    with np.load(tmp_path / "answer.npz") as answer:
        for i, (tensors, expected) in enumerate(versions):
            for name, tensor in expected.items():
                held = answer[f"{name}{i}"]
                if name.endswith("packed"):  # the kernel's stand-in kept the order of the words
                    held = marlin.repack(held.reshape(tensors[name].shape))
                np.testing.assert_array_equal(held, tensor.astype(held.dtype), name)


def test_sglang_takes_zero_points_of_experts_for_awq(tmp_path):
    """Which is why the adapters refuse `w4a16_asym` for experts."""
    live.interpreter()
    zeros = np.random.default_rng(0).integers(0, 16, (4, 128)).astype(np.uint8)
    np.savez(tmp_path / "given.npz", awq=pack_words(zeros, AWQ_ORDER), compressed_tensors=pack_words(zeros))
    live.run("zero_points.py", tmp_path / "given.npz", tmp_path / "answer.npz")
    with np.load(tmp_path / "answer.npz") as answer:
        right = {name: np.array_equal(answer[name], marlin.pack_zero_points(zeros)) for name in answer.files}
    assert right == {"awq": True, "compressed_tensors": False}


def test_sglang_cannot_load_dense_int4_a_second_time():
    """Which is why the adapters refuse to send it: see `check_int4`."""
    live.interpreter()
    found = json.loads(live.run("dense.py"))
    assert found == {
        "loader before": True,
        "loader after": False,
        "shape": [256 // 16, 2 * 128],
        "again": "AssertionError",
    }
