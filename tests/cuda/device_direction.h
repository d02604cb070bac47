// A direction of a quantisation as an executed kernel sees it.
#pragma once

#include "../cpp/quantize_cases.h"
#include "device_copies.h"

namespace jaxlowprec {

/// A direction's results and inputs in the device's memory.
struct DeviceDirection {
  const Direction& direction;
  DeviceBytes tensor, rows, sixteens, data, scale;

  DeviceDirection(const Direction& d, int64_t misalignment)
      : direction(d),
        tensor(d.tensor, 0, "tensor"),
        rows(d.rows, 0, "rows"),
        sixteens(d.sixteens, 0, "sixteens"),
        data(d.data.size(), misalignment, "data"),
        scale(d.scale.size(), misalignment, "scale") {}

  QuantizeDirection problem(const DeviceBytes* key, uint32_t stream) const {
    QuantizeDirection p;
    if (!direction.wanted) return p;
    p.data = data.as(), p.scale = scale.as();
    if (direction.has_tensor()) p.tensor = tensor.as<float>();
    if (key) p.random = direction.random(key->as<uint32_t>(), rows.as<uint32_t>(), sixteens.as<uint32_t>(), stream);
    return p;
  }

  void check() const {
    if (!direction.wanted) return;
    CHECK_EQ(scale.first_difference(direction.scale), -1);
    CHECK_EQ(data.first_difference(direction.data), -1);
    CHECK_EQ(data.unwritten(), 0);
    CHECK_EQ(scale.unwritten(), 0);
  }
};

}  // namespace jaxlowprec
