#include "../launch_blocks.h"
#include "layouts.cuh"
#include "layouts.h"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const ScaleLayoutProblem& p, cudaStream_t stream) {
  const Format& f = p.format;
  if (f.scaling == Scaling::kTensor) return cudaErrorInvalidValue;
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
