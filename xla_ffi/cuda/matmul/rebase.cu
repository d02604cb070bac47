// MXFP4 to E4M3 with scales of 128 (rebase.h), without a conversion: E2M1 times 2^d has eight magnitudes, whose E4M3 codes
// are the eight bytes of two registers, from which PRMT picks by the E2M1 codes themselves.
//
// Data flow: a lane has 16 codes of each of four blocks of 128, 8 bytes read and 16 written, so that a warp's accesses are
// whole sectors of four rows: with 16 bytes read a lane would write 32, half a sector at a time. Eight lanes have a block of
// 128 and find its scale by shuffles. A thread block has 32 rows, whose scales are 128 neighbouring bytes.
// Bytes moved per element: 1/2 + 1/32 read, 1 + 1/32 written. Launch: tiles of 32 rows by 512 columns.
#include "../dequantize.cuh"
#include "../launch_grid.cuh"
#include "rebase.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kRebaseThreads = 256;
constexpr int kRebaseRows = kRebaseThreads / 8;  // of a tile
constexpr int kRebaseAhead = 4;                  // blocks of 128 in flight a thread

struct RebaseArguments {
  const uint8_t *data, *scale;
  uint8_t* codes;
  uint32_t* scales;
  uint32_t rows, sixteens, blocks;  // of a row of E2M1 codes; of 128, of a row of the result
  uint32_t scale_stride;            // from the scales of a row, or of rows that share them, to the next
  int32_t row_shift;                // log2 of the rows that share a scale
  Tiles tiles;                      // of one matrix
};

/// The E4M3 codes of 0 .5 1 1.5 | 2 3 4 6 times 2^(u - 6), a byte each. Where u is above 12, only that of 0 means anything.
JLP_DEVICE uint2 rebased_magnitudes(int u) {
  const uint32_t exponents = static_cast<uint32_t>(u) * 0x08080808u;
  if (u > 0) return {(exponents & 0xFFFFFF00u) + 0x0C080000u, exponents + 0x1C181410u};
  switch (u) {  // at least 0.5 is subnormal in E4M3
    case 0: return {0x0C080400u, 0x1C181410u};
    case -1: return {0x06040200u, 0x14100C08u};
    case -2: return {0x03020100u, 0x0C080604u};
    case -3: return {0x02010000u, 0x06040302u};  // from here on some are rounded
    case -4: return {0x01000000u, 0x03020201u};
    case -5: return {0x00000000u, 0x02010100u};
    case -6: return {0x00000000u, 0x01000000u};
    default: return {0x00000000u, 0x00000000u};
  }
}

/// Eight E2M1 codes as E4M3, by the codes of their magnitudes.
JLP_DEVICE uint2 rebased(uint32_t codes, uint2 magnitudes) {
  const uint32_t even = codes << 4;  // the signs of codes 0, 2, 4 and 6 at the top of each byte, as the others' in `codes`
  const uint32_t low = __byte_perm(magnitudes.x, magnitudes.y, codes & 0x7777u);
  const uint32_t high = __byte_perm(magnitudes.x, magnitudes.y, codes >> 16 & 0x7777u);
  return {and_or(__byte_perm(even, codes, 0x5140), 0x80808080u, low),
          and_or(__byte_perm(even, codes, 0x7362), 0x80808080u, high)};
}

static __global__ void __launch_bounds__(kRebaseThreads, 4) rebase_kernel(const RebaseArguments a) {
  constexpr uint32_t kLeastScale = 7;  // whose 64th part is 2^-126
  const uint32_t lane = threadIdx.x % 8;
  for (TilePlace at = Tiles::first(a.tiles); at.batch < a.tiles.count.batch; at = Tiles::next(a.tiles, at)) {
    const uint32_t row = at.down * kRebaseRows + threadIdx.x / 8, block = at.across * kRebaseAhead;  // the first of its 128s
    const uint32_t sixteen = block * 8 + lane;
    const bool inside = row < a.rows;
    const uint2* from = reinterpret_cast<const uint2*>(a.data) + (uint64_t{row} * a.sixteens + sixteen);
    const uint8_t* from_scale = a.scale + (uint64_t{row >> a.row_shift} * a.scale_stride + sixteen / 2);
    uint4* to = reinterpret_cast<uint4*>(a.codes) + (uint64_t{row} * a.blocks * 8 + sixteen);
    uint32_t* to_scale = a.scales + (uint64_t{block} * a.rows + row);
    uint2 codes[kRebaseAhead] = {};
    uint32_t scales[kRebaseAhead] = {};
#pragma unroll
    for (int i = 0; i < kRebaseAhead; ++i)
      if (inside && sixteen + 8 * i < a.sixteens) codes[i] = __ldg(from + 8 * i), scales[i] = __ldg(from_scale + 4 * i);
#pragma unroll
    for (int i = 0; i < kRebaseAhead; ++i) {
      const bool zero = ((codes[i].x | codes[i].y) & 0x77777777u) == 0;
      uint32_t largest = zero && scales[i] != kE8M0NaN ? 0 : scales[i];
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2)
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
      if (!inside || block + i >= a.blocks) continue;
      const uint32_t top = max(largest, kLeastScale);
      const uint2 magnitudes = rebased_magnitudes(static_cast<int>(scales[i] + 12) - static_cast<int>(top));
      const uint2 low = rebased(codes[i].x, magnitudes), high = rebased(codes[i].y, magnitudes);
      to[8 * i] = make_uint4(low.x, low.y, high.x, high.y);
      if (lane == 0) to_scale[uint64_t{a.rows} * i] = largest == kE8M0NaN ? kNaNBits : (top - 6) << 23;
    }
  }
}

cudaError_t launch(const RebaseProblem& p, cudaStream_t stream) {
  const MatmulOperand& operand = p.operand;
  const Format& f = operand.format;
  const int64_t width = rebased_width(operand.columns);
  if (!rebase_supports(operand) || p.rows > INT32_MAX || width > INT32_MAX || !aligned(operand.data, 8) ||
      !aligned(p.codes, 16))
    return cudaErrorInvalidValue;
  if (p.rows * width == 0) return cudaSuccess;
  RebaseArguments a{};
  a.data = operand.data, a.scale = operand.scale, a.codes = p.codes, a.scales = reinterpret_cast<uint32_t*>(p.scales);
  a.rows = static_cast<uint32_t>(p.rows), a.sixteens = static_cast<uint32_t>(operand.columns / 16);
  a.blocks = static_cast<uint32_t>(width / 128), a.scale_stride = static_cast<uint32_t>(f.scale_columns(operand.columns));
  a.row_shift = f.tiles ? log2_of(f.block) : 0;
  if (!cut(1, divide_up(p.rows, kRebaseRows), divide_up(a.blocks, kRebaseAhead), a.tiles)) return cudaErrorInvalidValue;
  struct Nothing {};
  return launch_over_tiles<rebase_kernel, Nothing>(kRebaseThreads, a, stream);
}

// --- with its own scales
//
// All rows are one of sixteens: a thread has four, 8 bytes read and 16 written. Bytes moved per element: 1/2 read, 1
// written.

constexpr int kWidenAhead = 4;

struct WidenArguments {
  const uint2* data;
  uint4* codes;
  uint32_t sixteens;
};

static __global__ void __launch_bounds__(kRebaseThreads, 4) widen_kernel(const WidenArguments a) {
  constexpr uint32_t kPiece = kRebaseThreads * kWidenAhead;
  const uint2 magnitudes = rebased_magnitudes(6);  // times 1
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kPiece + threadIdx.x; first < a.sixteens; first += gridDim.x * kPiece) {
    uint2 codes[kWidenAhead] = {};
#pragma unroll
    for (int i = 0; i < kWidenAhead; ++i)
      if (first + i * kRebaseThreads < a.sixteens) codes[i] = __ldg(a.data + first + i * kRebaseThreads);
#pragma unroll
    for (int i = 0; i < kWidenAhead; ++i) {
      if (first + i * kRebaseThreads >= a.sixteens) continue;
      const uint2 low = rebased(codes[i].x, magnitudes), high = rebased(codes[i].y, magnitudes);
      a.codes[first + i * kRebaseThreads] = make_uint4(low.x, low.y, high.x, high.y);
    }
  }
}

cudaError_t launch(const WidenProblem& p, cudaStream_t stream) {
  const int64_t sixteens = p.rows * p.operand.columns / 16;
  if (!rebase_supports(p.operand) || sixteens > INT32_MAX || !aligned(p.operand.data, 8) || !aligned(p.codes, 16))
    return cudaErrorInvalidValue;
  if (sixteens == 0) return cudaSuccess;
  const WidenArguments a = {reinterpret_cast<const uint2*>(p.operand.data), reinterpret_cast<uint4*>(p.codes),
                            static_cast<uint32_t>(sixteens)};
  return launch_over_pieces<widen_kernel>(divide_up(sixteens, kRebaseThreads * kWidenAhead), kRebaseThreads, a, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
