#include "layouts.cuh"
#include "layouts.h"

namespace jaxlowprec {
namespace cuda {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

cudaError_t launch_blocks(void (*kernel)(ScaleLayoutArguments), int64_t blocks, size_t shared_bytes,
                          const ScaleLayoutArguments& a, cudaStream_t stream) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(256);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace

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
      return launch_blocks(pad_scales_kernel, divide_up(a.rows * divide_up(a.blocks, 4) * 4, 256), 0, a, stream);
    }
    a.row_tiles = static_cast<uint32_t>(divide_up(p.rows, 32));
    a.column_tiles = static_cast<uint32_t>(divide_up(a.blocks, 32));
    return launch_blocks(transpose_scales_kernel, p.batch * a.row_tiles * a.column_tiles, sizeof(TransposeShared), a,
                         stream);
  }
  while (f.tiles && (1 << a.row_shift) < f.block) ++a.row_shift;
  a.row_tiles = static_cast<uint32_t>(divide_up(p.rows, 128));
  a.column_tiles = static_cast<uint32_t>(divide_up(a.blocks, 4));
  return launch_blocks(swizzle_kernel, p.batch * a.row_tiles * divide_up(a.column_tiles, kSwizzleTiles), 0, a, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
