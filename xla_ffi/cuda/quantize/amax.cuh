// Tensor amax: the largest magnitude of a matrix, and of its columnwise random Hadamard transform (numerics.md 1 and 3).
//
//   amax_plain: 16-byte pieces -> maxima as integers, two 16-bit elements at once -> warp -> one atomic a block
//   amax_rotated: a thread takes 16 rows of a pair of columns -> transform -> maximum; the plain one on the way
//
// Bytes moved per element: 2 or 4 read, whether one maximum is wanted or both.
// Launch: blocks of 256 threads, as many as the device holds at once, each going through pieces of its matrix, or tiles of
// 64 rows by 128 columns.
#pragma once

#include "../launch_grid.cuh"
#include "rotate.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kAmaxThreads = 256;
constexpr int kAmaxPieces = 8;  // of 16 bytes, a thread and tile: loaded before the first is used
constexpr int kAmaxBlocks = 5;  // that registers are to suffice for

struct AmaxArguments {
  const void* x;
  int64_t rows, columns;
  Tiles tiles;
  uint32_t *plain, *rotated;  // plain may be null
  uint32_t sign_mask;
  bool pairs;  // rows begin at multiples of two elements' bytes
};

struct AmaxShared {
  uint32_t of_warp[2][kAmaxThreads / 32];
};

/// NaN becomes the one quiet NaN and subnormals zero, whatever was found.
JLP_DEVICE uint32_t canonical_amax(uint32_t bits) {
  if (bits > kInfinityBits) return kNaNBits;
  return bits < kMinNormalBits ? 0u : bits;
}

/// The largest of what the threads of each warp found, for the block's threads to read.
template <int kWarps>
JLP_DEVICE void share_amaxes(uint32_t found, uint32_t (&of_warp)[kWarps]) {
  const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, found);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
  __syncthreads();
}

/// Raises a matrix's result to what the threads of a block found.
template <int kWarps>
JLP_DEVICE void raise(uint32_t* result, uint32_t found, uint32_t (&of_warp)[kWarps]) {
  share_amaxes(found, of_warp);
  if (threadIdx.x == 0) {
    uint32_t of_block = 0;
#pragma unroll
    for (const uint32_t bits : of_warp) of_block = max(of_block, bits);
    atomicMax(result, canonical_amax(of_block));
  }
  __syncthreads();
}

/// Tiles are kAmaxThreads * kAmaxPieces pieces of 16 bytes, of a matrix taken for one row of `columns`.
template <class E>
__global__ void __launch_bounds__(kAmaxThreads, kAmaxBlocks) amax_plain(const AmaxArguments a) {
  constexpr int kPieceElements = 16 / E::kBytes;
  AmaxShared& shared = block_shared<AmaxShared>();
  uint32_t most = 0;
  TilePlace next;
  for (TilePlace at = Tiles::first(a.tiles); at.batch < a.tiles.count.batch; at = next) {
    const auto* x = static_cast<const typename E::Storage*>(a.x) + at.batch * a.columns;
    // The elements before the first whole piece, and after the last one.
    const int64_t misaligned = reinterpret_cast<uintptr_t>(x) % 16 / E::kBytes;
    const int64_t head = misaligned ? min(kPieceElements - misaligned, a.columns) : 0;
    const int64_t pieces = (a.columns - head) / kPieceElements;
    const int64_t tail = head + pieces * kPieceElements;
    uint32_t edge[2] = {};
    if (at.across == 0 && threadIdx.x < head) edge[0] = x[threadIdx.x];
    if (at.across == 0 && threadIdx.x < a.columns - tail) edge[1] = x[tail + threadIdx.x];
    most = max(most, magnitude_bits<E>(edge));

    const auto* from = reinterpret_cast<const uint4*>(x + head);
    const int64_t first = static_cast<int64_t>(at.across) * kAmaxThreads * kAmaxPieces + threadIdx.x;
    uint32_t words[4 * kAmaxPieces];
#pragma unroll
    for (int i = 0; i < kAmaxPieces; ++i) {
      const uint4 piece = first + i * kAmaxThreads < pieces ? __ldg(from + first + i * kAmaxThreads) : uint4{0, 0, 0, 0};
      words[4 * i] = piece.x, words[4 * i + 1] = piece.y, words[4 * i + 2] = piece.z, words[4 * i + 3] = piece.w;
    }
    most = max(most, magnitude_bits<E>(words));
    next = Tiles::next(a.tiles, at);
    if (next.batch != at.batch) raise(a.plain + at.batch, most, shared.of_warp[0]), most = 0;
  }
}

template <class E>
constexpr int kRotatedBlocks = E::kBytes == 4 ? 3 : 4;
constexpr int kRotatedRows = 16 * (kAmaxThreads / kTilePairs);

/// 16 rows of a pair of columns, as Tile::load_pair gives them; zeros beyond the matrix.
///
/// Every load is issued before any is used. So one test decides for all rows: with a branch for each row, the next row's
/// load would wait where the branches meet (scripts/machine_code counts the loads).
template <class E>
JLP_DEVICE void load_pair(const AmaxArguments& a, const typename E::Storage* x, int64_t row, int64_t column,
                          uint32_t (&pairs)[Tile<E>::kPairWords]) {
  const auto* from = x + row * a.columns + column;
  if (a.pairs && row + 16 <= a.rows && column + 2 <= a.columns) {
#pragma unroll
    for (int r = 0; r < 16; ++r, from += a.columns) {
      if constexpr (E::kBytes == 4) {
        const uint2 both = __ldg(reinterpret_cast<const uint2*>(from));
        pairs[r] = both.x, pairs[16 + r] = both.y;
      } else {
        pairs[r] = __ldg(reinterpret_cast<const uint32_t*>(from));
      }
    }
    return;
  }
  uint32_t first[16], second[16];
#pragma unroll
  for (int r = 0; r < 16; ++r, from += a.columns) {
    const int64_t count = row + r < a.rows ? a.columns - column : 0;
    first[r] = count > 0 ? __ldg(from) : 0u;
    second[r] = count > 1 ? __ldg(from + 1) : 0u;
  }
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    if constexpr (E::kBytes == 4)
      pairs[r] = first[r], pairs[16 + r] = second[r];
    else
      pairs[r] = first[r] | second[r] << 16;
  }
}

/// The largest magnitude of a column's transform.
///
/// The larger of |a + b| and |a - b| is |a| + |b|, and scaling and rounding are monotone: once, of the largest, will do.
/// Where that is not finite its kind may differ from the sums' own, so they are looked at one by one.
template <class E>
JLP_DEVICE uint32_t rotated_amax(const uint32_t (&pairs)[Tile<E>::kPairWords], int column) {
  float v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = column_value<E>(pairs, column, r);
  hadamard_butterfly<8>(v);
  hadamard_butterfly<8>(v + 8);
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, as_bits(fabsf(v[i]) + fabsf(v[i + 8])));
  most = as_bits(E::round(as_float(most) * 0.25f)) & kMagnitudeBits;
  if (most < kInfinityBits) return most;
  most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    most = max(most, as_bits(E::round((v[i] + v[i + 8]) * 0.25f)) & kMagnitudeBits);
    most = max(most, as_bits(E::round((v[i] - v[i + 8]) * 0.25f)) & kMagnitudeBits);
  }
  return most;
}

template <class E>
__global__ void __launch_bounds__(kAmaxThreads, kRotatedBlocks<E>) amax_rotated(const AmaxArguments a) {
  AmaxShared& shared = block_shared<AmaxShared>();
  uint32_t plain = 0, rotated = 0;
  TilePlace next;
  for (TilePlace at = Tiles::first(a.tiles); at.batch < a.tiles.count.batch; at = next) {
    const int64_t row = static_cast<int64_t>(at.down) * kRotatedRows + threadIdx.x / kTilePairs * 16;
    const int64_t column = static_cast<int64_t>(at.across) * kTile + threadIdx.x % kTilePairs * 2;
    uint32_t pairs[Tile<E>::kPairWords];
    load_pair<E>(a, static_cast<const typename E::Storage*>(a.x) + at.batch * a.rows * a.columns, row, column, pairs);
    if (a.plain) plain = max(plain, magnitude_bits<E>(pairs));
    flip_signs<E>(pairs, a.sign_mask);
    rotated = max(rotated, max(rotated_amax<E>(pairs, 0), rotated_amax<E>(pairs, 1)));
    next = Tiles::next(a.tiles, at);
    if (next.batch == at.batch) continue;
    raise(a.rotated + at.batch, rotated, shared.of_warp[0]);
    if (a.plain) raise(a.plain + at.batch, plain, shared.of_warp[1]);
    plain = rotated = 0;
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
