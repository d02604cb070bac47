// Statistics of a tensor: moments, outliers of columns, and the vector that is made of all sums.
#include <algorithm>

#include "../../statistics_vector.h"
#include "../intrinsics.cuh"
#include "../launch_blocks.h"
#include "../vectors.cuh"
#include "elements.cuh"
#include "statistics.h"

namespace jaxlowprec {
namespace cuda {

// --- From a tensor's sums to the vector of its statistics: the rules of ../../statistics_vector.h, and the CPU's order of
// sums.
//
// Data flow: 256 counts by scale to shared memory -> one thread finds the scales in use -> 32 threads add up an octave each.
// Bytes moved per tensor: 1.3 KB read, 0.4 KB written.
// Launch: a block of 256 threads for each tensor.

constexpr int kVectorThreads = 256;
constexpr int kVectorFormats = 512;  // of one launch: kernels take their scalings as arguments

struct VectorsArguments {
  const float *sums, *amax, *rms, *outliers, *channels;
  float* result;
  int64_t formats;       // a tensor's format is its number modulo so many
  int32_t first, count;  // the formats that this launch does
  uint8_t scalings[kVectorFormats];
};

struct VectorsShared {
  float by_scale[kSumsScales];
  int32_t below[kSumsScales];
  ScalesInUse scales;
};

static __global__ void __launch_bounds__(kVectorThreads) vectors_kernel(const VectorsArguments a) {
  static_assert(kVectorThreads == kSumsScales, "a thread has a bin of scales");
  VectorsShared& shared = block_shared<VectorsShared>();
  const int format = blockIdx.x % a.count, i = threadIdx.x;
  const int64_t tensor = static_cast<int64_t>(blockIdx.x / a.count) * a.formats + a.first + format;
  const Scaling scaling = static_cast<Scaling>(a.scalings[format]);
  const float* sums = a.sums + tensor * kSums;
  float* result = a.result + tensor * kVector;
  shared.by_scale[i] = sums[kSumsScalesFrom + i];
  __syncthreads();
  if (i == 0) {
    const KnownOfTensor known{a.amax[tensor], a.rms[tensor], a.outliers[tensor], nullptr};
    const ScalesInUse scales = scales_in_use(scaling, shared.by_scale);
    write_scalars(sums, known, scales, result);
    shared.scales = scales;
  }
  __syncthreads();
  shared.below[i] = octaves_below(shared.scales, scale_bin(scaling, i));
  if (i < kSumsCodes) result[kVectorCodesFrom + i] = sums[kSumsCodesFrom + i] / sums[0];
  if (i < 2 * kChannels) result[kVectorChannelsFrom + i] = a.channels[tensor * 2 * kChannels + i];
  __syncthreads();
  if (i >= kOctaves) return;
  float share = 0.0f;
  for (int bin = 0; bin < kSumsScales; ++bin)
    if (shared.below[bin] == i && shared.by_scale[bin] > 0) share += shared.by_scale[bin] / shared.scales.blocks;
  result[kVectorOctavesFrom + i] = share;
}

// The largest finite magnitude and the root mean square of matrices; what is subnormal or not finite counts as zero.
//
// Data flow: 16-byte pieces -> their largest magnitude -> squares of the elements brought near 1 by a power of two, added up
// in float32 -> a thread's double -> the block's, into the workspace -> a block for each matrix adds up its parts.
// A square never overflows, and one that underflows is of an element 2^63 times less than its neighbour.
// Bytes moved per element: 2 or 4 read. The workspace is 16 bytes a part.
// Launch: blocks of 256 threads, one for each part, each going through tiles of its matrix; then one a matrix.

constexpr int kMomentsThreads = 256, kMomentsPieces = 4;  // of 16 bytes, a thread and tile: loaded before the first is used

struct MomentsArguments {
  const void* x;
  int64_t size;  // of a matrix
  MomentsOfPart* found;
  float* result;
  uint32_t parts;  // of a matrix
};

struct MomentsShared {
  double energy[kMomentsThreads / 32];
  uint32_t largest[kMomentsThreads / 32];
};

/// Adds up the squares of the finite ones of some elements.
template <int kCount>
JLP_DEVICE void add_moments(float (&v)[kCount], MomentsOfPart& found) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t bits = finite_magnitude(v[i]);
    largest = max(largest, bits), v[i] = Lanes<float>::from_bits(bits);
  }
  const uint32_t exponent = min(max(largest >> 23, 1u), 253u);
  const float unit = Lanes<float>::from_bits((254 - exponent) << 23), size = Lanes<float>::from_bits(exponent << 23);
  float energy = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) energy += v[i] * unit * (v[i] * unit);
  found.energy += static_cast<double>(energy) * size * size;
  found.largest = max(found.largest, largest);
}

/// The first thread gets what all threads of the block found.
JLP_DEVICE MomentsOfPart moments_of_block(MomentsOfPart found, MomentsShared& shared) {
  found.energy = sum_of_warp(found.energy), found.largest = __reduce_max_sync(0xFFFFFFFFu, found.largest);
  if (threadIdx.x % 32 == 0)
    shared.energy[threadIdx.x / 32] = found.energy, shared.largest[threadIdx.x / 32] = found.largest;
  __syncthreads();
  MomentsOfPart all = {};
  for (int warp = 0; threadIdx.x == 0 && warp < kMomentsThreads / 32; ++warp)
    all.energy += shared.energy[warp], all.largest = max(all.largest, shared.largest[warp]);
  return all;
}

template <ElementType kType>
static __global__ void __launch_bounds__(kMomentsThreads, 4) moments_kernel(const MomentsArguments a) {
  constexpr int kBytes = kElementBytes<kType>, kPieceElements = 16 / kBytes;
  const int64_t batch = blockIdx.x / a.parts;
  const uint32_t part = blockIdx.x % a.parts;
  const uint8_t* x = static_cast<const uint8_t*>(a.x) + batch * a.size * kBytes;
  // The elements before the first whole piece, and after the last one.
  const int64_t misaligned = reinterpret_cast<uintptr_t>(x) % 16 / kBytes;
  const int64_t head = misaligned ? min(kPieceElements - misaligned, a.size) : 0;
  const int64_t pieces = (a.size - head) / kPieceElements, tail = head + pieces * kPieceElements;
  MomentsOfPart found = {};
  if (part == 0) {
    float edge[2] = {threadIdx.x < head ? load_one<kType>(x, threadIdx.x) : 0.0f,
                     threadIdx.x < a.size - tail ? load_one<kType>(x, tail + threadIdx.x) : 0.0f};
    add_moments(edge, found);
  }
  const auto* from = reinterpret_cast<const uint4*>(x + head * kBytes);
  constexpr int64_t kTile = kMomentsThreads * kMomentsPieces;
  for (int64_t first = part * kTile + threadIdx.x; first < pieces; first += a.parts * kTile) {
    uint32_t words[4 * kMomentsPieces];
#pragma unroll
    for (int i = 0; i < kMomentsPieces; ++i) {
      const uint4 piece =
          first + i * kMomentsThreads < pieces ? __ldg(from + first + i * kMomentsThreads) : uint4{0, 0, 0, 0};
      words[4 * i] = piece.x, words[4 * i + 1] = piece.y, words[4 * i + 2] = piece.z, words[4 * i + 3] = piece.w;
    }
    float v[kMomentsPieces * kPieceElements];
#pragma unroll
    for (int i = 0; i < 4 * kMomentsPieces; ++i) widen<kType>(words[i], &v[i * kPerWord<kType>]);
    add_moments(v, found);
  }
  const MomentsOfPart all = moments_of_block(found, block_shared<MomentsShared>());
  if (threadIdx.x == 0) a.found[blockIdx.x] = all;
}

static __global__ void __launch_bounds__(kMomentsThreads) moments_sum_kernel(const MomentsArguments a) {
  const MomentsOfPart* parts = a.found + static_cast<int64_t>(blockIdx.x) * a.parts;
  MomentsOfPart found = {};
  for (uint32_t part = threadIdx.x; part < a.parts; part += kMomentsThreads)
    found.energy += parts[part].energy, found.largest = max(found.largest, parts[part].largest);
  const MomentsOfPart all = moments_of_block(found, block_shared<MomentsShared>());
  if (threadIdx.x != 0) return;
  a.result[2 * blockIdx.x] = Lanes<float>::from_bits(all.largest);
  a.result[2 * blockIdx.x + 1] = static_cast<float>(sqrt(all.energy / static_cast<double>(a.size)));
}

// --- How many elements of each column are beyond a threshold.
//
// Data flow: a thread takes eight columns of every eighth row of a tile, four rows in flight, and counts in registers; the
// block's eight warps add up in shared memory, and each column is added to the result once. Counts are integers, so the
// order in which blocks add changes nothing.
// Bytes moved per element: 2 or 4 read. The result is zeroed first, and each count added to for every 256 rows.
// Launch: blocks of 256 threads, one for each tile of 256 rows by 256 columns.

constexpr int kOutlierTile = 256, kOutlierThreads = 256, kOutlierWarps = kOutlierThreads / 32;
constexpr int kOutlierRowsInFlight = 4;

struct OutliersArguments {
  const void* x;
  const float* threshold;
  int32_t* result;
  int64_t rows, columns;
  uint32_t row_tiles, column_tiles;  // of a matrix
  bool whole;                        // rows are whole eights, and aligned
};

struct OutliersShared {
  int32_t counts[kOutlierTile];
};

template <ElementType kType>
static __global__ void __launch_bounds__(kOutlierThreads, 4) outliers_kernel(const OutliersArguments a) {
  OutliersShared& shared = block_shared<OutliersShared>();
  const uint32_t column_tile = blockIdx.x % a.column_tiles, rest = blockIdx.x / a.column_tiles;
  const int64_t batch = rest / a.row_tiles, from = static_cast<int64_t>(rest % a.row_tiles) * kOutlierTile;
  const int64_t to = min(from + kOutlierTile, a.rows);
  const int64_t first_column = static_cast<int64_t>(column_tile) * kOutlierTile;
  const int64_t column = first_column + threadIdx.x % 32 * 8, count = a.columns - column;
  const uint32_t threshold = Lanes<float>::bits(a.threshold[batch]);
  shared.counts[threadIdx.x] = 0;
  int beyond[8] = {};
  for (int64_t row = from + threadIdx.x / 32; row < to; row += kOutlierWarps * kOutlierRowsInFlight) {
    EightElements<kType> x[kOutlierRowsInFlight];
#pragma unroll
    for (int i = 0; i < kOutlierRowsInFlight; ++i) {
      const int64_t at = row + i * kOutlierWarps;
      x[i].load(a.x, (batch * a.rows + at) * a.columns + column, at < to ? count : 0, a.whole);
    }
#pragma unroll
    for (int i = 0; i < kOutlierRowsInFlight; ++i) {
      float v[8];
      x[i].decode(v);
#pragma unroll
      for (int k = 0; k < 8; ++k) beyond[k] += finite_magnitude(v[k]) > threshold;
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (beyond[k]) atomicAdd(&shared.counts[threadIdx.x % 32 * 8 + k], beyond[k]);
  __syncthreads();
  const int found = shared.counts[threadIdx.x];
  if (found) atomicAdd(&a.result[batch * a.columns + first_column + threadIdx.x], found);
}

cudaError_t launch(const MomentsProblem& p, void* workspace, cudaStream_t stream) {
  if (p.batch == 0 || p.size == 0) return cudaSuccess;
  const int64_t tile = int64_t{kMomentsThreads} * kMomentsPieces * 16 / element_bytes(p.type);
  const uint32_t parts = static_cast<uint32_t>(parts_of_matrix(p.batch, divide_up(p.size, tile)));
  const MomentsArguments a{p.x, p.size, static_cast<MomentsOfPart*>(workspace), p.result, parts};
  const cudaError_t error = with_type(p.type, [&](auto type) {
    return launch_blocks(moments_kernel<type>, {p.batch * parts, 1, 1, kMomentsThreads, sizeof(MomentsShared)}, stream, a);
  });
  if (error != cudaSuccess) return error;
  return launch_blocks(moments_sum_kernel, {p.batch, 1, 1, kMomentsThreads, sizeof(MomentsShared)}, stream, a);
}

cudaError_t launch(const OutliersProblem& p, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(p.result, 0, p.batch * p.columns * sizeof *p.result, stream);
  if (error != cudaSuccess || p.batch == 0 || p.rows == 0 || p.columns == 0) return error;
  const int64_t down = divide_up(p.rows, kOutlierTile), across = divide_up(p.columns, kOutlierTile);
  if (down * across * p.batch > INT32_MAX) return cudaErrorInvalidValue;
  const OutliersArguments a{p.x,
                            p.threshold,
                            p.result,
                            p.rows,
                            p.columns,
                            static_cast<uint32_t>(down),
                            static_cast<uint32_t>(across),
                            aligned(p.x, 16) && p.columns % 8 == 0};
  return with_type(p.type, [&](auto type) {
    return launch_blocks(outliers_kernel<type>, {down * across * p.batch, 1, 1, kOutlierThreads, sizeof(OutliersShared)},
                         stream, a);
  });
}

cudaError_t launch(const VectorsProblem& p, cudaStream_t stream) {
  VectorsArguments a{p.sums, p.amax, p.rms, p.outliers, p.channels, p.result, p.formats, 0, 0, {}};
  for (int64_t first = 0; first < p.formats && p.tensors > 0; first += kVectorFormats) {
    a.first = static_cast<int32_t>(first);
    a.count = static_cast<int32_t>(std::min<int64_t>(kVectorFormats, p.formats - first));
    for (int i = 0; i < a.count; ++i) a.scalings[i] = static_cast<uint8_t>(p.scalings[first + i]);
    const cudaError_t error = launch_blocks(
        vectors_kernel, {p.tensors / p.formats * a.count, 1, 1, kVectorThreads, sizeof(VectorsShared)}, stream, a);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jaxlowprec
