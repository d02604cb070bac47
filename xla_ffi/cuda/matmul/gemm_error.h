// Which ways a GEMM of quantised operands can take on a GPU, and how far from the exact product its sums may be on each.
// docs/explanation/exact_sums.md, derives the numbers; the tests of every engine take them from here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace jaxlowprec {
namespace cuda {

enum class MatmulRoute : int32_t {
  kNone,
  kSmall,     // few rows of a, NVFP4: b is decoded in registers (matmul_decode.h)
  kDecoded,   // both operands decoded to bfloat16, exactly (decode.h), and multiplied by bfloat16 tensor cores
  kTensor,    // FP8 tensor cores, the tensors' scales as one operand's; scales of lines: float32 sums, then line_scales.h
  kLines,     // FP8 tensor cores with a float32 scale for each line of both operands
  kInt8,      // INT8 tensor cores: exact int32 sums, then line_scales.h
  kNibbles,   // INT8 tensor cores, b's 4-bit codes unpacked in registers: exact sums of groups (int8_by_nibbles.h)
  kBlock128,  // FP8 tensor cores with float32 scales of 128 elements and 128x128
  kRebased,   // the same with scales of 128 elements, which E8M0 scales of 32 become, and E2M1 codes FP8 codes (rebase.h)
  kMX,        // FP8 tensor cores with E8M0 scales of 32
  kWidened,   // the same, of which one operand's E2M1 codes become FP8 codes, or both operands' (rebase.h)
  kNVFP4,     // FP4 tensor cores with E4M3 scales of 16
};

/// |sum - exact sum|, relative to the sum of the terms' magnitudes, before the result is rounded.
struct SumError {
  double expected;  // what the tests hold random operands to
  double largest;   // what no operands exceed
};

/// FP8 tensor cores of compute capability 8.9 and 9.0 align the products of an instruction with the running sum, keep this
/// many bits below the largest one's leading bit, and truncate the rest.
constexpr int kFp8FractionBits = 13;
/// After so much of K cuBLASLt adds the running sum to one in float32 and begins anew ("fast accumulation" is off).
constexpr int64_t kFp8Promotion = 128;
/// The least K of one instruction, at either end of which the running sum is truncated too.
constexpr int64_t kFp8Instruction = 16;
/// Simulated for random operands: at most 2^-9.4, where all terms have one sign.
constexpr double kFp8Expected = 1.0 / 512;

/// What an element of kRebased is off by at most, relative to the largest scale of the blocks of its 128 that are not all
/// zero; nothing if its own block's scale is at least 2^-14 of that one. With e for what elements are off by, and T the sum
/// of (|a| + e_a) (|b| + e_b), a sum's error is at most SumError * T + T - (the sum of the terms' magnitudes).
constexpr double kRebaseError = 1.0 / 65536;

/// On GPUs of that compute capability (90 for 9.0).
inline SumError sum_error(MatmulRoute route, int capability, int64_t depth) {
  const double contract = std::ldexp(static_cast<double>(depth), -24);  // numerics.md 9
  if (route == MatmulRoute::kInt8) return {3 * 0x1p-24, 3 * 0x1p-24};   // the sum as a float32, and two products
  const bool fp8 = route == MatmulRoute::kTensor || route == MatmulRoute::kLines || route == MatmulRoute::kBlock128 ||
                   route == MatmulRoute::kRebased;
  if (!fp8 || capability >= 100) return {contract, contract};
  // Each product is truncated once, each running sum at both ends of an instruction: by less than the last kept bit of
  // what is at most the sum of the magnitudes.
  const int64_t truncated = std::min(depth, kFp8Promotion) + 2 * (kFp8Promotion / kFp8Instruction);
  const double largest = std::ldexp(static_cast<double>(truncated), -kFp8FractionBits);
  return {contract + std::min(kFp8Expected, largest), contract + largest};
}

}  // namespace cuda
}  // namespace jaxlowprec
