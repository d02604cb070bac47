#include "../launch_blocks.h"
#include "int8_by_nibbles.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

/// Fewer blocks than this leave multiprocessors idle: an H100 has 132.
constexpr int64_t kEnoughBlocks = 128;

template <class Weight, int kGroup, class Tile>
cudaError_t launch_tiles(const Int8ByNibblesArguments& a, cudaStream_t stream) {
  const int64_t tiles = divide_up(a.rows, Tile::kRows) * divide_up(a.columns, Tile::kColumns);
  return launch_blocks(int8_by_nibbles_kernel<Weight, kGroup, Tile>,
                       {tiles, 1, 1, Tile::kThreads, sizeof(NibbleStages<Weight, kGroup, Tile>)}, stream, a);
}

template <class Weight, int kGroup>
cudaError_t launch_group(const Int8ByNibblesArguments& a, cudaStream_t stream) {
  if (a.rows <= FewRowsTile::kRows) return launch_tiles<Weight, kGroup, FewRowsTile>(a, stream);
  const int64_t large = divide_up(a.rows, ManyRowsTile::kRows) * divide_up(a.columns, ManyRowsTile::kColumns);
  return large < kEnoughBlocks ? launch_tiles<Weight, kGroup, SomeRowsTile>(a, stream)
                               : launch_tiles<Weight, kGroup, ManyRowsTile>(a, stream);
}

template <class Weight>
cudaError_t launch_weight(int group, const Int8ByNibblesArguments& a, cudaStream_t stream) {
  switch (group) {
    case 32: return launch_group<Weight, 32>(a, stream);
    case 64: return launch_group<Weight, 64>(a, stream);
    case 128: return launch_group<Weight, 128>(a, stream);
    case 256: return launch_group<Weight, 256>(a, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch(const Int8ByNibblesProblem& p, cudaStream_t stream) {
  const Format& f = p.b_format;
  const bool all_aligned = aligned(p.a, 16) && aligned(p.b, 16) && aligned(p.b_scale, 16) && aligned(p.result, 16) &&
                           aligned(p.accumulate, 16) && p.columns % 16 == 0 && p.depth % 16 == 0;
  if (!all_aligned || p.type == ElementType::kF16 || p.depth > INT32_MAX) return cudaErrorInvalidValue;
  if (p.rows * p.columns == 0) return cudaSuccess;
  const Int8ByNibblesArguments a = {
      p.a,          p.a_scale, p.b,   p.b_scale, p.rows, p.columns, p.depth, f.blocks(p.depth), f.row_bytes(p.depth),
      p.accumulate, p.result,  p.type};
  if (f.code == CodeType::kE2M1 && f.scaling == Scaling::kE8M0 && !f.tiles) return launch_group<Mxfp4Weight, 32>(a, stream);
  if (f.code != CodeType::kInt4) return cudaErrorInvalidValue;
  return f.scale_type == ElementType::kBF16 ? launch_weight<Int4Weight<ElementType::kBF16>>(f.block, a, stream)
                                            : launch_weight<Int4Weight<ElementType::kF16>>(f.block, a, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
