// A norm's arrays as an executed kernel sees them.
#pragma once

#include "../cpp/check.h"
#include "../cpp/producers_reference.h"
#include "device_copies.h"

namespace jaxlowprec {

/// A result in the device's memory: all of it is written, and as expected.
inline void check_result(const DeviceBytes& found, const Buffer& expected, ElementType type) {
  const int64_t count = expected.size() / reference::element_size(type);
  CHECK_EQ(first_difference(found.as(), expected.as(), type, count), -1);
  CHECK_EQ(found.unwritten(), 0);
}

/// A norm's arrays in the device's memory.
struct DeviceNorm {
  const reference::Norms& n;
  int64_t misalignment;
  DeviceBytes x{n.x, misalignment, "x"}, residual{n.residual, misalignment, "residual"};
  DeviceBytes weight{n.weight, 0, "weight"}, beta{n.beta, 0, "beta"};
  DeviceBytes y{n.x.size(), misalignment, "y"}, total{n.x.size(), misalignment, "total"};
  DeviceBytes mean{n.mean.size(), 0, "mean"}, inverse{n.inverse.size(), 0, "inverse"};

  NormProblem problem() const {
    NormProblem p = n.problem();
    p.x = x.as(), p.weight = weight.as<float>(), p.result = y.as(), p.inverse = inverse.as<float>();
    if (n.c.has_residual) p.residual = residual.as(), p.total = total.as();
    if (n.c.has_beta) p.beta = beta.as<float>();
    if (n.c.layer()) p.mean = mean.as<float>();
    return p;
  }

  /// The results beside the norm, and that x and the residual were read once. again: how many of x's bytes were read once
  /// more, or of the sum's.
  void check_others(uint64_t again) const {
    check_result(inverse, n.inverse, ElementType::kF32);
    if (n.c.has_residual) check_result(total, n.total, n.c.type);
    if (n.c.layer()) check_result(mean, n.mean, ElementType::kF32);
    const uint64_t bytes = n.x.size(), sums = n.c.has_residual ? again : 0;
    CHECK_EQ(x.traffic().read, bytes + again - sums);
    CHECK_EQ(residual.traffic().read, n.c.has_residual ? bytes : 0);
    CHECK_EQ(total.traffic().read, sums);
  }
  void check(uint64_t again) const {
    check_result(y, n.y, n.c.type);
    CHECK_EQ(y.traffic().read, uint64_t{0});
    check_others(again);
  }
};

}  // namespace jaxlowprec
