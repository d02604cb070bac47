// A direction of a quantisation as an executed kernel sees it.
#pragma once

#include "../cpp/quantize_cases.h"
#include "device_copies.h"

namespace jaxlowprec {

/// A direction's results and inputs in the device's memory.
struct DeviceDirection {
  const Direction& direction;
  const bool column_major;  // how scales are to lie
  DeviceBytes tensor, rows, sixteens, data, scale;

  DeviceDirection(const Direction& d, int64_t misalignment, bool column_major = false)
      : direction(d),
        column_major(column_major),
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
    CHECK_EQ(column_major ? scale.first_difference(scales_by_columns()) : scale.first_difference(direction.scale), -1);
    CHECK_EQ(data.first_difference(direction.data), -1);
    CHECK_EQ(data.unwritten(), 0);
    CHECK_EQ(scale.unwritten(), 0);
  }

 private:
  Buffer scales_by_columns() const {
    const Direction& d = direction;
    const int64_t blocks = d.format.scale_columns(d.length), size = d.lines * blocks;
    Buffer found(d.scale.size());
    for (int64_t i = 0; i < d.batch * size; ++i)
      found.as<uint32_t>()[i] = d.scale.as<uint32_t>()[i / size * size + i % d.lines * blocks + i % size / d.lines];
    return found;
  }
};

/// Whether a case has its scales column by column, where a format has both orders: about half of them.
inline bool is_column_major(const Format& format, std::mt19937& random) {
  return format.scaling == Scaling::kFloat32 && !format.tiles && random() % 2;
}

}  // namespace jaxlowprec
