"""Decoders of the Llama kind in Flax NNX: training, and generation with a cache."""

from jaxlowprec.models.decoder.cache import Cache
from jaxlowprec.models.decoder.config import DecoderConfig
from jaxlowprec.models.decoder.generate import Generation, Generator
from jaxlowprec.models.decoder.model import Decoder, log_probabilities, loss
from jaxlowprec.ops.kv_cache import CACHES

__all__ = ["CACHES", "Cache", "Decoder", "DecoderConfig", "Generation", "Generator", "log_probabilities", "loss"]
