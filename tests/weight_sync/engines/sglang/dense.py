"""Runs in SGLang's environment: a dense INT4 layer is loaded, and then again. Prints what is found, as JSON.

What needs a GPU is replaced: the kernel that repacks words, its workspace, and the check of its sizes.
"""

import json
import types

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as dense
from sglang.srt.model_loader.loader import DefaultModelLoader

K, N = 256, 128


def repacked(words, perm, size_k, size_n, num_bits):
    return words.reshape(size_k // 16, 2 * size_n)


dense.gptq_marlin_repack = repacked
dense.marlin_make_workspace = lambda device: torch.zeros(1)
dense.check_marlin_supports_shape = lambda *sizes: None
scheme = dense.CompressedTensorsWNA16("group", 4, 128)
scheme.quant_type = types.SimpleNamespace(size_bits=4)  # a name where there is no GPU
layer, device = torch.nn.Module(), torch.device("cpu")
layer.scheme, layer.quant_method = scheme, CompressedTensorsLinearMethod(None)
scheme.create_weights(layer, N, K, [N], K, torch.bfloat16, lambda parameter, loaded: parameter.data.copy_(loaded))
model = torch.nn.Sequential(layer)
found = {"loader before": hasattr(layer.weight_packed, "weight_loader")}
DefaultModelLoader.postprocess_weights(model, device)
DefaultModelLoader.restore_weights_before_loading(model, device)
found |= {"loader after": hasattr(layer.weight_packed, "weight_loader"), "shape": list(layer.weight_packed.shape)}
try:
    DefaultModelLoader.postprocess_weights(model, device)
except AssertionError:
    found["again"] = "AssertionError"
print(json.dumps(found))
