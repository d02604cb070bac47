"""Static scales of caches of keys and values."""

from jaxlowprec.models.decoder.kv_scales import calibrate, scale_of

__all__ = ["calibrate", "scale_of"]
