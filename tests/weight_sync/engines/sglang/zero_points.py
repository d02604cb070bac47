"""Runs in SGLang's environment: zero_points.py GIVEN.npz ANSWER.npz. Converts zero points of an expert for its kernel.

GIVEN has words [K/g, N/8], by the name of the order of their nibbles; so has ANSWER, with the order of the kernel.
"""

import sys

import numpy as np
import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16_moe import (
    moe_awq_to_marlin_zero_points,
)


def converted(words):
    groups, columns = words.shape
    return moe_awq_to_marlin_zero_points(torch.from_numpy(words)[None], groups, 8 * columns, 4)[0].numpy()


given = np.load(sys.argv[1])
np.savez(sys.argv[2], **{name: converted(given[name]) for name in given.files})
