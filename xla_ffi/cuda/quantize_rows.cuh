// Quantisation along rows alone, for blocks of one row: no shared memory for elements, every thread takes 16 of them from
// memory to its registers.
//
//   elements (32 bytes a thread, 64 of float32) -> block amax over 1, 2 or 8 lanes -> scale -> codes (8 or 16 bytes a thread)
//
// Bytes moved per element: 2 or 4 read; 1/2 or 1 written and the scales: 1/16 (NVFP4), 1/32 (MX) or 1/32 (Float8Block).
// Launch: blocks of 256 threads, as many as the device holds at once, each going through tiles of 16 segments of 512 columns
// (kTileSegments); a segment belongs to a warp. A tile is wide, where rows are long or can be taken for one, or tall.
#pragma once

#include "quantize_scales.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kSegmentColumns = 512;
constexpr int kTileSegments = 16;
constexpr int kSegmentsAhead = kTileSegments / kRowWarps;  // of a warp, loaded before the first is used

struct RowsShared {
  EncodeTable table;
};

template <class E>
constexpr int kRowBlocks = E::kBytes == 4 ? 3 : 4;  // that a multiprocessor can hold, by registers

template <class E, class Code, bool kTwoLevel, bool kStochastic>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<E>) quantize_rows(const QuantizeArguments a) {
  RowsShared& shared = block_shared<RowsShared>();
  const DirectionArguments& direction = a.rowwise;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lanes = kTwoLevel ? 1 : a.block / 16;  // that share a block; 0: the tensor
  Matrix<kTwoLevel> matrix = {};
  uint32_t key[2] = {};
  uint32_t started = ~0u;  // the matrix whose scale this is
  for (uint32_t tile = blockIdx.x; tile < a.batch * a.tiles_down * a.tiles_across; tile += gridDim.x) {
    const uint32_t down = tile / a.tiles_across, batch = down / a.tiles_down;
    if (batch != started) {
      __syncthreads();
      matrix = Matrix<kTwoLevel>::start(a, direction, batch, shared.table);
      load_key<kStochastic>(direction, batch, key);
      __syncthreads();
      started = batch;
    }
    if (threadIdx.x == 0 && tile == batch * a.tiles_down * a.tiles_across)
      store_tensor_scale(a, direction, matrix, batch);

    const int64_t first_row = static_cast<int64_t>(down - batch * a.tiles_down) * (kTileSegments >> a.log_segments);
    const int64_t first_column = static_cast<int64_t>(tile - down * a.tiles_across) * (kSegmentColumns << a.log_segments);
    Group<E> groups[kSegmentsAhead];
    int64_t rows[kSegmentsAhead], columns[kSegmentsAhead];
#pragma unroll
    for (int i = 0; i < kSegmentsAhead; ++i) {
      const int segment = i * kRowWarps + warp;
      rows[i] = first_row + (segment >> a.log_segments);
      columns[i] = first_column + (segment & ((1 << a.log_segments) - 1)) * kSegmentColumns + 16 * lane;
      const auto* x = static_cast<const typename E::Storage*>(a.x);
      const int64_t count = rows[i] < a.rows ? a.columns - columns[i] : 0;
      groups[i] = load_group<E>(x + (batch * a.rows + rows[i]) * a.columns + columns[i], count, a.pieces);
    }
#pragma unroll
    for (int i = 0; i < kSegmentsAhead; ++i) {
      const uint32_t amax = max_of_lanes(magnitude_bits<E>(groups[i].words), lanes);
      const BlockScale scale = Matrix<kTwoLevel>::scale(matrix, a, amax);
      const int64_t line = batch * a.rows + rows[i];
      const int64_t offset = kPacked<Code> ? columns[i] / 2 : columns[i];
      if (rows[i] >= a.rows || offset >= direction.row_bytes) continue;
      if (lanes > 0 && lane % lanes == 0 && columns[i] < a.columns)
        store_scale<kTwoLevel>(a, direction.scale, line * direction.scale_columns + columns[i] / a.block, scale.stored);
      uint32_t random[4] = {}, codes[kCodeWords<Code>];
      if (columns[i] < a.columns) random_bytes<kStochastic>(direction.random, key, rows[i], columns[i] / 16, random);
      quantize_group<Code, kTwoLevel, kStochastic>(a, groups[i], scale, amax, random, codes);
      store_codes(direction.data + line * direction.row_bytes, offset, direction.row_bytes, direction.pieces, codes);
    }
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
