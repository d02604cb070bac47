// The types of codes: one table that enumerators, names, dispatch, decoding tables and the GPU's source files follow.
//
// A new 8-bit float is a struct and its name in JLP_FLOAT8_TYPES, which CMakeLists.txt reads too. docs/how-to/extending.md
// says what else it may want.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace jaxlowprec {

/// Which codes of a floating-point type are not finite numbers.
enum class Special {
  kNone,
  kNaN,            // the largest magnitude, all ones
  kInfinityAndNaN  // the largest exponent, as in IEEE 754: infinity with mantissa 0, else NaN
};

namespace detail {

constexpr float two_to(int exponent) {
  float power = 1.0f;
  for (; exponent > 0; --exponent) power *= 2.0f;
  for (; exponent < 0; ++exponent) power *= 0.5f;
  return power;
}

}  // namespace detail

/// A type of `kBits` bits: the sign, the exponent, the mantissa. Zero and subnormal numbers are as in IEEE 754.
template <int kBits, int kMantissa, int kExponentBias, Special kSpecials>
struct FloatType {
  static constexpr int kMantissaBits = kMantissa, kBias = kExponentBias;
  static constexpr Special kSpecial = kSpecials;
  static constexpr bool kPacked = kBits == 4;  // two codes per byte
  /// All magnitude bits set: the code of NaN, where there is one.
  static constexpr int kMagnitudeCode = (1 << (kBits - 1)) - 1;
  /// The code of infinity if the type has it.
  static constexpr int kInfinityCode = kMagnitudeCode >> kMantissa << kMantissa;
  static constexpr int kLargestCode = kSpecials == Special::kNone  ? kMagnitudeCode
                                      : kSpecials == Special::kNaN ? kMagnitudeCode - 1
                                                                   : kInfinityCode - 1;
  static constexpr int kLargestExponent = (kLargestCode >> kMantissa) - kExponentBias;
  static constexpr float kMinNormal = detail::two_to(1 - kExponentBias);
  static constexpr float kMax =
      ((1 << kMantissa) + (kLargestCode & ((1 << kMantissa) - 1))) * detail::two_to(kLargestExponent - kMantissa);
  /// Whether a code is the upper byte of the float16 with the same value.
  static constexpr bool kUpperByteOfFloat16 = kBits == 8 && kExponentBias == 15 && kSpecials == Special::kInfinityAndNaN;
};

struct E2M1 : FloatType<4, 1, 1, Special::kNone> {  // up to 6
  static constexpr const char* kName = "e2m1";      // as Format.element in jaxlowprec/arrays/formats.py
};
struct E4M3 : FloatType<8, 3, 7, Special::kNaN> {  // up to 448
  static constexpr const char* kName = "e4m3";
  static constexpr bool kMeetsItself = true;  // whether there is a GEMM of two operands of this type
};
struct E5M2 : FloatType<8, 2, 15, Special::kInfinityAndNaN> {  // up to 57344
  static constexpr const char* kName = "e5m2";
  static constexpr bool kMeetsItself = false;
};

/// The 8-bit floats: calls the macro `use` with each.
#define JLP_FLOAT8_TYPES(use) use(E4M3) use(E5M2)

#define JLP_ENUMERATOR(Type) k##Type,
enum class CodeType : int32_t { kE2M1, JLP_FLOAT8_TYPES(JLP_ENUMERATOR) kInt4, kInt8 };
#undef JLP_ENUMERATOR

/// Calls visit(E4M3()), visit(E5M2()) ... for an 8-bit float.
template <class Visit>
static auto with_float8(CodeType code, Visit visit) {
#define JLP_CASE(Type) \
  case CodeType::k##Type: return visit(Type());
  switch (code) {
    JLP_FLOAT8_TYPES(JLP_CASE)
    default: std::abort();  // handlers admit no other code here
  }
#undef JLP_CASE
}

/// The same for any float, E2M1 included.
template <class Visit>
static auto with_float(CodeType code, Visit visit) {
  if (code == CodeType::kE2M1) return visit(E2M1());
  return with_float8(code, visit);
}

/// Whether there is a GEMM of two operands of this type (numerics.md 9).
static inline bool meets_itself(CodeType code) {
  if (code == CodeType::kE2M1 || code == CodeType::kInt8) return true;
  return with_float8(code, [](auto type) { return decltype(type)::kMeetsItself; });
}

}  // namespace jaxlowprec
