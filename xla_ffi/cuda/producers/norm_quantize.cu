// Norms that are quantised and not stored, to MXFP8, MXFP4 and Float8Block: bytes are those of the norm's kernel and then
// the quantisation's (numerics.md 12.2 and 4 to 7).
//
// Data flow: norm_kernel finds the numbers of all rows, and stores x + residual where there is one. Then the tiles of
// quantize_tiles.cuh, or of pow2_tiles.cuh where they serve: each thread normalises, where they lie in shared memory, the
// chunks of 16 bytes that it has copied there, with the weights of its chunk's columns in registers -> rounded to the
// elements' type -> quantised.
//
// Bytes moved per element of 16 bits: x twice, 4, and what quantisation writes; with a residual 4 more. The norm stored and
// quantised moves 2 more. A block with all columns of a tile's rows would read x once, but 132 blocks of 128 rows of 4096
// columns are 138 MB, which no L2 cache holds until the second reading.
// Launch: as those.
#include "../launch.h"
#include "../quantize/pow2_tiles.cuh"
#include "../quantize/quantize_launch.cuh"
#include "../quantize/quantize_tiles.cuh"
#include "pieces.cuh"

namespace jaxlowprec {
namespace cuda {

/// Base: QuantizeArguments or WholeTilesArguments.
template <class Base>
struct NormQuantizeArguments : Base {
  const float *weight, *beta;   // [batch, columns]; beta null: none
  const float *mean, *inverse;  // [batch, rows]; mean null: none
  bool whole;                   // rows of all these arrays are pieces of 16 bytes, and aligned
};

/// Up to P::kCount numbers; zeros in place of those that do not exist.
template <class P>
JLP_DEVICE void load_some(const float* from, int64_t index, int count, bool whole, typename P::Values& v) {
  if (whole && count >= P::kCount) return P::load_floats(from, index / P::kCount, v);
#pragma unroll
  for (int i = 0; i < P::kCount; ++i) v[i] = i < count ? __ldg(from + index + i) : 0.0f;
}

/// Normalises what this thread has copied of a tile; what is beyond the matrix stays zero. Chunks: Tile or OwnChunks.
template <class E, class Arguments, class Chunks>
JLP_DEVICE void norm_tile(const Arguments& a, const TileCorner& at, Chunks& tile) {
  using P = Piece<E::kType, true>;
  const int first = Chunks::own_chunk() * P::kCount, count = at.columns_left - first;
  if (count <= 0) return;
  const int64_t parameters = at.batch * a.columns + at.column + first, line = at.batch * a.rows + at.row;
  typename P::Values weight, beta = {};
  load_some<P>(a.weight, parameters, count, a.whole, weight);
  if (a.beta) load_some<P>(a.beta, parameters, count, a.whole, beta);
#pragma unroll 2
  for (int r = Chunks::own_row(); r < at.rows_left; r += Chunks::kOwnRows) {
    uint4& piece = tile.own(r);
    const float inverse = __ldg(a.inverse + line + r), mean = a.mean ? __ldg(a.mean + line + r) : 0.0f;
    typename P::Values v;
    P::decode(piece, v);
#pragma unroll
    for (int i = 0; i < P::kCount; ++i) {
      v[i] = ((v[i] - mean) * inverse) * weight[i];  // v - 0 is v, of either sign
      if (a.beta) v[i] = v[i] + beta[i];
      if (i >= count) v[i] = 0.0f;
    }
    piece = P::encode(v);
  }
}

/// As those of quantize_tiles, but three where that has four and the code would spill: everywhere but on sm_90.
template <class E, bool kStochastic>
constexpr int kNormTileBlocks =
    kArch != 900 && kTileBlocks<E, Scales::kOne, kStochastic> > 3 ? 3 : kTileBlocks<E, Scales::kOne, kStochastic>;

template <class E, class Code, bool kStochastic>
__global__ void __launch_bounds__(kTileThreads, kNormTileBlocks<E, kStochastic>)
    quantize_norm_tiles(const __grid_constant__ NormQuantizeArguments<QuantizeArguments> a) {
  quantize_each_tile<E, Code, Scales::kOne, kStochastic, false, 1>(
      a.tiles, &a, [&](const TileCorner& at, auto& tiles) { norm_tile<E>(a, at, tiles[0]); });
}

template <class Code, int kBlock>
__global__ void __launch_bounds__(kPow2TileThreads, kPow2TileBlocks)
    quantize_norm_pow2_tiles(const __grid_constant__ NormQuantizeArguments<WholeTilesArguments> a) {
  quantize_each_pow2_tile<Code, kBlock, 1>(
      a.tiles, &a, [&](TilePlace at, const auto& tiles) { norm_tile<BF16>(a, TileCorner::of_whole(at), tiles[0]); });
}

namespace {

/// Sets what the norm needs beside the elements, whose rows are whole pieces or not.
template <class Arguments>
void set_operands(const NormQuantizeProblem& p, bool pieces, Arguments& a) {
  a.weight = p.weight, a.beta = p.beta, a.mean = p.mean, a.inverse = p.inverse;
  a.whole = pieces && aligned(p.weight, 16) && aligned(p.beta, 16);
}

template <class E, class Code, bool kStochastic>
cudaError_t launch_tiles_of_norm(const NormQuantizeProblem& p, cudaStream_t stream) {
  QuantizeProblem q = p.quantize;
  q.x = p.total ? p.total : p.x;
  if constexpr (std::is_same_v<E, BF16> && !kStochastic)
    if (const int found = pow2_block<Code>(q.format); found && whole_tiles(q)) {
      NormQuantizeArguments<WholeTilesArguments> a{};
      static_cast<WholeTilesArguments&>(a) = whole_tiles_arguments(q);
      set_operands(p, true, a);
      return with_pow2_block<Code>(
          found, [&](auto block) { return launch_pow2_tiles<quantize_norm_pow2_tiles<Code, block>, Code>(q, a, stream); });
    }
  NormQuantizeArguments<QuantizeArguments> a{};
  static_cast<QuantizeArguments&>(a) = quantize_arguments<E, Code>(q);
  set_operands(p, a.pieces, a);
  if (!cut(q.batch, divide_up(q.rows, kTile), divide_up(q.columns, kTile), a.tiles)) return cudaErrorInvalidValue;
  using Shared = TilesShared<E, Code, Scales::kOne, kStochastic>;
  return launch_over_tiles<quantize_norm_tiles<E, Code, kStochastic>, Shared>(kTileThreads, a, stream);
}

}  // namespace

cudaError_t launch(const NormQuantizeProblem& p, cudaStream_t stream) {
  if (!random_fits(p.quantize)) return cudaErrorInvalidValue;
  const cudaError_t error = launch(static_cast<const NormProblem&>(p), stream);
  if (error != cudaSuccess || p.batch == 0 || p.rows == 0 || p.columns == 0) return error;
  return with_float(p.quantize.format.code, [&](auto code) {
    return with_element(p.type, [&](auto element) {
      using Code = decltype(code);
      using E = decltype(element);
      return p.quantize.stochastic() ? launch_tiles_of_norm<E, Code, true>(p, stream)
                                     : launch_tiles_of_norm<E, Code, false>(p, stream);
    });
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
