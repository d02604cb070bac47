// The operations of kernels.h one element at a time, as numerics.md words them, on top of the scalar rules of
// xla_ffi/numerics (which formats_test.cc and numerics_test.cc pin). The GEMM: matmul_reference.h.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "../../xla_ffi/numerics/hadamard.h"
#include "../../xla_ffi/numerics/nvfp4.h"
#include "../../xla_ffi/numerics/philox.h"
#include "reference_elements.h"

namespace jaxlowprec {
namespace reference {

constexpr int64_t kBlock = 16;

inline int64_t blocks_in(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

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
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t line = 0; line < lines; ++line)
      for (int64_t first = 0; first < length; first += p.size) {
        const auto index = [&](int64_t i) {
          const int64_t row = p.vertical ? first + i : line, column = p.vertical ? line : first + i;
          return (batch * p.rows + row) * p.columns + column;
        };
        for (int i = 0; i < p.size; ++i) v[i] = get(p.x, p.type, index(i));
        hadamard(v.data(), p.size, p.sign_bits, p.inverse, p.type);
        for (int i = 0; i < p.size; ++i) put(result, p.type, index(i), v[i]);
      }
}

// --- one direction of a matrix: contraction axis last, padded with zeros to whole blocks, then rotated where asked

struct Lines {
  int64_t count, blocks;
  std::vector<float> x;  // [count, 16 * blocks]
};

template <class Problem>  // QuantizeProblem or AmaxProblem
Lines lines_of(const Problem& p, int64_t batch, bool columnwise, bool rotate) {
  Lines lines{columnwise ? p.columns : p.rows, blocks_in(columnwise ? p.rows : p.columns), {}};
  lines.x.resize(lines.count * lines.blocks * kBlock);
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t c = 0; c < p.columns; ++c) {
      const int64_t line = columnwise ? c : r, k = columnwise ? r : c;
      lines.x[line * lines.blocks * kBlock + k] = get(p.x, p.type, (batch * p.rows + r) * p.columns + c);
    }
  for (size_t at = 0; rotate && at < lines.x.size(); at += kBlock) rotate16(&lines.x[at], p.sign_mask, false, p.type);
  return lines;
}

/// Magnitude bits of the largest element; NaN is the one quiet NaN (numerics.md 1).
inline uint32_t amax_bits(const Lines& lines) {
  uint32_t most = 0;
  for (const float value : lines.x) most = std::max(most, magnitude(L::flush(value)));
  return most > kInfinityBits ? kNaNBits : most;
}

// --- quantisation (numerics.md 2 and 4)

inline uint32_t random_byte(const Random& random, int64_t batch, int64_t line, int64_t block, int k) {
  uint32_t counter[4] = {random.blocks[block], random.rows[line], random.stream, 0};
  philox4x32_10<float>(counter, random.key[2 * batch], random.key[2 * batch + 1]);
  return (counter[k / 4] >> (8 * (k % 4))) & 0xFFu;
}

/// Codes [count, 8 * blocks] and scales, a direction and batch entry at a time.
inline void quantize(const Lines& lines, const QuantizeDirection& direction, bool tiles, int64_t batch, uint8_t* data,
                     uint8_t* scale) {
  const float amax = direction.amax[batch];
  const Nvfp4TensorScale tensor = nvfp4_tensor_scale(amax);
  const int64_t height = tiles ? kBlock : 1;
  memset(data, 0, lines.count * lines.blocks * 8);
  for (int64_t first = 0; first < lines.count; first += height)
    for (int64_t block = 0; block < lines.blocks; ++block) {
      const int64_t last = std::min(first + height, lines.count);
      uint32_t most = 0;
      for (int64_t line = first; line < last; ++line)
        for (int k = 0; k < kBlock; ++k)
          most = std::max(most, magnitude(lines.x[(line * lines.blocks + block) * kBlock + k]));
      const bool poisoned = !tensor.finite || most >= kInfinityBits;
      const uint32_t byte = poisoned ? kE4M3NaN : nvfp4_block_scale(L::from_bits(most), tensor.multiplier);
      scale[first / height * lines.blocks + block] = static_cast<uint8_t>(byte);
      if (poisoned) continue;
      const float encode = nvfp4_block_encode<float>(byte, tensor.decode);
      for (int64_t line = first; line < last; ++line)
        for (int k = 0; k < kBlock; ++k) {
          const int64_t at = (line * lines.blocks + block) * kBlock + k;
          const float y = L::scaled(lines.x[at], encode);
          const uint32_t code = direction.random.key
                                    ? e2m1_encode_stochastic(y, random_byte(direction.random, batch, line, block, k))
                                    : e2m1_encode(y);
          data[at / 2] |= static_cast<uint8_t>(code << (at % 2 * 4));
        }
    }
}

// --- decoding (numerics.md 2)

inline void dequantize(const DequantizeProblem& p, void* result) {
  const int64_t blocks = blocks_in(p.columns), scale_rows = p.tiles ? blocks_in(p.rows) : p.rows;
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t row = 0; row < p.rows; ++row)
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t scale_row = p.tiles ? row / kBlock : row, line = batch * p.rows + row;
        const float scale = e4m3_decode<float>(p.scale[(batch * scale_rows + scale_row) * blocks + block]);
        float v[kBlock];
        for (int k = 0; k < kBlock; ++k)
          v[k] = nvfp4_decode<float>(code_at(p.data, (line * blocks + block) * kBlock + k), scale, L::flush(p.amax[batch]));
        if (p.rotate) rotate16(v, p.sign_mask, true, ElementType::kF32);  // rounded once, below
        for (int64_t k = 0; k < kBlock && block * kBlock + k < p.columns; ++k)
          put(result, p.type, line * p.columns + block * kBlock + k, v[k]);
      }
}

}  // namespace reference
}  // namespace jaxlowprec
