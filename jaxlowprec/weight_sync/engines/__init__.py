"""Transports that tell SGLang and vLLM, over their own HTTP calls, to load a version from a shared disk."""
