"""Decoders of the Llama kind in Flax NNX: training, and generation with a cache.

>>> from jaxlowprec.models.decoder import DecoderConfig
>>> sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
>>> sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
>>> DecoderConfig.of({"model_type": "llama"} | sizes).head
16
"""

from jaxlowprec.models.decoder.cache import Cache
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.generate import Generator, Written
from jaxlowprec.models.decoder.model import Decoder, log_probabilities, loss

__all__ = ["Cache", "Decoder", "DecoderConfig", "Generator", "Written", "log_probabilities", "loss"]
