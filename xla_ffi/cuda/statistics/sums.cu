#include <algorithm>

#include "../launch_blocks.h"
#include "sums.cuh"

namespace jaxlowprec {
namespace cuda {
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
