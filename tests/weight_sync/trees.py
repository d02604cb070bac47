"""Small trees, their mapping, and what a session needs, for the tests of weight sync."""

import ml_dtypes
import numpy as np

from jaxlowprec.checkpoints import LLAMA
from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push
from jaxlowprec.weight_sync.bucket import Bucket, BucketHeader, checksum, pack
from jaxlowprec.weight_sync.manifest import Manifest

HIDDEN, INNER, VOCABULARY = 128, 256, 40
MAPPING = LLAMA


def llama(layers=2, dtype=ml_dtypes.bfloat16, seed=0):
    """A Llama-like tree of numpy arrays, kernels [K, N]; each of another magnitude."""
    random = np.random.default_rng(seed)
    count = iter(range(10**6))

    def made(*shape):
        return (random.standard_normal(shape, np.float32) * np.float32(0.01 * (1 + next(count) % 7))).astype(dtype)

    def layer():
        linears = {f"{p}_proj": {"kernel": made(HIDDEN, HIDDEN if p in "qo" else HIDDEN // 2)} for p in "qkvo"}
        linears["q_proj"]["bias"] = made(HIDDEN)
        return {
            "self_attn": linears,
            "mlp": {
                "gate_proj": {"kernel": made(HIDDEN, INNER)},
                "up_proj": {"kernel": made(HIDDEN, INNER)},
                "down_proj": {"kernel": made(INNER, HIDDEN)},
            },
            "input_layernorm": {"scale": made(HIDDEN)},
        }

    return {
        "embed_tokens": {"embedding": made(VOCABULARY, HIDDEN)},
        "layers": [layer() for _ in range(layers)],
        "norm": {"scale": made(HIDDEN)},
        "lm_head": {"kernel": made(HIDDEN, VOCABULARY)},
    }


def numbered(version, arrays=4, size=1000):
    """A tree in which every number is the version's."""
    return {f"m{i}": {"w": np.full(size, version, np.float32)} for i in range(arrays)}


def is_whole(weights):
    """Whether a snapshot is one version of `numbered`, complete."""
    return len(weights) == 4 and all((array == weights.version).all() for array in weights.values())


def synced(tree, *args, receiver=None, **options):
    """A receiver after a push."""
    receiver = receiver or Receiver()
    push(WeightSource(tree, *args, **options), InProcess(receiver))
    return receiver


def parts(version=1, names="ab", last=True):
    """A manifest of small tensors, and a bucket for each."""
    buckets = [
        pack(version, i, last and i == len(names) - 1, {name: np.full(3, ord(name), np.uint8)})
        for i, name in enumerate(names)
    ]
    return Manifest(tuple(placed.entry for bucket in buckets for placed in bucket.entries)), buckets


def relabelled(bucket, **fields):
    """A bucket with other fields in its header."""
    header = {name: getattr(bucket.header, name) for name in ("version", "index", "last", "entries", "nbytes")}
    return Bucket(BucketHeader(**{**header, "checksum": checksum(bucket.payload), **fields}), bucket.payload)
