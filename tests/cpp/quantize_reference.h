// Quantisation and decoding of every format one element at a time, as numerics.md words them (see reference.h).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../../xla_ffi/numerics/block_scales.h"
#include "../../xla_ffi/numerics/nvfp4.h"
#include "../../xla_ffi/numerics/philox.h"
#include "reference.h"

namespace jaxlowprec {
namespace reference {

/// A block's scale as it is stored, in the low bits, and what its elements are multiplied by; poisoned: its codes are 0.
struct BlockScale {
  uint32_t stored;
  float encode;
  bool poisoned;
};

inline float maximum(CodeType code) {
  return with_float(code, [](auto element) { return decltype(element)::kMax; });
}

inline MxElement mx_element(CodeType code) {
  return with_float(code, [](auto element) { return kMxElement<decltype(element)>; });
}

/// Of the block whose amax has these bits. `tensor` is the matrix's amax or encode scale, where the format has one.
inline BlockScale block_scale(const Format& f, uint32_t amax, float tensor, bool encode_scale_given) {
  const Float8ScaleRule float8{maximum(f.code), f.amax_epsilon, f.power_of_two};
  switch (f.scaling) {
    case Scaling::kTwoLevel: {
      const Nvfp4TensorScale scale = nvfp4_tensor_scale(tensor);
      if (!scale.usable || amax >= kInfinityBits) return {kFloat8NaN, 0, true};
      const uint32_t byte = nvfp4_block_scale(L::from_bits(amax), scale.multiplier);
      return {byte, nvfp4_block_encode<float>(byte, scale.decode), false};
    }
    case Scaling::kE8M0: {
      const MxElement element = mx_element(f.code);
      const uint32_t rounding = f.scale_rule == ScaleRule::kEven ? element.half_unit : 0;
      const uint32_t byte = f.scale_rule == ScaleRule::kUp ? mx_scale_up<float>(amax, element)
                                                           : mx_scale_floor<float>(amax, element, rounding);
      return {byte, mx_encode<float>(byte), byte == kE8M0NaN};
    }
    default: {
      const float encode = f.scaling == Scaling::kTensor ? float8_tensor_encode_scale(tensor, encode_scale_given, float8)
                                                         : float8_encode_scale<float>(amax, float8);
      return {L::bits(float8_decode_scale(encode)), encode, std::isnan(encode)};
    }
  }
}

/// Word `word` of the call of a line and a sixteen, or several.
inline uint32_t random_word(const Random& random, int64_t batch, int64_t line, uint32_t sixteen, int64_t word) {
  uint32_t counter[4] = {sixteen, random.rows[batch * random.rows_step + line], random.stream, 0};
  philox4x32_10<float>(counter, random.key[2 * batch], random.key[2 * batch + 1]);
  return counter[word];
}

inline uint32_t sixteen_at(const Random& random, int64_t batch, int64_t k) {
  return random.sixteens[batch * random.sixteens_step + k / 16];
}

inline uint32_t random_byte(const Random& random, int64_t batch, int64_t line, int64_t k) {
  return (random_word(random, batch, line, sixteen_at(random, batch, k), k % 16 / 4) >> (8 * (k % 4))) & 0xFFu;
}

/// 20 bits of the block that begins at k (numerics.md 14).
inline uint32_t random_scale_bits(const Random& random, int64_t batch, int64_t line, int64_t k) {
  const uint32_t block = sixteen_at(random, batch, k);
  return random_word(random, batch, line, block / 4, block % 4) >> 12;
}

/// Finite numbers saturate, also where the product overflows; others become NaN.
inline uint32_t code_of(CodeType code, float x, float encode, const uint32_t* byte) {
  float y = L::scaled(x, encode);
  if (std::isfinite(x)) y = std::clamp(y, -maximum(code), maximum(code));
  if (code == CodeType::kE2M1) return byte ? e2m1_encode_stochastic(y, *byte) : e2m1_encode(y);
  return with_float8(code, [&](auto element) {
    using Element = decltype(element);
    return byte ? float8_encode_stochastic<Element>(y, *byte) : float8_encode<Element>(y);
  });
}

/// The sum of the errors of a block's rows by a scale, each row's in order, rows as a tree.
template <ScaleError kError>
float error_sum(const std::vector<std::vector<float>>& rows, const TriedScale<float>& scale, const Nvfp4RoomScale& tensor) {
  const float encode = nvfp4_block_encode<float>(scale.byte, tensor.decode);
  std::vector<float> sums;
  for (const std::vector<float>& row : rows) {
    float sum = 0;
    for (const float x : row) {
      const float a = L::flush(std::fabs(x)), number = e2m1_decode<float>(code_of(CodeType::kE2M1, a, encode, nullptr));
      sum = L::flush(sum + nvfp4_error<kError>(a, number, scale.value, tensor));
    }
    sums.push_back(sum);
  }
  for (size_t half = sums.size() / 2; half > 0; half /= 2)
    for (size_t r = 0; r < half; ++r) sums[r] = L::flush(sums[r] + sums[r + half]);
  return sums[0];
}

/// The best of several scales (numerics.md 13), in place of `found`.
template <ScaleError kError>
BlockScale best_scale(const std::vector<std::vector<float>>& rows, uint32_t amax, float tensor, const BlockScale& found) {
  if (found.poisoned) return found;
  const Nvfp4RoomScale room = nvfp4_room_scale(tensor);
  TriedScale<float> scales[scales_tried(kError)];
  nvfp4_scales(L::flush(L::from_bits(amax)), room.encode, scales);
  uint32_t best = scales[0].byte;
  float least = error_sum<kError>(rows, scales[0], room);
  for (const TriedScale<float>& scale : scales) {
    const float error = error_sum<kError>(rows, scale, room);
    if (error < least) best = scale.byte, least = error;
  }
  return {best, nvfp4_block_encode<float>(best, room.decode), false};
}

inline BlockScale best_scale(ScaleRule rule, const std::vector<std::vector<float>>& rows, uint32_t amax, float tensor,
                             const BlockScale& found) {
  switch (rule) {
    case ScaleRule::kFourOverSix: return best_scale<ScaleError::kAbsolute>(rows, amax, tensor, found);
    case ScaleRule::kFourOverSixMse: return best_scale<ScaleError::kSquared>(rows, amax, tensor, found);
    default: return best_scale<ScaleError::kRelativeSquared>(rows, amax, tensor, found);
  }
}

/// What rule 6 finds where there is room above.
inline BlockScale scale_with_room(uint32_t amax, float tensor, const BlockScale& found) {
  if (found.poisoned) return found;
  const Nvfp4RoomScale room = nvfp4_room_scale(tensor);
  const uint32_t byte = nvfp4_block_scale(L::flush(L::from_bits(amax)), nvfp4_multiplier(room.encode));
  return {byte, nvfp4_block_encode<float>(byte, room.decode), false};
}

/// The E4M3 byte of a block of 16 after its correction (numerics.md 14), decided in float64.
inline uint32_t corrected_scale(const float* x, const BlockScale& block, uint32_t bits) {
  float energy = 0, product = 0;
  for (int i = 0; i < 16; ++i) {
    const float v = L::flush(std::fabs(L::scaled(x[i], block.encode)));
    const float number = e2m1_decode<float>(e2m1_encode(v));
    energy += L::flush(v * v), product += L::flush(v * number);
  }
  float ratio = energy / product;
  if (!std::isfinite(ratio)) ratio = 1;
  const double t = std::min(L::flush(float8_decode<E4M3, float>(block.stored) * ratio), E4M3::kMax);
  uint32_t low = 0;
  while (low < 0x7Eu && double{float8_decode<E4M3, float>(low + 1)} <= t) ++low;
  if (low == 0x7Eu) return low;
  const double from = double{float8_decode<E4M3, float>(low)}, to = double{float8_decode<E4M3, float>(low + 1)};
  return low + (std::floor((t - from) / (to - from) * 0x1p20) + bits >= 0x1p20);
}

// --- lines that have a scale each (numerics.md 18), with divisions where the kernels have none

/// Of the line whose amax has these bits: its scale, a number of the stored type, and the factor of elements or 0, where
/// they are divided.
struct LineScale {
  float scale, factor;
};

inline LineScale line_scale(const Format& f, uint32_t amax) {
  if (amax >= kInfinityBits) return {L::from_bits(kNaNBits), 0};
  const bool integers = f.code == CodeType::kInt8, deploy = f.scale_rule == ScaleRule::kDeploy;
  const float most = L::flush(L::from_bits(amax)), largest = integers ? (deploy ? 127.0f : 127.5f) : maximum(f.code);
  float scale = most > 0 ? std::max(most / largest, 0x1p-126f) : 0.0f;
  scale = std::max(scale, f.least_scale);
  scale = number(rounded_bits(scale, f.scale_type), f.scale_type);
  const bool in_float32 = f.scale_type == ElementType::kF32;
  if (std::isinf(scale)) return {L::from_bits(kNaNBits), 0};
  if (integers && deploy && in_float32) return {scale, most > 0 ? std::min(127.0f / most, 0x1p126f) : 1.0f};
  if (scale == 0) scale = f.scale_type == ElementType::kBF16 ? 0x1p-7f : in_float32 ? 1.0f : 0x1p-10f;
  return {scale, 0};
}

inline uint32_t line_code(const Format& f, float x, const LineScale& line, const uint32_t* byte) {
  if (std::isnan(line.scale)) return 0;
  const float from = L::flush(x), y = from == 0 ? 0.0f : line.factor > 0 ? from * line.factor : from / line.scale;
  if (f.code != CodeType::kInt8) {
    const float most = maximum(f.code), limited = std::clamp(y, -most, most);
    return with_float8(f.code, [&](auto element) {
      using Element = decltype(element);
      return byte ? float8_encode_stochastic<Element>(limited, *byte) : float8_encode<Element>(limited);
    });
  }
  const float least = f.scale_rule == ScaleRule::kCompressedTensors && !byte ? -128.0f : -127.0f;
  const float limited = std::clamp(y, least, 127.0f), magnitude = std::fabs(limited);
  float code = byte ? std::floor(magnitude) : std::nearbyint(magnitude);
  if (byte && magnitude - code >= (255.5f - *byte) / 256) ++code;
  return static_cast<uint8_t>(static_cast<int8_t>(std::signbit(limited) ? -code : code));
}

inline void quantize_lines(const QuantizeProblem& p, const Lines& lines, const QuantizeDirection& direction, int64_t batch,
                           int64_t length, uint8_t* data, uint8_t* scale) {
  const Format& f = p.format;
  for (int64_t line = 0; line < lines.count; ++line, data += length) {
    const float* x = lines.x.data() + line * lines.length;
    uint32_t most = 0;
    for (int64_t k = 0; k < length; ++k) most = std::max(most, magnitude(x[k]));
    const LineScale found = line_scale(f, direction.tensor ? magnitude(direction.tensor[batch * lines.count + line]) : most);
    put(scale, f.scale_type, line, found.scale);
    for (int64_t k = 0; k < length; ++k) {
      const uint32_t byte = direction.random.key ? random_byte(direction.random, batch, line, k) : 0;
      data[k] = static_cast<uint8_t>(line_code(f, x[k], found, direction.random.key ? &byte : nullptr));
    }
  }
}

/// Codes and scales of one matrix in one direction.
inline void quantize(const QuantizeProblem& p, const Lines& lines, const QuantizeDirection& direction, int64_t batch,
                     int64_t length, uint8_t* data, uint8_t* scale) {
  const Format& f = p.format;
  if (f.scaling == Scaling::kRows) return quantize_lines(p, lines, direction, batch, length, data, scale);
  const bool tensor = f.scaling == Scaling::kTensor, packed = f.code == CodeType::kE2M1;
  const int64_t width = tensor ? lines.length : f.block, height = tensor ? lines.count : f.tiles ? f.block : 1;
  const int64_t coded = packed ? (length + 15) / 16 * 16 : length;  // a rotation fills its last 16 elements
  memset(data, 0, lines.count * f.row_bytes(length));
  for (int64_t first = 0; first < lines.count; first += height)
    for (int64_t start = 0; start < lines.length; start += width, scale += f.scale_bytes()) {
      const int64_t last = std::min(first + height, lines.count);
      uint32_t most = 0;
      for (int64_t line = first; line < last; ++line)
        for (int64_t k = start; k < start + width; ++k) most = std::max(most, magnitude(lines.x[line * lines.length + k]));
      const float tensor_number = direction.tensor ? direction.tensor[batch] : 0;
      BlockScale block = block_scale(f, most, tensor_number, p.encode_scale_given);
      if (f.chooses_scales()) {
        std::vector<std::vector<float>> rows(height, std::vector<float>(width));
        for (int64_t line = first; line < last; ++line)
          for (int64_t k = start; k < start + width; ++k) {
            const bool transposed = f.tiles && &direction == &p.columnwise;  // rows are those of the array
            float& element = transposed ? rows[k - start][line - first] : rows[line - first][k - start];
            element = lines.x[line * lines.length + k];
          }
        block = best_scale(f.scale_rule, rows, most, tensor_number, block);
      } else if (p.eden) {
        block = scale_with_room(most, tensor_number, block);
      }
      if (p.eden && !block.poisoned)
        block.stored = corrected_scale(lines.x.data() + first * lines.length + start, block,
                                       random_scale_bits(direction.random, batch, first, start));
      memcpy(scale, &block.stored, f.scale_bytes());
      if (block.poisoned) continue;
      for (int64_t line = first; line < last; ++line)
        for (int64_t k = start; k < std::min(start + width, coded); ++k) {
          const bool random_codes = direction.random.key && !p.eden;
          const uint32_t byte = random_codes ? random_byte(direction.random, batch, line, k) : 0;
          const uint32_t code =
              code_of(f.code, lines.x[line * lines.length + k], block.encode, random_codes ? &byte : nullptr);
          uint8_t* to = data + line * f.row_bytes(length) + (packed ? k / 2 : k);
          *to |= static_cast<uint8_t>(packed ? code << (k % 2 * 4) : code);
        }
    }
}

// --- decoding

/// The number that one element stands for.
inline float decode(const DequantizeProblem& p, int64_t batch, int64_t row, int64_t column) {
  const Format& f = p.format;
  const bool tensor = f.scaling == Scaling::kTensor;
  const bool lines = f.scaling == Scaling::kRows, integers = f.code == CodeType::kInt8;
  const int64_t scale_row = tensor ? 0 : f.tiles ? row / f.block : row;
  const int64_t scale_column = tensor || lines ? 0 : column / f.block;
  const uint8_t* data = p.data + (batch * p.rows + row) * f.row_bytes(p.columns);
  uint32_t bits = 0;
  memcpy(
      &bits,
      p.scale + ((batch * f.scale_rows(p.rows) + scale_row) * f.scale_columns(p.columns) + scale_column) * f.scale_bytes(),
      f.scale_bytes());
  const float scale = f.scaling == Scaling::kTwoLevel ? float8_decode<E4M3, float>(bits)
                      : f.scaling == Scaling::kE8M0   ? e8m0_decode<float>(bits)
                      : lines                         ? number(bits, f.scale_type)
                                                      : L::from_bits(bits);
  if (integers) return multiply(static_cast<float>(static_cast<int8_t>(data[column])), scale);
  if (f.code != CodeType::kE2M1) return multiply(float8_number(f.code, data[column]), scale);
  const uint32_t code = (data[column / 2] >> (column % 2 * 4)) & 15u;
  if (f.scaling == Scaling::kTwoLevel) return nvfp4_decode<float>(code, scale, L::flush(p.amax[batch]));
  return multiply(e2m1_decode<float>(code), scale);
}

inline void dequantize(const DequantizeProblem& p, void* result) {
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t row = 0; row < p.rows; ++row)
      for (int64_t start = 0; start < p.columns; start += 16) {
        const int64_t padded = p.rotate ? start + 16 : std::min(start + 16, p.columns);  // a rotation has whole blocks
        float v[16];
        for (int64_t k = start; k < padded; ++k) v[k - start] = decode(p, batch, row, k);
        if (p.rotate) rotate16(v, p.sign_mask, true, ElementType::kF32);  // rounded once, below
        for (int64_t k = start; k < std::min(start + 16, p.columns); ++k)
          put(result, p.type, (batch * p.rows + row) * p.columns + k, v[k - start]);
      }
}

}  // namespace reference
}  // namespace jaxlowprec
