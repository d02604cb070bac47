#include <algorithm>

#include "../decode.h"
#include "../launch_blocks.h"
#include "weight_only_plan.h"
#include "weight_stream.cuh"

namespace jaxlowprec {
namespace cuda {
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

/// Launches the kernel of weight_stream.cuh if it serves: a weight of whole units, whose scales fit into shared memory. `x`:
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
