// Rows of MXFP8, MXFP4, Float8Block and Float8Tensor: the maxima of 16 elements fold into those of blocks, and scales of a
// span of packets come before its codes, so that one packet's chain of dependent steps hides behind the others'.
#pragma once

#include "../../numerics/block_scales.h"
#include "../../numerics/e2m1.h"
#include "../../problems.h"
#include "../tiles.h"
#include "../vec.h"
#include "codes.h"
#include "lines.h"
#include "random.h"

namespace jaxlowprec {
namespace JLP_ISA {

// --- Block scales that follow from the block's own amax: those of MX and 8-bit floats (numerics.md 5 to 7).

struct BlockScales {
  bool e8m0, up;
  MxElement mx;
  uint32_t mx_rounding;
  Float8ScaleRule float8;

  explicit BlockScales(const Format& format)
      : e8m0(format.scaling == Scaling::kE8M0), up(format.scale_rule == ScaleRule::kUp) {
    with_float(format.code, [&](auto element) { set<decltype(element)>(format); });
  }

  /// From the magnitude bits of kLanes blocks' amaxes: what is stored, a byte or a float32's bits, and what elements are
  /// multiplied by. Blocks that hold NaN or infinity are poisoned: both are NaN. False if there is one.
  bool compute(U32 amax, U32& stored, F32& encode) const {
    if (e8m0) {
      stored = up ? mx_scale_up<F32>(amax, mx) : mx_scale_floor<F32>(amax, mx, mx_rounding);
      encode = mx_encode<F32>(stored);
    } else {
      encode = float8_encode_scale<F32>(amax, float8);
      stored = L::bits(float8_decode_scale(encode));
    }
    return all_below(L::from_bits(amax), __builtin_inff());
  }

  int64_t bytes() const { return e8m0 ? 1 : 4; }

  void store_scales(uint8_t* to, U32 stored) const {
    if (e8m0)
      store_low_bytes(to, stored);
    else
      store(to, stored);
  }

 private:
  template <class Element>
  void set(const Format& format) {
    mx = kMxElement<Element>;
    mx_rounding = format.scale_rule == ScaleRule::kEven ? mx.half_unit : 0u;
    float8 = {Element::kMax, format.amax_epsilon, format.power_of_two};
  }
};

constexpr int kLargestBlock = 128;                       // along a row
constexpr int kUnit = std::max(kPacket, kLargestBlock);  // elements along a row: whole packets and whole blocks
constexpr int kUnitPackets = kUnit / kPacket;
constexpr int kUnitGranules = kUnit / kBlock;

/// What one matrix of the batch is quantised with.
struct BlockContext {
  Format format;
  BlockScales scales;
  Random random;  // its own
  float tensor_encode = 1;

  BlockContext(const QuantizeProblem& p, const QuantizeDirection& direction, int64_t batch)
      : format(p.format), scales(p.format), random(direction.random.of(batch)) {
    if (is_tensor())
      tensor_encode = float8_tensor_encode_scale(direction.tensor[batch], p.encode_scale_given, scales.float8);
  }
  /// Whether elements are multiplied by powers of two.
  bool powers_of_two() const { return !is_tensor() && (scales.e8m0 || format.power_of_two); }
  bool is_tensor() const { return format.scaling == Scaling::kTensor; }
  /// Where an amax and a scale stand for more than one row.
  bool is_shared() const { return is_tensor() || format.tiles; }
};

/// Packets of a row, or of the rows of a tile, that lie together in memory: kUnit-aligned, so that blocks are whole.
struct BlockSpan {
  alignas(64) uint32_t amax[kSpan * kLanes];      // of granules
  alignas(64) float encode[kSpan * kLanes];       // of granules
  alignas(64) uint8_t scale[kSpan * kLanes / 2];  // a byte for 2 granules, or 4 bytes for 8
  bool finite;

  template <class E>
  __attribute__((noinline)) void compute(const typename E::Storage* x, int packets, const BlockContext& context) {
    if (context.is_tensor()) return compute_tensor<E>(x, packets, context);
    finite = true;
    for (int g = 0; g < packets; ++g) store(amax + g * kLanes, E::block_amax(x + g * kPacket));
    for (int g = packets; g % 8; ++g) store(amax + g * kLanes, U32{});
    context.format.block == 32 ? compute_of_two(packets, context) : compute_of_eight(packets, context);
  }

 private:
  template <class E>
  void compute_tensor(const typename E::Storage* x, int packets, const BlockContext& context) {
    U32 most = U32{};
    for (int g = 0; g < packets; ++g) {
      most = max_magnitude(most, E::packet_amax(x + g * kPacket));
      store(encode + g * kLanes, L::splat(context.tensor_encode));
    }
    finite = max_lane(most) < kInfinityBits;
  }

  void compute_of_two(int packets, const BlockContext& context) {
    for (int g = 0; g < packets; g += 2) {
      const auto max = [](U32 a, U32 b) { return max_magnitude(a, b); };
      U32 stored;
      F32 factor;
      finite &= context.scales.compute(pairwise_max(load<U32>(amax + g * kLanes), load<U32>(amax + (g + 1) * kLanes), max),
                                       stored, factor);
      context.scales.store_scales(scale + g / 2 * kLanes, stored);
      store_interleaved(encode + g * kLanes, factor, factor);
    }
  }

  void compute_of_eight(int packets, const BlockContext& context) {
    for (int g = 0; g < packets; g += 8) {
      U32 m[8], stored;
      F32 factor;
      for (int i = 0; i < 8; ++i) m[i] = load<U32>(amax + (g + i) * kLanes);
      finite &= context.scales.compute(fold_eight(m, [](U32 a, U32 b) { return max_magnitude(a, b); }), stored, factor);
      context.scales.store_scales(scale + g / 2 * kLanes, stored);
      float* spread = encode + g * kLanes;
      for (int i = 0; i < 8 * kLanes; ++i) spread[i] = factor[i / 8];
    }
  }
};

/// Codes of elements that were not finite become NaN with their signs.
template <class E>
__attribute__((noinline)) void write_nan_codes(const typename E::Storage* x, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const U32 bits = L::bits(E::load_lanes(x + i));
    for (int lane = 0; lane < kLanes; ++lane)
      if ((bits[lane] & kMagnitudeBits) >= kInfinityBits)
        codes[i + lane] = static_cast<uint8_t>(kFloat8NaN | (bits[lane] >> 24 & 0x80u));
  }
}

/// How many bytes `elements` codes take.
template <class Element>
constexpr int64_t code_bytes(int64_t elements) {
  return Element::kPacked ? elements / 2 : elements;
}

/// One packet of 8-bit floats.
template <class E, class Element, bool kStochastic, bool kExponents>
JLP_RULE void encode_float8_packet(const typename E::Storage* x, const float* encode, const uint8_t* random, uint8_t* data) {
  JLP_UNROLL(4)
  for (int i = 0; i < kPacket; i += 4 * kLanes) {
    if constexpr (kExponents) {  // a vector's elements are of one block, which is two granules at least
      const auto offset = [&](int at) { return I16{} + exponent_offset<Element>(encode[at / (2 * kBlock) * 2]); };
      if (encode_float8_by_exponent<Element>(x + i, offset(i), offset(i + 2 * kLanes), data + i)) continue;
    }
    encode_float8<E, Element, kStochastic>(
        x + i, [&](int k) { return L::splat(encode[(i + k * kLanes) / kBlock]); },
        [&](int k) { return load_u8(random + i + k * kLanes); }, data + i);
  }
}

template <class E>
using UnitsAhead = PacketsAhead<E, kUnitPackets>;

/// The codes of a span.
template <class E, class Element, bool kStochastic>
__attribute__((noinline)) void encode_span(const typename E::Storage* x, int packets, const BlockSpan& span,
                                           const RandomSpan& random, const BlockContext& context, const UnitsAhead<E>& ahead,
                                           uint8_t* data) {
  const bool ordinary = span.finite && context.scales.up;  // of E2M1
  with_exponents<E, kStochastic>(context.powers_of_two(), [&](auto exponents) {
    for (int g = 0; g < packets; ++g) {
      ahead.fetch(g);
      const float* encode = span.encode + g * kLanes;
      uint8_t* to = data + code_bytes<Element>(g * kPacket);
      if constexpr (Element::kPacked)
        quantize_row_packet<E, kStochastic>(x + g * kPacket, encode, ordinary, random.bytes[g], to);
      else
        encode_float8_packet<E, Element, kStochastic, exponents>(x + g * kPacket, encode, random.bytes[g], to);
    }
  });
  if (Element::kPacked || __builtin_expect(span.finite, 1)) return;
  if (context.is_tensor()) return write_nan_codes<E>(x, packets * kPacket, data);
  for (int i = 0; i < packets * kLanes; ++i)
    if (span.encode[i] != span.encode[i]) memset(data + i * kBlock, 0, kBlock);
}

/// How elements become codes. Only these functions are compiled for each element format and rounding; the rest of the kernel
/// is compiled once for each type of input.
template <class E>
struct BlockEncoder {
  using Storage = typename E::Storage;
  bool packed, stochastic;
  /// encode_span
  void (*span)(const Storage* x, int packets, const BlockSpan& span, const RandomSpan& random, const BlockContext& context,
               const UnitsAhead<E>& ahead, uint8_t* data);
  /// encode_columns_of_granule
  void (*columns)(const Storage* x, const float* encode, const uint32_t (*random)[kSquare], const BlockContext& context,
                  uint8_t* codes);

  /// How many bytes `elements` codes take.
  int64_t code_bytes(int64_t elements) const { return packed ? elements / 2 : elements; }
};

/// That of a format's codes and rounding. Compiled in kernels_quantize_blocks.cc.
template <class E>
const BlockEncoder<E>& block_encoder(CodeType code, bool stochastic);

/// A run of elements of one row, quantised with blocks along it.
template <class E>
void quantize_blocks_of_row(const BlockEncoder<E>& encoder, const typename E::Storage* x, int64_t elements,
                            const BlockContext& context, uint32_t row, const uint32_t* granules, uint8_t* data,
                            uint8_t* scale) {
  BlockSpan span;
  RandomSpan random;
  while (elements > 0) {
    alignas(64) typename E::Storage padded[kUnit];
    alignas(64) uint8_t codes[kUnit];
    alignas(64) uint32_t padded_granules[kUnitGranules] = {};
    const bool whole = elements >= kUnit;
    const int packets = static_cast<int>(whole ? std::min<int64_t>(kSpan, elements / kUnit * kUnitPackets) : kUnitPackets);
    const int64_t count = whole ? packets * kPacket : elements;
    if (!whole) {
      memset(padded, 0, sizeof padded);
      memcpy(padded, x, count * sizeof *x);
      if (encoder.stochastic) memcpy(padded_granules, granules, divide_up(count, kBlock) * sizeof *granules);
    }
    const auto* from = whole ? x : padded;
    const uint32_t* ids = whole ? granules : padded_granules;
    span.template compute<E>(from, packets, context);
    if (encoder.stochastic) random.compute(context.random, &row, 1, ids, packets);
    encoder.span(from, packets, span, random, context, {from + kSpan * kPacket, kUnit}, whole ? data : codes);
    if (!whole) memcpy(data, codes, context.format.row_bytes(count));
    if (!context.is_tensor()) {
      const int64_t bytes = context.format.blocks(count) * context.scales.bytes();
      memcpy(scale, span.scale, bytes);
      scale += bytes;
    }
    x += count, elements -= count, data += encoder.code_bytes(count), granules += count / kBlock;
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
