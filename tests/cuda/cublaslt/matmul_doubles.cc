#include "matmul_doubles.h"

#include <cstring>

#include "../../../xla_ffi/cuda/decode.h"
#include "../../../xla_ffi/cuda/errors.h"
#include "../../../xla_ffi/cuda/matmul/int8_by_nibbles.h"
#include "../../../xla_ffi/cuda/matmul/layouts.h"
#include "../../../xla_ffi/cuda/matmul/line_scales.h"
#include "../../../xla_ffi/cuda/matmul/matmul_plan.h"
#include "../../../xla_ffi/cuda/matmul/rebase.h"
#include "../../../xla_ffi/cuda/weight_only/matmul_decode.h"
#include "../../cpp/rebase_reference.h"

// --- CUDA's runtime

extern "C" cudaError_t cudaGetDevice(int* device) { return *device = doubles::device, cudaSuccess; }
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? doubles::capability / 10 : doubles::capability % 10;
  return cudaSuccess;
}
extern "C" cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}

// An event is the time when it was recorded.
extern "C" cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return *event = reinterpret_cast<cudaEvent_t>(new float), cudaSuccess;
}
extern "C" cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<float*>(event), cudaSuccess; }
extern "C" cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  return *reinterpret_cast<float*>(event) = doubles::milliseconds(), cudaSuccess;
}
extern "C" cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
extern "C" cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t start, cudaEvent_t end) {
  return *elapsed = *reinterpret_cast<float*>(end) - *reinterpret_cast<float*>(start), cudaSuccess;
}

namespace jaxlowprec {
namespace cuda {
namespace {

/// A decoded element, without the tensor's scale.
float decoded(const MatmulOperand& operand, int64_t rows, int64_t row, int64_t k) {
  const float code = reference::decoded_code(operand, rows, 0, row, k);
  if (operand.format.scaling == Scaling::kTensor || operand.format.scaling == Scaling::kRows) return code;
  return code * reference::decoded_scale(operand, rows, 0, row, k / operand.format.block);
}

void swizzle(const ScaleLayoutProblem& p) {
  const int64_t blocks = p.format.scale_columns(p.columns), across = (blocks + 3) / 4;
  for (int64_t i = 0; i < p.rows; ++i)
    for (int64_t j = 0; j < blocks; ++j)
      static_cast<uint8_t*>(p.result)[((i / 128) * across + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4] =
          p.scale[(p.format.tiles ? i / p.format.block : i) * blocks + j];
}

void lay_out_floats(const ScaleLayoutProblem& p) {
  const int64_t rows = p.format.scale_rows(p.rows), blocks = p.format.scale_columns(p.columns);
  const int64_t padded_rows = (rows + 3) / 4 * 4, padded_blocks = (blocks + 3) / 4 * 4;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < blocks; ++j)
      static_cast<float*>(p.result)[p.format.tiles ? i * padded_blocks + j : j * padded_rows + i] =
          reinterpret_cast<const float*>(p.scale)[i * blocks + j];
}

}  // namespace

std::string reason(cudaError_t status) { return "CUDA error " + std::to_string(status); }

cudaError_t launch(const DecodeProblem& p, cudaStream_t) {
  auto* to = static_cast<uint16_t*>(p.result);
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t k = 0; k < p.width; ++k)
      *to++ = k < p.depth ? static_cast<uint16_t>(bf16_encode(decoded(p.operand, p.rows, row, k))) : 0;
  return cudaSuccess;
}

cudaError_t launch(const ScaleLayoutProblem& p, cudaStream_t) {
  ++doubles::layout_calls;
  std::memset(p.result, 0, gemm_scale_bytes(p.format, p.rows, p.columns));
  p.format.scaling == Scaling::kFloat32 ? lay_out_floats(p) : swizzle(p);
  return cudaSuccess;
}

cudaError_t launch(const RebaseProblem& p, cudaStream_t) {
  const reference::Rebased rebased(p.operand, p.rows);
  std::copy(rebased.codes.begin(), rebased.codes.end(), p.codes);
  std::copy(rebased.scales.begin(), rebased.scales.end(), p.scales);
  return cudaSuccess;
}

cudaError_t launch(const LineScalesProblem& p, cudaStream_t) {
  for (int64_t i = 0; i < p.rows * p.columns; ++i) {
    const float sum =
        p.integers ? static_cast<float>(static_cast<const int32_t*>(p.sums)[i]) : static_cast<const float*>(p.sums)[i];
    const float scaled =
        reference::multiply(reference::multiply(sum, p.of_columns[i % p.columns]), p.of_rows[i / p.columns]);
    const float onto = p.accumulate ? reference::get(p.accumulate, p.type, i) : 0;
    reference::put(p.result, p.type, i, p.accumulate ? reference::add(scaled, onto) : scaled);
  }
  return cudaSuccess;
}

cudaError_t launch(const Int8ByNibblesProblem& p, cudaStream_t) {
  const Format& f = p.b_format;
  const int64_t groups = f.blocks(p.depth), size = f.scale_bytes();
  std::vector<uint8_t> scales(groups * p.columns * size);  // row by row
  for (int64_t i = 0; i < groups * p.columns; ++i)
    std::memcpy(&scales[i * size], p.b_scale + (i % groups * p.columns + i / groups) * size, size);
  MatmulProblem same{};
  same.a = {{CodeType::kInt8, Scaling::kRows, 1, false, ScaleRule::kDeploy, false, 0, ElementType::kF32},
            p.a,
            reinterpret_cast<const uint8_t*>(p.a_scale),
            nullptr,
            p.depth};
  same.b = {f, p.b, scales.data(), nullptr, groups * f.block};
  same.batch = 1, same.rows = p.rows, same.columns = p.columns;
  same.accumulate = p.accumulate, same.type = same.accumulate_type = p.type;
  reference::matmul(same, p.result, nullptr);
  return cudaSuccess;
}

cudaError_t launch(const WidenProblem& p, cudaStream_t) {
  for (int64_t row = 0; row < p.rows; ++row)
    for (int64_t k = 0; k < p.operand.columns; ++k)
      p.codes[row * p.operand.columns + k] =
          static_cast<uint8_t>(float8_encode<E4M3>(reference::decoded_code(p.operand, p.rows, 0, row, k)));
  return cudaSuccess;
}

int64_t matmul_decode_workspace_bytes(const MatmulDecodeProblem&) { return 256; }

cudaError_t launch(const MatmulDecodeProblem& p, cudaStream_t) {
  ++doubles::small_calls;
  const Format format{CodeType::kE2M1, Scaling::kTwoLevel, p.w.group, p.w.tiles, ScaleRule::kUp, false, 0};
  const MatmulOperand w{format, p.w.data, static_cast<const uint8_t*>(p.w.scale), nullptr, p.depth};
  for (int64_t m = 0; m < p.rows; ++m)
    for (int64_t n = 0; n < p.columns; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < p.depth; ++k) sum += double{decoded(p.x, p.rows, m, k)} * decoded(w, p.columns, n, k);
      reference::put(p.result, p.type, m * p.columns + n, static_cast<float>(*p.alpha * sum));
    }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jaxlowprec
