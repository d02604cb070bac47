"""The model of examples/lm as transformers builds it: what another program has to make of its checkpoint."""

import torch
import transformers
from torch import nn
from torch.nn import functional


class DemoConfig(transformers.PretrainedConfig):
    """config.json of the demo."""

    model_type = "jaxlowprec-demo"

    def __init__(self, layers=4, width=128, heads=4, context=128, **others):
        super().__init__(**others)
        self.layers, self.width, self.heads, self.context = layers, width, heads, context


class Norm(nn.Module):
    """Flax's RMSNorm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)


def _linears(**sizes):
    return nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name, (k, n) in sizes.items()})


class Layer(nn.Module):
    """Attention and MLP."""

    def __init__(self, config):
        super().__init__()
        width, self.heads = config.width, config.heads
        self.input_layernorm, self.post_attention_layernorm = Norm(width), Norm(width)
        self.self_attn = _linears(qkv_proj=(width, 3 * width), o_proj=(width, width))
        self.mlp = _linears(up_proj=(width, 4 * width), down_proj=(4 * width, width))

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.self_attn["qkv_proj"](self.input_layernorm(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.self_attn["o_proj"](attended.reshape(batch, time, width))
        hidden = functional.gelu(self.mlp["up_proj"](self.post_attention_layernorm(x)), approximate="tanh")
        return x + self.mlp["down_proj"](hidden)


class DemoModel(transformers.PreTrainedModel):
    """Bytes [batch, time] to logits."""

    config_class = DemoConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(256, config.width),
                "embed_positions": nn.Embedding(config.context, config.width),
                "layers": nn.ModuleList(Layer(config) for _ in range(config.layers)),
                "norm": Norm(config.width),
            }
        )
        self.lm_head = nn.Linear(config.width, 256, bias=False)
        self.post_init()

    def forward(self, tokens):
        x = self.model["embed_tokens"](tokens) + self.model["embed_positions"](torch.arange(tokens.shape[1]))
        for layer in self.model["layers"]:
            x = layer(x)
        return self.lm_head(self.model["norm"](x)).float()
