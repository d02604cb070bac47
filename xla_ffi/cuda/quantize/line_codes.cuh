// Scales of lines, and 16 elements of a line to 8-bit codes (numerics.md 18).
#pragma once

#include "../../line_rule.h"
#include "quantize_scales.cuh"

namespace jaxlowprec {
namespace cuda {

/// What a launch fixes of all lines.
struct LineRule {
  LineScaleRule scales;
  ElementType type;  // of stored scales
  float least;       // integer
};

inline LineRule line_rule(const Format& f) { return {line_scale_rule(f), f.scale_type, least_integer(f)}; }

/// A number of the type of stored scales, in float32.
JLP_DEVICE float rounded_to(ElementType type, float x) {
  return type == ElementType::kBF16 ? BF16::round(x) : type == ElementType::kF16 ? F16::round(x) : x;
}

/// From the magnitude bits of a line's amax.
JLP_DEVICE LineFactors<float> factors_of_line(const LineRule& rule, uint32_t amax) {
  return line_factors<float>(amax, rule.scales, [type = rule.type](float x) { return rounded_to(type, x); });
}

/// Stores a line's scale, a number of its type or NaN.
JLP_DEVICE void store_line_scale(ElementType type, uint8_t* scales, int64_t line, float scale) {
  if (type == ElementType::kF32) {
    reinterpret_cast<uint32_t*>(scales)[line] = as_bits(scale);
    return;
  }
  const bool bf16 = type == ElementType::kBF16;
  const uint32_t nan = bf16 ? kNaNBits >> 16 : 0x7E00u, stored = bf16 ? bf16x2(scale, 0.0f) : f16x2(scale, 0.0f);
  reinterpret_cast<uint16_t*>(scales)[line] = static_cast<uint16_t>(scale != scale ? nan : stored);
}

/// Four bytes, the low ones of words.
JLP_DEVICE uint32_t low_bytes(const uint32_t (&v)[4]) {
  return __byte_perm(__byte_perm(v[0], v[1], 0x0040), __byte_perm(v[2], v[3], 0x0040), 0x5410);
}

/// The codes of four elements, scaled; stochastic ones by the bytes of `random`.
template <class Code, bool kStochastic>
JLP_DEVICE uint32_t codes_of_four(const float (&y)[4], float least, uint32_t random) {
  if constexpr (std::is_same_v<Code, Int8>) {
    uint32_t v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = kStochastic ? int8_stochastic(y[i], (random >> (8 * i)) & 0xFFu) : int8_nearest(y[i], least);
    return low_bytes(v);
  } else {
    return float8_codes<Code, kStochastic>(y, random);
  }
}

/// The codes of 16 elements of a line: zeros where it is poisoned.
template <class Code, bool kStochastic, class E>
JLP_DEVICE void encode_line_sixteen(const Sixteen<E>& sixteen, const LineFactors<float>& factors, const LineRule& rule,
                                    const uint32_t (&random)[4], uint32_t (&codes)[4]) {
  const float first = rule.scales.divides ? factors.unit : factors.encode;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = __fmaf_rn(value(sixteen, 4 * quarter + i), first, 0.0f);  // -0 becomes 0
    if (rule.scales.divides) {
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i] = line_quotient(y[i], factors.divisor, factors.encode);
    }
    codes[quarter] = codes_of_four<Code, kStochastic>(y, rule.least, random[quarter]);
  }
  if (factors.scale == factors.scale) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes[i] = 0;
}

/// The random bytes of a sixteen of a line of a matrix.
template <bool kStochastic>
JLP_DEVICE void random_bytes_of(const Random& random, int64_t batch, int64_t line, int64_t sixteen, uint32_t (&bytes)[4]) {
  if constexpr (kStochastic) {
    bytes[0] = random.sixteens[batch * random.sixteens_step + sixteen];
    bytes[1] = random.rows[batch * random.rows_step + line];
    bytes[2] = random.stream, bytes[3] = 0;
    philox4x32_10<float>(bytes, random.key[2 * batch], random.key[2 * batch + 1]);
  }
}

/// Calls visit with the type of codes: on the host, to choose a kernel.
template <class Visit>
cudaError_t with_line_code(CodeType code, Visit visit) {
  if (code == CodeType::kInt8) return visit(Int8{});
  return with_float8(code, visit);
}

}  // namespace cuda
}  // namespace jaxlowprec
