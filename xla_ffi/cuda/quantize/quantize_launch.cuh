// From a QuantizeProblem to a launch of one of the kernels. Included by a source file for each type of code.
#pragma once

#include "nvfp4_tiles.cuh"
#include "pow2_tiles.cuh"
#include "quantize.h"
#include "quantize_rows.cuh"
#include "quantize_tiles.cuh"

namespace jaxlowprec {
namespace cuda {

inline DirectionArguments direction_arguments(const Format& f, const QuantizeDirection& d, int64_t lines, int64_t length) {
  const int64_t row_bytes = f.row_bytes(length), piece = f.packed() ? 8 : 16;
  const bool pieces = aligned(d.data, piece) && row_bytes % piece == 0;
  const int64_t rows = f.scale_rows(lines), columns = f.scale_columns(length);
  return {d.tensor,
          d.data,
          d.scale,
          d.random,
          row_bytes,
          rows,
          columns,
          pieces,
          f.column_major ? 1 : columns,
          f.column_major ? rows : 1};
}

template <class E, class Code>
QuantizeArguments quantize_arguments(const QuantizeProblem& p) {
  const Format& f = p.format;
  QuantizeArguments a = {};
  a.x = p.x, a.rows = p.rows, a.columns = p.columns;
  a.pieces = aligned(p.x, 16) && p.columns * E::kBytes % 16 == 0;
  a.sign_mask = p.sign_mask;
  a.scaling = f.scaling, a.scale_rule = f.scale_rule, a.mx = kMxElement<Code>;
  a.float8 = {Code::kMax, f.amax_epsilon, f.power_of_two};
  a.squares = f.tiles, a.encode_scale_given = p.encode_scale_given;
  while (1 << a.log_block < f.block) ++a.log_block;
  a.rowwise = direction_arguments(f, p.rowwise, p.rows, p.columns);
  a.columnwise = direction_arguments(f, p.columnwise, p.columns, p.rows);
  return a;
}

/// For a pass over rows only. If blocks are whole and no value depends on a row or a matrix, all rows are taken as one long
/// row.
inline QuantizeProblem as_long_rows(QuantizeProblem p) {
  const bool stochastic = p.rowwise.random.key, has_tensor = p.rowwise.tensor;
  if (stochastic || p.format.column_major) return p;
  if (!has_tensor) p.rows *= p.batch, p.batch = 1;
  if (p.columns % (p.format.packed() ? p.format.block : 16) == 0 && p.columns % p.format.block == 0)
    p.columns *= p.rows, p.rows = 1;
  return p;
}

/// The block of formats whose scales are powers of two that follow from amaxes, if the kernels for these know it; else 0.
template <class Code>
int pow2_block(const Format& f) {
  if (f.tiles) return 0;
  if (f.scaling == Scaling::kE8M0 && f.scale_rule == ScaleRule::kUp && f.block == 32) return 32;
  const bool is_pow2 = f.scaling == Scaling::kFloat32 && f.power_of_two && f.amax_epsilon == 0.0f;
  return !Code::kPacked && is_pow2 && f.block == 128 ? 128 : 0;
}

/// Calls visit with such a block, as a constant.
template <class Code, class Visit>
cudaError_t with_pow2_block(int block, Visit visit) {
  if constexpr (!Code::kPacked)
    if (block == 128) return visit(std::integral_constant<int, 128>{});
  return visit(std::integral_constant<int, 32>{});
}

/// Whether they serve rows: whole blocks, aligned, and sixteens that can be counted in 32 bits, one grid further too. Of one
/// matrix, where scales lie column by column.
template <class Code>
bool pow2_rows_serve(const QuantizeProblem& p) {
  const int64_t sixteens = p.batch * p.rows * p.columns / 16;
  return pow2_block<Code>(p.format) && p.columns % p.format.block == 0 && sixteens <= INT32_MAX && aligned(p.x, 16) &&
         aligned(p.rowwise.data, p.format.packed() ? 8 : 16) && (p.batch == 1 || !p.format.column_major);
}

template <class Code>
cudaError_t launch_pow2_rows(const QuantizeProblem& p, cudaStream_t stream) {
  const int64_t sixteens = p.batch * p.rows * p.columns / 16;
  Pow2RowsArguments a = {
      static_cast<const uint4*>(p.x), p.rowwise.data, p.rowwise.scale, static_cast<uint32_t>(sixteens), 0, {}};
  const int64_t blocks = p.columns / p.format.block;
  if (p.format.column_major) a.rows = static_cast<uint32_t>(p.rows), a.blocks = DivideBy(static_cast<uint32_t>(blocks));
  const int64_t pieces = divide_up(sixteens, kPow2RowThreads * kPow2RowsAhead);
  return with_pow2_block<Code>(p.format.block, [&](auto block) {
    return launch_over_pieces<quantize_pow2_rows<Code, block>>(pieces, kPow2RowThreads, a, stream);
  });
}

template <class E, class Code, Scales kScales, bool kStochastic>
cudaError_t launch_rows(const QuantizeProblem& problem, cudaStream_t stream) {
  if constexpr (std::is_same_v<E, BF16> && kScales == Scales::kOne && !kStochastic)
    if (pow2_rows_serve<Code>(problem)) return launch_pow2_rows<Code>(problem, stream);
  const QuantizeProblem p = as_long_rows(problem);
  QuantizeArguments a = quantize_arguments<E, Code>(p);
  while ((kTileSegments >> a.log_segments) > 1 && (kSegmentColumns << a.log_segments) < a.columns) ++a.log_segments;
  const bool tall = (kRowWarps >> a.log_segments) > 0;
  a.log_sharing = static_cast<int8_t>(tall ? a.log_segments : a.log_segments - kLogWarpSegments);
  const int64_t down = divide_up(a.rows, kTileSegments >> a.log_segments);
  if (!cut(p.batch, down, divide_up(a.columns, kSegmentColumns << a.log_segments), a.tiles)) return cudaErrorInvalidValue;
  return launch_over_tiles<quantize_rows<E, Code, kScales, kStochastic>, RowsShared<kStochastic>>(kRowThreads, a, stream);
}

/// Whether tiles are whole and aligned, so that the kernels that copy tiles ahead serve; the rows of a tile are apart by
/// less than 2^32 bytes.
inline bool whole_tiles(const QuantizeProblem& p) {
  constexpr int64_t kMost = INT32_MAX / kTile;
  const auto aligned_results = [](const QuantizeDirection& d) { return aligned(d.data, 16) && aligned(d.scale, 8); };
  return p.rows % kTile == 0 && p.columns % kTile == 0 && p.rows <= kMost && p.columns <= kMost && aligned(p.x, 16) &&
         aligned_results(p.rowwise) && aligned_results(p.columnwise);
}

/// The arguments of those kernels; `tiles` are not set.
inline WholeTilesArguments whole_tiles_arguments(const QuantizeProblem& p) {
  const Format& f = p.format;
  const auto direction = [&](const QuantizeDirection& d, int64_t length) {
    const int64_t row = f.scale_columns(length) * f.scale_bytes(), lines = p.rows * p.columns / length;
    return WholeDirection{d.tensor,
                          d.data,
                          d.scale,
                          f.row_bytes(length),
                          f.column_major ? f.scale_bytes() : row,
                          d.random,
                          f.column_major ? f.scale_bytes() * lines : f.scale_bytes(),
                          lines * row};
  };
  return {static_cast<const uint16_t*>(p.x), p.rows,     p.columns, {}, direction(p.rowwise, p.columns),
          direction(p.columnwise, p.rows),   p.sign_mask};
}

/// Launches one of them.
template <auto kKernel, class Shared, int kBlocks, class Arguments>
cudaError_t launch_whole_tiles(const QuantizeProblem& p, int threads, Arguments a, cudaStream_t stream) {
  static_assert(kBlocks * (sizeof(Shared) + 1024) <= 228 * 1024, "an sm_90 holds them, and needs 1 KiB");
  if (!cut(p.batch, p.rows / kTile, p.columns / kTile, a.tiles)) return cudaErrorInvalidValue;
  return launch_over_tiles<kKernel, Shared>(threads, a, stream);
}

/// The kernels of pow2_tiles.cuh, and those that make their elements first.
template <auto kKernel, class Code, class Arguments>
cudaError_t launch_pow2_tiles(const QuantizeProblem& p, const Arguments& a, cudaStream_t stream) {
  return launch_whole_tiles<kKernel, Pow2TilesShared<Code>, kPow2TileBlocks>(p, kPow2TileThreads, a, stream);
}

template <class E, class Code, Scales kScales, bool kStochastic, bool kRotate>
cudaError_t launch_tiles(const QuantizeProblem& p, cudaStream_t stream) {
  if constexpr (std::is_same_v<E, BF16> && kScales == Scales::kOne && !kStochastic)
    if (const int found = pow2_block<Code>(p.format); found && whole_tiles(p))
      return with_pow2_block<Code>(found, [&](auto block) {
        return launch_pow2_tiles<quantize_pow2_tiles<Code, block>, Code>(p, whole_tiles_arguments(p), stream);
      });
  if constexpr (std::is_same_v<E, BF16> && kScales == Scales::kTwoLevel)
    if (!p.format.tiles && whole_tiles(p))
      return launch_whole_tiles<quantize_nvfp4_tiles<kStochastic, kRotate>, Nvfp4TilesShared<kStochastic>, kNvfp4TileBlocks>(
          p, kNvfp4TileThreads, whole_tiles_arguments(p), stream);
  QuantizeArguments a = quantize_arguments<E, Code>(p);
  if (!cut(p.batch, divide_up(a.rows, kTile), divide_up(a.columns, kTile), a.tiles)) return cudaErrorInvalidValue;
  using Shared = TilesShared<E, Code, kScales, kStochastic>;
  static_assert(kTileBlocks<E, kScales, kStochastic> * (sizeof(Shared) + 1024) <= 228 * 1024,
                "an sm_90 holds them, and needs 1 KiB");
  return launch_over_tiles<quantize_tiles<E, Code, kScales, kStochastic, kRotate>, Shared>(kTileThreads, a, stream);
}

template <class E, class Code, Scales kScales, bool kStochastic>
cudaError_t launch_quantize(const QuantizeProblem& p, cudaStream_t stream) {
  if (!p.columnwise.data && !p.format.tiles) return launch_rows<E, Code, kScales, kStochastic>(p, stream);
  if constexpr (kIsTwoLevel<kScales>)
    if (p.rotate_columns) return launch_tiles<E, Code, kScales, kStochastic, true>(p, stream);
  return launch_tiles<E, Code, kScales, kStochastic, false>(p, stream);
}

template <class Code, Scales kScales>
cudaError_t quantize_codes(const QuantizeProblem& p, cudaStream_t stream) {
  return with_element(p.type, [&](auto element) {
    using E = decltype(element);
    if constexpr (kScales == Scales::kTwoLevelWithRoom)
      return launch_quantize<E, Code, kScales, true>(p, stream);
    else if (p.random())
      return launch_quantize<E, Code, kScales, true>(p, stream);
    else
      return launch_quantize<E, Code, kScales, false>(p, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
