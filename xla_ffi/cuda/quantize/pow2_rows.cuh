// Quantisation of bfloat16 along rows of whole blocks to formats whose scales are powers of two: all rows are one long row
// of sixteens. Straight from memory to registers, sixteen elements a thread, two of them on their way.
//
// Bytes moved per element: 2 read; 1/2 or 1 written, and the scales: 1/32. Launch: blocks of 256 threads, as many as the
// device holds at once.
#pragma once

#include "quantize_scales.cuh"

namespace jaxlowprec {
namespace cuda {

// Blocks whose scales are powers of two (MX by the rule "up", Float8Block with power_of_two), of bfloat16: numerics.md 5, 6.
//
// Scaling by a power of two is exact in bfloat16, so two elements stay in a word from memory to codes, of which each
// instruction serves both:
//   signs: z = x + (2^-126 - 2^-133): what is zero or subnormal becomes positive; a sum with any other number keeps its
//   sign,
//     and its value unless its code is 0 anyway
//   scale: amax's exponent after adding a carry to its mantissa; no division
//   E2M1: the least of three lines from 128 on, where bfloat16's steps are 1: codes are the low bits of a half
//   8 bits: the hardware's conversion of z times the scale, where it has one
// Blocks that are not finite, hold nothing from 2^-87 on (2^-85 of E5M2), or reach 2^127 are rare: their elements are first
// multiplied exactly, and then have a scale of 1.

/// A number in both halves of a word.
template <uint32_t kHalf>
constexpr uint32_t kTwice = kHalf * 0x00010001u;
constexpr uint32_t kBf16One = kTwice<0x3F80u>;

/// z of two elements.
JLP_DEVICE uint32_t positive_zeros(uint32_t x) { return multiply_add_bf16x2(x, kBf16One, kTwice<0x007Fu>); }

/// Of two blocks, one in each half: the scales as E8M0 bytes, and what their elements are multiplied by, 2^(127 - byte).
struct PairScale {
  uint32_t stored, encode;
};

/// The scales of blocks with these amaxes, bfloat16 without signs.
template <class Code>
JLP_DEVICE PairScale pair_scale(uint32_t amaxes) {
  constexpr uint32_t kLargest = Code::kLargestExponent;
  constexpr uint32_t kMantissa = Code::kLargestCode & ((1 << Code::kMantissaBits) - 1);  // of the largest element
  constexpr uint32_t kCarry = 0x7Fu - (kMantissa << (7 - Code::kMantissaBits));          // what has a larger one, goes up
  const uint32_t exponents = (amaxes >> 7) & 0x00FF00FFu, up = ((amaxes + kTwice<kCarry>) >> 7) & 0x01FF01FFu;
  const uint32_t stored = __vminu2(__vmaxu2(up, kTwice<kLargest + 1>) - kTwice<kLargest>, exponents);
  return {stored, (kTwice<254> - stored) << 7};
}

/// Whether one of the two blocks is rare.
template <class Code>
JLP_DEVICE bool is_rare(uint32_t amaxes) {
  constexpr uint32_t kLeast = Code::kLargestExponent > 8 ? 0x1500u : 0x1400u;  // bits of the least amax that is not
  return (((amaxes + kTwice<0x0100u>) | (amaxes - kTwice<kLeast>)) & 0x80008000u) != 0;
}

/// Multiplies the elements of two blocks, of which one is rare; they are zero where they are subnormal, or their block is
/// not finite. kFloat32: a block of zeros has the scale 1, not 2^-127.
template <bool kFloat32, int kCount>
JLP_DEVICE void scale_rare(uint32_t (&words)[kCount], uint32_t amaxes, PairScale& scale) {
  const uint32_t halves[2] = {amaxes & 0xFFFFu, amaxes >> 16}, masks[2] = {0xFFFFu, 0xFFFF0000u};
  uint32_t finite[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    finite[i] = halves[i] < 0x7F80u ? masks[i] : 0u;
    if (kFloat32 && halves[i] < 0x80u)
      scale = {(scale.stored & ~masks[i]) | (kTwice<127> & masks[i]), (scale.encode & ~masks[i]) | (kBf16One & masks[i])};
  }
#pragma unroll
  for (uint32_t& word : words)
    word = multiply_bf16x2(word & ((word & 0x7F80u ? finite[0] : 0u) | (word & 0x7F800000u ? finite[1] : 0u)), scale.encode);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (!finite[i]) scale.stored |= kTwice<kE8M0NaN> & masks[i];
  scale.encode = kBf16One;
}

/// The float32 of an E8M0 byte.
JLP_DEVICE uint32_t float_of_e8m0(uint32_t byte) { return byte == kE8M0NaN ? kNaNBits : byte << 23; }

/// The maximum of both halves, in both.
JLP_DEVICE uint32_t max_of_halves(uint32_t pair) { return __vmaxu2(pair, __byte_perm(pair, 0u, 0x1032)); }

// --- E2M1

/// Twice, once and half what two elements are multiplied by.
struct PairLines {
  uint32_t two, one, half;
};
JLP_DEVICE PairLines lines_of(uint32_t encode) { return {encode + kTwice<0x80u>, encode, encode - kTwice<0x80u>}; }

constexpr uint32_t kBf16Of128 = kTwice<0x4300u>;

/// E2M1 codes of two magnitudes, plus kBf16Of128. No scaled magnitude exceeds 6, and all products are exact.
JLP_DEVICE uint32_t e2m1_codes(uint32_t magnitudes, const PairLines& by) {
  return __vimin3_u16x2(multiply_add_bf16x2(magnitudes, by.two, kBf16Of128),
                        multiply_add_bf16x2(magnitudes, by.one, kBf16Of128 + kTwice<2>),
                        multiply_add_bf16x2(magnitudes, by.half, kBf16Of128 + kTwice<4>));
}

/// The codes of eight elements that lie in four words.
JLP_DEVICE uint32_t e2m1_of_eight(const uint32_t* magnitudes, const uint32_t* z, const PairLines& by) {
  const uint32_t first = __byte_perm(e2m1_codes(magnitudes[0], by), e2m1_codes(magnitudes[1], by), 0x6240);
  const uint32_t second = __byte_perm(e2m1_codes(magnitudes[2], by), e2m1_codes(magnitudes[3], by), 0x6240);
  const uint32_t even = __byte_perm(first, second, 0x5410), odd = __byte_perm(first, second, 0x7632);
  return with_signs(even + 16u * odd, z);
}

/// The codes of four words, rows r to r + 3 of two columns: 16 bits of each column's line. `signs`: those of z.
JLP_DEVICE uint32_t e2m1_of_four_rows(const uint32_t* magnitudes, uint32_t signs, const PairLines& by) {
  return e2m1_codes(magnitudes[0], by) + 16u * e2m1_codes(magnitudes[1], by) + 256u * e2m1_codes(magnitudes[2], by) +
         4096u * e2m1_codes(magnitudes[3], by) + (signs - 0x1111u * kBf16Of128);
}

// --- 8 bits

/// The codes of four numbers that need no saturation.
template <class Code>
JLP_DEVICE uint32_t float8_of_four(float a, float b, float c, float d) {
  if constexpr (kHasFloat8Conversion<Code>) {
    return float8x2_hardware<Code>(a, b) | float8x2_hardware<Code>(c, d) << 16;
  } else {
    const auto code = [](float y) {
      return (float8_magnitude_bits<Code>(fabsf(y)) - kFloat8Offset<Code>) | ((as_bits(y) >> 24) & 0x80u);
    };
    return code(a) | code(b) << 8 | code(c) << 16 | code(d) << 24;
  }
}

constexpr int kPow2RowThreads = 256;
constexpr int kPow2RowsAhead = 2;

/// Division of numbers below 2^28 by a number, as a product.
struct DivideBy {
  uint32_t divisor = 1, factor = 1u << 28, shift = 28;

  DivideBy() = default;
  explicit DivideBy(uint32_t divisor) : divisor(divisor) {
    while ((uint64_t{1} << (shift - 28)) < divisor) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor);  // at most 2^29
  }
  JLP_DEVICE uint32_t quotient(const DivideBy& by, uint32_t n) {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * by.factor >> by.shift);
  }
};

struct Pow2RowsArguments {
  const uint4* x;  // two of a sixteen
  uint8_t *data, *scale;
  uint32_t sixteens;
  uint32_t rows = 0;  // of which scales lie column by column; 0: row by row
  DivideBy blocks;    // of a row, then
};

/// Codes of a sixteen, and its block's scale in the low half; `reload` gives its words again. A block has 16 * kLanes
/// elements, and its other sixteens are the neighbouring lanes'.
template <class Code, int kLanes, class Reload>
JLP_DEVICE PairScale pow2_sixteen(const Sixteen<BF16>& x, uint32_t (&codes)[kCodeWords<Code>], Reload reload) {
  constexpr bool kFloat32 = kLanes == 8;
  uint32_t z[8], magnitudes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) z[i] = positive_zeros(x.words[i]), magnitudes[i] = x.words[i] & 0x7FFF7FFFu;
  uint32_t amax =
      __vmaxu2(__vimax3_u16x2(__vimax3_u16x2(magnitudes[0], magnitudes[1], magnitudes[2]), magnitudes[3], magnitudes[4]),
               __vimax3_u16x2(magnitudes[5], magnitudes[6], magnitudes[7]));
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2)
    amax = __vmaxu2(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
  amax = max_of_halves(amax);
  PairScale scale = pair_scale<Code>(amax);
  if (is_rare<Code>(amax)) {
    Sixteen<BF16> again = reload();
    scale_rare<kFloat32>(again.words, amax, scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i] = again.words[i], magnitudes[i] = again.words[i] & 0x7FFF7FFFu;
  }
  if constexpr (Code::kPacked) {
    const PairLines lines = lines_of(scale.encode);
#pragma unroll
    for (int half = 0; half < 2; ++half) codes[half] = e2m1_of_eight(magnitudes + 4 * half, z + 4 * half, lines);
  } else {
    uint32_t y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = multiply_bf16x2(z[i], scale.encode);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      codes[i] =
          float8_of_four<Code>(BF16::low(y[2 * i]), BF16::high(y[2 * i]), BF16::low(y[2 * i + 1]), BF16::high(y[2 * i + 1]));
  }
  return scale;
}

/// Where the scale of a block lies, counted along the rows.
JLP_DEVICE uint32_t pow2_scale_place(const Pow2RowsArguments& a, uint32_t block) {
  if (a.rows == 0) return block;
  const uint32_t row = DivideBy::quotient(a.blocks, block);
  return (block - row * a.blocks.divisor) * a.rows + row;
}

/// kBlock: 32 (MX) or 128 (Float8Block).
template <class Code, int kBlock>
static __global__ void __launch_bounds__(kPow2RowThreads, 5) quantize_pow2_rows(const Pow2RowsArguments a) {
  constexpr int kLanes = kBlock / 16;
  constexpr uint32_t kPiece = kPow2RowThreads * kPow2RowsAhead;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kPiece + threadIdx.x; first - threadIdx.x < a.sixteens; first += gridDim.x * kPiece) {
    Sixteen<BF16> x[kPow2RowsAhead] = {};
#pragma unroll
    for (int step = 0; step < kPow2RowsAhead; ++step)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (first + step * kPow2RowThreads < a.sixteens)
          set_piece(x[step], i, __ldg(a.x + 2 * int64_t{first + step * kPow2RowThreads} + i));
#pragma unroll
    for (int step = 0; step < kPow2RowsAhead; ++step) {
      const uint32_t at = first + step * kPow2RowThreads;
      uint32_t codes[kCodeWords<Code>];
      const PairScale scale = pow2_sixteen<Code, kLanes>(x[step], codes, [&] { return x[step]; });
      if (at >= a.sixteens) continue;
      if (threadIdx.x % kLanes == 0) {
        if constexpr (kBlock == 32)
          a.scale[at / kLanes] = static_cast<uint8_t>(scale.stored);
        else
          reinterpret_cast<uint32_t*>(a.scale)[pow2_scale_place(a, at / kLanes)] = float_of_e8m0(scale.stored & 0xFFu);
      }
      if constexpr (Code::kPacked)
        reinterpret_cast<uint2*>(a.data)[at] = {codes[0], codes[1]};
      else
        reinterpret_cast<uint4*>(a.data)[at] = {codes[0], codes[1], codes[2], codes[3]};
    }
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
