"""The parts of `jaxlowprec.decoder`: configurations, layers, caches, generation.

>>> from jaxlowprec.decoder import DecoderConfig
>>> sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
>>> sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
>>> DecoderConfig.of({"model_type": "llama"} | sizes).head
16
"""
