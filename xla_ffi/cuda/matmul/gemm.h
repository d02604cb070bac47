// A GEMM as cuBLASLt is asked for it, in the terms of this library: row-major operands, contracted along their last axis.
#pragma once

#include <cstdint>
#include <optional>

#include "../../problems.h"

namespace jaxlowprec {
namespace cuda {

enum class GemmType : int32_t { kF32, kBF16, kE4M3, kE5M2, kE2M1, kI8, kI32 };

/// The type of codes that cuBLASLt multiplies; nothing for others, which are decoded to bfloat16.
inline std::optional<GemmType> gemm_type(CodeType code) {
  switch (code) {
    case CodeType::kE2M1: return GemmType::kE2M1;
    case CodeType::kE4M3: return GemmType::kE4M3;
    case CodeType::kE5M2: return GemmType::kE5M2;
    case CodeType::kInt8: return GemmType::kI8;
    default: return std::nullopt;
  }
}

/// How the elements of an operand [rows, depth] are scaled, and in which order the scales lie.
enum class GemmScaling : int32_t {
  kNone,
  kFloat32,         // a float32 for all of the operand
  kFloat32Lines,    // a float32 for each row: [rows]
  kE4M3x16,         // an E4M3 for 16 elements of a row, in tiles of 128 rows by 4 blocks (numerics.md 6)
  kE8M0x32,         // an E8M0 for 32, in the same tiles
  kFloat32x128,     // a float32 for 128: [ceil(depth / 128), rows], rows a multiple of 4
  kFloat32x128x128  // a float32 for a square: [ceil(rows / 128), ceil(depth / 128) rounded up to a multiple of 4]
};

struct GemmOperand {
  GemmType type;
  const void* data;  // [rows, depth]
  int64_t rows;
  GemmScaling scaling;
  const void* scale;
};

/// result [a.rows, b.rows] = alpha * a b^T + beta * accumulate, added up in float32; of 8-bit integers a b^T alone, in
/// int32. Rows of narrow operands (not bfloat16) and of the result are multiples of 16 bytes, all pointers 16-byte aligned.
struct Gemm {
  GemmOperand a, b;
  int64_t depth;
  GemmType result_type;  // kF32 or kBF16; kI32 of kI8
  void* result;
  const void* accumulate;   // of the result's type; null: nothing is accumulated onto
  const float* alpha_beta;  // in the device's memory; null: 1, and 1 if something is accumulated onto
  void* workspace;          // 256-byte aligned
  int64_t workspace_bytes;
};

/// The workspace that cuBLASLt's fastest algorithms ask for on Hopper and later.
constexpr int64_t kGemmWorkspace = int64_t{32} << 20;

/// Whether rebase.h takes an operand: MXFP4 in whole blocks.
inline bool rebase_supports(const MatmulOperand& operand) {
  const Format& f = operand.format;
  return f.code == CodeType::kE2M1 && f.scaling == Scaling::kE8M0 && operand.columns % f.block == 0;
}
/// Elements of a row of the result: whole blocks of 128, whatever cuBLASLt makes of others.
inline int64_t rebased_width(int64_t columns) { return (columns + 127) / 128 * 128; }
/// Bytes of the result's codes, and of the scales that lie behind them.
inline int64_t rebased_bytes(int64_t rows, int64_t columns) { return rows * (rebased_width(columns) / 128) * (128 + 4); }

/// Bytes of one matrix's scales in the layout of layouts.h.
inline int64_t gemm_scale_bytes(const Format& format, int64_t rows, int64_t columns) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t blocks = format.scale_columns(columns);
  switch (format.scaling) {
    case Scaling::kTwoLevel:
    case Scaling::kE8M0: return divide_up(rows, 128) * divide_up(blocks, 4) * 512;
    case Scaling::kFloat32:
      return format.tiles ? format.blocks(rows) * divide_up(blocks, 4) * 16 : blocks * divide_up(rows, 4) * 16;
    default: return 4;
  }
}

/// Whether one matrix's scales lie so already: no launch brings them into order.
inline bool gemm_scales_in_order(const Format& format, int64_t rows, int64_t columns) {
  if (format.scaling == Scaling::kRows) return true;
  if (format.scaling != Scaling::kFloat32) return false;
  const int64_t blocks = format.scale_columns(columns);
  return format.tiles ? blocks % 4 == 0 : rows % 4 == 0 && (format.column_major || blocks == 1);
}

}  // namespace cuda
}  // namespace jaxlowprec
