// Decoding the dictionary attribute that describes a format: the counterpart of Format.attributes in
// jaxlowprec/arrays/formats.py.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <utility>

#include "../problems.h"
#include "buffers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxlowprec {

namespace ffi = xla::ffi;

template <class T, size_t N>
std::optional<T> named(std::string_view name, const std::array<std::pair<std::string_view, T>, N>& names) {
  for (const auto& [known, value] : names)
    if (name == known) return value;
  return std::nullopt;
}

inline std::optional<Scaling> scaling_named(std::string_view name) {
  using Scalings = std::array<std::pair<std::string_view, Scaling>, 6>;
  constexpr Scalings kScalings = {{{"two_level", Scaling::kTwoLevel},
                                   {"e8m0", Scaling::kE8M0},
                                   {"float32", Scaling::kFloat32},
                                   {"tensor", Scaling::kTensor},
                                   {"float16", Scaling::kFloat16},
                                   {"rows", Scaling::kRows}}};
  return named(name, kScalings);
}

/// The format, or nothing where there is none of these fields.
inline std::optional<Format> make_format(std::string_view code_name, std::string_view scaling_name,
                                         std::string_view rule_name, int32_t block, bool tiles, bool power_of_two,
                                         float amax_epsilon) {
  using Rules = std::array<std::pair<std::string_view, ScaleRule>, 9>;
#define JLP_NAMED(Type) std::pair(std::string_view(Type::kName), CodeType::k##Type),
  constexpr std::array kCodes = {JLP_NAMED(E2M1) JLP_FLOAT8_TYPES(JLP_NAMED)
                                     std::pair(std::string_view("int4"), CodeType::kInt4),
                                 std::pair(std::string_view("int8"), CodeType::kInt8)};
#undef JLP_NAMED
  constexpr Rules kRules = {{{"up", ScaleRule::kUp},
                             {"floor", ScaleRule::kFloor},
                             {"even", ScaleRule::kEven},
                             {"six", ScaleRule::kSix},
                             {"four_over_six", ScaleRule::kFourOverSix},
                             {"four_over_six_mse", ScaleRule::kFourOverSixMse},
                             {"search", ScaleRule::kSearch},
                             {"deploy", ScaleRule::kDeploy},
                             {"compressed-tensors", ScaleRule::kCompressedTensors}}};
  const auto code = named(code_name, kCodes);
  const auto scaling = scaling_named(scaling_name);
  const auto rule = named(rule_name, kRules);
  if (!code || !scaling || !rule) return std::nullopt;
  if ((*code == CodeType::kInt4) != (*scaling == Scaling::kFloat16)) return std::nullopt;
  const bool rows = *scaling == Scaling::kRows, int8 = *code == CodeType::kInt8;
  if ((int8 && !rows) || (rows && tiles) || int8 != (*rule >= ScaleRule::kDeploy)) return std::nullopt;
  const int32_t expected = *scaling == Scaling::kTwoLevel  ? 16
                           : *scaling == Scaling::kE8M0    ? 32
                           : *scaling == Scaling::kFloat32 ? 128
                           : *scaling == Scaling::kTensor  ? 1
                           : *scaling == Scaling::kRows    ? 1
                                                           : block;
  const bool packed_only = *scaling == Scaling::kTwoLevel,
             wide_only = *scaling == Scaling::kFloat32 || *scaling == Scaling::kTensor || rows;
  if (block != expected || block < 1 || (packed_only && *code != CodeType::kE2M1) || (wide_only && *code == CodeType::kE2M1))
    return std::nullopt;
  if (*scaling != Scaling::kTwoLevel && *rule >= ScaleRule::kSix && *rule <= ScaleRule::kSearch) return std::nullopt;
  return Format{*code, *scaling, block, tiles, *rule, power_of_two, amax_epsilon};
}

/// Sets the type of a line's or a group's scale to that of their buffer. False: it has no such scales.
inline bool take_scale_type(Format& format, const ffi::AnyBuffer& scale) {
  const bool rows = format.scaling == Scaling::kRows;
  if (!rows && format.scaling != Scaling::kFloat16) return true;
  const auto type = element_type(scale.element_type());
  if (!type || (*type == ElementType::kF32 && !rows)) return false;
  format.scale_type = *type;
  return true;
}

/// The format, or nothing where the dictionary lacks an entry or has one this build does not know. `may_be_column_major`:
/// the call's kernels know scales in either order, in float32, or `of_weights` of 4 bits.
inline std::optional<Format> decode_format(const ffi::Dictionary& attributes, bool may_be_column_major = false,
                                           bool of_weights = false) {
  const auto code_name = attributes.get<std::string_view>("element");
  const auto scaling_name = attributes.get<std::string_view>("scaling");
  const auto rule_name = attributes.get<std::string_view>("scale_rule");
  const auto block = attributes.get<int32_t>("block");
  const auto tiles = attributes.get<bool>("tiles"), power_of_two = attributes.get<bool>("power_of_two");
  const auto amax_epsilon = attributes.get<float>("amax_epsilon");
  if (!code_name || !scaling_name || !rule_name || !block || !tiles || !power_of_two || !amax_epsilon) return std::nullopt;
  auto format = make_format(*code_name, *scaling_name, *rule_name, *block, *tiles, *power_of_two, *amax_epsilon);
  if (format && format->scaling == Scaling::kRows) {
    const auto least_scale = attributes.get<float>("least_scale");
    if (!least_scale) return std::nullopt;
    format->least_scale = *least_scale;
  }
  if (!format || !attributes.contains("column_major")) return format;
  const bool known = format->scaling == Scaling::kFloat32 || (of_weights && format->packed());
  if (!may_be_column_major || !known || format->tiles) return std::nullopt;
  format->column_major = true;
  return format;
}

}  // namespace jaxlowprec
