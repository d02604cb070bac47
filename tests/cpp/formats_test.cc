// The element and scale formats of xla_ffi/numerics against definitions that share no code with them: tables of all
// representable values, searched in double precision.
#include "formats.h"

#include <cmath>
#include <limits>
#include <vector>

#include "../../xla_ffi/numerics/block_scales.h"
#include "../../xla_ffi/numerics/e2m1.h"
#include "../../xla_ffi/numerics/float16.h"
#include "../../xla_ffi/numerics/float8.h"
#include "check.h"

namespace jaxlowprec {
namespace {

using L = Lanes<float>;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Every finite bfloat16 number against the search, both signs.
template <class Encode>
void agrees_with_search_over_all_bf16(const Format& format, uint32_t sign_bit, Encode encode) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_number(bits);
    if (!std::isfinite(x)) continue;
    CHECK_EQ(encode(x), format.nearest(std::fabs(static_cast<double>(x))) | (std::signbit(x) ? sign_bit : 0u));
  }
}

/// Every value, every tie between two values, and the float32 numbers next to the tie.
template <class Encode>
void turns_at_every_threshold(const Format& format, uint32_t sign_bit, Encode encode) {
  for (uint32_t code = 0; code + 1 < format.count(); ++code) {
    const float tie = static_cast<float>((format.value(code) + format.value(code + 1)) / 2);
    const float below = std::nextafter(tie, 0.0f), above = std::nextafter(tie, kInfinity);
    CHECK_EQ(encode(static_cast<float>(format.value(code))), code);
    CHECK_EQ(encode(below), code);
    CHECK_EQ(encode(tie), code % 2 ? code + 1 : code);
    CHECK_EQ(encode(above), code + 1);
    CHECK_EQ(encode(-below), code | sign_bit);
    CHECK_EQ(encode(-tie), (code % 2 ? code + 1 : code) | sign_bit);
    CHECK_EQ(encode(-above), (code + 1) | sign_bit);
  }
}

template <class Encode>
void saturates(const Format& format, uint32_t sign_bit, Encode encode) {
  const float most = static_cast<float>(format.value(format.count() - 1));
  for (const float x : {most, std::nextafter(most, kInfinity), 2 * most, 1e30f, kMaxFinite}) {
    CHECK_EQ(encode(x), format.count() - 1);
    CHECK_EQ(encode(-x), (format.count() - 1) | sign_bit);
  }
}

// --- e2m1 (numerics.md 2)

TEST(e2m1_nearest_agrees_with_search_over_all_bf16) { agrees_with_search_over_all_bf16(e2m1, 8, e2m1_encode<float>); }

TEST(e2m1_nearest_turns_at_every_threshold) {
  turns_at_every_threshold(e2m1, 8, e2m1_encode<float>);
  const float ties[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};  // spelled out in numerics.md 2
  const uint32_t codes[] = {0, 2, 2, 4, 4, 6, 6};
  for (int i = 0; i < 7; ++i) CHECK_EQ(e2m1_encode(ties[i]), codes[i]);
}

TEST(e2m1_nearest_saturates_and_keeps_the_sign_of_what_rounds_to_zero) {
  saturates(e2m1, 8, e2m1_encode<float>);
  CHECK_EQ(e2m1_encode(kInfinity), 7u);
  CHECK_EQ(e2m1_encode(-kInfinity), 15u);
  CHECK_EQ(e2m1_encode(-1e-30f), 8u);
}

TEST(e2m1_magnitude_needs_no_saturation_below_seven) {
  for (float a = 5.0f; (a = std::nextafter(a, kInfinity)) < 7.0f; a += 1e-4f)
    CHECK_EQ(e2m1_magnitude_bits(a) - kE2M1MagicBits, 7u);
  CHECK_EQ(e2m1_magnitude_bits(std::nextafter(7.0f, 0.0f)) - kE2M1MagicBits, 7u);
}

TEST(e2m1_decodes_all_codes) {
  for (uint32_t code = 0; code < 16; ++code) {
    const float value = e2m1_decode<float>(code);
    CHECK_EQ(std::fabs(value), e2m1.value(code & 7));
    CHECK_EQ(std::signbit(value), code >= 8);
  }
}

// --- stochastic rounding (numerics.md 4)

/// In double precision: up if and only if frac >= (255.5 - byte) / 256.
uint32_t stochastic_by_definition(const Format& format, uint32_t sign_bit, double y, uint32_t byte) {
  const double a = std::fabs(y);
  uint32_t code = format.floor(a);
  if (code + 1 < format.count()) {
    const double low = format.value(code), step = format.value(code + 1) - low;
    code += (a - low) / step >= (255.5 - byte) / 256 ? 1 : 0;
  }
  return code | (std::signbit(y) ? sign_bit : 0u);
}

/// Where some byte turns, and the float32 numbers next to it; and numbers that the caller adds.
template <class Encode>
void stochastic_agrees_for_every_byte(const Format& format, uint32_t sign_bit, std::vector<float> values, Encode encode) {
  for (uint32_t code = 0; code + 1 < format.count(); ++code)
    for (int k = 0; k < 256; ++k) {
      const double low = format.value(code), step = format.value(code + 1) - low;
      const float turn = static_cast<float>(low + (k + 0.5) / 256 * step);
      values.insert(values.end(), {turn, std::nextafter(turn, 0.0f), std::nextafter(turn, kInfinity)});
    }
  const float most = static_cast<float>(format.value(format.count() - 1));
  values.insert(values.end(),
                {1e-30f, L::from_bits(kMinNormalBits), most, std::nextafter(most, kInfinity), 2 * most, 1e30f, kMaxFinite});
  for (const float value : values)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      CHECK_EQ(encode(value, byte), stochastic_by_definition(format, sign_bit, value, byte));
      CHECK_EQ(encode(-value, byte), stochastic_by_definition(format, sign_bit, -value, byte));
    }
}

/// Every finite bfloat16 number, both signs, by a byte of its own.
template <class Encode>
void stochastic_agrees_over_all_bf16(const Format& format, uint32_t sign_bit, Encode encode) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_number(bits);
    for (const uint32_t byte : {0u, (bits * 2654435761u) >> 24, 255u})
      if (std::isfinite(x)) CHECK_EQ(encode(x, byte), stochastic_by_definition(format, sign_bit, x, byte));
  }
}

template <class Encode>
void stochastic_never_moves_a_grid_point(const Format& format, uint32_t sign_bit, Encode encode) {
  for (uint32_t code = 0; code < format.count(); ++code)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      CHECK_EQ(encode(static_cast<float>(format.value(code)), byte), code);
      if (code > 0) CHECK_EQ(encode(static_cast<float>(-format.value(code)), byte), code | sign_bit);
    }
}

template <class Encode>
void stochastic_goes_up_for_the_rounded_share_of_the_bytes(const Format& format, int fractions, Encode encode) {
  for (uint32_t code = 0; code + 1 < format.count(); ++code)
    for (int i = 0; i < fractions; ++i) {
      const double low = format.value(code), step = format.value(code + 1) - low,
                   fraction = i / static_cast<double>(fractions);
      uint32_t ups = 0;
      for (uint32_t byte = 0; byte < 256; ++byte) ups += encode(static_cast<float>(low + fraction * step), byte) - code;
      CHECK_EQ(ups, static_cast<uint32_t>(std::round(256 * fraction)));
    }
}

TEST(e2m1_stochastic_agrees_with_the_rule_for_every_byte) {
  std::vector<float> values;
  for (int i = 1; i <= 6 * 1024; ++i) values.push_back(static_cast<float>(i) / 1024);
  stochastic_agrees_for_every_byte(e2m1, 8, values, e2m1_encode_stochastic<float>);
}
TEST(e4m3_stochastic_agrees_with_the_rule_for_every_byte) {
  stochastic_agrees_for_every_byte(e4m3, 0x80, {}, float8_encode_stochastic<E4M3, float>);
}
TEST(e5m2_stochastic_agrees_with_the_rule_for_every_byte) {
  stochastic_agrees_for_every_byte(e5m2, 0x80, {}, float8_encode_stochastic<E5M2, float>);
}

TEST(stochastic_rounding_agrees_with_the_rule_over_all_bf16) {
  stochastic_agrees_over_all_bf16(e2m1, 8, e2m1_encode_stochastic<float>);
  stochastic_agrees_over_all_bf16(e4m3, 0x80, float8_encode_stochastic<E4M3, float>);
  stochastic_agrees_over_all_bf16(e5m2, 0x80, float8_encode_stochastic<E5M2, float>);
}

TEST(stochastic_rounding_never_moves_a_grid_point) {
  stochastic_never_moves_a_grid_point(e2m1, 8, e2m1_encode_stochastic<float>);
  stochastic_never_moves_a_grid_point(e4m3, 0x80, float8_encode_stochastic<E4M3, float>);
  stochastic_never_moves_a_grid_point(e5m2, 0x80, float8_encode_stochastic<E5M2, float>);
}

TEST(stochastic_rounding_goes_up_for_the_rounded_share_of_the_bytes) {
  stochastic_goes_up_for_the_rounded_share_of_the_bytes(e2m1, 2048, e2m1_encode_stochastic<float>);
  stochastic_goes_up_for_the_rounded_share_of_the_bytes(e4m3, 2048, float8_encode_stochastic<E4M3, float>);
  stochastic_goes_up_for_the_rounded_share_of_the_bytes(e5m2, 2048, float8_encode_stochastic<E5M2, float>);
}

// --- 8-bit formats: infinity and NaN are never turned into a number (numerics.md 1)

TEST(e4m3_agrees_with_search_over_all_bf16) { agrees_with_search_over_all_bf16(e4m3, 0x80, float8_encode<E4M3, float>); }
TEST(e4m3_turns_at_every_threshold) { turns_at_every_threshold(e4m3, 0x80, float8_encode<E4M3, float>); }
TEST(e4m3_saturates) { saturates(e4m3, 0x80, float8_encode<E4M3, float>); }

TEST(e5m2_agrees_with_search_over_all_bf16) { agrees_with_search_over_all_bf16(e5m2, 0x80, float8_encode<E5M2, float>); }
TEST(e5m2_turns_at_every_threshold) { turns_at_every_threshold(e5m2, 0x80, float8_encode<E5M2, float>); }
TEST(e5m2_saturates) { saturates(e5m2, 0x80, float8_encode<E5M2, float>); }

TEST(e4m3_magnitude_saturates_infinity_too) {  // a block scale may overflow before the tensor's amax is known to be finite
  CHECK_EQ(float8_encode_magnitude<E4M3>(kInfinity), 0x7Eu);
}

TEST(float8_encodes_every_bf16_infinity_and_nan_as_nan) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_number(bits);
    if (std::isfinite(x)) continue;
    CHECK_EQ(float8_encode<E4M3>(x) & 0x7Fu, 0x7Fu);
    CHECK(std::isnan(float8_decode<E4M3, float>(float8_encode<E4M3>(x))));
    CHECK(std::isnan(float8_decode<E5M2, float>(float8_encode<E5M2>(x))));
    CHECK_EQ(float8_encode_stochastic<E4M3>(x, 255u), float8_encode<E4M3>(x));
    CHECK_EQ(float8_encode_stochastic<E5M2>(x, 255u), float8_encode<E5M2>(x));
    CHECK_EQ(e8m0_encode_up(x), 0xFFu);
  }
}

TEST(float8_decodes_all_bytes) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t m = byte & 0x7F;
    const float small = float8_decode<E4M3, float>(byte), wide = float8_decode<E5M2, float>(byte);
    CHECK_EQ(std::signbit(small), byte >= 0x80);
    CHECK_EQ(std::signbit(wide), byte >= 0x80);
    if (m < 0x7F)
      CHECK_EQ(std::fabs(small), e4m3.value(m));
    else
      CHECK_EQ(L::bits(small) & kMagnitudeBits, kNaNBits);
    if (m < 0x7C)
      CHECK_EQ(std::fabs(wide), e5m2.value(m));
    else if (m == 0x7C)
      CHECK_EQ(std::fabs(wide), kInfinity);
    else
      CHECK_EQ(L::bits(wide) & kMagnitudeBits, kNaNBits);
  }
}

/// The least power of two that is not below a: numerics.md 6.
uint32_t e8m0_by_definition(double a) {
  if (a < std::ldexp(1, -126)) return 0;
  uint32_t byte = 1;
  while (std::ldexp(1, static_cast<int>(byte) - 127) < a) ++byte;
  return byte;
}

TEST(e8m0_agrees_with_search_over_all_bf16) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_number(bits);
    if (std::isfinite(x)) CHECK_EQ(e8m0_encode_up(x), e8m0_by_definition(std::fabs(x)));
  }
}

TEST(e8m0_turns_just_above_every_power_of_two) {  // above 2^127 none is left: the NaN byte, never a smaller scale
  for (int e = -126; e <= 127; ++e) {
    const float power = std::ldexp(1.0f, e);
    CHECK_EQ(e8m0_encode_up(power), static_cast<uint32_t>(e + 127));
    CHECK_EQ(e8m0_encode_up(std::nextafter(power, kInfinity)), static_cast<uint32_t>(e + 128));
    CHECK_EQ(e8m0_encode_up(std::nextafter(power, 0.0f)), e == -126 ? 0u : static_cast<uint32_t>(e + 127));
  }
}

TEST(e8m0_decodes_all_bytes) {
  CHECK_EQ(L::bits(e8m0_decode<float>(0)), 0u);  // 2^-127 counts as zero
  for (uint32_t byte = 1; byte < 255; ++byte)
    CHECK_EQ(e8m0_decode<float>(byte), std::ldexp(1.0, static_cast<int>(byte) - 127));
  CHECK_EQ(L::bits(e8m0_decode<float>(255)), kNaNBits);
}

// --- MX scales (numerics.md 6), from the exponents of numbers

struct MxCase {
  MxElement element;
  int mantissa_bits, largest_exponent;
  double maximum;
};
const MxCase kMxCases[] = {{kMxElement<E2M1>, 1, 2, 6}, {kMxElement<E4M3>, 3, 8, 448}, {kMxElement<E5M2>, 2, 15, 57344}};

uint32_t clamped_scale(int exponent) { return static_cast<uint32_t>(std::max(exponent + 127, 1)); }

/// The least power of two that is not below amax / maximum, as float32 sees that.
uint32_t up_by_definition(const MxCase& c, float amax) {
  const double product = static_cast<double>(static_cast<float>(amax * static_cast<float>(1 / c.maximum)));
  return product < std::ldexp(1, -126) ? 1u : std::max(1u, e8m0_by_definition(product));
}

/// amax's exponent; with `round`, of amax rounded to the element's mantissa, ties up.
uint32_t floor_by_definition(const MxCase& c, double amax, bool round) {
  int exponent;
  const double significand = 2 * std::frexp(amax, &exponent);  // in [1, 2)
  const double unit = std::ldexp(1, -c.mantissa_bits);
  const bool carries = round && std::floor(significand / unit + 0.5) * unit >= 2;
  return clamped_scale(exponent - 1 + carries - c.largest_exponent);
}

void check_mx_scales(float amax) {
  const uint32_t bits = L::bits(amax);
  for (const MxCase& c : kMxCases) {
    const uint32_t up = mx_scale_up<float>(bits, c.element), floor = mx_scale_floor<float>(bits, c.element, 0);
    const uint32_t even = mx_scale_floor<float>(bits, c.element, c.element.half_unit);
    CHECK_EQ(up, up_by_definition(c, amax));
    CHECK_EQ(floor, floor_by_definition(c, amax, false));
    CHECK_EQ(even, floor_by_definition(c, amax, true));
    for (const uint32_t scale : {up, floor, even}) {
      CHECK(scale <= 253);
      CHECK_EQ(mx_encode<float>(scale), std::ldexp(1.0, 127 - static_cast<int>(scale)));
    }
    CHECK(amax * static_cast<double>(mx_encode<float>(up)) <= c.maximum * (1 + 1e-7));
  }
}

TEST(mx_scales_agree_with_the_rules_over_all_bf16) {
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const float amax = bf16_number(bits);
    if (std::isfinite(amax) && L::bits(amax) >= kMinNormalBits) check_mx_scales(amax);
  }
}

TEST(mx_scales_turn_where_the_rules_say) {
  for (int e = -125; e < 128; ++e)
    for (const double significand : {1.0, 1.5, 1.75, 1.875, 1.9375, 448 / 256.0, 57344 / 32768.0}) {
      const float amax = static_cast<float>(std::ldexp(significand, e));
      check_mx_scales(amax);
      if (amax > std::ldexp(1.0f, -126)) check_mx_scales(std::nextafter(amax, 0.0f));
      if (amax < kMaxFinite) check_mx_scales(std::nextafter(amax, kInfinity));
    }
}

TEST(mx_scales_of_zero_blocks_are_zero_and_of_poisoned_ones_nan) {
  for (const MxCase& c : kMxCases)
    for (const uint32_t rounding : {0u, c.element.half_unit}) {
      for (const uint32_t zero : {0u, 1u, kMinNormalBits - 1}) {
        CHECK_EQ(mx_scale_up<float>(zero, c.element), 0u);
        CHECK_EQ(mx_scale_floor<float>(zero, c.element, rounding), 0u);
      }
      for (const uint32_t poison : {kInfinityBits, kInfinityBits + 1, kNaNBits, kMagnitudeBits}) {
        CHECK_EQ(mx_scale_up<float>(poison, c.element), kE8M0NaN);
        CHECK_EQ(mx_scale_floor<float>(poison, c.element, rounding), kE8M0NaN);
      }
    }
  CHECK(std::isnan(mx_encode<float>(kE8M0NaN)));
}

// --- float32 scales (numerics.md 5 and 7)

float block_scale_by_definition(float maximum, float amax, float epsilon, bool power_of_two) {
  const double smallest = std::ldexp(1, -126);
  const double a = std::max(amax < smallest ? 0.0f : amax, epsilon < smallest ? 0.0f : epsilon);
  if (a == 0) return 1;
  const double quotient = std::min(static_cast<double>(maximum) / a, std::ldexp(1, 126));
  if (!power_of_two) return static_cast<float>(quotient);  // of two float32: rounded once more changes nothing
  int exponent;
  std::frexp(static_cast<float>(quotient), &exponent);
  return static_cast<float>(std::ldexp(1, exponent - 1));
}

TEST(float8_scales_agree_with_the_rule_over_all_bf16) {
  for (const float maximum : {448.0f, 57344.0f})
    for (const float epsilon : {0.0f, 1e-39f, 1e-12f, 3.0f})
      for (const bool power_of_two : {false, true})
        for (uint32_t bits = 0; bits < 0x7F80; ++bits) {
          const Float8ScaleRule rule{maximum, epsilon, power_of_two};
          const float amax = bf16_number(bits), encode = float8_encode_scale<float>(L::bits(amax), rule);
          CHECK_EQ(encode, block_scale_by_definition(maximum, amax, epsilon, power_of_two));
          CHECK_EQ(float8_decode_scale(encode), static_cast<float>(1.0 / encode));
          CHECK(L::bits(float8_decode_scale(encode)) >= kMinNormalBits);
          if (power_of_two) CHECK(static_cast<double>(amax) * encode <= maximum);
        }
}

TEST(float8_scales_of_poisoned_blocks_are_the_one_nan) {
  for (const uint32_t poison : {kInfinityBits, kInfinityBits + 1, kNaNBits, kMagnitudeBits}) {
    const float encode = float8_encode_scale<float>(poison, {448, 1, true});
    CHECK_EQ(L::bits(encode), kNaNBits);
    CHECK_EQ(L::bits(float8_decode_scale(encode)), kNaNBits);
  }
}

TEST(float8_tensor_scales_are_the_block_rule_or_as_given) {
  const Float8ScaleRule rule{448, 0.5f, false};
  CHECK_EQ(float8_tensor_encode_scale(7, false, rule), 64.0f);
  CHECK_EQ(float8_tensor_encode_scale(0.1f, false, rule), 896.0f);
  CHECK_EQ(float8_tensor_encode_scale(7, true, rule), 7.0f);
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")})
    for (const bool is_scale : {false, true}) CHECK(std::isnan(float8_tensor_encode_scale(bad, is_scale, rule)));
  for (const float bad : {0.0f, -0.0f, 1e-39f, -2.0f}) CHECK(std::isnan(float8_tensor_encode_scale(bad, true, rule)));
  CHECK(std::isnan(float8_tensor_encode_scale(-2.0f, false, rule)));
  for (const float zero : {0.0f, -0.0f, -1e-39f}) CHECK_EQ(float8_tensor_encode_scale(zero, false, rule), 896.0f);
}

// --- 16-bit formats: overflow is infinity

TEST(bf16_turns_at_every_threshold) { turns_at_every_threshold(bf16, 0x8000, bf16_encode<float>); }
TEST(f16_turns_at_every_threshold) { turns_at_every_threshold(f16, 0x8000, f16_encode<float>); }
TEST(f16_agrees_with_search_over_all_bf16) { agrees_with_search_over_all_bf16(f16, 0x8000, f16_encode<float>); }

TEST(bf16_and_f16_keep_infinity) {
  for (const uint32_t sign : {0u, 0x8000u}) {
    CHECK_EQ(bf16_encode(bf16_decode<float>(0x7F80 | sign)), 0x7F80u | sign);
    CHECK_EQ(f16_encode(f16_decode<float>(0x7C00 | sign)), 0x7C00u | sign);
    CHECK_EQ(f16_encode(bf16_decode<float>(0x7F80 | sign)), 0x7C00u | sign);
  }
}

TEST(bf16_decodes_and_encodes_back_every_bit_pattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_decode<float>(bits);
    const uint32_t m = bits & 0x7FFF;
    CHECK_EQ(std::isnan(x), m > 0x7F80);
    CHECK_EQ(std::signbit(x), bits >= 0x8000);
    if (m < 0x7F80) CHECK_EQ(std::fabs(x), bf16.value(m));
    CHECK_EQ(bf16_encode(x), m > 0x7F80 ? bits | 0x40 : bits);  // NaN comes back quiet
  }
}

TEST(f16_decodes_and_encodes_back_every_bit_pattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = f16_decode<float>(bits);
    const uint32_t m = bits & 0x7FFF;
    CHECK_EQ(std::isnan(x), m > 0x7C00);
    CHECK_EQ(std::isinf(x), m == 0x7C00);
    CHECK_EQ(std::signbit(x), bits >= 0x8000);
    if (m < 0x7C00) CHECK_EQ(std::fabs(x), f16.value(m));
    CHECK_EQ(f16_encode(x), m > 0x7C00 ? bits | 0x200 : bits);
  }
}

TEST(a_nan_whose_payload_is_cut_off_stays_nan) {
  for (const uint32_t bits : {0x7F800001u, 0xFF800001u, 0x7F801FFFu, 0x7FFFFFFFu, 0xFFFFFFFFu, kNaNBits}) {
    const uint32_t sign = (bits & kSignBit) >> 16;
    CHECK((bf16_encode(L::from_bits(bits)) & 0x7FFF) > 0x7F80);
    CHECK((f16_encode(L::from_bits(bits)) & 0x7FFF) > 0x7C00);
    CHECK_EQ(bf16_encode(L::from_bits(bits)) & 0x8000, sign);
    CHECK_EQ(f16_encode(L::from_bits(bits)) & 0x8000, sign);
  }
}

}  // namespace
}  // namespace jaxlowprec
