// Quantisation only along rows, for blocks of one row: no shared memory for elements, every thread takes 16 of them from
// memory to its registers.
//
//   elements (32 bytes per thread, 64 of float32) -> block amax over 1, 2 or 8 lanes -> scale -> codes (8 or 16 bytes a
//   thread)
//
// Bytes moved per element: 2 or 4 read; 1/2 or 1 written and the scales: 1/16 (NVFP4), 1/32 (MX) or 1/32 (Float8Block).
// Launch: blocks of 256 threads, as many as the device holds at once, each going from the matrices' end through tiles of 32
// segments of 512 columns; a segment belongs to a warp. A tile is wide, where rows are long or can be taken for one, or
// tall.
#pragma once

#include "eden.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kSegmentColumns = 512;
constexpr int kTileSegments = 32;
constexpr int kLogWarpSegments = 2;
constexpr int kWarpSegments = 1 << kLogWarpSegments;
static_assert(kWarpSegments * kRowWarps == kTileSegments, "a warp's share of a tile");
constexpr int kSegmentsAhead = 2;  // loaded before the first is used

/// Sixteens of a row, `step` columns from one to the next, zeros beyond its `columns`. whole: rows are sixteens that begin
/// at multiples of 16 bytes; pieces: they begin at such.
///
/// Where they are whole, every load is issued before any is used: there is no branch between them.
template <class E, int kHeld>
JLP_DEVICE void load_held(const typename E::Storage* row, int64_t column, int64_t step, int64_t columns, bool whole,
                          bool pieces, Sixteen<E> (&held)[kHeld]) {
  if (whole) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const auto* from = reinterpret_cast<const uint4*>(row + column + j * step);
      const bool exists = column + j * step < columns;
#pragma unroll
      for (int i = 0; i < Sixteen<E>::kPieces; ++i) set_piece(held[j], i, exists ? __ldg(from + i) : uint4{0, 0, 0, 0});
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j)
    held[j] = load_sixteen<E>(row + column + j * step, left(columns, column + j * step, 16), pieces);
}

template <bool kStochastic>
struct RowsShared {
  EncodeTable table;
  RoundKeys<kStochastic> keys;
};

/// Blocks that registers are to suffice for.
template <class E, Scales kScales, bool kStochastic>
constexpr int kRowBlocks = kIsChosen<kScales> || kEden<kScales, kStochastic>
                               ? 2
                               : (E::kBytes == 4 ? 3 : 4) - (kStochastic && !kIsTwoLevel<kScales> ? 1 : 0);

/// Where a thread's 16 elements are and where its results go.
template <class E>
struct RowCursor {
  const typename E::Storage* x;
  uint8_t *data, *scale;
  int64_t row, column;
};

template <class E, class Code, Scales kScales, bool kStochastic>
struct RowQuantizer {
  const QuantizeArguments& a;
  const RowsShared<kStochastic>& shared;
  Matrix<kScales> matrix;

  __device__ __forceinline__ RowCursor<E> cursor(uint32_t batch, int64_t row, int64_t column) const {
    const DirectionArguments& direction = a.rowwise;
    const int64_t line = batch * a.rows + row;
    const int64_t scale = scale_place<kScales>(direction, batch, row, column >> log_block<kScales>(a));
    return {static_cast<const typename E::Storage*>(a.x) + line * a.columns + column,
            direction.data + line * direction.row_bytes + code_bytes<Code>(column),
            direction.scale + (byte_scales<kScales>(a) ? scale : 4 * scale), row, column};
  }

  /// Of the sixteen at `at`, where `count` elements and `bytes` of codes exist.
  __device__ __forceinline__ void quantize(const RowCursor<E>& at, const Sixteen<E>& sixteen, int count, int bytes,
                                           bool pieces) const {
    const int lanes = sixteens_in_block<kScales>(a);  // that share a block; 0: the tensor
    const uint32_t amax = max_of_lanes(magnitude_bits<E>(sixteen.words), lanes);
    BlockScale scale = scale_of(matrix, a, sixteen, amax, shared.table);
    correct_scale<kScales>(sixteen, shared.keys, a.rowwise.random, at.row, at.column / 16, count > 0, scale);
    if (lanes > 0 && threadIdx.x % lanes == 0 && count > 0) store_scale<kScales>(a, at.scale, 0, scale.stored);
    uint32_t random[4] = {}, codes[kCodeWords<Code>];
    constexpr bool kRandomCodes = kStochastic && !kEden<kScales, kStochastic>;
    if constexpr (kRandomCodes)
      if (count > 0) random_bytes(shared.keys, a.rowwise.random, at.row, at.column / 16, random);
    quantize_sixteen<Code, kScales, kRandomCodes>(a, sixteen, scale, amax, random, codes);
    store_codes(at.data, bytes, pieces, codes);
  }
};

template <class E, class Code, Scales kScales, bool kStochastic>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<E, kScales, kStochastic>)
    quantize_rows(const QuantizeArguments a) {
  constexpr int kCodeBytes = 4 * kCodeWords<Code>;
  RowsShared<kStochastic>& shared = block_shared<RowsShared<kStochastic>>();
  const DirectionArguments& direction = a.rowwise;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  RowQuantizer<E, Code, kScales, kStochastic> quantizer = {a, shared, {}};

  // From one of a warp's segments to its next.
  const bool tall = (kRowWarps >> a.log_segments) > 0;
  const int step_rows = tall ? kRowWarps >> a.log_segments : 0, step_columns = tall ? 0 : kSegmentColumns << a.log_sharing;
  const auto step = [&](int64_t row_size, int64_t column_size) { return step_rows * row_size + column_size; };
  const int64_t x_step = step(a.columns, step_columns),
                data_step = step(direction.row_bytes, code_bytes<Code>(step_columns));
  const int64_t scale_bytes = byte_scales<kScales>(a) ? 1 : 4;
  const int64_t scale_step = scale_bytes * step(scale_line<kScales>(direction),
                                                (step_columns >> log_block<kScales>(a)) * scale_block<kScales>(direction));

  uint32_t started = ~0u;  // the matrix whose scale is at hand
  for (TilePlace tile = Tiles::last(a.tiles); tile.batch < a.tiles.count.batch; tile = Tiles::previous(a.tiles, tile)) {
    if (tile.batch != started) {
      __syncthreads();
      quantizer.matrix = Matrix<kScales>::start(a, direction, tile.batch, shared.table);
      start_keys(direction, tile.batch, shared.keys);
      __syncthreads();
      started = tile.batch;
    }
    store_tensor_scale(a, direction, quantizer.matrix, tile);

    const int tile_rows = kTileSegments >> a.log_segments, tile_columns = kSegmentColumns << a.log_segments;
    const int64_t first_row = static_cast<int64_t>(tile.down) * tile_rows;
    const int64_t first_column = static_cast<int64_t>(tile.across) * tile_columns;
    const bool whole = first_row + tile_rows <= a.rows && first_column + tile_columns <= a.columns;
    const int64_t row = first_row + (warp >> a.log_sharing);
    const int64_t column = first_column + (warp & ((1 << a.log_sharing) - 1)) * kSegmentColumns + 16 * lane;
    RowCursor<E> at = quantizer.cursor(tile.batch, row, column);
    const auto advance = [&] {
      at.x += x_step, at.data += data_step, at.scale += scale_step, at.row += step_rows, at.column += step_columns;
    };
    if (whole && a.pieces && direction.pieces) {
#pragma unroll 1
      for (int i = 0; i < kWarpSegments; i += kSegmentsAhead) {
        Sixteen<E> sixteens[kSegmentsAhead];
#pragma unroll
        for (int j = 0; j < kSegmentsAhead; ++j) sixteens[j] = load_sixteen<E>(at.x + j * x_step, 16, true);
#pragma unroll
        for (int j = 0; j < kSegmentsAhead; ++j, advance()) quantizer.quantize(at, sixteens[j], 16, kCodeBytes, true);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kWarpSegments; ++i, advance()) {
        const bool exists = at.row < a.rows;
        const int count = exists ? left(a.columns, at.column, 16) : 0;
        const int bytes = exists ? left(direction.row_bytes, code_bytes<Code>(at.column), kCodeBytes) : 0;
        quantizer.quantize(at, load_sixteen<E>(at.x, count, a.pieces), count, bytes, direction.pieces);
      }
    }
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
