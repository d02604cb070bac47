"""The random bytes of stochastic rounding (numerics.md 4)."""

import numpy as np


def philox(counter, key):
    """uint32 [..., 4] and [..., 2] -> uint32 [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [key[..., i].astype(np.uint64) for i in range(2)]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k[0], p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=-1).astype(np.uint32)


def random_bytes(key, stream, rows, groups):
    """uint8 [R, 16 G]: a byte for each element, by its row and sixteen."""
    counter = np.zeros((len(rows), len(groups), 4), np.uint32)
    counter[..., 0], counter[..., 1], counter[..., 2] = np.asarray(groups)[None], np.asarray(rows)[:, None], stream
    words = philox(counter, np.broadcast_to(np.asarray(key, np.uint32), (*counter.shape[:2], 2)))
    return words.astype("<u4").view(np.uint8).reshape(len(rows), -1)
