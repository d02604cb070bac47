// The arguments of the quantisation kernels, and block scales (numerics.md 2 and 5 to 7).
#pragma once

#include "../../numerics/block_scales.h"
#include "../../numerics/nvfp4.h"
#include "../../numerics/philox.h"
#include "../launch_grid.cuh"
#include "quantize.h"
#include "quantize_codes.cuh"

namespace jaxlowprec {
namespace cuda {

/// Where one direction's results go and what it needs besides the elements.
struct DirectionArguments {
  const float* tensor;
  uint8_t* data;  // null: not wanted
  uint8_t* scale;
  Random random;
  int64_t row_bytes;   // codes of a line
  int64_t scale_rows;  // of a matrix
  int64_t scale_columns;
  bool pieces;                      // codes of 16 elements may be stored at once
  int64_t scale_line, scale_block;  // how far a scale is from that of the next line, and of the next block
};

struct QuantizeArguments {
  const void* x;
  int64_t rows, columns;
  Tiles tiles;
  int32_t log_segments;  // of a row of the rows kernel's tiles
  bool pieces;           // rows begin at multiples of 16 bytes
  int8_t log_sharing;    // of the warps that share such a row of a tile
  uint32_t sign_mask;

  // the scale's rule
  Scaling scaling;
  ScaleRule scale_rule;
  MxElement mx;
  Float8ScaleRule float8;
  int32_t log_block;  // of the elements that share a scale; 0 for a tensor's
  bool squares;
  bool encode_scale_given;

  DirectionArguments rowwise, columnwise;
};

/// Sixteens of elements that share a scale, along the quantised axis; 0 for a tensor's.
template <Scales kScales>
JLP_DEVICE int sixteens_in_block(const QuantizeArguments& a) {
  return kIsTwoLevel<kScales> ? 1 : (1 << a.log_block) / 16;
}
template <Scales kScales>
JLP_DEVICE int log_block(const QuantizeArguments& a) {
  return kIsTwoLevel<kScales> ? 4 : a.log_block;
}

/// What is stored of a block's scale, in the low bits, and what its elements are multiplied by; NaN: the block is poisoned.
struct BlockScale {
  uint32_t stored;
  float encode;
  JLP_DEVICE bool poisoned(const BlockScale& scale) { return scale.encode != scale.encode; }
};

/// An encode scale for every byte that a block's scale can be: a division per byte instead of one per block.
using EncodeTable = float[128];

/// By the block's threads, and a barrier must follow. `decode` is S_dec.
JLP_DEVICE void fill_table(float decode, EncodeTable& table) {
  const uint32_t byte = threadIdx.x;
  if (byte < 128) table[byte] = byte == kFloat8NaN ? as_float(kNaNBits) : nvfp4_block_encode<float>(byte, decode);
}

/// What a matrix fixes whose scales have room above them (numerics.md 13), from its amax.
struct RoomStart {
  Nvfp4RoomScale tensor;
  uint32_t poison_from;  // blocks whose amax has these bits or more
};

/// As Matrix::start.
JLP_DEVICE RoomStart start_with_room(float amax, EncodeTable& table) {
  const Nvfp4RoomScale tensor = nvfp4_room_scale(amax);
  fill_table(tensor.decode, table);
  return {tensor, nvfp4_tensor_scale(amax).usable ? kInfinityBits : 0u};
}

/// What one matrix fixes for all of its blocks in one direction.
template <Scales kScales>
struct Matrix;

template <>
struct Matrix<Scales::kTwoLevel> {
  float multiplier;
  uint32_t poison_from;  // blocks whose amax has these bits or more

  /// The block's threads share the work, and a barrier must follow.
  JLP_DEVICE Matrix start(const QuantizeArguments&, const DirectionArguments& direction, uint32_t batch,
                          EncodeTable& table) {
    if (!direction.data) return {0, 0};
    return of_amax(direction.tensor[batch], table);
  }
  JLP_DEVICE Matrix of_amax(float amax, EncodeTable& table) {
    const Nvfp4TensorScale tensor = nvfp4_tensor_scale(amax);
    fill_table(tensor.decode, table);
    return {tensor.multiplier, tensor.usable ? kInfinityBits : 0u};
  }

  JLP_DEVICE BlockScale scale(const Matrix& m, const QuantizeArguments&, uint32_t amax, const EncodeTable& table) {
    const float exact = __fmul_rn(as_float(amax), m.multiplier);
    uint32_t byte;
    if constexpr (kHasFloat8Conversion<E4M3>)
      byte = float8x2_hardware<E4M3>(exact, 0.0f) & 0x7Fu;
    else
      byte = float8_encode_magnitude<E4M3>(fminf(exact, kMaxFinite));
    byte = amax >= m.poison_from ? kFloat8NaN : byte;
    return {byte, table[byte]};
  }
};

template <>
struct Matrix<Scales::kTwoLevelWithRoom> : Matrix<Scales::kTwoLevel> {
  /// As that of kTwoLevel.
  JLP_DEVICE Matrix start(const QuantizeArguments&, const DirectionArguments& direction, uint32_t batch,
                          EncodeTable& table) {
    if (!direction.data) return {};
    const RoomStart found = start_with_room(direction.tensor[batch], table);
    return {{nvfp4_multiplier(found.tensor.encode), found.poison_from}};
  }
};

template <>
struct Matrix<Scales::kOne> {
  float tensor_encode;  // kTensor

  JLP_DEVICE Matrix start(const QuantizeArguments& a, const DirectionArguments& direction, uint32_t batch, EncodeTable&) {
    if (a.scaling != Scaling::kTensor || !direction.data) return {0};
    return {float8_tensor_encode_scale(direction.tensor[batch], a.encode_scale_given, a.float8)};
  }

  JLP_DEVICE BlockScale scale(const Matrix& m, const QuantizeArguments& a, uint32_t amax, const EncodeTable&) {
    if (a.scaling == Scaling::kE8M0) {
      const uint32_t rounding = a.scale_rule == ScaleRule::kEven ? a.mx.half_unit : 0u;
      const uint32_t byte =
          a.scale_rule == ScaleRule::kUp ? mx_scale_up<float>(amax, a.mx) : mx_scale_floor<float>(amax, a.mx, rounding);
      return {byte, mx_encode<float>(byte)};
    }
    const float encode = a.scaling == Scaling::kTensor ? m.tensor_encode : float8_encode_scale<float>(amax, a.float8);
    return {as_bits(float8_decode_scale(encode)), encode};
  }
};

/// Rules that choose a scale (numerics.md 13).
template <Scales kScales>
struct Matrix {
  Nvfp4RoomScale tensor;
  uint32_t poison_from;  // blocks whose amax has these bits or more

  /// As that of kTwoLevel.
  JLP_DEVICE Matrix start(const QuantizeArguments&, const DirectionArguments& direction, uint32_t batch,
                          EncodeTable& table) {
    if (!direction.data) return {};
    return of_amax(direction.tensor[batch], table);
  }
  JLP_DEVICE Matrix of_amax(float amax, EncodeTable& table) {
    const RoomStart found = start_with_room(amax, table);
    return {found.tensor, found.poison_from};
  }
};

/// A tensor's one scale is stored by its first tile.
template <Scales kScales>
JLP_DEVICE void store_tensor_scale(const QuantizeArguments& a, const DirectionArguments& direction,
                                   const Matrix<kScales>& matrix, const TilePlace& at) {
  if constexpr (!kIsTwoLevel<kScales>)
    if (a.scaling == Scaling::kTensor && direction.data && threadIdx.x == 0 && at.down == 0 && at.across == 0)
      reinterpret_cast<float*>(direction.scale)[at.batch] = float8_decode_scale(matrix.tensor_encode);
}

template <Scales kScales>
JLP_DEVICE bool is_tensor(const QuantizeArguments& a) {
  return !kIsTwoLevel<kScales> && a.scaling == Scaling::kTensor;
}

/// Whether a stored scale is a byte; else a float32.
template <Scales kScales>
JLP_DEVICE bool byte_scales(const QuantizeArguments& a) {
  return kIsTwoLevel<kScales> || a.scaling == Scaling::kE8M0;
}

/// How far apart the scales of neighbouring lines are, and those of neighbouring blocks of a line, in scales.
template <Scales kScales>
JLP_DEVICE int64_t scale_line(const DirectionArguments& d) {
  return kIsTwoLevel<kScales> ? d.scale_columns : d.scale_line;
}
template <Scales kScales>
JLP_DEVICE int64_t scale_block(const DirectionArguments& d) {
  return kIsTwoLevel<kScales> ? 1 : d.scale_block;
}

/// Where a block's scale lies, in scales.
template <Scales kScales>
JLP_DEVICE int64_t scale_place(const DirectionArguments& d, uint32_t batch, int64_t line, int64_t block) {
  return batch * (d.scale_rows * d.scale_columns) + line * scale_line<kScales>(d) + block * scale_block<kScales>(d);
}

/// Stores a block's scale.
template <Scales kScales>
JLP_DEVICE void store_scale(const QuantizeArguments& a, uint8_t* scales, int64_t index, uint32_t stored) {
  if (byte_scales<kScales>(a))
    scales[index] = static_cast<uint8_t>(stored);
  else
    reinterpret_cast<uint32_t*>(scales)[index] = stored;
}

/// The largest of `lanes` neighbouring lanes' maxima, a power of two.
JLP_DEVICE uint32_t max_of_lanes(uint32_t amax, int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2) amax = max(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, distance));
  return amax;
}

// --- random bytes: 16 for each 16 elements of a line (numerics.md 4)

/// Philox's ten pairs of round keys of one matrix and direction, and its indices: read from shared memory, where they cost
/// less than additions and registers.
template <bool kStochastic>
struct RoundKeys {};
template <>
struct RoundKeys<true> {
  alignas(16) uint32_t words[20];
  uint32_t rows, sixteens;  // where its indices begin: two 64-bit pointers are registers too many
};

/// The block's threads share the work, and a barrier must follow.
template <class Direction, bool kStochastic>
JLP_DEVICE void start_keys(const Direction& direction, uint32_t batch, RoundKeys<kStochastic>& keys) {
  if constexpr (kStochastic) {
    const uint32_t i = threadIdx.x;
    const Random& random = direction.random;
    if (!direction.data || i > 20) return;
    if (i == 20)
      keys.rows = static_cast<uint32_t>(batch * random.rows_step),
      keys.sixteens = static_cast<uint32_t>(batch * random.sixteens_step);
    else
      keys.words[i] = random.key[2 * batch + i % 2] + i / 2 * (i % 2 ? kPhiloxKeyStep1 : kPhiloxKeyStep0);
  }
}

template <bool kStochastic>
JLP_DEVICE void philox_rounds(const RoundKeys<kStochastic>& keys, uint32_t (&words)[4]) {
#pragma unroll
  for (int round = 0; round < 10; round += 2) {
    const uint4 two = *reinterpret_cast<const uint4*>(keys.words + 2 * round);
    philox_round<float>(words, two.x, two.y);
    philox_round<float>(words, two.z, two.w);
  }
}

/// Four words, little-endian.
template <bool kStochastic>
JLP_DEVICE void random_bytes(const RoundKeys<kStochastic>& keys, const Random& random, int64_t line, int64_t sixteen,
                             uint32_t (&bytes)[4]) {
  if constexpr (kStochastic) {
    bytes[0] = random.sixteens[keys.sixteens + sixteen], bytes[1] = random.rows[keys.rows + line], bytes[2] = random.stream,
    bytes[3] = 0;
    philox_rounds(keys, bytes);
  }
}

/// The codes of a sixteen whose block has this scale; `amax` is at least the sixteen's own.
template <class Code, Scales kScales, bool kStochastic, class E>
JLP_DEVICE void quantize_sixteen(const QuantizeArguments& a, const Sixteen<E>& sixteen, const BlockScale& scale,
                                 uint32_t amax, const uint32_t (&random)[4], uint32_t (&codes)[kCodeWords<Code>]) {
  encode_sixteen<Code, kStochastic>(sixteen, scale.encode, __fmul_rn(as_float(amax), scale.encode) < 7.0f, random, codes);
  if constexpr (!Code::kPacked)
    if (is_tensor<kScales>(a) && amax >= kInfinityBits) put_nan_codes(sixteen, codes);
  if (!BlockScale::poisoned(scale)) return;
#pragma unroll
  for (uint32_t& word : codes) word = 0;
}

/// As many of the codes as there is room for: `left` bytes.
template <int kWords>
JLP_DEVICE void store_codes(uint8_t* to, int left, bool pieces, const uint32_t (&codes)[kWords]) {
  if (pieces && left >= 4 * kWords) {
    if constexpr (kWords == 2)
      *reinterpret_cast<uint2*>(to) = {codes[0], codes[1]};
    else
      *reinterpret_cast<uint4*>(to) = {codes[0], codes[1], codes[2], codes[3]};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i)
    if (i < left) to[i] = static_cast<uint8_t>(codes[i / 4] >> (8 * (i % 4)));
}

/// How much of `size` is left from `first` on, but at most `most`.
JLP_DEVICE int left(int64_t size, int64_t first, int most) {
  return static_cast<int>(kept(size - first < most ? static_cast<uint32_t>(size - first) : static_cast<uint32_t>(most)));
}

template <class Code>
JLP_DEVICE int64_t code_bytes(int64_t elements) {
  return Code::kPacked ? elements / 2 : elements;
}

}  // namespace cuda
}  // namespace jaxlowprec
