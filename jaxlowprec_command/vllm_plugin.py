"""Tells vLLM of the weight transfer backend "jaxlowprec". All of vLLM's processes call it, so it imports little."""

from __future__ import annotations

import contextlib


def register() -> None:
    """Registers the backend, whose module is imported only where it is configured. May be called many times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(
            "jaxlowprec", "jaxlowprec.weight_sync.engines.vllm_worker", "TransferEngine"
        )
