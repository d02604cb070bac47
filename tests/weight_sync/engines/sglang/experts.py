"""Runs in SGLang's environment: experts.py VERSIONS.npz ANSWER.npz. A layer of INT4 experts loads versions in turn.

VERSIONS has `group_size` and for each version i `<tensor><i>`, in the layout that SGLang loads. SGLang's own loader
restores the layer before each version but the first, and repacks it afterwards. Only the kernel that repacks words is
replaced, since it needs a GPU: by one that keeps their order and gives them the kernel's shape.
"""

import sys
import types

import numpy as np
import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsFusedMoEMethod
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as experts
from sglang.srt.model_loader.loader import DefaultModelLoader

NAMES = ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale")


def reshaped(words, order, k, n, bits):
    assert words.shape == (k // 8, n) and bits == 4 and not order.numel()
    return words.reshape(k // 16, 2 * n)


def layer_of(version, group_size):
    """A layer with SGLang's parameters for experts of these sizes."""
    count, rows, columns = version["w13_weight_packed"].shape
    quantised = types.SimpleNamespace(
        num_bits=4, strategy="group", group_size=group_size, actorder=None, symmetric=True
    )
    layer = torch.nn.Module()
    layer.moe_tp_size = 1
    config = types.SimpleNamespace(quant_format="pack-quantized")
    layer.scheme = experts.CompressedTensorsWNA16MoE(config, quantised)
    layer.scheme.create_weights(layer, count, 8 * rows, columns // 2, torch.bfloat16)
    layer.quant_method = CompressedTensorsFusedMoEMethod(config)
    return layer


sys.modules[experts.gptq_marlin_moe_repack.__module__].gptq_marlin_repack = reshaped
experts.marlin_make_workspace = lambda device, blocks: torch.zeros(1)
given = np.load(sys.argv[1])
group_size = int(given["group_size"])
versions = [{name: given[f"{name}{i}"] for name in NAMES} for i in range((len(given.files) - 1) // len(NAMES))]
model, device, answer = torch.nn.Sequential(layer_of(versions[0], group_size)), torch.device("cpu"), {}
for i, version in enumerate(versions):
    if i:
        DefaultModelLoader.restore_weights_before_loading(model, device)
    for name, array in version.items():
        parameter = getattr(model[0], name)
        assert parameter.shape == array.shape, (name, parameter.shape, array.shape)
        parameter.data.copy_(torch.from_numpy(array))
    DefaultModelLoader.postprocess_weights(model, device)
    answer |= {f"{name}{i}": getattr(model[0], name).float().numpy() for name in NAMES if name.endswith("scale")}
    answer |= {f"{name}{i}": getattr(model[0], name).numpy().copy() for name in NAMES if name.endswith("packed")}
np.savez(sys.argv[2], **answer)
