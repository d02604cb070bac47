"""What each kernel needs in flight, and why where that is not the default."""

import dataclasses
import math
import re

from sass import Kernel

# 4.8 TB/s over 132 multiprocessors is 36 bytes a nanosecond each; a load takes some 650 ns under load.
NEEDED_BYTES = 24 * 1024


@dataclasses.dataclass(frozen=True)
class Need:
    """What kernels of a name need. `read_share`: of the bytes that it moves, those read; only they wait in flight.
    `memory_share`: the time that its bytes take, of the time that its instructions take where that is longer."""

    name: str  # a regular expression for the name with its template's arguments
    read_share: float = 1.0
    memory_share: float = 1.0
    in_loop: bool = False  # the kernel's work is a loop, and so must be what counts
    dynamic_shared: int = 0  # bytes, at most: sizeof of the kernel's struct Shared
    exempt: str = ""  # why nothing is needed

    @property
    def bytes(self) -> int:
        """How many a multiprocessor must have in flight."""
        return 0 if self.exempt else int(NEEDED_BYTES * self.read_share * self.memory_share)


# ElementType is 0 BF16, 1 F16, 2 F32.
NEEDS = (
    Need("amax_(plain|rotated)<.*>", in_loop=True, dynamic_shared=64),
    # Scales that are chosen or corrected: 47 or more instructions an element (check.py --count) take 0.2 ns on a
    # multiprocessor, its 2.6 bytes 0.07.
    Need(r"quantize_rows<\w+, E2M1, [2-5], .*>", memory_share=1 / 2, in_loop=True, dynamic_shared=640),
    Need("quantize_rows<.*>", in_loop=True, dynamic_shared=640),
    Need("quantize_pow2_rows<.*>", in_loop=True, dynamic_shared=1),
    Need(r"row_scaled_quantize<\w+, [3-5]>", memory_share=1 / 2, in_loop=True, dynamic_shared=544),
    Need("row_scaled_quantize<.*>", in_loop=True, dynamic_shared=544),
    # Two tiles of 32 KiB, codes of one, scales and maxima.
    Need("quantize_(norm_|activation_|gradient_)?(pow2|nvfp4)_tiles<.*>", in_loop=True, dynamic_shared=84 * 1024),
    # A tile of 64 KiB, codes, maxima and tables; of 32 KiB where elements have 16 bits, and two for gradients of two.
    Need(r"quantize_gradient_tiles<\w+, \w+, 2>", in_loop=True, dynamic_shared=86 * 1024),
    Need("quantize_(norm_|activation_|gradient_)?tiles<F32, .*>", in_loop=True, dynamic_shared=86 * 1024),
    Need("quantize_(norm_|activation_|gradient_)?tiles<.*>", in_loop=True, dynamic_shared=54 * 1024),
    # Lines that have a scale each.
    Need("line_amaxes<.*>", in_loop=True, dynamic_shared=4096),
    Need("quantize_line_rows<.*>", in_loop=True, dynamic_shared=32),
    Need("quantize_line_tiles<F32, .*>", in_loop=True, dynamic_shared=86 * 1024),
    Need("quantize_line_tiles<.*>", in_loop=True, dynamic_shared=54 * 1024),
    # Four bytes read of a sum, and two or four written.
    Need("scale_lines<2, .*>", read_share=0.5, in_loop=True, dynamic_shared=1),
    Need("scale_lines<.*>", read_share=2 / 3, in_loop=True, dynamic_shared=1),
    # Half or one byte read of each code, and 2 or 4 written for it; a few scales.
    Need("decode_sixteens<E2M1>", read_share=0.6 / 2.6, in_loop=True, dynamic_shared=1),
    Need("decode_sixteens<.*>", read_share=1 / 3, in_loop=True, dynamic_shared=1),
    # Half a byte read of each code, and one written.
    Need("(rebase|widen)_kernel", read_share=1 / 3, in_loop=True, dynamic_shared=1),
    Need(r"dequantize_kernel<E2M1, \d, [01]>", read_share=0.6 / 2.6),
    Need(r"dequantize_kernel<E2M1, \d, 2>", read_share=0.6 / 4.6),
    Need(r"dequantize_kernel<(E\dM\d|Int8), \d, [01]>", read_share=1 / 3),
    Need(r"dequantize_kernel<(E\dM\d|Int8), \d, 2>", read_share=1 / 5),
    # As many bytes read as written.
    Need("hadamard_rows_kernel<.*>", read_share=0.5),
    Need(r"hadamard_columns_kernel<\d, 16, .*>", read_share=0.5),
    Need("hadamard_columns_kernel<.*>", read_share=0.5, dynamic_shared=64 * 1024),
    Need("int4_symmetric_rows<.*, false>", read_share=0.5, in_loop=True, dynamic_shared=1),
    Need("int4_symmetric_rows<.*, true>", in_loop=True, dynamic_shared=1),
    Need("int4_rows<.*, false>", read_share=0.5),
    Need("int4_columns<.*, false>", read_share=0.5, dynamic_shared=24 * 1024),
    Need("int4_rows<.*, true>"),
    Need("int4_columns<.*, true>", dynamic_shared=24 * 1024),
    Need("int4_decode_rows<[01], .*>", read_share=0.5 / 2.5),
    Need("int4_decode_rows<2, .*>", read_share=0.5 / 4.5),
    Need("int4_decode_columns<[01], .*>", read_share=0.5 / 2.5, dynamic_shared=24 * 1024),
    Need("int4_decode_columns<2, .*>", read_share=0.5 / 4.5, dynamic_shared=24 * 1024),
    Need("int4_(decode_)?any<.*>", exempt="for groups of odd sizes and for padded lines: an element at a time"),
    # Twelve units of a warp's weights in shared memory, or four; x comes from the L2 cache.
    Need("weight_stream_kernel<.*>", in_loop=True, dynamic_shared=227 * 1024),
    # Weights of 16 columns a warp in registers; x comes from the L2 cache, through shared memory.
    Need("matmul_decode_kernel<., 1, .*>", in_loop=True, dynamic_shared=32 * 1024),
    Need("matmul_decode_kernel<., 2, .*>", in_loop=True, dynamic_shared=64 * 1024),
    # Stages of a tile's operands in shared memory.
    Need("int8_by_nibbles_kernel<.*, NibbleTile<2, .*> ?>", dynamic_shared=53 * 1024),
    Need("int8_by_nibbles_kernel<.*, NibbleTile<4, .*> ?>", dynamic_shared=51 * 1024),
    Need("int8_by_nibbles_kernel<.*, NibbleTile<8, .*> ?>", dynamic_shared=76 * 1024),
    Need(
        "(matmul_decode_sum|moments_sum|sums_sum|add_parts)_kernel",
        exempt="sums that the kernel before it wrote: in the L2 cache",
    ),
    # Producers: one operand or two read of each result, or three of two. Norms keep rows in shared memory.
    Need(r"activation_kernel<\d, Activate<\w+, false> ?>", in_loop=True, read_share=1 / 2, dynamic_shared=1),
    Need(r"activation_kernel<\d, ActivateBackward<\w+, true> ?>", in_loop=True, read_share=3 / 5, dynamic_shared=1),
    Need(r"activation_kernel<.*>", in_loop=True, read_share=2 / 3, dynamic_shared=1),
    # The same with amaxes and sums: pairs of columns kept in 16 or 32 KiB a result, sums in 2.
    Need(r"amaxed_activation_kernel<[01], Activate<\w+, false> ?>", 1 / 2, in_loop=True, dynamic_shared=19 * 1024),
    Need(r"amaxed_activation_kernel<2, Activate<\w+, false> ?>", 1 / 2, in_loop=True, dynamic_shared=35 * 1024),
    Need(r"amaxed_activation_kernel<[01], Activate<\w+, true> ?>", 2 / 3, in_loop=True, dynamic_shared=19 * 1024),
    Need(r"amaxed_activation_kernel<2, Activate<\w+, true> ?>", 2 / 3, in_loop=True, dynamic_shared=35 * 1024),
    Need(
        r"amaxed_activation_kernel<[01], ActivateBackward<\w+, false> ?>", 2 / 3, in_loop=True, dynamic_shared=19 * 1024
    ),
    Need(r"amaxed_activation_kernel<2, ActivateBackward<\w+, false> ?>", 2 / 3, in_loop=True, dynamic_shared=35 * 1024),
    Need(
        r"amaxed_activation_kernel<[01], ActivateBackward<\w+, true> ?>", 3 / 5, in_loop=True, dynamic_shared=35 * 1024
    ),
    Need(r"amaxed_activation_kernel<2, ActivateBackward<\w+, true> ?>", 3 / 5, in_loop=True, dynamic_shared=67 * 1024),
    Need("sum_over_rows_kernel<.*>", in_loop=True, dynamic_shared=3 * 1024),
    Need(r"(amaxed_)?norm_(gradient_)?kernel<\d, false, \d>", exempt="for rows of odd sizes: an element at a time"),
    Need(r"norm_kernel<.*>", in_loop=True, read_share=1 / 2, dynamic_shared=48 * 1024),
    # Of long rows a block keeps all that fits into a multiprocessor.
    Need(r"amaxed_norm_kernel<.*>", in_loop=True, read_share=1 / 2, dynamic_shared=227 * 1024),
    Need(r"norm_gradient_kernel<.*>", in_loop=True, read_share=2 / 3, dynamic_shared=227 * 1024),
    # The statistics. Of what `sums` reads, elements of 16 bits are the larger part; the window has no narrower loads.
    Need("moments_kernel<.*>", in_loop=True, dynamic_shared=96),
    Need("outliers_kernel<.*>", in_loop=True, dynamic_shared=1024),
    Need(r"sums_kernel<[01], false>", in_loop=True, dynamic_shared=16 * 1024, read_share=2 / 2.5),
    Need(r"sums_kernel<[01], true>", in_loop=True, dynamic_shared=33 * 1024, read_share=2 / 2.5),
    Need("sums_kernel<2, false>", in_loop=True, dynamic_shared=16 * 1024),
    Need("sums_kernel<2, true>", in_loop=True, dynamic_shared=33 * 1024),
    Need("vectors_kernel", exempt="1.3 KB a tensor"),
    # AdamW and Lion: more than half of what they move is read. Exponents and codes are narrower loads, not counted.
    Need("optimizer_update<.*>", read_share=0.6, in_loop=True, dynamic_shared=160),
    Need("optimizer_update_any<.*>", exempt="for rows that end with a part of a block: an element at a time"),
    Need("(swizzle|transpose_scales|pad_scales)_kernel", exempt="scales: a sixteenth of the operand's bytes or less"),
)


# The most instructions an element that kernels may take on sm_90a, a twentieth more than they do: see counts.py.
MOST_INSTRUCTIONS = {
    r"int4_symmetric_rows<([01]), \1, \d, true>": 8.0,
    r"int4_symmetric_rows<([01]), \1, \d, false>": 9.6,
    r"quantize_pow2_rows<E\dM\d, \d+>": 8.4,
    r"quantize_pow2_tiles<E2M1, \d+>": 19.2,
    r"quantize_pow2_tiles<E[45]M\d, \d+>": 16.6,
    # Besides the norm or the activation, whose loops are counted once or not at all.
    r"quantize_(norm|activation|gradient)_pow2_tiles<E2M1, \d+(, 1)?>": 20.7,
    r"quantize_(norm|activation|gradient)_pow2_tiles<E[45]M\d, \d+(, 1)?>": 18.7,
    "quantize_nvfp4_tiles<false, false>": 26.3,
    "quantize_nvfp4_tiles<false, true>": 35.7,
    "quantize_nvfp4_tiles<true, false>": 33.8,
    "quantize_nvfp4_tiles<true, true>": 43.5,
    "decode_sixteens<.*>": 6.8,
    "rebase_kernel": 5.1,
    "int8_by_nibbles_kernel<.*, (128|256), NibbleTile<8, .*> ?>": 7.7,
    "int8_by_nibbles_kernel<Int4Weight.*, 64, NibbleTile<8, .*> ?>": 9.6,
    "int8_by_nibbles_kernel<Int4Weight.*, 32, NibbleTile<8, .*> ?>": 14.8,
    "int8_by_nibbles_kernel<Mxfp4Weight, 32, NibbleTile<8, .*> ?>": 18.3,
    "optimizer_update<AdamW, [01], 0, true>": 81.0,
    "optimizer_update<AdamW, 2, 0, true>": 87.3,
    "optimizer_update<AdamW, [34], 0, true>": 86.1,
    "optimizer_update<Lion, [01], 0, true>": 50.2,
    "optimizer_update<Lion, [234], 0, true>": 56.5,
    "weight_stream_kernel<0, (true|false), 1, 4, 12>": 3.8,
    "weight_stream_kernel<1, false, 1, 4, 12>": 3.1,
}


def most_instructions(kernel: Kernel) -> float:
    """How many instructions an element a kernel may take; infinite where nothing is said of it."""
    if kernel.architecture != "sm_90a":
        return math.inf
    found = (most for name, most in MOST_INSTRUCTIONS.items() if re.fullmatch(name, kernel.name))
    return next(found, math.inf)


def need_of(name: str) -> Need | None:
    """The first of the needs whose name the kernel has."""
    return next((need for need in NEEDS if re.fullmatch(need.name, name)), None)
