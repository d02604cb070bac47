// Counts and sums of a quantisation: elements beside what their codes decode to, blocks by their scale, codes by their bin.
//
// Data flow: a tile of 32 lines by 128 elements, a line being a run of the quantised axis. A thread has eight elements of
// each of two lines: x (columnwise by way of shared memory, transposed), their codes, their scale -> decoded and compared ->
// counts in registers, sums in float32 and once a tile in double; histograms by integer atomics in shared memory, those of
// codes by lane, so that no two lanes meet. Magnitudes of every 16th line -> sums_tile.cuh. At the end the block's numbers,
// by shuffles of fixed order, into its part of the workspace; sums_sum_kernel adds up the parts, in theirs. Bytes moved per
// element: 2 or 4 and the code's 0.5 or 1 read, and a scale for every eight elements, of which all but the first come from
// the cache. The workspace is 2.4 KB a part. Launch: blocks of 256 threads, one for each part, each going through items: 32
// lines (128 where a scale covers 128) by 512 elements, or whole lines where all lines have one scale.
#include <algorithm>

#include "../launch_blocks.h"
#include "sums_tile.cuh"

namespace jaxlowprec {
namespace cuda {

/// Notes that the scale of a thread's eight elements is used if any thread of its run has one that counts. `line`: of the
/// group.
JLP_DEVICE void note_use(const SumsArguments& a, bool counts, uint32_t stored, int line, SumsShared& shared) {
  const uint32_t lanes = a.run / 8, lane = threadIdx.x % 32;
  const uint32_t those = __ballot_sync(0xFFFFFFFFu, counts) >> lane & ((1u << lanes) - 1);
  if (lane % lanes != 0 || those == 0) return;
  if (a.covers == Covers::kBlock) {
    atomicAdd(&shared.scales[bin_of_scale(a.codes.scale_kind, stored)], 1u);
  } else if (a.covers == Covers::kTile) {
    const int across = kTileLength >> a.codes.column_shift, k = threadIdx.x % kOctets * 8;
    atomicOr(&shared.used[(line >> a.codes.row_shift) * across + (k >> a.codes.column_shift)], 1u);
  } else {
    atomicOr(&shared.used[line], 1u);
  }
}

/// Counts the scales of the tiles or lines that are used. All threads, after a barrier; a barrier follows.
JLP_DEVICE void count_uses(const SumsArguments& a, const SumsPlace& at, SumsShared& shared) {
  const int i = threadIdx.x;
  if (i < kTileLines && shared.used[i]) {
    const bool tile = a.covers == Covers::kTile;
    const int across = tile ? kTileLength >> a.codes.column_shift : 1;
    const int64_t line = tile ? at.line() + (static_cast<int64_t>(i / across) << a.codes.row_shift) : 0;
    const int64_t k = tile ? at.k() + (static_cast<int64_t>(i % across) << a.codes.column_shift) : 0;
    atomicAdd(&shared.scales[bin_of_scale(a.codes.scale_kind, scale_at(a.codes, at.batch, line, k))], 1u);
    shared.used[i] = 0;
  }
  __syncthreads();
}

template <ElementType kType, bool kColumnwise>
JLP_DEVICE void count_tile(const SumsArguments& a, const SumsPlace& at, float unit, float amax,
                           SumsSharedOf<kColumnwise>& shared, Counts& counts) {
  SumsTile<kType> tile;
  tile.template load<kColumnwise>(a, at);
  if constexpr (kColumnwise) {
    tile.transpose(shared);
    __syncthreads();
  }
  const int within = static_cast<int>(at.down % a.group_tiles) * kTileLines;  // its group
  TileSums sums = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float v[8];
    tile.template elements<kColumnwise>(step, shared, v);
    if (threadIdx.x < kOctets) {
#pragma unroll
      for (int i = 0; i < 8; ++i) shared.ranges.sizes[step][threadIdx.x * 8 + i] = finite_magnitude(v[i]);
    }
    const float scale = decode_scale(a.codes.scale_kind, tile.scales[step]);
    const Decoded decoded{tile.codes[step], scale, a.codes.amax != nullptr, amax};
    const bool some = count_eight(a.code, v, decoded, tile.count(a, at, step), unit, shared.codes, counts, sums);
    note_use(a, some, tile.scales[step], within + step * kRangeEvery + threadIdx.x / kOctets, shared);
  }
  shared.sums.add(sums);
  __syncthreads();
  find_middles(a.run, shared.ranges);
  __syncthreads();
  add_ranges(a.run, a.codes.columns - at.k(), unit, shared.ranges);
}

/// The block's numbers to its part of the workspace, in the order of the reference.
JLP_DEVICE void store_counts(const Counts& counts, SumsShared& shared, double* sums) {
  const auto& sums_of = shared.sums.numbers;
  const int t = threadIdx.x;
  const double numbers[kWarpNumbers] = {double(counts.zeros),
                                        double(counts.underflow),
                                        double(counts.saturation),
                                        double(counts.nonfinite),
                                        double(counts.poisoned),
                                        sums_of[0][t],
                                        sums_of[1][t],
                                        sums_of[2][t],
                                        sums_of[3][t]};
#pragma unroll
  for (int i = 0; i < kWarpNumbers; ++i) {
    const double of_warp = sum_of_warp(numbers[i]);
    if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32][i] = of_warp;
  }
  __syncthreads();
  const int i = threadIdx.x;
  sums[kSumsScalesFrom + i] = shared.scales[i];
  if (i >= 32) return;
  static_assert(kSumsCodes == 32, "a lane has a bin of codes");
  const double codes = static_cast<double>(shared.codes.count(i)), elements = sum_of_warp(codes);
  const double ranges = sum_of_warp(i < kMostRuns ? shared.ranges.ranges[i] : 0.0);
  const double runs = sum_of_warp(i < kMostRuns ? shared.ranges.runs[i] : 0.0);
  sums[kSumsCodesFrom + i] = codes;
  double number = i == 0 ? elements : i == 10 ? ranges : i == 11 ? runs : 0.0;
  const int counted = i - 1;
  for (int warp = 0; counted >= 0 && counted < kWarpNumbers && warp < kSumsThreads / 32; ++warp)
    number += shared.of_warp[warp][counted];
  if (i < kSumsScalesFrom) sums[i] = number;
}

/// That registers are to suffice for. Two have enough bytes in flight where elements have 32 bits, and for the bandwidth of
/// sm_80, whose code would spill with three.
template <ElementType kType>
constexpr int kSumsBlocks = kType == ElementType::kF32 || kArch < 900 ? 2 : 3;

template <ElementType kType, bool kColumnwise>
static __global__ void __launch_bounds__(kSumsThreads, kSumsBlocks<kType>) sums_kernel(const SumsArguments a) {
  static_assert(kSumsThreads == kSumsScales, "a thread has a bin of scales");
  auto& shared = block_shared<SumsSharedOf<kColumnwise>>();
  shared.codes.clear();
  shared.scales[threadIdx.x] = 0;
  if (threadIdx.x < kTileLines) shared.used[threadIdx.x] = 0;
  clear_ranges(shared.ranges);
  shared.sums.clear();
  __syncthreads();

  SumsPlace at;
  at.batch = blockIdx.x / a.parts;
  const float unit = a.unit[at.batch], amax = a.codes.amax ? a.codes.amax[at.batch] : 0.0f;
  Counts counts = {};
  for (uint32_t item = blockIdx.x % a.parts; item < a.groups * a.segments; item += a.parts) {
    const uint32_t down = item / a.segments * a.group_tiles, below = min(down + a.group_tiles, a.tiles_down);
    at.across = item % a.segments * a.segment_tiles;
    const uint32_t end = min(at.across + a.segment_tiles, a.tiles_across);
    for (; at.across < end; ++at.across) {
      for (at.down = down; at.down < below; ++at.down) count_tile<kType, kColumnwise>(a, at, unit, amax, shared, counts);
      at.down = down;
      if (a.covers == Covers::kTile) count_uses(a, at, shared);
    }
    if (a.covers == Covers::kTensor) count_uses(a, at, shared);
  }
  store_counts(counts, shared, a.found[blockIdx.x].sums);
}

constexpr int kSumsTogether = 32;  // numbers that a block adds up over the parts
struct PartsShared {
  double sums[kSumsThreads / kSumsTogether][kSumsTogether];
};

/// Adds up the parts of a matrix. Block (x, y): numbers of the x-th 32, matrix y.
static __global__ void __launch_bounds__(kSumsThreads) sums_sum_kernel(const SumsArguments a) {
  constexpr int kApart = kSumsThreads / kSumsTogether;
  constexpr uint32_t kBlocks = (kSums + kSumsTogether - 1) / kSumsTogether;
  PartsShared& shared = block_shared<PartsShared>();
  const int64_t batch = blockIdx.x / kBlocks;
  const int place = threadIdx.x % kSumsTogether, number = blockIdx.x % kBlocks * kSumsTogether + place;
  double sum = 0;
  for (uint32_t part = threadIdx.x / kSumsTogether; number < kSums && part < a.parts; part += kApart)
    sum += a.found[batch * a.parts + part].sums[number];
  shared.sums[threadIdx.x / kSumsTogether][place] = sum;
  __syncthreads();
  if (threadIdx.x >= kSumsTogether || number >= kSums) return;
  for (int i = 1; i < kApart; ++i) sum += shared.sums[i][place];
  a.result[batch * kSums + number] = static_cast<float>(sum);
}

namespace {

template <ElementType kType, bool kColumnwise>
cudaError_t launch_sums(const SumsArguments& a, int64_t batch, cudaStream_t stream) {
  return launch_blocks(sums_kernel<kType, kColumnwise>,
                       {batch * a.parts, 1, 1, kSumsThreads, sizeof(SumsSharedOf<kColumnwise>)}, stream, a);
}

template <ElementType kType>
cudaError_t launch_sums(const SumsArguments& a, bool columnwise, int64_t batch, cudaStream_t stream) {
  return columnwise ? launch_sums<kType, true>(a, batch, stream) : launch_sums<kType, false>(a, batch, stream);
}

}  // namespace

cudaError_t launch(const SumsProblem& p, void* workspace, cudaStream_t stream) {
  const Format& f = p.format;
  const bool tensor = f.scaling == Scaling::kTensor, packed = f.code == CodeType::kE2M1;
  const int32_t run = tensor ? kRangeRun : f.block;
  if (f.code == CodeType::kInt4 || (run != 16 && run != 32 && run != 128) || (packed && !aligned(p.data, 4)))
    return cudaErrorInvalidValue;
  if (p.batch == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  SumsArguments a{};
  a.codes = dequantize_arguments(f, p.data, p.scale, p.lines(), p.length());
  a.codes.columns = p.length(), a.codes.amax = p.amax;
  a.code = f.code, a.x = p.x, a.unit = p.unit, a.found = static_cast<SumsOfPart*>(workspace), a.result = p.result;
  a.covers = tensor ? Covers::kTensor : f.tiles ? Covers::kTile : Covers::kBlock;
  a.run = run;
  const int64_t down = divide_up(p.lines(), kTileLines), across = divide_up(p.length(), kTileLength);
  // Scales of tiles, and lines of a tensor, are seen whole by one block.
  const int64_t group = f.tiles ? std::max(f.block / kTileLines, 1) : 1;
  const int64_t segment = tensor ? across : kSumsSegment / kTileLength;
  const int64_t groups = divide_up(down, group), segments = divide_up(across, segment);
  if (groups * segments > INT32_MAX || down > INT32_MAX || across > INT32_MAX || p.batch > INT32_MAX)
    return cudaErrorInvalidValue;
  a.tiles_down = static_cast<uint32_t>(down), a.tiles_across = static_cast<uint32_t>(across);
  a.group_tiles = static_cast<uint32_t>(group), a.segment_tiles = static_cast<uint32_t>(segment);
  a.groups = static_cast<uint32_t>(groups), a.segments = static_cast<uint32_t>(segments);
  a.parts = static_cast<uint32_t>(parts_of_matrix(p.batch, groups * segments));
  a.whole_x = aligned(p.x, 16) && p.columns % 8 == 0;
  a.whole_codes = aligned(p.data, 8) && p.length() % 8 == 0;
  cudaError_t error;
  switch (p.type) {
    case ElementType::kBF16: error = launch_sums<ElementType::kBF16>(a, p.columnwise, p.batch, stream); break;
    case ElementType::kF16: error = launch_sums<ElementType::kF16>(a, p.columnwise, p.batch, stream); break;
    default: error = launch_sums<ElementType::kF32>(a, p.columnwise, p.batch, stream);
  }
  if (error != cudaSuccess) return error;
  const int64_t blocks = p.batch * divide_up(kSums, kSumsTogether);
  return launch_blocks(sums_sum_kernel, {blocks, 1, 1, kSumsThreads, sizeof(PartsShared)}, stream, a);
}

}  // namespace cuda
}  // namespace jaxlowprec
