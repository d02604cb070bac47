"""Hostile GGUF files, and the configs and tokenizers that become one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import struct

from jaxlowprec.checkpoints import CheckpointError, schemes
from jaxlowprec.checkpoints.files.folder import CheckpointFolder
from jaxlowprec.checkpoints.gguf import GGUFFile, export_gguf, import_gguf, inspect_gguf
from jaxlowprec.cli.inspect import render
from tests.checkpoints.gguf.models import byte_level, folder, from_sentencepiece
from tests.hostile.mutation import NUMBERS, VALUES
from tests.hostile.of_checkpoints import made_in
from tests.hostile.target import Target

ALIGNMENT = 32
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes by the number of a value's type
STRING, ARRAY = 8, 9
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
MODELS = {
    "llama": {"rope_scaling": YARN},
    "qwen3_moe": {},
    "mixtral": {},
    "qwen2": {},
}
TOKENIZERS = {"llama": byte_level, "mixtral": from_sentencepiece}


def text(value):
    """A string as GGUF has it."""
    data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
    return U64.pack(len(data)) + data


def number(kind, value):
    """A number of a type, wrapped to its width."""
    if kind in (6, 12):
        return U32.pack(kind) + struct.pack("<f" if kind == 6 else "<d", value)
    return U32.pack(kind) + (value % (1 << 8 * WIDTHS[kind])).to_bytes(WIDTHS[kind], "little")


FLOATS = (0.0, -0.0, 1e-45, -1.0, 0.5, 2.9, 65.0, 1e30, math.inf, -math.inf, math.nan)
WORDS = tuple(value for value in VALUES if type(value) is str)
METADATA = (
    *(number(kind, value) for kind in (0, 4, 5, 10, 11) for value in NUMBERS),
    *(number(kind, value) for kind in (6, 12) for value in FLOATS),
    *(number(7, value) for value in (0, 1, 2, 255)),
    *(U32.pack(STRING) + text(value) for value in (*WORDS, b"\xff\xfe")),
    *(U32.pack(ARRAY) + U32.pack(kind) + U64.pack(count) + bytes(16) for kind in range(14) for count in (0, 2, 2**61)),
    *(U32.pack(ARRAY) + U32.pack(STRING) + U64.pack(2) + text("a") + text(word) for word in WORDS),
    *(U32.pack(kind) for kind in (13, 99, 2**32 - 1)),
)
"""Type and value of an entry, right or wrong."""

NAMES = (*WORDS, "blk.2147483647.attn_q.weight", "blk.-1.attn_q.weight", "blk.0.attn_q.bias", "rope_freqs.weight")


@dataclasses.dataclass
class Parts:
    """A file taken apart: entries are key, type and value; tensors are name, sizes, type and offset."""

    entries: list[tuple[bytes, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes

    @classmethod
    def of(cls, file):
        """A file's parts. Raises struct.error, KeyError or IndexError if it is damaged where they begin or end."""
        tensors, entries = U64.unpack_from(file, 8)[0], U64.unpack_from(file, 16)[0]
        at = 24

        def string():
            nonlocal at
            length = U64.unpack_from(file, at)[0]
            at += 8 + length
            return bytes(file[at - length : at])

        def value():
            nonlocal at
            begin, kind = at, U32.unpack_from(file, at)[0]
            at += 4
            if kind == ARRAY:
                kind, count = U32.unpack_from(file, at)[0], U64.unpack_from(file, at + 4)[0]
                at += 12
            else:
                count = 1
            if kind == STRING:
                for _ in range(count):
                    string()
            else:
                at += count * WIDTHS[kind]
            return bytes(file[begin:at])

        def tensor():
            nonlocal at
            name, axes = string(), U32.unpack_from(file, at)[0]
            *sizes, kind, offset = struct.unpack_from(f"<{axes}QIQ", file, at + 4)
            at += 4 + 8 * axes + 12
            return name, sizes, kind, offset

        found = [(string(), value()) for _ in range(entries)]
        table = [tensor() for _ in range(tensors)]
        return cls(found, table, bytes(file[-(-at // ALIGNMENT) * ALIGNMENT :]))

    def file(self):
        """The file, whose counts are right."""
        made = b"GGUF" + U32.pack(3) + U64.pack(len(self.tensors)) + U64.pack(len(self.entries))
        made += b"".join(text(key) + value for key, value in self.entries)
        for name, sizes, kind, offset in self.tensors:
            made += text(name) + U32.pack(len(sizes)) + b"".join(U64.pack(size % 2**64) for size in sizes)
            made += U32.pack(kind % 2**32) + U64.pack(offset % 2**64)
        return made + bytes(-len(made) % ALIGNMENT) + self.data


def change_gguf(mutator, data):
    """A file with one entry, tensor, count or byte changed."""
    draw = mutator.random
    if draw.random() < 0.15:
        return mutator.bytes(data)
    if draw.random() < 0.1:
        at, piece = draw.choice((4, 8, 16)), U64.pack(draw.choice(NUMBERS) % 2**64)
        return data[:at] + piece[: 4 if at == 4 else 8] + data[at + (4 if at == 4 else 8) :]
    try:
        parts = Parts.of(data)
    except (struct.error, KeyError, IndexError, OverflowError, MemoryError):
        return mutator.bytes(data)
    if parts.entries and draw.random() < 0.5:
        _change_entry(draw, parts.entries)
    elif parts.tensors:
        _change_tensor(draw, parts.tensors)
    return parts.file()


def _change_entry(draw, entries):
    at = draw.randrange(len(entries))
    key, value = entries[at]
    how = draw.random()
    if how < 0.75:
        entries[at] = key, draw.choice(METADATA)
    elif how < 0.85:
        entries[at] = draw.choice((draw.choice(WORDS).encode(errors="surrogatepass"), draw.choice(entries)[0])), value
    elif how < 0.95:
        del entries[at]
    else:
        more = draw.choice((b"split.count", b"general.alignment", b"llama.expert_count", b"llama.rope.scaling.type"))
        entries.append((more, draw.choice(METADATA)))


def _change_tensor(draw, tensors):
    at = draw.randrange(len(tensors))
    name, sizes, kind, offset = tensors[at]
    how = draw.random()
    if how < 0.15:
        chosen = draw.choice((draw.choice(NAMES).encode(errors="surrogatepass"), draw.choice(tensors)[0]))
        tensors[at] = chosen, sizes, kind, offset
    elif how < 0.55:
        size = draw.choice((*NUMBERS, *sizes, 33, 96))
        place = draw.randrange(len(sizes) + 1)
        whole = (sizes[:place] + [size] + sizes[place + draw.choice((0, 1)) :], sizes[:place], sizes[::-1])
        tensors[at] = name, draw.choice(whole), kind, offset
    elif how < 0.75:
        tensors[at] = name, sizes, draw.choice((*range(42), 2**31, 2**32 - 1)), offset
    elif how < 0.9:
        tensors[at] = name, sizes, kind, draw.choice((*NUMBERS, offset + 1, offset - 32, draw.choice(tensors)[3]))
    else:
        del tensors[at]


def import_file(data, folder):
    """A file as a folder: what is accepted has a config.json of finite numbers, and every tensor can be read."""
    file, made = folder / "a.gguf", folder / "made"
    file.write_bytes(data)
    shutil.rmtree(made, ignore_errors=True)
    render(inspect_gguf(file))
    try:
        import_gguf(file, made)
    except CheckpointError:
        assert not list(made.glob("*.safetensors")), "a refused file has left weights"
        raise

    def no_number(word):
        raise AssertionError(f"config.json has {word}")

    json.loads((made / "config.json").read_text(), parse_constant=no_number)
    with CheckpointFolder(made) as opened:
        for name in opened.shard_of:
            opened.spec(name)


def gguf_seeds():
    def made(path, family, scheme):
        export_gguf(folder(path / "hf", family, shards=1, **MODELS[family]), path / "a.gguf", scheme)
        return (path / "a.gguf").read_bytes()

    int4 = schemes.by_name("w4a16", group_size=32, scale_dtype="float16")
    choices = itertools.product(MODELS, (None, int4))
    return [
        made_in(lambda path, family=family, scheme=scheme: made(path, family, scheme)) for family, scheme in choices
    ]


def export_folder(data, path):
    """A folder whose config.json and tokenizer.json are the case, to GGUF; the first byte chooses the tensors."""
    family = list(MODELS)[data[0] % len(MODELS)] if data else "llama"
    source = path / family
    if not source.exists():
        folder(source, family, shards=1)
    config, _, tokenizer = data[1:].partition(b"\n\n")
    (source / "config.json").write_bytes(config)
    (source / "tokenizer.json").write_bytes(tokenizer)
    (path / "made.gguf").unlink(missing_ok=True)
    export_gguf(source, path / "made.gguf")
    with GGUFFile(path / "made.gguf") as made:
        for name in made.specs:
            made.read(name)


def folder_seeds():
    def made(path, family):
        tokenizer = TOKENIZERS.get(family, from_sentencepiece)()
        source = folder(path, family, shards=1, tokenizer=tokenizer, **MODELS[family])
        return [(source / name).read_bytes() for name in ("config.json", "tokenizer.json")]

    seeds = enumerate(MODELS)
    return [bytes([i]) + b"\n\n".join(made_in(lambda path, family=family: made(path, family))) for i, family in seeds]


def change_folder(mutator, data):
    """The config's JSON, or the tokenizer's."""
    config, _, tokenizer = data[1:].partition(b"\n\n")
    if mutator.random.random() < 0.6:
        config = mutator.document(config).replace(b"\n\n", b"\n")
    else:
        tokenizer = mutator.document(tokenizer)
    return data[:1] + config + b"\n\n" + tokenizer


TARGETS = {
    "gguf": Target(import_file, gguf_seeds, (CheckpointError,), change_gguf),
    "to_gguf": Target(export_folder, folder_seeds, (CheckpointError,), change_folder),
}
