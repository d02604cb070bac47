// Operands of a GEMM to bfloat16 where rows are whole blocks of at least 16 without padding: all matrices are one row of
// sixteens. A thread has 16 codes, 8 or 16 bytes, and one scale for them, of four sixteens on their way at a time.
//
// Bytes moved per element: its code, 1/2 or 1, read; 2 written; a scale for every 16, 32 or 128. Launch: blocks of 256
// threads, as many as the device holds at once.
#pragma once

#include "dequantize.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kDecodeAhead = 4;

struct DecodeSixteensArguments {
  const uint8_t *data, *scale;
  uint4* result;
  uint32_t sixteens, of_row;          // all of them; of a row
  int32_t row_shift, sixteens_shift;  // log2 of the rows, and of the sixteens of a row, that share a scale
  uint32_t scale_stride;              // from the scales of a row, or of rows that share them, to the next
  ScaleKind scale_kind;
};

/// Two eights of codes.
template <class Element>
struct SixteenCodes {
  EightCodes<Element> eights[2];

  JLP_DEVICE SixteenCodes load(const uint8_t* data, uint32_t at) {
    SixteenCodes codes;
    if constexpr (Element::kPacked) {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(data) + at);
      codes.eights[0].words[0] = words.x, codes.eights[1].words[0] = words.y;
    } else {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(data) + at);
      codes.eights[0].words[0] = words.x, codes.eights[0].words[1] = words.y;
      codes.eights[1].words[0] = words.z, codes.eights[1].words[1] = words.w;
    }
    return codes;
  }
};

/// Where a sixteen's scale lies.
JLP_DEVICE uint32_t scale_of_sixteen(const DecodeSixteensArguments& a, uint32_t at) {
  if (a.row_shift == 0) return at >> a.sixteens_shift;  // rows of scales are whole, too
  const uint32_t row = at / a.of_row;
  return (row >> a.row_shift) * a.scale_stride + ((at - row * a.of_row) >> a.sixteens_shift);
}

template <class Element>
static __global__ void __launch_bounds__(kDequantizeThreads, 4) decode_sixteens(const DecodeSixteensArguments a) {
  constexpr uint32_t kPiece = kDequantizeThreads * kDecodeAhead;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kPiece + threadIdx.x; first < a.sixteens; first += gridDim.x * kPiece) {
    SixteenCodes<Element> codes[kDecodeAhead] = {};
    uint32_t scales[kDecodeAhead] = {};
#pragma unroll
    for (int i = 0; i < kDecodeAhead; ++i) {
      const uint32_t at = first + i * kDequantizeThreads;
      if (at >= a.sixteens) continue;
      codes[i] = SixteenCodes<Element>::load(a.data, at);
      scales[i] = load_scale(a.scale_kind, a.scale, scale_of_sixteen(a, at));
    }
#pragma unroll
    for (int i = 0; i < kDecodeAhead; ++i) {
      const uint32_t at = first + i * kDequantizeThreads;
      if (at >= a.sixteens) continue;
      const float scale = decode_scale(a.scale_kind, scales[i]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[8];
        codes[i].eights[half].decode(v);
        apply_scale<Decoding::kProduct>(v, scale, 0.0f);
        store_eight<ElementType::kBF16, true>(a.result + 2 * int64_t{at} + half, 0, v, 8);
      }
    }
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
