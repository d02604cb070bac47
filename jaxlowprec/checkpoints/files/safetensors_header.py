"""The header of a safetensors file: parsed with every check that the format allows, and laid out for writing.

A file is eight bytes that hold a length (little-endian), a JSON object of that length, and the tensors' bytes one after
the other. The object maps a name to `{"dtype", "shape", "data_offsets": [begin, end]}`; offsets count from the end of
the object. `__metadata__` maps strings to strings.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxlowprec.checkpoints.errors import CheckpointError, brief
from jaxlowprec.checkpoints.files.dtypes import BITS, MAX_BITS, MAX_RANK, bits_of
from jaxlowprec.checkpoints.files.strict_json import load_json

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit: a longer header is a damaged file, or one made to exhaust memory."""

MAX_NAME_BYTES = (1 << 16) - 1
"""The longest name of a tensor that is read or written, as in a GGUF file: published names have some hundred bytes."""

_ALIGNMENT = 64  # bytes: alignment of the first tensor, as XLA and vector units want it
_MAX_DIMENSION = 2**63 - 1
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Dtype (safetensors' name) and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return bits_of(self.dtype, self.shape) // 8


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file: its spec, and the position of its first byte, counted from the start of the file."""

    spec: TensorSpec
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A file's content: `tensors` in the order of their bytes, `metadata`, and `size`, the bytes of the whole file."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    size: int


def parse_header(where: str, text: bytes, file_size: int) -> Header:
    """The header whose JSON is `text`, of a file of `file_size` bytes.

    Raises:
        CheckpointError: it is not JSON, a field is missing, unknown or of a wrong type, a name comes twice, a dtype is
            unknown, a tensor has more than `MAX_RANK` dimensions, its bytes do not fit its shape, lie outside the file,
            overlap, or leave a gap, or a name has more than `MAX_NAME_BYTES`.
    """
    content = load_json(where, text)
    if not isinstance(content, dict) or not text.startswith(b"{"):
        raise CheckpointError(f"{where}: the header is not a JSON object")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{where}: __metadata__ in the header must map strings to strings")
    spans = sorted((_span(where, name, info) for name, info in content.items()), key=lambda span: span[1:3])
    data_start = LENGTH_BYTES + len(text)
    end = 0
    tensors = {}
    for name, begin, stop, spec in spans:
        if begin != end:
            fault = "overlaps the one before it" if begin < end else f"leaves a gap of {begin - end} bytes before it"
            raise CheckpointError(
                f"{where}: tensor {brief(name)} {fault} (it begins at {begin}, the last ended at {end})"
            )
        end = stop
        tensors[name] = TensorEntry(spec, data_start + begin)
    if data_start + end != file_size:
        fault = "truncated" if data_start + end > file_size else "too long"
        raise CheckpointError(
            f"{where}: the file is {fault}: its header describes {data_start + end} bytes, it has {file_size}"
        )
    return Header(tensors, metadata, file_size)


def layout_header(where: str, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, Header]:
    """The first bytes of a new file (length and header), and the positions of its tensors.

    Tensors with wide elements come first, so that each is aligned to its elements; tensors of one width are in the
    order of their names. The header is padded with spaces to a multiple of 64 bytes.
    """
    order = sorted(specs, key=lambda name: (-BITS[specs[name].dtype], name))
    content: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name in order:
        spec = specs[name]
        if name == "__metadata__" or bits_of(spec.dtype, spec.shape) % 8:
            raise CheckpointError(f"{where}: tensor {name!r} {spec} cannot be written to a safetensors file")
        content[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, begin + spec.nbytes],
        }
        begin += spec.nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: {len(specs)} tensors make a header of {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}"
        )
    prefix = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return prefix, parse_header(where, text, len(prefix) + begin)


def _span(where: str, name: str, info: Any) -> tuple[str, int, int, TensorSpec]:
    """A tensor's name, first byte, end and spec, from its entry in the header."""
    tensor = f"{where}: tensor {brief(name)}"
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise CheckpointError(f"{tensor} has a name of {len(name)} characters; at most {MAX_NAME_BYTES} bytes are read")
    if not isinstance(info, dict) or set(info) != _FIELDS:
        raise CheckpointError(f"{tensor} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{tensor} has dtype {brief(dtype)}, which safetensors does not define")
    if not isinstance(shape, list) or not _whole_numbers(shape[: MAX_RANK + 1]):
        raise CheckpointError(f"{tensor} has shape {brief(shape)}; needs a list of whole numbers")
    if len(shape) > MAX_RANK:
        raise CheckpointError(f"{tensor} has {len(shape)} dimensions; at most {MAX_RANK} are read")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _whole_numbers(offsets) or offsets[0] > offsets[1]:
        raise CheckpointError(f"{tensor} has data_offsets {brief(offsets)}; needs [begin, end]")
    bits, given = bits_of(dtype, shape), offsets[1] - offsets[0]
    if bits != 8 * given:
        takes = f"{bits / 8:g}" if bits <= MAX_BITS else "more than 2**60"
        raise CheckpointError(f"{tensor} has {given} bytes; {dtype} of shape {brief(shape)} takes {takes}")
    if bits_of(dtype, [size for size in shape if size]) > MAX_BITS:  # even an empty array cannot have this shape
        raise CheckpointError(f"{tensor} has shape {brief(shape)}, which no array can have")
    return name, offsets[0], offsets[1], TensorSpec(dtype, tuple(shape))


def _whole_numbers(values: list[Any]) -> bool:
    """Whether all values are integers from 0 to 2**63 - 1; true and false are not."""
    return all(type(v) is int and 0 <= v <= _MAX_DIMENSION for v in values)
