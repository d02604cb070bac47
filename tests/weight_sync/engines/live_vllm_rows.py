"""vLLM's operators for INT8 by rows, in its own environment: live_vllm_rows.py QUESTION ANSWER, files of arrays."""

import sys

import numpy as np
import torch
import vllm._custom_ops as ops

with np.load(sys.argv[1]) as question:
    x, codes, scales = (torch.from_numpy(question[name]) for name in ("x", "codes", "scales"))
x = x.view(torch.bfloat16)
quantised, of_tokens, _ = ops.scaled_int8_quant(x)
handler = ops.create_onednn_scaled_mm(codes.t(), scales, torch.bfloat16, True, False, 32)
result = torch.empty(len(x), len(codes), dtype=torch.bfloat16)
ops.onednn_scaled_mm(handler, quantised, result, of_tokens, None, None, None)
found = {"codes": quantised, "scales": of_tokens, "result": result.view(torch.int16)}
np.savez(sys.argv[2], **{name: value.numpy() for name, value in found.items()})
