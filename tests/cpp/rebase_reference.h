// MXFP4 as E4M3 with scales of 128 one element at a time, by xla_ffi/cuda/matmul/rebase.h's rule.
#pragma once

#include <cmath>

#include "../../xla_ffi/numerics/float8.h"
#include "matmul_reference.h"

namespace jaxlowprec {
namespace reference {

inline int e8m0_scale(const MatmulOperand& o, int64_t row, int64_t k) {
  const int64_t line = o.format.tiles ? row / o.format.block : row;
  return o.scale[line * o.format.scale_columns(o.columns) + k / o.format.block];
}

/// The byte of the largest scale of the blocks that are not all zero, of the 128 elements of a row from k on; NaN's counts.
inline int largest_e8m0_scale(const MatmulOperand& o, int64_t row, int64_t k) {
  int largest = 0;
  for (const int64_t end = std::min(k + 128, o.columns); k < end; ++k) {
    const int scale = e8m0_scale(o, row, k);
    if (scale == 255 || decoded_code(o, 0, 0, row, k) != 0) largest = std::max(largest, scale);
  }
  return largest;
}

struct Rebased {
  int64_t width;
  std::vector<uint8_t> codes;  // [rows, width]
  std::vector<float> scales;   // [width / 128, rows]

  Rebased(const MatmulOperand& o, int64_t rows)
      : width((o.columns + 127) / 128 * 128), codes(rows * width), scales(rows * width / 128) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t first = 0; first < width; first += 128) {
        const int largest = largest_e8m0_scale(o, row, first), base = std::max(largest, 7) - 6;
        scales[first / 128 * rows + row] = largest == 255 ? NAN : std::ldexp(1.0f, base - 127);
        for (int64_t k = first; k < std::min(first + 128, o.columns); ++k) {
          const int shift = std::min(e8m0_scale(o, row, k) - base, 6);  // a larger one is of zeros
          const double number = std::ldexp(double{decoded_code(o, rows, 0, row, k)}, shift);
          codes[row * width + k] = static_cast<uint8_t>(float8_encode<E4M3>(static_cast<float>(number)));
        }
      }
  }
};

}  // namespace reference
}  // namespace jaxlowprec
