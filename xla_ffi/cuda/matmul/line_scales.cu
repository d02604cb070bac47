// Sums of a GEMM times the scales of both operands' lines: a thread has four neighbours of each of several rows' parts.
//
// Bytes moved per result: 4 read, 2 or 4 written, what is accumulated onto read. Launch: blocks of 256 threads, as many as
// the device holds at once.
#include "../launch_grid.cuh"
#include "../vectors.cuh"
#include "line_scales.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kLineScalesThreads = 256;
constexpr int kLineScalesAhead = 4;  // fours that a thread loads before the first is used

struct LineScalesArguments {
  const uint4* sums;
  const float* of_rows;
  const float4* of_columns;
  const void* accumulate;
  void* result;
  uint32_t fours, of_row;  // all of them; of a row
};

/// Four numbers of an array of the result's type.
template <ElementType kType>
struct Four {
  uint32_t words[kType == ElementType::kF32 ? 4 : 2];

  JLP_DEVICE Four load(const void* from, uint32_t at) {
    Four four;
    if constexpr (kType == ElementType::kF32) {
      const uint4 v = static_cast<const uint4*>(from)[at];
      four.words[0] = v.x, four.words[1] = v.y, four.words[2] = v.z, four.words[3] = v.w;
    } else {
      const uint2 v = static_cast<const uint2*>(from)[at];
      four.words[0] = v.x, four.words[1] = v.y;
    }
    return four;
  }
  __device__ __forceinline__ void store(void* to, uint32_t at) const {
    if constexpr (kType == ElementType::kF32)
      static_cast<uint4*>(to)[at] = {words[0], words[1], words[2], words[3]};
    else
      static_cast<uint2*>(to)[at] = {words[0], words[1]};
  }
};

template <ElementType kType, bool kIntegers>
static __global__ void __launch_bounds__(kLineScalesThreads, 4) scale_lines(const LineScalesArguments a) {
  constexpr uint32_t kPiece = kLineScalesThreads * kLineScalesAhead, kPer = kPerWord<kType>;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kPiece + threadIdx.x; first < a.fours; first += gridDim.x * kPiece) {
    uint4 sums[kLineScalesAhead] = {};
#pragma unroll
    for (int i = 0; i < kLineScalesAhead; ++i) {
      const uint32_t at = first + i * kLineScalesThreads;
      if (at < a.fours) sums[i] = a.sums[at];
    }
#pragma unroll
    for (int i = 0; i < kLineScalesAhead; ++i) {
      const uint32_t at = first + i * kLineScalesThreads;
      if (at >= a.fours) continue;
      const uint32_t row = at / a.of_row, words[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
      const float of_row = __ldg(a.of_rows + row);
      const float4 of_columns = __ldg(a.of_columns + (at - row * a.of_row));
      const float each[4] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
      float v[4], onto[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float sum = kIntegers ? static_cast<float>(static_cast<int32_t>(words[j])) : Lanes<float>::from_bits(words[j]);
        v[j] = (sum * each[j]) * of_row;
      }
      if (a.accumulate) {
        const auto given = Four<kType>::load(a.accumulate, at);
#pragma unroll
        for (uint32_t j = 0; j < 4; j += kPer) widen<kType>(given.words[j / kPer], onto + j);
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = v[j] + onto[j];
      }
      Four<kType> four;
#pragma unroll
      for (uint32_t j = 0; j < 4; j += kPer) four.words[j / kPer] = narrow<kType>(v + j);
      four.store(a.result, at);
    }
  }
}

cudaError_t launch(const LineScalesProblem& p, cudaStream_t stream) {
  const int64_t fours = p.rows * p.columns / 4;
  const bool all_aligned =
      aligned(p.sums, 16) && aligned(p.of_columns, 16) && aligned(p.accumulate, 16) && aligned(p.result, 16);
  if (p.columns % 4 != 0 || fours > INT32_MAX || !all_aligned) return cudaErrorInvalidValue;
  if (fours == 0) return cudaSuccess;
  const LineScalesArguments a = {static_cast<const uint4*>(p.sums),
                                 p.of_rows,
                                 reinterpret_cast<const float4*>(p.of_columns),
                                 p.accumulate,
                                 p.result,
                                 static_cast<uint32_t>(fours),
                                 static_cast<uint32_t>(p.columns / 4)};
  const int64_t pieces = divide_up(fours, kLineScalesThreads * kLineScalesAhead);
  return with_type(p.type, [&](auto type) {
    return p.integers ? launch_over_pieces<scale_lines<type, true>>(pieces, kLineScalesThreads, a, stream)
                      : launch_over_pieces<scale_lines<type, false>>(pieces, kLineScalesThreads, a, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
