"""GGUF files of llama.cpp: read with every check, decoded to the bit, written from folders and turned into folders.

>>> from jaxlowprec.checkpoints import gguf
>>> gguf.TYPES["Q4_0"].block_bytes
18
"""

from jaxlowprec.checkpoints.gguf.block_types import DECODED, TYPES, BlockType
from jaxlowprec.checkpoints.gguf.exact import array_of_blocks, blocks_of_array
from jaxlowprec.checkpoints.gguf.exporting import export_gguf
from jaxlowprec.checkpoints.gguf.gguf_file import GGUFFile, GGUFWriter, inspect_gguf
from jaxlowprec.checkpoints.gguf.header import TensorSpec
from jaxlowprec.checkpoints.gguf.importing import import_gguf

__all__ = [
    "DECODED",
    "TYPES",
    "BlockType",
    "GGUFFile",
    "GGUFWriter",
    "TensorSpec",
    "array_of_blocks",
    "blocks_of_array",
    "export_gguf",
    "import_gguf",
    "inspect_gguf",
]
