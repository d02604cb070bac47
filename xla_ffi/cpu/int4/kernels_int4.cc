// Int4: fake quantisation, codes, and codes back to numbers.
#include <vector>

#include "../entry.h"
#include "int4_elements.h"
#include "int4_quantize.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Int4 codes back to numbers: steps from zero times the scale, rounded once to the deployment dtype, then to the result's.
// Bytes moved per element: half a byte read, the element written.
//
// Along rows the 16 numbers that a group's codes stand for are computed first, and codes looked up in them. Along columns
// lanes are columns: 16 bytes of each of 16 lines are transposed, then decoded by every column's own scale; an incomplete
// tile is decoded as rows into a buffer and transposed element by element.

/// What the 16 codes of a group decode to: the deployment dtype's bits, low and high bytes apart.
struct Int4Table {
  Bytes16 low, high;

  template <class Deploy>
  JLP_RULE Int4Table of(uint16_t scale_bits, uint32_t zero) {
    alignas(64) uint16_t values[16];
    alignas(64) static constexpr float kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const F32 scale = int4_decode_scale<F32, Deploy>(U32{} + scale_bits);
    const F32 middle = L::splat(static_cast<float>(zero));
    for (int i = 0; i < 16; i += kLanes)
      store_u16(values + i, int4_decode<F32, Deploy>(load<F32>(kCodes + i) - middle, scale));
    const Bytes16 a = load<Bytes16>(values), b = load<Bytes16>(values + 8);
    return {JLP_SHUFFLE(Bytes16, a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
            JLP_SHUFFLE(Bytes16, a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
  }

  /// 16 codes, one per byte, to as many 16-bit numbers.
  JLP_RULE void decode(const Int4Table& table, Bytes16 codes, uint16_t* to) {
    const Bytes16 low = look_up(table.low, codes), high = look_up(table.high, codes);
    store(to, interleave_low_bytes(low, high)), store(to + 8, interleave_high_bytes(low, high));
  }
};

template <class Deploy>
struct Int4DecodedRows {
  /// `count` elements of a group whose first code is the k-th nibble of `line`.
  JLP_RULE void decode_group(const uint8_t* line, int64_t k, int64_t count, const Int4Table& table, uint16_t* to) {
    int64_t i = 0;
    for (const uint8_t* bytes = line + k / 2; k % 2 == 0 && i + 16 <= count; i += 16, bytes += 8) {
      typedef uint64_t Words __attribute__((vector_size(16)));
      const Bytes16 two = (Bytes16)Words{load<uint64_t>(bytes), 0};
      Int4Table::decode(table, interleave_low_bytes(two & 15, two >> 4), to + i);
    }
    for (; i < count; ++i) {
      const int code = (line[(k + i) / 2] >> ((k + i) % 2 * 4)) & 15;
      to[i] = static_cast<uint16_t>(table.low[code] | (table.high[code] << 8));
    }
  }

  /// A line, or a piece of one that starts with a group, in the deployment dtype.
  __attribute__((noinline)) static void decode_line(const uint8_t* data, int64_t length, int64_t group,
                                                    const uint16_t* scale, const uint8_t* zero, uint16_t* to) {
    for (int64_t first = 0; first < length; first += group, ++scale) {
      const Int4Table table = Int4Table::of<Deploy>(*scale, zero ? *zero++ : kInt4Middle);
      decode_group(data, first, std::min(group, length - first), table, to + first);
    }
  }
};

/// Elements of the deployment dtype as elements of the result's type.
template <class E, class Deploy>
__attribute__((noinline)) void convert(const uint16_t* from, int64_t count, typename E::Storage* to) {
  using From = Int4Elements<std::conditional_t<std::is_same_v<Deploy, DeployF16>, F16, BF16>>;
  for (; count >= kLanes; count -= kLanes, from += kLanes, to += kLanes) E::store_lanes(to, From::load_lanes(from));
  uint16_t padded[kLanes] = {};
  typename E::Storage rest[kLanes];
  memcpy(padded, from, count * sizeof *from);
  E::store_lanes(rest, From::load_lanes(padded));
  memcpy(to, rest, count * sizeof *to);
}

template <class E, class Deploy>
struct Int4Decoded {
  using Storage = typename E::Storage;
  using I = Int4Elements<E>;
  using Rows = Int4DecodedRows<Deploy>;
  static constexpr bool kDirect = std::is_same_v<typename I::Deploy, Deploy>;  // the result is of the deployment dtype

  /// A line or a piece of one that starts with a group.
  static void line(const uint8_t* data, int64_t length, int64_t group, const uint16_t* scale, const uint8_t* zero,
                   Storage* to) {
    if constexpr (kDirect) return Rows::decode_line(data, length, group, scale, zero, to);
    uint16_t* decoded = reinterpret_cast<uint16_t*>(thread_scratch(length * sizeof(uint16_t)));
    Rows::decode_line(data, length, group, scale, zero, decoded);
    convert<E, Deploy>(decoded, length, to);
  }

  static void tile(const Int4DequantizeProblem& p, int64_t batch, const Int4Tile& tile) {
    const int64_t group = p.format.group, line = batch * p.columns + tile.column;
    const uint8_t* data = p.data + line * p.line_bytes() + tile.row / 2;
    const int64_t first = line * p.groups() + tile.row / group;
    const uint16_t* scale = p.scale + first;
    const uint8_t* zero = p.zero ? p.zero + first : nullptr;
    Storage* to = static_cast<Storage*>(p.result) + (batch * p.rows + tile.row) * p.columns + tile.column;
    if (!tile.whole(p)) return transposed(p, tile, data, scale, zero, to);
    for (int64_t row = 0; row < tile.rows; row += group, ++scale) {
      const Columns columns(scale, zero, p.groups());
      for (int64_t r = 0; r < group; r += 32)
        decode_32_rows(data + (row + r) / 2, p.line_bytes(), columns, to + (row + r) * p.columns, p.columns);
      if (zero) ++zero;
    }
  }

 private:
  /// Scales and zero points of a strip's columns, in the order in which two vectors of bytes are loaded.
  struct Columns {
    alignas(64) float scale[kStrip], zero[kStrip];

    Columns(const uint16_t* scales, const uint8_t* zeros, int64_t stride) {
      alignas(64) uint8_t order[kStrip], at[kStrip];
      for (int j = 0; j < kStrip; ++j) order[j] = static_cast<uint8_t>(j);
      for (int j = 0; j < kStrip; j += kStep) {
        U32 a, b;
        I::load_two_bytes(order + j, a, b);
        store_low_bytes(at + j, a), store_low_bytes(at + j + kLanes, b);
      }
      alignas(64) uint16_t bits[kStrip];
      for (int j = 0; j < kStrip; ++j) {
        bits[j] = scales[at[j] * stride];
        zero[j] = zeros ? zeros[at[j] * stride] : static_cast<float>(kInt4Middle);
      }
      for (int j = 0; j < kStrip; j += kLanes) store(scale + j, int4_decode_scale<F32, Deploy>(load_u16(bits + j)));
    }
  };

  /// 16 bytes of each of kStrip lines.
  static void decode_32_rows(const uint8_t* data, int64_t line_bytes, const Columns& columns, Storage* to, int64_t stride) {
    alignas(64) uint8_t codes[16][kStrip];
    lines_to_codes(data, line_bytes, codes);
    for (int r = 0; r < 16; ++r, to += 2 * stride)
      for (int j = 0; j < kStrip; j += kStep) {
        U32 a, b;
        I::load_two_bytes(&codes[r][j], a, b);
        store_two(to + j, a & 15u, b & 15u, columns, j);
        store_two(to + stride + j, a >> 4, b >> 4, columns, j);
      }
  }

  JLP_RULE void store_two(Storage* to, U32 a, U32 b, const Columns& columns, int j) {
    const F32 sa = load<F32>(columns.scale + j), sb = load<F32>(columns.scale + j + kLanes);
    const F32 va = L::to_float(a) - load<F32>(columns.zero + j), vb = L::to_float(b) - load<F32>(columns.zero + j + kLanes);
    if constexpr (kDirect) {
      I::store_two(to, int4_decode<F32, Deploy>(va, sa), int4_decode<F32, Deploy>(vb, sb));
    } else if constexpr (std::is_same_v<E, Float>) {
      I::store_two(to, nan_or(Deploy::round(va * sa), sa), nan_or(Deploy::round(vb * sb), sb));
    } else {  // from the one 16-bit type to the other
      using Result = typename I::Deploy;
      const auto bits = [](F32 v, F32 scale) {
        const U32 finite = Result::template finite_bits<F32>(Deploy::round(v * scale));
        return scale != scale ? U32{} + Result::kNaN : finite;
      };
      I::store_two(to, bits(va, sa), bits(vb, sb));
    }
  }
  JLP_RULE F32 nan_or(F32 value, F32 scale) { return scale != scale ? L::from_bits(U32{} + kNaNBits) : value; }

  /// Column by column as rows, 16 at once side by side. Not fast.
  static void transposed(const Int4DequantizeProblem& p, const Int4Tile& tile, const uint8_t* data, const uint16_t* scale,
                         const uint8_t* zero, Storage* to) {
    constexpr int64_t kLines = 16;
    std::vector<Storage> lines(kLines * tile.rows);
    for (int64_t first = 0; first < tile.columns; first += kLines) {
      const int64_t count = std::min(kLines, tile.columns - first);
      for (int64_t j = 0; j < count; ++j) {
        const int64_t c = first + j;
        line(data + c * p.line_bytes(), tile.rows, p.format.group, scale + c * p.groups(),
             zero ? zero + c * p.groups() : nullptr, &lines[j * tile.rows]);
      }
      for (int64_t r = 0; r < tile.rows; ++r)
        for (int64_t j = 0; j < count; ++j) to[r * p.columns + first + j] = lines[j * tile.rows + r];
    }
  }
};

namespace {

template <class Visit>
auto with_deploy(const Int4Format& f, Visit visit) {
  return f.scale == ElementType::kF16 ? visit(DeployF16{}) : visit(DeployBF16{});
}

template <class E, class Deploy, bool kSymmetric>
struct FakeQuantize {
  static int64_t chunks_per_matrix(const Int4FakeQuantizeProblem& p) {
    return p.columnwise ? Int4Tiles(p, false).tiles : Int4Runs(p).chunks();
  }
  static void chunk(const Int4FakeQuantizeProblem& p, int64_t batch, int64_t chunk) {
    if (p.columnwise) {
      const Int4Tile tile(p, Int4Tiles(p, false), chunk);
      return Int4Columns<E, Deploy, kSymmetric>::fake_quantize_tile(p, batch, tile);
    }
    const Int4Runs runs(p);
    runs.visit(chunk, [&](int64_t line, int64_t first, int64_t count) {
      const int64_t at = batch * p.size() + line * runs.length + first;
      Int4Rows<E, Deploy, kSymmetric>::fake_quantize_line(static_cast<const typename E::Storage*>(p.x) + at, count,
                                                          p.format.group, static_cast<typename E::Storage*>(p.result) + at);
    });
  }
};

template <class E, class Deploy, bool kSymmetric>
struct Quantize {
  static constexpr int64_t kColumns = 4 * kStrip;  // of a chunk

  static int64_t chunks_per_matrix(const Int4QuantizeProblem& p) {
    return p.columnwise ? Int4Tiles(p, true, kColumns).tiles : Int4Runs(p).chunks();
  }
  static void chunk(const Int4QuantizeProblem& p, int64_t batch, int64_t chunk) {
    if (p.columnwise) {
      const Int4Tile tiles(p, Int4Tiles(p, true, kColumns), chunk, kColumns);
      return Int4Columns<E, Deploy, kSymmetric>::quantize_tiles(p, batch, tiles);
    }
    const Int4Runs runs(p);
    runs.visit(chunk, [&](int64_t line, int64_t first, int64_t count) {
      const int64_t byte = (batch * p.rows + line) * p.line_bytes() + first / 2;
      const int64_t group = (batch * p.rows + line) * p.groups() + first / p.format.group;
      Int4Rows<E, Deploy, kSymmetric>::quantize_line(
          static_cast<const typename E::Storage*>(p.x) + batch * p.size() + line * runs.length + first, count,
          p.format.group, p.data + byte, p.scale + group, kSymmetric ? nullptr : p.zero + group);
    });
  }
};

template <class E, class Deploy>
struct Dequantize {
  static int64_t chunks_per_matrix(const Int4DequantizeProblem& p) {
    return p.columnwise ? Int4Tiles(p, true).tiles : Int4Runs(p).chunks();
  }
  static void chunk(const Int4DequantizeProblem& p, int64_t batch, int64_t chunk) {
    if (p.columnwise) return Int4Decoded<E, Deploy>::tile(p, batch, Int4Tile(p, Int4Tiles(p, true), chunk));
    const Int4Runs runs(p);
    runs.visit(chunk, [&](int64_t line, int64_t first, int64_t count) {
      const int64_t group = (batch * p.rows + line) * p.groups() + first / p.format.group;
      Int4Decoded<E, Deploy>::line(
          p.data + (batch * p.rows + line) * p.line_bytes() + first / 2, count, p.format.group, p.scale + group,
          p.zero ? p.zero + group : nullptr,
          static_cast<typename E::Storage*>(p.result) + batch * p.size() + line * runs.length + first);
    });
  }
};

template <template <class, class, bool> class Operation, class Problem, class Visit>
auto resolve_encoding(const Problem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    return with_deploy(p.format, [&](auto deploy) {
      return with_bool(p.format.symmetric, [&](auto symmetric) {
        return visit(Operation<decltype(e), decltype(deploy), decltype(symmetric)::value>{});
      });
    });
  });
}

/// The result holds numbers of the deployment dtype: it is of that type, or float32.
template <class Visit>
auto resolve_fake_quantize(const Int4FakeQuantizeProblem& p, Visit visit) {
  return with_bool(p.format.symmetric, [&](auto symmetric) {
    constexpr bool kSymmetric = decltype(symmetric)::value;
    const bool half = p.format.scale == ElementType::kF16;
    if (p.type == ElementType::kF32)
      return half ? visit(FakeQuantize<Float, DeployF16, kSymmetric>{})
                  : visit(FakeQuantize<Float, DeployBF16, kSymmetric>{});
    return half ? visit(FakeQuantize<F16, DeployF16, kSymmetric>{}) : visit(FakeQuantize<BF16, DeployBF16, kSymmetric>{});
  });
}

template <class Visit>
auto resolve_quantize(const Int4QuantizeProblem& p, Visit visit) {
  return resolve_encoding<Quantize>(p, visit);
}

template <class Visit>
auto resolve_dequantize(const Int4DequantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    return with_deploy(p.format, [&](auto deploy) { return visit(Dequantize<decltype(e), decltype(deploy)>{}); });
  });
}

}  // namespace

JLP_DEFINE_ENTRY(int4_fake_quantize, Int4FakeQuantizeProblem, resolve_fake_quantize)
JLP_DEFINE_ENTRY(int4_quantize, Int4QuantizeProblem, resolve_quantize)
JLP_DEFINE_ENTRY(int4_dequantize, Int4DequantizeProblem, resolve_dequantize)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
