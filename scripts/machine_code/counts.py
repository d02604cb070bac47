"""Instructions that a thread takes for an element of the quantisation kernels' main loops.

A loop's count is that of the shortest way through one turn of it which passes every instruction that the loop is there
for: its loads, its maxima, its conversions, its stores of 16 codes. So slow ways (divisions that overflow, saturation,
elements that are not finite, edges) are not in it. Of several rules for scales the shortest counts, and a loop inside
the loop is passed once, or not at all: the counts are lower bounds for MX and Float8. What is issued is counted,
whatever time that takes: it is not a measurement.
"""

import dataclasses
import heapq
import re

from sass import Kernel


@dataclasses.dataclass(frozen=True)
class Part:
    """A loop, the smallest that has all of `has`. A turn passes all that match `through`, for so many elements."""

    name: str
    elements: int
    has: tuple[str, ...]
    through: str


ENCODING = r"VIMNMX3(?!\.U16)|F2FP\.SATFINITE|FADD(\.FTZ)?\.RZ"  # E2M1 to nearest, conversions, stochastic rounding
MAXIMA = r"VIMNMX3?\.U16x2"  # of 16-bit elements
STORES = r"STG\.E\.(?:64|128)"  # of 16 elements' codes
ROWS = Part("rows", 16, (r"LDS\.128", STORES), f"{MAXIMA}|{ENCODING}|{STORES}")
COLUMNS = Part("columns", 32, (MAXIMA, r"STS\.(?:64|128)"), f"{MAXIMA}|{ENCODING}")
TILE = Part("tile", 64, ("LDGSTS", "BAR"), f"LDGSTS|{STORES}")
SEGMENTS = Part("rows", 32, (r"LDG\.E\.128", STORES), rf"LDG\.E\.128|{MAXIMA}|{ENCODING}|{STORES}")

WHOLE_TILES = Part("tile", 32, ("LDGSTS", "BAR"), rf"LDGSTS|{MAXIMA}|{ENCODING}|{STORES}")
WHOLE_NVFP4_TILES = Part("tile", 64, ("LDGSTS", "BAR"), f"LDGSTS|{ENCODING}|{STORES}")  # rare blocks have minima, too
SIXTEENS = Part("rows", 32, (r"LDG\.E\.128", "MUFU"), rf"LDG\.E\.128|{MAXIMA}|MUFU|STG\.E\.(?:64|128)")
DECODED = Part("codes", 64, (r"LDG\.E\.(?:64|128)", r"STG\.E\.128"), r"LDG\.E\.(?:64|128)|STG\.E\.128")
PRODUCTS = Part("products", 64, ("IMMA", "LDGSTS"), "IMMA|LDGSTS|LDS")  # of the tensor cores: a warp's 128 k
# Maxima of halves: those of whole words are in the way of rare numbers.
EIGHTS = Part("eights", 8, (r"LDG\.E\.128", "VIADDMNMX"), r"LDG\.E\.128|LDS\.128|VIADDMNMX\.S16x2|STG\.E\.64")
WEIGHTS = Part("weights", 256, ("HMMA", "LDGSTS"), "HMMA|LDGSTS|LDS")  # of a lane: four units

# The kernels of 16-bit elements, which training quantises, and their loops from the inside to the outside.
COUNTED = (
    (r"amax_plain<B?F16>", (Part("pieces", 64, (r"LDG\.E\.128",), r"LDG\.E\.128"),)),
    (r"amax_rotated<B?F16>", (Part("rows", 32, (r"LDG\.E\.CONSTANT",), rf"LDG\.E\.CONSTANT|{MAXIMA}"),)),
    (r"quantize_rows<B?F16, .*>", (SEGMENTS,)),
    (r"quantize_pow2_rows<.*>", (SEGMENTS,)),
    (r"quantize_tiles<B?F16, .*>", (ROWS, COLUMNS, TILE)),
    (r"quantize_(norm_|activation_|gradient_)?pow2_tiles<\w+, \d+(, 1)?>", (WHOLE_TILES,)),
    (r"quantize_nvfp4_tiles<.*>", (WHOLE_NVFP4_TILES,)),
    (r"decode_sixteens<.*>", (DECODED,)),
    (r"rebase_kernel", (DECODED,)),
    (r"weight_stream_kernel<., (true|false), 1, 4, 12>", (WEIGHTS,)),
    (r"int8_by_nibbles_kernel<.*, NibbleTile<8, .*> ?>", (PRODUCTS,)),
    (r"int4_symmetric_rows<([01]), \1, .*>", (SIXTEENS,)),
    (r"optimizer_update<\w+, \d, 0, true>", (EIGHTS,)),
)


def matches(kernel: Kernel, block: int, pattern: str) -> int:
    """How many instructions of a block match."""
    return sum(re.match(pattern, instruction.opcode) is not None for instruction in kernel.blocks[block].instructions)


def blocks_with(kernel: Kernel, loop: frozenset[int], pattern: str) -> list[int]:
    """The blocks of a loop with an instruction that matches."""
    return [block for block in sorted(loop) if matches(kernel, block, pattern)]


def of_one_way(kernel: Kernel, head: int, loop: frozenset[int], pattern: str) -> list[int]:
    """Blocks that match and can be passed in one turn: of two that exclude each other, the one that matches more often.

    If they match as often, the shorter one: it lacks what only rare elements need.
    """
    blocks = blocks_with(kernel, loop, pattern)
    blocks.sort(key=lambda block: (-matches(kernel, block, pattern), len(kernel.blocks[block].instructions)))
    bits = {block: 1 << i for i, block in enumerate(blocks)}
    ahead = reachable(kernel, head, loop, bits)
    kept: list[int] = []
    for block in blocks:
        if all(ahead[block] & bits[other] or ahead[other] & bits[block] for other in kept):
            kept.append(block)
    return kept


def reachable(kernel: Kernel, head: int, loop: frozenset[int], bits: dict[int, int]) -> dict[int, int]:
    """For each block of a loop, the bits of the blocks that it or one after it in the same turn has."""
    result = {block: bits.get(block, 0) for block in loop}
    changed = True
    while changed:
        changed = False
        for block in sorted(loop, reverse=True):
            bits_here = result[block]
            for successor in kernel.blocks[block].successors:
                if successor in loop and successor != head:
                    bits_here |= result[successor]
            changed |= bits_here != result[block]
            result[block] = bits_here
    return result


def shortest_turn(
    kernel: Kernel, head: int, loop: frozenset[int], required: list[int], free: frozenset[int]
) -> int | None:
    """Instructions of the shortest way from a loop's head back to it, through all required blocks.

    Those of `free` blocks do not count.
    """
    bits = {block: 1 << i for i, block in enumerate(required)}
    everything = (1 << len(required)) - 1
    ahead = reachable(kernel, head, loop, bits)

    def length(block: int) -> int:
        return 0 if block in free else sum(i.name != "NOP" for i in kernel.blocks[block].instructions)

    start = (head, bits.get(head, 0))
    best = {start: length(head)}
    queue = [(length(head), start)]
    while queue:
        cost, (block, seen) = heapq.heappop(queue)
        if cost > best[block, seen]:
            continue
        for successor in kernel.blocks[block].successors:
            if successor == head and seen == everything:
                return cost
            if successor not in loop or successor == head or seen | ahead[successor] != everything:
                continue
            state = (successor, seen | bits.get(successor, 0))
            if cost + length(successor) < best.get(state, cost + length(successor) + 1):
                best[state] = cost + length(successor)
                heapq.heappush(queue, (best[state], state))
    return None


def counts_of(kernel: Kernel, parts: tuple[Part, ...]) -> list[tuple[str, float]]:
    """Instructions an element of each part of a kernel."""
    loops = sorted(zip(kernel.heads, kernel.loops, strict=True), key=lambda loop: len(loop[1])) if kernel.loops else []
    result, inside, heads = [], frozenset(), []
    for part in parts:
        fits = [
            (head, loop)
            for head, loop in loops
            if all(blocks_with(kernel, loop - inside, pattern) for pattern in part.has)
        ]
        if not fits:
            continue
        smallest = [fit for fit in fits if not any(other[1] < fit[1] for other in fits)]
        head, loop = max(smallest, key=lambda fit: sum(matches(kernel, block, part.has[0]) for block in fit[1]))
        required = [b for b in of_one_way(kernel, head, loop, part.through) if b not in inside]
        required += [h for h in heads if h in loop and h not in required]
        turn = shortest_turn(kernel, head, loop, required, inside)
        if turn is not None:
            result.append((part.name, turn / part.elements))
        inside, heads = inside | loop, [*heads, head]
    return result


HEAD = ("| kernel | instructions an element | of which |", "| --- | --- | --- |")


def counted(kernel: Kernel) -> list[tuple[str, float]]:
    """Instructions an element of each part of a kernel; nothing where it is not counted."""
    parts = next((parts for name, parts in COUNTED if re.fullmatch(name, kernel.name)), ())
    return counts_of(kernel, parts) if parts else []


def row(kernel: Kernel) -> str:
    """A kernel's row of a Markdown table, or nothing where it is not counted."""
    counts = counted(kernel)
    if not counts:
        return ""
    detail = ", ".join(f"{name} {count:.1f}" for name, count in counts) if len(counts) > 1 else ""
    return f"| `{kernel.name}`, {kernel.architecture} | {sum(count for _, count in counts):.1f} | {detail} |"
