// Few rows of x by a quantised weight: the kernel that streams the weight, and the launch of it or of matmul_decode.cuh's.
#include <algorithm>

#include "../decode.h"
#include "../launch_blocks.h"
#include "matmul_decode.cuh"
#include "weight_only_plan.h"

namespace jaxlowprec {
namespace cuda {

// --- y[M, N] = x[M, K] decode(w[N, K])^T as matmul_decode.cuh, in one launch without a workspace, for weights of whole 16
// rows by 128 k: enough of them on their way from memory to keep it busy.
//
// Data flow: a block has 16 * kTiles weight rows and all of K; its 16 warps take 128 k each in turn. What a lane will decode
// it copies to shared memory itself, 16 bytes of rows g and g + 8 of a unit (16 rows by 128 k), and waits for nothing but
// its own copies: kSlots units a warp are on their way, 192 KiB a multiprocessor with 12. A warp's x is its own, and goes
// from the L2 cache to its registers. Scales and zero points of all the block's rows lie in shared memory from the
// beginning. The warps' sums meet where the codes were and are added in the order of the warps: of at most 2048 k each,
// since tensor cores cut off what they add. So a row's bits depend on no other row, nor on kTiles and kSlots.
//
// x is bfloat16, or NVFP4 codes, which are decoded as the weight's.
//
// Bytes moved: a weight row's codes and scales once for every 16 rows of x; x once a block (from L2); the result once.
// Launch: (weight rows / (16 * kTiles), M / 16) blocks of 16 warps, one a multiprocessor with 12 slots.

constexpr int kStreamWarps = 16;
constexpr int kUnitBytes = 16 * kChunk / 2;
constexpr int64_t kMaximumStreamDepth = 2048 * kStreamWarps;

/// Rows of scales, and of zero points, in shared memory: 16 bytes apart from banks of their own.
struct StreamLayout {
  uint32_t scale_bytes, scale_pitch, zero_pitch;  // of a row; zero_pitch 0: none
  uint32_t lane_pitch, tile_pitch;                // from one weight row's scales to the next one's, and from one tile's
};

inline StreamLayout stream_layout(uint32_t scale_bytes, uint32_t zero_bytes, int32_t scale_shift) {
  const auto pitch = [](uint32_t bytes) { return (bytes + 15) / 16 * 16 + 16; };
  const uint32_t scales = pitch(scale_bytes);
  return {scale_bytes, scales, zero_bytes ? pitch(zero_bytes) : 0, scale_shift ? 0 : scales,
          scale_shift ? scales : 16 * scales};
}

struct WeightStreamArguments {
  MatmulDecodeArguments a;  // its x are bfloat16 elements or NVFP4 codes, and x_stride counts either
  StreamLayout layout;
  int32_t group_shift;  // kInt4: log2 of the 32 k that share a scale
  // Of codes of x:
  const uint8_t* x_scale;
  int32_t x_scale_shift;  // log2 of the rows that share a scale
};

// --- x: a lane's 32 k of a row and chunk

template <bool kCodes>
struct LaneX;

/// bfloat16.
template <>
struct LaneX<false> {
  static constexpr float kSumScale = 1.0f;
  uint4 words[4];

  JLP_DEVICE LaneX load(const WeightStreamArguments& given, int64_t row, uint32_t k) {
    const uint16_t* from = given.a.x + (row * given.a.x_stride + k);
    LaneX x;
#pragma unroll
    for (int j = 0; j < 4; ++j) x.words[j] = __ldg(reinterpret_cast<const uint4*>(from) + j);
    return x;
  }
  __device__ __forceinline__ void pairs(uint4 (&to)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[j] = pair_up(words[j]);
  }
};

/// NVFP4 codes, and two scales: decoded as those of weights, but for their kSumScale.
template <>
struct LaneX<true> {
  static constexpr float kSumScale = cuda::kSumScale<WeightType::kNvfp4>;
  LaneCodes codes;

  JLP_DEVICE LaneX load(const WeightStreamArguments& given, int64_t row, uint32_t k) {
    const uint32_t stride = given.a.x_stride;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(given.a.x) + (row * (stride / 2) + k / 2);
    const uint8_t* scale = given.x_scale + ((row >> given.x_scale_shift) * (stride / 16) + k / 16);
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from));
    return {{{v.x, v.y, v.z, v.w}, __ldg(reinterpret_cast<const uint16_t*>(scale)), 0}};
  }
  __device__ __forceinline__ void pairs(uint4 (&to)[4]) const {
    const LaneFactors factors = factors_of<WeightType::kNvfp4>(codes);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto pair = [&](auto i) {
        return decode_pair<WeightType::kNvfp4, decltype(i)::value>(codes.words[j], factors.scale[j / 2], 0);
      };
      to[j] = make_uint4(pair(std::integral_constant<int, 0>{}), pair(std::integral_constant<int, 1>{}),
                         pair(std::integral_constant<int, 2>{}), pair(std::integral_constant<int, 3>{}));
    }
  }
};

/// Bytes of shared memory of a block.
template <int kTiles, int kSlots>
constexpr size_t stream_shared(const StreamLayout& layout, int32_t scale_shift) {
  return size_t{kStreamWarps} * kSlots * kUnitBytes + ((16 * kTiles) >> scale_shift) * layout.scale_pitch +
         16 * kTiles * layout.zero_pitch;
}

/// Rows of bytes from memory to shared memory, where they are `pitch` apart.
JLP_DEVICE void stage_rows(uint8_t* to, uint32_t pitch, const uint8_t* from, uint32_t row_bytes, uint32_t rows) {
  constexpr uint32_t kThreads = kStreamWarps * 32;
  if (row_bytes % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    const uint32_t pieces = row_bytes / 16;
    for (uint32_t i = threadIdx.x; i < rows * pieces; i += kThreads)
      copy_async16(to + i / pieces * pitch + i % pieces * 16, from + 16 * i);
  } else {
    for (uint32_t i = threadIdx.x; i < rows * row_bytes; i += kThreads) to[i / row_bytes * pitch + i % row_bytes] = from[i];
  }
}

template <WeightType kWeight, bool kXCodes, int kColumnTiles, int kTiles, int kSlots>
static __global__ void __launch_bounds__(kStreamWarps * 32, 1)
    weight_stream_kernel(const __grid_constant__ WeightStreamArguments given) {
  constexpr int kRows = 16 * kTiles, kSteps = kSlots / kTiles;
  constexpr bool kZeroPoints = kWeight == WeightType::kInt4 && kTiles < 4;  // whether the weight may have some
  struct Shared {
    uint4 codes[kStreamWarps][kSlots][2][32];  // afterwards the warps' sums
    alignas(16) uint8_t staged[16];            // scales, then zero points: as the launch says
  };
  static_assert(kSteps * kTiles == kSlots && kColumnTiles * 8 * (kRows + 8) * 4 <= kSlots * kUnitBytes);
  const MatmulDecodeArguments& a = given.a;
  const StreamLayout& layout = given.layout;
  Shared& shared = block_shared<Shared>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t own_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int64_t first_row = own_row + kRows <= a.columns ? own_row : a.columns - kRows;  // a last block repeats rows
  const int64_t first_x = static_cast<int64_t>(blockIdx.y) * 16;
  const int rows = a.rows - first_x < 8 * kColumnTiles ? static_cast<int>(a.rows - first_x) : 8 * kColumnTiles;
  const uint32_t chunks = a.depth / kChunk, steps = (chunks - warp + kStreamWarps - 1) / kStreamWarps;

  uint8_t* const scales = shared.staged;
  uint8_t* const zeros = scales + (kRows >> a.scale_shift) * layout.scale_pitch;
  stage_rows(scales, layout.scale_pitch,
             static_cast<const uint8_t*>(a.scale) + (first_row >> a.scale_shift) * layout.scale_bytes, layout.scale_bytes,
             kRows >> a.scale_shift);
  if (layout.zero_pitch) stage_rows(zeros, layout.zero_pitch, a.zero_point + first_row * a.groups, a.groups, kRows);
  copy_async_commit();

  // Unit (step, tile): rows 16 tile + g and 8 more, chunk 16 step + warp.
  const uint8_t* const block_codes = a.data + first_row * a.row_bytes;
  const uint32_t lane_codes = g * a.row_bytes + warp * (kChunk / 2) + 16 * t;
  const auto issue = [&](uint32_t step, int slot) {
    if (step < steps) {
      const uint8_t* unit =
          block_codes + (lane_codes + step * (kStreamWarps * kChunk / 2) + slot % kTiles * (16 * a.row_bytes));
      copy_async16(&shared.codes[warp][slot][0][lane], unit);
      copy_async16(&shared.codes[warp][slot][1][lane], unit + 8 * a.row_bytes);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) issue(slot / kTiles, slot);

  // x: rows g and g + 8; zeros, scales too, where there is none.
  LaneX<kXCodes> next[kColumnTiles];
  const auto load_x = [&](uint32_t step) {
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
      next[c] = step < steps && 8 * c + g < rows
                    ? LaneX<kXCodes>::load(given, first_x + 8 * c + g, (step * kStreamWarps + warp) * kChunk + 32 * t)
                    : LaneX<kXCodes>{};
  };
  load_x(0);

  float sums[kTiles][kColumnTiles][4] = {};
  copy_async_wait<kSlots>();
  __syncthreads();
  const uint8_t* const lane_scales = scales + g * layout.lane_pitch;  // of row 16 tile + 8 h + g
  const uint8_t* const lane_zeros = zeros + g * layout.zero_pitch;
  int first_slot = 0;
#pragma unroll 1
  for (uint32_t step = 0; step < steps; ++step) {
    uint4 pairs[kColumnTiles][4];
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) next[c].pairs(pairs[c]);
    if constexpr (kColumnTiles == 1) load_x(step + 1);
    const uint32_t chunk = step * kStreamWarps + warp;
    const uint32_t group = kWeight == WeightType::kNvfp4 ? chunk * 8 + 2 * t : (chunk * 4 + t) >> given.group_shift;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      copy_async_wait<kSlots - 1>();
      LaneCodes codes[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 v = shared.codes[warp][first_slot + tile][h][lane];
        const uint8_t* const scale = lane_scales + tile * layout.tile_pitch + 8 * h * layout.lane_pitch;
        codes[h] = {{v.x, v.y, v.z, v.w}, 0, kWeight == WeightType::kInt4 ? 8u : 0u};
        codes[h].scale = *reinterpret_cast<const uint16_t*>(scale + (kWeight == WeightType::kInt4 ? 2 : 1) * group);
        if (kZeroPoints && layout.zero_pitch) codes[h].second = lane_zeros[(16 * tile + 8 * h) * layout.zero_pitch + group];
      }
      multiply_codes<kWeight, kColumnTiles>(
          codes, [&](int c, int j) { return pairs[c][j]; }, [&](int, int c) -> float(&)[4] { return sums[tile][c]; });
      issue(step + kSteps, first_slot + tile);  // into the slot that has been read
    }
    if constexpr (kColumnTiles > 1) load_x(step + 1);  // no registers for it before
    first_slot = first_slot + kTiles == kSlots ? 0 : first_slot + kTiles;
  }
  copy_async_wait<0>();
  __syncwarp();  // all lanes have read their codes

  // [row of x][weight row]
  constexpr int kPitch = kRows + 8;
  float* const own = reinterpret_cast<float*>(shared.codes[warp]);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) own[(8 * c + 2 * t + i % 2) * kPitch + 16 * tile + g + i / 2 * 8] = sums[tile][c][i];
  __syncthreads();
  for (int i = threadIdx.x; i < rows * kRows; i += kStreamWarps * 32) {
    const int m = i / kRows, n = i % kRows;
    if (first_row + n < own_row) continue;  // the block before has it
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kStreamWarps; ++w) sum += reinterpret_cast<const float*>(shared.codes[w])[m * kPitch + n];
    sum *= kSumScale<kWeight> * LaneX<kXCodes>::kSumScale;
    store_result(a.result, a.type, (first_x + m) * a.columns + first_row + n, a.alpha ? sum * *a.alpha : sum);
  }
}

namespace {

/// How many blocks share K: so that 128 weight rows per block fill an H100 twice, each block with what a warp loads ahead at
/// least. A function of the weight's shape alone: bytes depend neither on the device nor on the rows of x.
int64_t splits_of(int64_t columns, int64_t depth) {
  const int64_t most = divide_up(depth, kChunk * kAhead);
  const int64_t wanted = std::max<int64_t>(1, std::min(kSmallBlocks / divide_up(columns, kDecodeColumns), most));
  return divide_up(most, divide_up(most, wanted));  // of equal size, none of them empty
}

int64_t decoded_x_bytes(const MatmulDecodeProblem& p) {
  return p.x.data ? divide_up(p.rows * decoded_width(p.depth), 8) * 16 : 0;
}

template <WeightType kWeight, int kColumnTiles, bool kWhole>
cudaError_t launch_kernel(const MatmulDecodeArguments& a, int64_t splits, cudaStream_t stream) {
  const Blocks blocks{divide_up(a.columns, kDecodeColumns), splits, divide_up(a.rows, 16), kDecodeWarps * 32,
                      sizeof(MatmulDecodeShared<kColumnTiles>)};
  return launch_blocks(matmul_decode_kernel<kWeight, kColumnTiles, kWhole>, blocks, stream, a);
}

template <WeightType kWeight>
cudaError_t launch_weight(const MatmulDecodeArguments& a, bool whole, int64_t splits, cudaStream_t stream) {
  if (a.rows <= 8)
    return whole ? launch_kernel<kWeight, 1, true>(a, splits, stream) : launch_kernel<kWeight, 1, false>(a, splits, stream);
  return whole ? launch_kernel<kWeight, 2, true>(a, splits, stream) : launch_kernel<kWeight, 2, false>(a, splits, stream);
}

// --- one launch for weights of whole units

/// Blocks of so many weight rows, at least, that fill a GPU; else blocks are smaller.
constexpr int64_t kStreamBlocks = 120;

template <WeightType kWeight, bool kXCodes, int kColumnTiles, int kTiles, int kSlots>
cudaError_t launch_stream(const WeightStreamArguments& a, cudaStream_t stream) {
  const Blocks blocks{divide_up(a.a.columns, 16 * kTiles), divide_up(a.a.rows, 16), 1, kStreamWarps * 32,
                      stream_shared<kTiles, kSlots>(a.layout, a.a.scale_shift)};
  return launch_blocks(weight_stream_kernel<kWeight, kXCodes, kColumnTiles, kTiles, kSlots>, blocks, stream, a);
}

/// Launches one with so many rows of x a block, if its scales fit into the device's shared memory.
template <WeightType kWeight, bool kXCodes, int kColumnTiles>
cudaError_t launch_some_stream(const WeightStreamArguments& a, size_t most, bool& served, cudaStream_t stream) {
  const auto fits = [&](size_t bytes) { return bytes <= most; };
  const auto fills = [&](int64_t rows) { return a.a.columns >= kStreamBlocks * rows; };
  if constexpr (kColumnTiles == 1)  // for two there are too few registers
    if (!a.a.zero_point && fills(64) && fits(stream_shared<4, 12>(a.layout, a.a.scale_shift)))
      return launch_stream<kWeight, kXCodes, kColumnTiles, 4, 12>(a, stream);
  if (fills(32) && fits(stream_shared<2, 12>(a.layout, a.a.scale_shift)))
    return launch_stream<kWeight, kXCodes, kColumnTiles, 2, 12>(a, stream);
  if (fits(stream_shared<1, 12>(a.layout, a.a.scale_shift)))
    return launch_stream<kWeight, kXCodes, kColumnTiles, 1, 12>(a, stream);
  if (fits(stream_shared<1, 4>(a.layout, a.a.scale_shift)))
    return launch_stream<kWeight, kXCodes, kColumnTiles, 1, 4>(a, stream);
  served = false;
  return cudaSuccess;
}

/// Launches the streaming kernel if it serves: a weight of whole units, whose scales fit into shared memory. `x`:
/// codes, if it has any; they have no columns beyond the depth.
template <WeightType kWeight, bool kXCodes>
cudaError_t try_stream(const MatmulDecodeArguments& a, const MatmulOperand& x, int32_t group, bool whole, bool& served,
                       cudaStream_t stream) {
  const uint32_t scale_bytes = a.groups * (kWeight == WeightType::kInt4 ? 2 : 1);
  WeightStreamArguments s{a, stream_layout(scale_bytes, a.zero_point ? a.groups : 0, a.scale_shift), 0, x.scale,
                          x.format.tiles ? 4 : 0};
  while (int64_t{32} << s.group_shift < group) ++s.group_shift;
  const bool even_groups = kWeight == WeightType::kNvfp4 || int64_t{32} << s.group_shift == group;
  served = whole && a.columns % 16 == 0 && a.depth % kChunk == 0 && a.depth <= kMaximumStreamDepth && even_groups &&
           uint64_t{a.groups} * group == a.depth;
  if (!served) return cudaSuccess;
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  return a.rows <= 8 ? launch_some_stream<kWeight, kXCodes, 1>(s, static_cast<size_t>(most), served, stream)
                     : launch_some_stream<kWeight, kXCodes, 2>(s, static_cast<size_t>(most), served, stream);
}

bool supported(const MatmulDecodeProblem& p) {
  const bool weight = p.w.type == WeightType::kNvfp4 ? p.w.group == 16 : p.w.group > 0 && p.w.group % 32 == 0 && !p.w.tiles;
  const bool x = !p.x.data || (p.x.format.scaling == Scaling::kTwoLevel && p.x.columns >= p.depth);
  return weight && x && p.depth > 0 && p.depth <= kMaximumDecodeDepth;
}

}  // namespace

int64_t matmul_decode_workspace_bytes(const MatmulDecodeProblem& p) {
  const int64_t splits = splits_of(p.columns, p.depth);
  return decoded_x_bytes(p) + (splits > 1 ? splits * p.rows * p.columns * 4 : 0);
}

cudaError_t launch(const MatmulDecodeProblem& p, cudaStream_t stream) {
  if (p.rows * p.columns == 0) return cudaSuccess;
  if (!supported(p)) return cudaErrorInvalidValue;
  MatmulDecodeArguments a{};
  const int64_t splits = splits_of(p.columns, p.depth), groups = divide_up(p.depth, p.w.group);
  a.groups = static_cast<uint32_t>(groups), a.row_bytes = static_cast<uint32_t>(groups * p.w.group / 2);
  if (p.w.group > 32) a.group_inverse = static_cast<uint32_t>(divide_up(int64_t{1} << 32, p.w.group / 32));
  a.data = p.w.data, a.scale = p.w.scale, a.zero_point = p.w.zero_point;
  a.scale_shift = p.w.tiles ? 4 : 0;
  a.alpha = p.alpha, a.rows = p.rows, a.columns = p.columns;
  a.chunks_per_split = static_cast<int32_t>(divide_up(divide_up(p.depth, kChunk * kAhead), splits) * kAhead);
  a.result = p.result, a.type = p.type;
  const bool whole_weight = aligned(a.data, 16) && a.row_bytes % 16 == 0;
  bool served = false;
  cudaError_t error = cudaSuccess;
  a.x_stride = a.depth = static_cast<uint32_t>(p.depth);
  if (p.x.data && p.w.type == WeightType::kNvfp4 && p.x.columns == p.depth) {
    a.x = reinterpret_cast<const uint16_t*>(p.x.data);
    const bool whole = whole_weight && aligned(p.x.data, 16) && aligned(p.x.scale, 2);
    error = try_stream<WeightType::kNvfp4, true>(a, p.x, p.w.group, whole, served, stream);
    if (served || error != cudaSuccess) return error;
  }
  a.x = static_cast<const uint16_t*>(p.x_bf16);
  if (p.x.data) {  // exact in bfloat16, zero beyond the depth
    const int64_t width = decoded_width(p.depth);
    error = launch(DecodeProblem{p.x, 1, p.rows, p.depth, width, p.workspace}, stream);
    if (error != cudaSuccess) return error;
    a.x = static_cast<const uint16_t*>(p.workspace), a.x_stride = a.depth = static_cast<uint32_t>(width);
  }
  if (splits > 1) a.partial = reinterpret_cast<float*>(static_cast<uint8_t*>(p.workspace) + decoded_x_bytes(p));
  const bool whole = whole_weight && aligned(a.x, 16) && a.x_stride % 8 == 0;
  error = p.w.type == WeightType::kNvfp4 ? try_stream<WeightType::kNvfp4, false>(a, {}, p.w.group, whole, served, stream)
                                         : try_stream<WeightType::kInt4, false>(a, {}, p.w.group, whole, served, stream);
  if (served || error != cudaSuccess) return error;
  error = p.w.type == WeightType::kNvfp4 ? launch_weight<WeightType::kNvfp4>(a, whole, splits, stream)
                                         : launch_weight<WeightType::kInt4>(a, whole, splits, stream);
  if (error != cudaSuccess || splits == 1) return error;
  return launch_blocks(matmul_decode_sum_kernel, {divide_up(p.rows * p.columns, 256)}, stream, a.partial,
                       static_cast<int>(splits), p.rows * p.columns, p.alpha, p.result, p.type);
}

}  // namespace cuda
}  // namespace jaxlowprec
