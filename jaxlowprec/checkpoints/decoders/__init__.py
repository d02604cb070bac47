"""Hugging Face folders as decoders of `jaxlowprec.models.decoder`, and trained decoders as folders."""

from jaxlowprec.checkpoints.decoders.exports import export, export_adapters
from jaxlowprec.checkpoints.decoders.folders import load

__all__ = ["export", "export_adapters", "load"]
