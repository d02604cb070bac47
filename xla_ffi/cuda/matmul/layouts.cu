// Scales from their logical order to cuBLASLt's (layouts.h). Bytes moved: each scale read once, save that those of square
// tiles are read again for each row (from the cache); the result written once, its padding too.
#include "../intrinsics.cuh"
#include "../launch_blocks.h"
#include "layouts.h"

namespace jaxlowprec {
namespace cuda {

struct ScaleLayoutArguments {
  const uint8_t* scale;
  void* result;
  int64_t scale_rows, rows, blocks;  // stored, and rows that the result has scales for
  int32_t row_shift;                 // log2 of the rows that share a scale
  uint32_t row_tiles, column_tiles;
};

/// A thread writes the 16 bytes of one row modulo 32 in a 128x4 tile: 4 blocks of rows r, r + 32, r + 64 and r + 96; a warp
/// a tile of 512 bytes; a block 8 neighbouring tiles, which share the sectors they read.
constexpr int kSwizzleTiles = 8;

static __global__ void __launch_bounds__(kSwizzleTiles * 32) swizzle_kernel(ScaleLayoutArguments a) {
  const uint32_t blocks_across = (a.column_tiles + kSwizzleTiles - 1) / kSwizzleTiles;
  const uint32_t column_tile = blockIdx.x % blocks_across * kSwizzleTiles + threadIdx.x / 32;
  const uint32_t row_tile = blockIdx.x / blocks_across % a.row_tiles, batch = blockIdx.x / blocks_across / a.row_tiles;
  if (column_tile >= a.column_tiles) return;
  const int64_t block = static_cast<int64_t>(column_tile) * 4;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = static_cast<int64_t>(row_tile) * 128 + i * 32 + threadIdx.x % 32;
    if (row >= a.rows) continue;
    const uint8_t* scales = a.scale + (batch * a.scale_rows + (row >> a.row_shift)) * a.blocks + block;
    if (a.blocks % 4 == 0 && reinterpret_cast<uintptr_t>(a.scale) % 4 == 0) {
      words[i] = *reinterpret_cast<const uint32_t*>(scales);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (block + j < a.blocks) words[i] |= static_cast<uint32_t>(scales[j]) << (8 * j);
    }
  }
  const int64_t tile = (static_cast<int64_t>(batch) * a.row_tiles + row_tile) * a.column_tiles + column_tile;
  static_cast<uint4*>(a.result)[tile * 32 + threadIdx.x % 32] = make_uint4(words[0], words[1], words[2], words[3]);
}

/// float32 [rows, blocks] to [blocks, rows rounded up to 4], through tiles of 32x32 in shared memory.
struct TransposeShared {
  uint32_t tile[32][33];
};

static __global__ void __launch_bounds__(256) transpose_scales_kernel(ScaleLayoutArguments a) {
  TransposeShared& shared = block_shared<TransposeShared>();
  const uint32_t column_tile = blockIdx.x % a.column_tiles, rest = blockIdx.x / a.column_tiles;
  const uint32_t row_tile = rest % a.row_tiles, batch = rest / a.row_tiles;
  const int64_t first_row = static_cast<int64_t>(row_tile) * 32, first_block = static_cast<int64_t>(column_tile) * 32;
  const int64_t padded = (a.rows + 3) / 4 * 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* scale = reinterpret_cast<const uint32_t*>(a.scale) + batch * a.rows * a.blocks;
#pragma unroll
  for (int line = warp; line < 32; line += 8) {
    const int64_t row = first_row + line, block = first_block + lane;
    shared.tile[line][lane] = row < a.rows && block < a.blocks ? scale[row * a.blocks + block] : 0u;
  }
  __syncthreads();
  uint32_t* result = static_cast<uint32_t*>(a.result) + batch * a.blocks * padded;
#pragma unroll
  for (int line = warp; line < 32; line += 8) {
    const int64_t row = first_row + lane, block = first_block + line;
    if (row < padded && block < a.blocks) result[block * padded + row] = shared.tile[lane][line];
  }
}

/// float32 [rows, blocks] to [rows, blocks rounded up to 4]. `rows` are those of all matrices.
static __global__ void __launch_bounds__(256) pad_scales_kernel(ScaleLayoutArguments a) {
  const int64_t padded = (a.blocks + 3) / 4 * 4, index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t row = index / padded, block = index % padded;
  if (row >= a.rows) return;
  const uint32_t* scale = reinterpret_cast<const uint32_t*>(a.scale);
  static_cast<uint32_t*>(a.result)[index] = block < a.blocks ? scale[row * a.blocks + block] : 0u;
}

cudaError_t launch(const ScaleLayoutProblem& p, cudaStream_t stream) {
  const Format& f = p.format;
  if (f.scaling == Scaling::kTensor || f.scaling == Scaling::kRows) return cudaErrorInvalidValue;
  if (p.batch * p.rows * p.columns == 0) return cudaSuccess;
  ScaleLayoutArguments a{};
  a.scale = p.scale, a.result = p.result;
  a.scale_rows = f.scale_rows(p.rows), a.rows = p.rows, a.blocks = f.scale_columns(p.columns);
  if (f.scaling == Scaling::kFloat32) {
    if (f.tiles) {
      a.rows = p.batch * a.scale_rows;
      return launch_blocks(pad_scales_kernel, {divide_up(a.rows * divide_up(a.blocks, 4) * 4, 256)}, stream, a);
    }
    a.row_tiles = static_cast<uint32_t>(divide_up(p.rows, 32));
    a.column_tiles = static_cast<uint32_t>(divide_up(a.blocks, 32));
    const Blocks blocks{p.batch * a.row_tiles * a.column_tiles, 1, 1, 256, sizeof(TransposeShared)};
    return launch_blocks(transpose_scales_kernel, blocks, stream, a);
  }
  while (f.tiles && (1 << a.row_shift) < f.block) ++a.row_shift;
  a.row_tiles = static_cast<uint32_t>(divide_up(p.rows, 128));
  a.column_tiles = static_cast<uint32_t>(divide_up(a.blocks, 4));
  return launch_blocks(swizzle_kernel, {p.batch * a.row_tiles * divide_up(a.column_tiles, kSwizzleTiles)}, stream, a);
}

}  // namespace cuda
}  // namespace jaxlowprec
