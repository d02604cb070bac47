// Quantisation of bfloat16 along rows of whole blocks to formats whose scales are powers of two: all rows are one long row
// of sixteens. Straight from memory to registers, sixteen elements a thread, two of them on their way.
//
// Bytes moved per element: 2 read; 1/2 or 1 written, and the scales: 1/32. Launch: blocks of 256 threads, as many as the
// device holds at once.
#pragma once

#include "pow2.cuh"

namespace jaxlowprec {
namespace cuda {

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
