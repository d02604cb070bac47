// The operations of kernels.h one element at a time, as numerics.md words them, on top of the scalar rules of
// xla_ffi/numerics (which formats_test.cc and numerics_test.cc pin): what all of them share, Hadamard transforms and amax.
// The processor keeps subnormal numbers here, so they are flushed by hand.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../../xla_ffi/numerics/hadamard.h"
#include "reference_elements.h"

namespace jaxlowprec {
namespace reference {

// --- Hadamard transforms (numerics.md 3)

inline void hadamard(float* v, int n, const uint32_t* sign_bits, bool inverse, ElementType type) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(n)));
  const auto flip = [&](int i) { v[i] = sign_bits[i] ? -v[i] : v[i]; };
  for (int i = 0; i < n && !inverse; ++i) flip(i);
  for (int stride = 1; stride < n; stride *= 2)
    for (int i = 0; i < n; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = add(a, b), v[i + stride] = add(a, -b);
    }
  for (int i = 0; i < n; ++i) {
    v[i] = multiply(v[i], scale);
    if (inverse) flip(i);
    v[i] = number(rounded_bits(v[i], type), type);
  }
}

inline void rotate16(float* v, uint32_t sign_mask, bool inverse, ElementType type) {
  uint32_t signs[16];
  for (int i = 0; i < 16; ++i) signs[i] = (sign_mask >> i) & 1u;
  hadamard(v, 16, signs, inverse, type);
}

inline void hadamard(const HadamardProblem& p, void* result) {
  const int64_t lines = p.vertical ? p.columns : p.rows, length = p.vertical ? p.rows : p.columns;
  std::vector<float> v(p.size);
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    std::vector<uint32_t> signs(p.sign_bits, p.sign_bits + p.size);
    for (int32_t i = 0; i < p.size && p.drawn_signs; ++i) signs[i] = (p.drawn_signs[4 * batch + i / 32] >> i % 32) & 1u;
    for (int64_t line = 0; line < lines; ++line)
      for (int64_t first = 0; first < length; first += p.size) {
        const auto index = [&](int64_t i) {
          const int64_t row = p.vertical ? first + i : line, column = p.vertical ? line : first + i;
          return (batch * p.rows + row) * p.columns + column;
        };
        for (int i = 0; i < p.size; ++i) v[i] = get(p.x, p.type, index(i));
        hadamard(v.data(), p.size, signs.data(), p.inverse, p.type);
        for (int i = 0; i < p.size; ++i) put(result, p.type, index(i), v[i]);
      }
  }
}

// --- one direction of a matrix: contraction axis last, padded with zeros to whole blocks, then rotated where asked

struct Lines {
  int64_t count, length;
  std::vector<float> x;  // [count, length]
};

template <class Problem>  // QuantizeProblem or AmaxProblem
Lines lines_of(const Problem& p, int64_t batch, bool columnwise, bool rotate, int64_t block = 16) {
  const int64_t elements = columnwise ? p.rows : p.columns;
  Lines lines{columnwise ? p.columns : p.rows, (elements + block - 1) / block * block, {}};
  lines.x.resize(lines.count * lines.length);
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.columns; ++c) {
      const int64_t line = columnwise ? c : r, k = columnwise ? r : c;
      lines.x[line * lines.length + k] = get(p.x, p.type, (batch * p.rows + r) * p.columns + c);
    }
  for (size_t at = 0; rotate && at < lines.x.size(); at += 16) rotate16(&lines.x[at], p.sign_mask, false, p.type);
  return lines;
}

/// Magnitude bits of the largest element; NaN is the one quiet NaN (numerics.md 1).
/// Of one of the lines: NaN and infinity are not lost.
inline float amax_of_line(const Lines& lines, int64_t line) {
  uint32_t most = 0;
  for (int64_t k = 0; k < lines.length; ++k) most = std::max(most, magnitude(L::flush(lines.x[line * lines.length + k])));
  return L::from_bits(most > kInfinityBits ? kNaNBits : most);
}

inline uint32_t amax_bits(const Lines& lines) {
  uint32_t most = 0;
  for (const float value : lines.x) most = std::max(most, magnitude(L::flush(value)));
  return most > kInfinityBits ? kNaNBits : most;
}

}  // namespace reference
}  // namespace jaxlowprec
