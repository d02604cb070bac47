"""The one kernel that SGLang takes from vLLM where there is no GPU, with torch: `vllm._custom_ops.rotary_embedding`.

SGLang's environment has no vLLM, whose builds need another torch. This file stands in for `vllm/_custom_ops.py` there.
"""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Rotates the first part of each head [tokens, heads * head_size] in place, halves with halves."""
    assert is_neox
    cos, sin = (half[:, None] for half in cos_sin_cache[positions.flatten()].float().chunk(2, -1))
    size = cos.shape[-1]
    for projected in (query, key):
        heads = projected.view(positions.numel(), -1, head_size)
        first, second = heads[..., :size].float(), heads[..., size : 2 * size].float()
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        heads[..., : 2 * size].copy_(rotated.to(projected.dtype))
