"""Sends new versions of the weights from a trainer to an engine, which serves the old version whole until then.

>>> import numpy as np
>>> from jaxlowprec.weight_sync import InProcess, Receiver, WeightSource, push
>>> receiver = Receiver()
>>> version = push(WeightSource({"w": np.ones(2, np.float32)}), InProcess(receiver))
>>> version, receiver.weights["w"]
(1, array([1., 1.], dtype=float32))
"""

from jaxlowprec.weight_sync.engines.sglang import SGLang
from jaxlowprec.weight_sync.engines.sglang_tensors import SGLangTensors
from jaxlowprec.weight_sync.engines.vllm import VLLM, VLLMTransfer
from jaxlowprec.weight_sync.errors import Aborted, PeerLost, PeerTimeout, Refused, SyncError
from jaxlowprec.weight_sync.folders.delta import DeltaTransport
from jaxlowprec.weight_sync.folders.directory import DirectoryTransport
from jaxlowprec.weight_sync.folders.pulling import pull
from jaxlowprec.weight_sync.manifest import Entry, Manifest
from jaxlowprec.weight_sync.receiving.comparison import differences, to_tree
from jaxlowprec.weight_sync.receiving.receiver import Receiver
from jaxlowprec.weight_sync.receiving.weights import Weights
from jaxlowprec.weight_sync.sending.bucketizer import Bucketizer
from jaxlowprec.weight_sync.sending.fan_out import Delivery, FanOut
from jaxlowprec.weight_sync.sending.session import Session, push
from jaxlowprec.weight_sync.sending.source import WeightSource
from jaxlowprec.weight_sync.sharded.joining import ShardedReceiver
from jaxlowprec.weight_sync.sharded.sending import push_shards
from jaxlowprec.weight_sync.transports.shared_memory import SharedMemoryReceiver, SharedMemoryTransport
from jaxlowprec.weight_sync.transports.tcp import TcpReceiver, TcpTransport
from jaxlowprec.weight_sync.transports.transport import InProcess, Transport

__all__ = [
    "Aborted",
    "Bucketizer",
    "Delivery",
    "DeltaTransport",
    "DirectoryTransport",
    "Entry",
    "FanOut",
    "InProcess",
    "Manifest",
    "PeerLost",
    "PeerTimeout",
    "Receiver",
    "Refused",
    "SGLang",
    "SGLangTensors",
    "Session",
    "ShardedReceiver",
    "SharedMemoryReceiver",
    "SharedMemoryTransport",
    "SyncError",
    "TcpReceiver",
    "TcpTransport",
    "Transport",
    "VLLM",
    "VLLMTransfer",
    "WeightSource",
    "Weights",
    "differences",
    "pull",
    "push",
    "push_shards",
    "to_tree",
]
