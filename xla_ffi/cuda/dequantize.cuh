// Codes back to numbers: the code times its scale, rounded once to the result's type (numerics.md 2 and 5 to 7); of NVFP4 a
// rotation of 16 undone where asked. The same kernel decodes an operand of a GEMM to bfloat16 (decode.h).
//
// Data flow: a thread loads eight codes of each of kSteps rows and their scales, then decodes and stores each: 16 bytes of a
// 16-bit result. Two neighbouring lanes have a rotation's 16 elements: strides 1, 2, 4 within the thread, 8 by a shuffle.
// Bytes moved per element: its code read and the element written, once; a scale read for every eight elements, of which all
// but the first come from the cache.
// Launch: tiles of (256 / lanes * kSteps) rows by (lanes * 8) columns, lanes being a power of two that the row fills.
#pragma once

#include "../numerics/hadamard.h"
#include "codes.cuh"

namespace jaxlowprec {
namespace cuda {

enum class ScaleKind : int32_t { kE4M3, kE8M0, kFloat32, kOne };

/// How the code and the scale make the number.
enum class Decoding { kProduct, kTwoLevel, kTwoLevelRotated };

struct DequantizeArguments {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;
  void* result;
  int64_t rows, columns;             // of numbers
  int64_t width;                     // of a row of the result; zero beyond `columns`
  int64_t row_bytes;                 // of codes
  int64_t scale_rows, scale_stride;  // of a matrix of scales
  int32_t row_shift, column_shift;   // log2 of the rows and columns that share a scale
  ScaleKind scale_kind;
  ElementType scale_type;  // of kFloat32: those of lines may have 16 bits
  uint32_t sign_mask;
  uint32_t column_tiles, row_tiles;  // of a matrix
  int32_t lane_shift;                // log2 of the lanes along a row
  bool whole;                        // codes and the result are whole eights, and aligned
};

// --- on the host

inline bool power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

inline int log2_of(int64_t power) {
  int log = 0;
  while ((int64_t{1} << log) < power) ++log;
  return log;
}

/// The arguments that a format and its arrays fix. `code_columns`: as many as the rows of codes have.
inline DequantizeArguments dequantize_arguments(const Format& f, const uint8_t* data, const uint8_t* scale, int64_t rows,
                                                int64_t code_columns) {
  constexpr int kAll = 62;  // log2 of more rows or columns than there are
  const bool tensor = f.scaling == Scaling::kTensor, rows_have = f.scaling == Scaling::kRows;
  DequantizeArguments a{};
  a.data = data, a.scale = scale, a.rows = rows;
  a.row_bytes = f.row_bytes(code_columns);
  a.scale_rows = f.scale_rows(rows), a.scale_stride = f.scale_columns(code_columns);
  a.row_shift = tensor ? kAll : f.tiles ? log2_of(f.block) : 0;
  a.column_shift = tensor || rows_have ? kAll : log2_of(f.block);
  a.scale_kind = f.scaling == Scaling::kTwoLevel ? ScaleKind::kE4M3
                 : f.scaling == Scaling::kE8M0   ? ScaleKind::kE8M0
                                                 : ScaleKind::kFloat32;
  a.scale_type = rows_have ? f.scale_type : ElementType::kF32;
  return a;
}

// --- on the device

constexpr int kDequantizeThreads = 256;
constexpr int kDequantizeSteps = 4;  // rows in flight a thread

JLP_DEVICE uint32_t load_scale(ScaleKind kind, const uint8_t* scale, int64_t index) {
  if (kind == ScaleKind::kFloat32) return reinterpret_cast<const uint32_t*>(scale)[index];
  return kind == ScaleKind::kOne ? 0 : scale[index];
}

JLP_DEVICE float decode_scale(ScaleKind kind, uint32_t stored) {
  switch (kind) {
    case ScaleKind::kE4M3: return float8_decode<E4M3, float>(stored);
    case ScaleKind::kE8M0: return e8m0_decode<float>(stored);
    case ScaleKind::kFloat32: return Lanes<float>::from_bits(stored);
    default: return 1.0f;
  }
}

/// The same where scales of lines may have 16 bits.
JLP_DEVICE uint32_t load_scale(ScaleKind kind, ElementType type, const uint8_t* scale, int64_t index) {
  return type == ElementType::kF32 ? load_scale(kind, scale, index) : reinterpret_cast<const uint16_t*>(scale)[index];
}
JLP_DEVICE float decode_scale(ScaleKind kind, ElementType type, uint32_t stored) {
  return type == ElementType::kF32    ? decode_scale(kind, stored)
         : type == ElementType::kBF16 ? Lanes<float>::from_bits(stored << 16)
                                      : f16_to_float(stored);
}

/// Codes `column` ... of a row. Packed rows are whole blocks, so that theirs are always complete.
template <class Element, bool kWhole>
JLP_DEVICE EightCodes<Element> load_codes(const DequantizeArguments& a, const uint8_t* row, int64_t column) {
  EightCodes<Element> codes = {};
  if constexpr (Element::kPacked) {
    codes.words[0] = *reinterpret_cast<const uint32_t*>(row + column / 2);
  } else if constexpr (kWhole) {
    const uint2 words = *reinterpret_cast<const uint2*>(row + column);
    codes.words[0] = words.x, codes.words[1] = words.y;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < a.row_bytes) codes.words[i / 4] |= static_cast<uint32_t>(row[column + i]) << (i % 4 * 8);
  }
  return codes;
}

/// (v H / 4) with signs, the thread's eight elements being the lower or the upper half of the 16 (numerics.md 3).
JLP_DEVICE void undo_rotation(float (&v)[8], uint32_t sign_mask) {
  const bool upper = threadIdx.x & 1u;
  hadamard_butterfly<8>(v);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], 1);
    const float sum = (other + (upper ? -v[i] : v[i])) * 0.25f;
    const uint32_t sign = sign_mask << (31 - i - (upper ? 8 : 0));
    v[i] = Lanes<float>::from_bits(Lanes<float>::bits(sum) ^ (sign & kSignBit));
  }
}

/// The factors of numerics.md 2 in their order; with -ftz, and the CPU set likewise, subnormals are zero.
template <Decoding kDecoding>
JLP_DEVICE void apply_scale(float (&v)[8], float scale, float amax) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = v[i] * scale;
    if constexpr (kDecoding != Decoding::kProduct) v[i] = v[i] * amax * 3.7202381645329296588897705078125e-4f;  // 1 / 2688
  }
}

/// Where a thread works: eight columns of rows `first`, `first + lines`, ... of one matrix.
struct DequantizePlace {
  int64_t batch, first, column;
  int lines;
};

JLP_DEVICE DequantizePlace dequantize_place(const DequantizeArguments& a) {
  const uint32_t column_tile = blockIdx.x % a.column_tiles, rest = blockIdx.x / a.column_tiles;
  const uint32_t row_tile = rest % a.row_tiles, lane = threadIdx.x & ((1u << a.lane_shift) - 1);
  const int lines = kDequantizeThreads >> a.lane_shift;
  return {rest / a.row_tiles, static_cast<int64_t>(row_tile) * (lines * kDequantizeSteps) + (threadIdx.x >> a.lane_shift),
          ((static_cast<int64_t>(column_tile) << a.lane_shift) + lane) * 8, lines};
}

/// kWhole: whole eights of codes and of the result, aligned. A rotation needs a row's padding, too.
template <class Element, Decoding kDecoding, ElementType kResult, bool kWhole, int kSteps>
JLP_DEVICE void dequantize_rows(const DequantizeArguments& a, const DequantizePlace& at) {
  const int64_t line = at.batch * a.rows + at.first;
  const uint8_t* row = a.data + line * a.row_bytes;
  const int64_t remaining = a.rows - at.first;
  const int rows = remaining < kSteps * at.lines ? static_cast<int>(remaining) : kSteps * at.lines;
  const int coded = at.column < (kDecoding == Decoding::kTwoLevelRotated ? a.row_bytes * 2 : a.columns) ? rows : 0;
  const float amax = kDecoding == Decoding::kProduct ? 0.0f : a.amax[at.batch];
  const ScaleKind kind = kDecoding == Decoding::kProduct ? a.scale_kind : ScaleKind::kE4M3;
  EightCodes<Element> codes[kSteps] = {};
  uint32_t scales[kSteps] = {};
#pragma unroll
  for (int step = 0; step < kSteps; ++step, row += at.lines * a.row_bytes) {
    if (step * at.lines >= coded) continue;
    codes[step] = load_codes<Element, kWhole>(a, row, at.column);
    const int64_t scale_row = at.batch * a.scale_rows + ((at.first + step * at.lines) >> a.row_shift);
    scales[step] = load_scale(kind, a.scale_type, a.scale, scale_row * a.scale_stride + (at.column >> a.column_shift));
  }
  int64_t index = line * a.width + at.column;
#pragma unroll
  for (int step = 0; step < kSteps; ++step, index += at.lines * a.width) {
    float v[8];
    codes[step].decode(v);
    apply_scale<kDecoding>(v, decode_scale(kind, a.scale_type, scales[step]), amax);
    if constexpr (kDecoding == Decoding::kTwoLevelRotated) undo_rotation(v, a.sign_mask);
    if (step * at.lines >= rows || at.column >= a.width) continue;
    if (!kWhole && at.column + 8 > a.columns) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = at.column + i < a.columns ? v[i] : 0.0f;
    }
    store_eight<kResult, kWhole>(a.result, index, v, a.width - at.column);
  }
}

template <class Element, Decoding kDecoding, ElementType kResult>
static __global__ void __launch_bounds__(kDequantizeThreads, 4) dequantize_kernel(DequantizeArguments a) {
  DequantizePlace at = dequantize_place(a);
  if (a.whole) return dequantize_rows<Element, kDecoding, kResult, true, kDequantizeSteps>(a, at);
#pragma unroll 1
  for (int step = 0; step < kDequantizeSteps; ++step, at.first += at.lines)
    dequantize_rows<Element, kDecoding, kResult, false, 1>(a, at);
}

}  // namespace cuda
}  // namespace jaxlowprec
