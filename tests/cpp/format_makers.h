// The formats of jaxlowprec/arrays/formats.py as the kernels get them.
#pragma once

#include "../../xla_ffi/problems.h"

namespace jaxlowprec {

constexpr Format nvfp4(bool tiles = false, ScaleRule rule = ScaleRule::kSix) {
  return {CodeType::kE2M1, Scaling::kTwoLevel, 16, tiles, rule, false, 0};
}
constexpr Format mx(CodeType code, bool tiles = false, ScaleRule rule = ScaleRule::kUp) {
  return {code, Scaling::kE8M0, 32, tiles, rule, false, 0};
}
constexpr Format float8_block(CodeType code, bool tiles, bool power_of_two = true, float amax_epsilon = 0) {
  return {code, Scaling::kFloat32, 128, tiles, ScaleRule::kUp, power_of_two, amax_epsilon};
}
constexpr Format float8_tensor(CodeType code, bool power_of_two = false, float amax_epsilon = 0) {
  return {code, Scaling::kTensor, 1, false, ScaleRule::kUp, power_of_two, amax_epsilon};
}
/// Float8Rows or Int8Rows.
constexpr Format line_format(CodeType code, ElementType scale_type = ElementType::kF32, float least_scale = 0,
                             ScaleRule rule = ScaleRule::kDeploy) {
  Format f = {code, Scaling::kRows, 1, false, code == CodeType::kInt8 ? rule : ScaleRule::kUp, false, 0};
  f.scale_type = scale_type, f.least_scale = least_scale;
  return f;
}

}  // namespace jaxlowprec
