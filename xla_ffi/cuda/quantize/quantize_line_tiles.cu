// Quantisation along columns, or both ways, by the scales of lines (numerics.md 18), whose amaxes are given: one pass over
// tiles of 128 x 128 elements.
//
//   amaxes of the tile's rows and columns -> what their elements are multiplied and divided by, in shared memory
//   elements -> shared memory (16-byte copies in the background; zeros beyond the matrix)
//   rows: a thread takes 16 elements of a row, 8 threads a row -> codes straight to memory
//   columns: a thread takes 2 x 16 rows of a pair of columns -> codes to shared memory, so that the K-major lines leave in
//     128 consecutive bytes
//
// Bytes moved per element: 2 or 4 read, 1 written a direction; a line's amax is read by each of its tiles.
// Launch: blocks of 256 threads, as many as the device holds at once, each going through tiles from the matrices' end.
#include "../launch.h"
#include "line_codes.cuh"
#include "quantize_launch.cuh"
#include "quantize_lines.h"

namespace jaxlowprec {
namespace cuda {

struct LineTilesArguments {
  const void* x;
  int64_t rows, columns;
  Tiles tiles;
  bool aligned;  // rows begin at multiples of 16 bytes
  LineRule rule;
  DirectionArguments rowwise, columnwise;
};

template <class E, class Code>
struct LineTilesShared {
  Tile<E> tile;
  CodePiece<Code> codes[kTile * kTileSixteens];
  LineFactors<float> rows[kTile], columns[kTile];
};

/// A tile's work.
template <class E, class Code, bool kStochastic>
struct LineTile : TileCorner {
  const LineTilesArguments& a;
  LineTilesShared<E, Code>& shared;

  /// What the lines of one direction are quantised with: a thread has one of them.
  __device__ __forceinline__ void start(bool columnwise) const {
    const DirectionArguments& direction = columnwise ? a.columnwise : a.rowwise;
    const int i = threadIdx.x % kTile;
    if (!direction.data || i >= (columnwise ? columns_left : rows_left)) return;
    const int64_t line = (columnwise ? batch * a.columns + column : batch * a.rows + row) + i;
    const LineFactors<float> factors = factors_of_line(a.rule, as_bits(direction.tensor[line]) & kMagnitudeBits);
    (columnwise ? shared.columns : shared.rows)[i] = factors;
    if ((columnwise ? row : column) == 0) store_line_scale(a.rule.type, direction.scale, line, factors.scale);
  }

  __device__ __forceinline__ void rows() const {
    const DirectionArguments& direction = a.rowwise;
    const int sixteen = threadIdx.x % kTileSixteens;
    const int bytes = left(a.columns, column + 16 * sixteen, 16);
#pragma unroll 1
    for (int r = threadIdx.x / kTileSixteens; r < rows_left && bytes > 0; r += kTileThreads / kTileSixteens) {
      uint32_t random[4] = {}, codes[4];
      random_bytes_of<kStochastic>(direction.random, batch, row + r, column / 16 + sixteen, random);
      encode_line_sixteen<Code, kStochastic>(shared.tile.row_sixteen(r, sixteen), shared.rows[r], a.rule, random, codes);
      store_codes(direction.data + (batch * a.rows + row + r) * a.columns + column + 16 * sixteen, bytes, direction.pieces,
                  codes);
    }
  }

  __device__ __forceinline__ void columns() const {
    const int pair = threadIdx.x % kTilePairs;
#pragma unroll 1
    for (int unit = 0; unit < kUnits; ++unit) {
      const int down = threadIdx.x / kTilePairs * kUnits + unit;
      uint32_t pairs[Tile<E>::kPairWords];
      shared.tile.load_pair(16 * down, pair, pairs);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int across = 2 * pair + c;
        if (across >= columns_left || 16 * down >= rows_left) continue;
        uint32_t random[4] = {};
        random_bytes_of<kStochastic>(a.columnwise.random, batch, column + across, row / 16 + down, random);
        encode_line_sixteen<Code, kStochastic>(Tile<E>::column_sixteen(pairs, c), shared.columns[across], a.rule, random,
                                               shared.codes[column_piece<Code>(across, down)].words);
      }
    }
  }
};

/// Blocks that registers are to suffice for.
template <class E, bool kStochastic>
constexpr int kLineTileBlocks = E::kBytes == 4 ? 2
                                : kStochastic  ? 3
                                               : 4;

template <class E, class Code, bool kStochastic>
__global__ void __launch_bounds__(kTileThreads, kLineTileBlocks<E, kStochastic>)
    quantize_line_tiles(const __grid_constant__ LineTilesArguments a) {
  auto& shared = block_shared<LineTilesShared<E, Code>>();
  const auto tile_of = [&](TilePlace at) {
    return LineTile<E, Code, kStochastic>{TileCorner::of(at, a.rows, a.columns), a, shared};
  };
  const auto load = [&](TilePlace at, int) {
    if (at.batch >= a.tiles.count.batch) return;
    const auto* x = static_cast<const typename E::Storage*>(a.x) + at.batch * a.rows * a.columns;
    shared.tile.load(x, a.rows, a.columns, static_cast<int64_t>(at.down) * kTile, static_cast<int64_t>(at.across) * kTile,
                     a.aligned);
  };
  static_assert(kTileThreads == 2 * kTile, "a thread has a row or a column");
  const auto start = [&](TilePlace at, int) { tile_of(at).start(threadIdx.x >= kTile); };
  each_tile<1, false>(a.tiles, load, start, [&](TilePlace at, int) {
    const auto tile = tile_of(at);
    if (a.rowwise.data) tile.rows();
    if (a.columnwise.data) tile.columns();
    return [=] {
      if (tile.a.columnwise.data) store_column_codes<Code>(tile, tile.a.columns, tile.a.columnwise, tile.shared.codes);
    };
  });
}

cudaError_t launch_line_tiles(const QuantizeProblem& p, cudaStream_t stream) {
  const Format& f = p.format;
  if ((p.rowwise.data && !p.rowwise.tensor) || (p.columnwise.data && !p.columnwise.tensor)) return cudaErrorInvalidValue;
  LineTilesArguments a = {};
  a.x = p.x, a.rows = p.rows, a.columns = p.columns, a.rule = line_rule(f);
  a.rowwise = direction_arguments(f, p.rowwise, p.rows, p.columns);
  a.columnwise = direction_arguments(f, p.columnwise, p.columns, p.rows);
  if (!cut(p.batch, divide_up(p.rows, kTile), divide_up(p.columns, kTile), a.tiles)) return cudaErrorInvalidValue;
  return with_line_code(f.code, [&](auto code) {
    return with_element(p.type, [&](auto element) {
      using E = decltype(element);
      using Code = decltype(code);
      using Shared = LineTilesShared<E, Code>;
      static_assert(kLineTileBlocks<E, false> * (sizeof(Shared) + 1024) <= 228 * 1024,
                    "an sm_90 holds them, and needs 1 KiB");
      a.aligned = aligned(p.x, 16) && p.columns * E::kBytes % 16 == 0;
      return p.random() ? launch_over_tiles<quantize_line_tiles<E, Code, true>, Shared>(kTileThreads, a, stream)
                        : launch_over_tiles<quantize_line_tiles<E, Code, false>, Shared>(kTileThreads, a, stream);
    });
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
