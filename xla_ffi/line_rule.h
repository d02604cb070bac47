// The rule by which a format's lines get their scales (numerics.md 18), for the CPU's kernels and the GPU's.
#pragma once

#include "numerics/row_scales.h"
#include "problems.h"

namespace jaxlowprec {

/// Of a format with Scaling::kRows, and with the type of its scales.
inline LineScaleRule line_scale_rule(const Format& f) {
  const bool integers = f.code == CodeType::kInt8, deploy = f.scale_rule == ScaleRule::kDeploy;
  const float maximum = integers ? (deploy ? kInt8Max : kInt8Max + 0.5f)
                                 : with_float8(f.code, [](auto element) { return decltype(element)::kMax; });
  const bool in_float32 = f.scale_type == ElementType::kF32, multiplies = integers && deploy && in_float32;
  const float epsilon = f.scale_type == ElementType::kBF16 ? 0.0078125f : 0.0009765625f;
  return {maximum, f.least_scale, !in_float32 ? epsilon : multiplies ? 0.0f : 1.0f, !multiplies};
}

/// The least integer that an element becomes.
inline float least_integer(const Format& f) { return f.scale_rule == ScaleRule::kCompressedTensors ? -128.0f : -127.0f; }

}  // namespace jaxlowprec
