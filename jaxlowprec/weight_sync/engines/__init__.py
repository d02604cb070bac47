"""Transports to SGLang and vLLM, by their own HTTP calls: over a shared disk, or to vLLM's workers."""
