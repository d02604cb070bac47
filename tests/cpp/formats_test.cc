// The element and scale formats of xla_ffi/numerics against definitions that share no code with them: tables of all
// representable values, searched in double precision.
#include "formats.h"

#include <cmath>
#include <limits>
#include <vector>

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

/// numerics.md 4 in double precision: up if and only if frac >= (255.5 - byte) / 256.
uint32_t stochastic_by_definition(double y, uint32_t byte) {
  const double a = std::fabs(y);
  uint32_t code = 7;
  while (e2m1.value(code) > a) --code;
  if (code < 7) {
    const double low = e2m1.value(code), step = e2m1.value(code + 1) - low;
    code += (a - low) / step >= (255.5 - byte) / 256 ? 1 : 0;
  }
  return code | (std::signbit(y) ? 8u : 0u);
}

TEST(e2m1_stochastic_agrees_with_the_rule_for_every_byte) {
  std::vector<float> values = {1e-30f,    L::from_bits(kMinNormalBits), 6.0f, std::nextafter(6.0f, 7.0f), 7.0f, 1e30f,
                               kMaxFinite};
  for (int i = 1; i <= 6 * 1024; ++i) values.push_back(static_cast<float>(i) / 1024);
  for (uint32_t code = 0; code < 7; ++code)  // where some byte turns, and the float32 numbers next to it
    for (int k = 0; k < 256; ++k) {
      const double low = e2m1.value(code), step = e2m1.value(code + 1) - low;
      const float turn = static_cast<float>(low + (k + 0.5) / 256 * step);
      values.insert(values.end(), {turn, std::nextafter(turn, 0.0f), std::nextafter(turn, kInfinity)});
    }
  for (const float value : values)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      CHECK_EQ(e2m1_encode_stochastic(value, byte), stochastic_by_definition(value, byte));
      CHECK_EQ(e2m1_encode_stochastic(-value, byte), stochastic_by_definition(-value, byte));
    }
}

TEST(e2m1_stochastic_never_moves_a_grid_point) {
  for (uint32_t code = 0; code < 8; ++code)
    for (uint32_t byte = 0; byte < 256; ++byte) {
      CHECK_EQ(e2m1_encode_stochastic(static_cast<float>(e2m1.value(code)), byte), code);
      if (code > 0) CHECK_EQ(e2m1_encode_stochastic(static_cast<float>(-e2m1.value(code)), byte), code | 8);
    }
}

TEST(e2m1_stochastic_goes_up_for_the_rounded_share_of_the_bytes) {
  for (uint32_t code = 0; code < 7; ++code)
    for (int i = 0; i < 2048; ++i) {
      const double low = e2m1.value(code), step = e2m1.value(code + 1) - low, fraction = i / 2048.0;
      uint32_t ups = 0;
      for (uint32_t byte = 0; byte < 256; ++byte)
        ups += e2m1_encode_stochastic(static_cast<float>(low + fraction * step), byte) - code;
      CHECK_EQ(ups, static_cast<uint32_t>(std::round(256 * fraction)));
    }
}

// --- 8-bit formats: infinity and NaN are never turned into a number (numerics.md 1)

TEST(e4m3_agrees_with_search_over_all_bf16) { agrees_with_search_over_all_bf16(e4m3, 0x80, e4m3_encode<float>); }
TEST(e4m3_turns_at_every_threshold) { turns_at_every_threshold(e4m3, 0x80, e4m3_encode<float>); }
TEST(e4m3_saturates) { saturates(e4m3, 0x80, e4m3_encode<float>); }

TEST(e5m2_agrees_with_search_over_all_bf16) { agrees_with_search_over_all_bf16(e5m2, 0x80, e5m2_encode<float>); }
TEST(e5m2_turns_at_every_threshold) { turns_at_every_threshold(e5m2, 0x80, e5m2_encode<float>); }
TEST(e5m2_saturates) { saturates(e5m2, 0x80, e5m2_encode<float>); }

TEST(e4m3_magnitude_saturates_infinity_too) {  // a block scale may overflow before the tensor's amax is known to be finite
  CHECK_EQ(e4m3_encode_magnitude(kInfinity), 0x7Eu);
}

TEST(float8_encodes_every_bf16_infinity_and_nan_as_nan) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = bf16_number(bits);
    if (std::isfinite(x)) continue;
    CHECK_EQ(e4m3_encode(x) & 0x7Fu, 0x7Fu);
    CHECK(std::isnan(e4m3_decode<float>(e4m3_encode(x))));
    CHECK(std::isnan(e5m2_decode<float>(e5m2_encode(x))));
    CHECK_EQ(e8m0_encode_up(x), 0xFFu);
  }
}

TEST(float8_decodes_all_bytes) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t m = byte & 0x7F;
    const float small = e4m3_decode<float>(byte), wide = e5m2_decode<float>(byte);
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
