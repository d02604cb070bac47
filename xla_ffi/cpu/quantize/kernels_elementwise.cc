// Amaxes, Hadamard transforms, and codes back to numbers.
#include "../../numerics/block_scales.h"
#include "../../numerics/nvfp4.h"
#include "../../numerics/row_scales.h"
#include "../../problems.h"
#include "../entry.h"
#include "gather_amaxes.h"
#include "rotate.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Codes back to numbers: the code times its scale, rounded once to the result's type (numerics.md 2 and 5 to 7); of NVFP4 a
// rotation of 16 undone where asked.
// Bytes moved per element: its code read, the element written.

struct Dequantize {
  static constexpr int64_t kRowsPerChunk = 16;

  static int64_t chunks_per_matrix(const DequantizeProblem& p) { return divide_up(p.rows, kRowsPerChunk); }

  static void chunk(const DequantizeProblem& p, int64_t batch, int64_t chunk) {
    const Format& f = p.format;
    const int64_t last = std::min((chunk + 1) * kRowsPerChunk, p.rows);
    for (int64_t row = chunk * kRowsPerChunk; row < last; ++row) {
      const int64_t line = batch * p.rows + row;
      const int64_t scale_row = f.scaling == Scaling::kTensor ? 0 : f.tiles ? row / f.block : row;
      const uint8_t* data = p.data + line * f.row_bytes(p.columns);
      const uint8_t* scale =
          p.scale + (batch * f.scale_rows(p.rows) + scale_row) * f.scale_columns(p.columns) * f.scale_bytes();
      for (int64_t column = 0; column < p.columns; column += kPacket) {
        const int count = static_cast<int>(std::min<int64_t>(kPacket, p.columns - column));
        alignas(64) float scales[kLanes] = {};
        decode_scales(f, scale, column, static_cast<int>(divide_up(count, kBlock)), scales);
        if (f.packed())
          decode_packed(p, data + column / 2, scales, p.amax ? &p.amax[batch] : nullptr, line * p.columns + column, count);
        else
          decode_bytes(p, data + column, scales, line * p.columns + column, count);
      }
    }
  }

 private:
  /// The scales of a packet's `count` 16s.
  JLP_RULE void decode_scales(const Format& f, const uint8_t* scale, int64_t column, int count, float* scales) {
    if (f.scaling == Scaling::kRows) return store(scales, L::splat(load_elements(scale, f.scale_type, 0, 1)[0]));
    alignas(64) uint32_t bits[kLanes] = {};
    const int shift = f.scaling == Scaling::kTensor ? 63 : __builtin_ctz(f.block);  // a power of two
    for (int i = 0; i < count; ++i) {
      const int64_t block = (column + i * kBlock) >> shift;
      memcpy(&bits[i], scale + block * f.scale_bytes(), f.scale_bytes());  // little-endian, as every supported processor
    }
    const U32 v = load<U32>(bits);
    store(scales, f.scaling == Scaling::kTwoLevel ? float8_decode<E4M3, F32>(v)
                  : f.scaling == Scaling::kE8M0   ? e8m0_decode<F32>(v)
                                                  : L::flush(L::from_bits(v)));
  }

  /// 4-bit codes of whole 16s. Those of NVFP4 count by an amax.
  JLP_RULE void decode_packed(const DequantizeProblem& p, const uint8_t* data, const float* scales, const float* amax,
                              int64_t index, int count) {
    alignas(64) uint8_t codes[kPacket / 2] = {};
    if (count < kPacket) memcpy(codes, data, divide_up(count, kBlock) * kBlock / 2), data = codes;
    Pair v[kPairs];
    JLP_UNROLL(8)
    for (int j = 0; j < kPairs; ++j) {
      const U32 two = load_u8(data + j * kLanes);
      const F32 factor = expand_blocks(scales, j);
      v[j] = {decode(two & 15u, factor, amax), decode(two >> 4, factor, amax)};
    }
    if (p.rotate) undo_rotation(p.sign_mask, v);
    for (int j = 0; j < kPairs; ++j) {
      store_lanes(p, index, count, 2 * j * kLanes, shuffle<InterleaveLow>(v[j].even, v[j].odd));
      store_lanes(p, index, count, (2 * j + 1) * kLanes, shuffle<InterleaveHigh>(v[j].even, v[j].odd));
    }
  }
  JLP_RULE F32 decode(U32 code, F32 scale, const float* amax) {
    return amax ? nvfp4_decode(code, scale, *amax) : L::flush(e2m1_decode<F32>(code) * scale);
  }

  JLP_RULE void decode_bytes(const DequantizeProblem& p, const uint8_t* data, const float* scales, int64_t index,
                             int count) {
    alignas(64) uint8_t codes[kPacket] = {};
    if (count < kPacket) memcpy(codes, data, count), data = codes;
    const auto decode_by = [&](auto decode) {
      for (int i = 0; i < count; i += kLanes)
        store_lanes(p, index, count, i, L::flush(decode(load_u8(data + i)) * scales[i / kBlock]));
    };
    if (p.format.code == CodeType::kInt8) return decode_by([](U32 code) { return int8_decode<F32>(code); });
    with_float8(p.format.code,
                [&](auto element) { decode_by([](U32 code) { return float8_decode<decltype(element), F32>(code); }); });
  }

  JLP_RULE void undo_rotation(uint32_t sign_mask, Pair (&v)[kPairs]) {
    butterfly_rows<kBlock>(v, kPairs);
    for (int j = 0; j < kPairs; ++j) {
      U32 even, odd;
      for (int i = 0; i < kLanes; ++i) {
        const int element = 2 * (j * kLanes + i) % kBlock;
        even[i] = ((sign_mask >> element) & 1u) << 31, odd[i] = ((sign_mask >> (element + 1)) & 1u) << 31;
      }
      v[j] = {L::from_bits(L::bits(v[j].even * 0.25f) ^ even), L::from_bits(L::bits(v[j].odd * 0.25f) ^ odd)};
    }
  }

  /// Elements `at` ... of a packet of `count` whose first is the result's element `index`.
  JLP_RULE void store_lanes(const DequantizeProblem& p, int64_t index, int count, int at, F32 values) {
    store_elements(p.result, p.type, index + at, std::clamp(count - at, 0, kLanes), values);
  }
};

namespace {

template <class Visit>
auto resolve_amax(const AmaxProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(Amax<decltype(e)>{}); });
}

template <class Visit>
auto resolve_dequantize(const DequantizeProblem&, Visit visit) {
  return visit(Dequantize{});
}

template <class Visit>
auto resolve_hadamard(const HadamardProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    switch (p.size) {
      case 16: return visit(Hadamard<E, 16>{});
      case 32: return visit(Hadamard<E, 32>{});
      case 64: return visit(Hadamard<E, 64>{});
      case 128: return visit(Hadamard<E, 128>{});
      default: return visit(Hadamard<E, 256>{});
    }
  });
}

}  // namespace

JLP_DEFINE_ENTRY(amax, AmaxProblem, resolve_amax)
JLP_DEFINE_ENTRY(dequantize, DequantizeProblem, resolve_dequantize)
JLP_DEFINE_ENTRY(hadamard, HadamardProblem, resolve_hadamard)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
