// Quantisation to Float8Rows and Int8Rows, along rows, along columns, or both (numerics.md 18). A row's amax is found while
// the row is in the cache, if it is not given. Amaxes of columns are given, of all rows.
// Bytes moved per element: the input once, 1 written a direction.
#pragma once

#include <new>
#include <vector>

#include "../../line_rule.h"
#include "../kernels.h"
#include "codes.h"
#include "gather_amaxes.h"
#include "line_steps.h"
#include "lines.h"
#include "random.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// The rule of a format's scales, and their type.
struct LineScales {
  LineScaleRule rule;
  ElementType type;

  explicit LineScales(const Format& f) : rule(line_scale_rule(f)), type(f.scale_type) {}

  LineFactors<F32> factors(U32 amax) const {
    return line_factors<F32>(amax, rule, [&](F32 scale) {
      return type == ElementType::kBF16 ? BF16::round(scale) : type == ElementType::kF16 ? F16::round(scale) : scale;
    });
  }
};

/// Codes of 4 * kLanes elements. `factors(k)` are those of the k-th kLanes, `random(k)` their random bytes; `least` is the
/// least integer.
template <class Element, bool kStochastic, bool kDivides, class Factors, class Random>
JLP_RULE U8 line_codes(const F32 (&x)[4], float least, Factors factors, Random random) {
  constexpr bool kInteger = std::is_same_v<Element, Int8>;
  U32 code[4];
  F32 scaled[4];
  JLP_UNROLL(4)
  for (int k = 0; k < 4; ++k) {
    const LineFactors<F32>& f = factors(k);
    scaled[k] = L::scaled(x[k], kDivides ? f.unit : f.encode);
    const F32 y = kDivides ? line_quotient(scaled[k], f.divisor, f.encode) : scaled[k];
    if constexpr (kInteger) {
      code[k] = kStochastic ? int8_stochastic(y, random(k)) : int8_nearest(y, least);
    } else {
      const F32 a = absolute(y);
      code[k] = kStochastic ? float8_magnitude_stochastic<Element>(a, random(k))
                            : float8_magnitude_bits<Element>(L::min(a, L::splat(Element::kMax)));
    }
  }
  if constexpr (kInteger)
    return in_order(pack_bytes(code[0], code[1], code[2], code[3]));
  else
    return in_order(pack_bytes_less(code[0], code[1], code[2], code[3], kStochastic ? 0 : kFloat8Offset<Element>) |
                    pack_signs(scaled[0], scaled[1], scaled[2], scaled[3]));
}

/// What several lines are quantised with.
template <int kCount>
struct FactorsOfLines {
  alignas(64) float scale[kCount], unit[kCount], divisor[kCount], encode[kCount];

  /// Those of `count` lines with these amaxes; `scales` is where they are stored, from place `first` on, or null.
  FactorsOfLines(const LineScales& rule, const float* amaxes, int count, uint8_t* scales, int64_t first) {
    for (int i = 0; i < count; i += kLanes) {
      const int there = std::min(kLanes, count - i);
      const LineFactors<F32> f = rule.factors(magnitude(load_elements(amaxes, ElementType::kF32, i, there)));
      store(scale + i, f.scale), store(unit + i, f.unit), store(divisor + i, f.divisor), store(encode + i, f.encode);
      if (scales) store_elements(scales, rule.type, first + i, there, f.scale);
    }
  }
  bool poisoned(int line) const { return scale[line] != scale[line]; }
  /// Of one line, in all lanes; and of kLanes lines.
  LineFactors<F32> of(int line) const {
    return {F32{}, L::splat(unit[line]), L::splat(divisor[line]), L::splat(encode[line])};
  }
  LineFactors<F32> from(int line) const {
    return {F32{}, load<F32>(unit + line), load<F32>(divisor + line), load<F32>(encode + line)};
  }
};

/// One operation on one matrix of the batch.
template <class E, class Element, bool kStochastic, bool kDivides>
struct QuantizeLines {
  using Storage = typename E::Storage;
  static constexpr int kStep = 4 * kLanes;              // elements whose codes fill a vector
  static constexpr int kTile = std::max(kPacket, 256);  // columns of a tile: whole packets
  static constexpr int64_t kStripColumns = 8 * kTile;
  static constexpr int64_t kTogetherBytes = 16 * 1024;       // of rows whose amaxes are found before their codes are made
  static constexpr int64_t kStreamedFrom = 8 * 1024 * 1024;  // bytes of codes: no processor's own cache holds them
  static constexpr int kLeastBySteps = 512;                  // columns: fewer are not worth what the steps take to find
  using FactorsOfRows = FactorsOfLines<kColumnTileRows>;
  using Steps = LineSteps<E, Element, kStochastic>;
  using FactorsOfColumns = FactorsOfLines<kTile>;

  static int64_t chunks_per_matrix(const QuantizeProblem& p) {
    if (p.columnwise.data) return divide_up(p.rows, kColumnTileRows) * divide_up(p.columns, kStripColumns);
    return divide_up(p.rows, rows_each(p));
  }

  static void chunk(const QuantizeProblem& p, int64_t batch, int64_t chunk) {
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    const LineScales rule(p.format);
    if (!p.columnwise.data) {
      const int64_t last = std::min((chunk + 1) * rows_each(p), p.rows);
      for (int64_t row = chunk * rows_each(p); row < last; row += rows_together(p))
        encode_rows(p, rule, batch, row, static_cast<int>(std::min(last - row, rows_together(p))), x + row * p.columns);
      return;
    }
    const int64_t across = divide_up(p.columns, kStripColumns), first = chunk / across * kColumnTileRows;
    const int64_t start = chunk % across * kStripColumns, last = std::min(start + kStripColumns, p.columns);
    const int rows = static_cast<int>(std::min<int64_t>(kColumnTileRows, p.rows - first));
    const float none[kColumnTileRows] = {};
    const int64_t line = batch * p.rows + first;
    const FactorsOfRows of_rows(rule, p.rowwise.data ? p.rowwise.tensor + line : none, rows,
                                start == 0 ? p.rowwise.scale : nullptr, line);
    std::vector<Steps> steps;
    steps.reserve(rows);
    for (int r = 0; r < rows && p.rowwise.data; ++r) steps.push_back(steps_of(p, of_rows, r, last - start));
    for (int64_t column = start; column < last; column += kTile)
      encode_tile(p, rule, batch, first, rows, column, x + first * p.columns + column, of_rows, steps.data());
  }

 private:
  static int64_t rows_each(const QuantizeProblem& p) {
    return std::max<int64_t>(1, elements_of_chunk(p.rows * p.columns) / std::max<int64_t>(p.columns, 1));
  }
  static int64_t rows_together(const QuantizeProblem& p) {
    const int64_t bytes = std::max<int64_t>(p.columns, 1) * sizeof(Storage);
    return std::clamp<int64_t>(kTogetherBytes / bytes, 1, kLanes);
  }
  static uint8_t* codes_of(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column) {
    return p.rowwise.data + (batch * p.rows + row) * p.columns + column;
  }
  static void write_zeros(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column, int64_t count) {
    memset(codes_of(p, batch, row, column), 0, count);
  }
  JLP_RULE void load_step(const Storage* x, F32 (&v)[4]) {
    JLP_UNROLL(4)
    for (int k = 0; k < 4; ++k) v[k] = E::load_lanes(x + k * kLanes);
  }

  /// `count` rows, rowwise: their amaxes, if they are not given, then their codes, while the next rows are fetched.
  static void encode_rows(const QuantizeProblem& p, const LineScales& rule, int64_t batch, int64_t row, int count,
                          const Storage* x) {
    float amaxes[kLanes];
    const int64_t line = batch * p.rows + row;
    for (int r = 0; r < count && !p.rowwise.tensor; ++r)
      amaxes[r] = Lanes<float>::from_bits(amax_of<E>(x + r * p.columns, p.columns));
    const FactorsOfLines<kLanes> factors(rule, p.rowwise.tensor ? p.rowwise.tensor + line : amaxes, count, p.rowwise.scale,
                                         line);
    for (int r = 0; r < count; ++r)
      encode_row(p, batch, row + r, 0, p.columns, x + r * p.columns, factors, r, steps_of(p, factors, r, p.columns),
                 count * p.columns);
  }

  /// The steps of the codes of a row of which `columns` are quantised.
  template <class Factors>
  static Steps steps_of(const QuantizeProblem& p, const Factors& of_rows, int r, int64_t columns) {
    const LineFactors<F32> factors = of_rows.of(r);
    return Steps(columns < kLeastBySteps || of_rows.poisoned(r) ? 0.0f : of_rows.scale[r],
                 [&](const Storage* x) { return codes_to_nearest(x, least_integer(p.format), factors); });
  }

  /// Codes of kStep elements of a row, to nearest.
  JLP_RULE U8 codes_to_nearest(const Storage* x, float least, const LineFactors<F32>& factors) {
    F32 v[4];
    load_step(x, v);
    return line_codes<Element, false, kDivides>(
        v, least, [&](int) -> const LineFactors<F32>& { return factors; }, [](int) { return U32{}; });
  }

  /// `count` elements of row `row` of the matrix, the r-th of `of_rows`, from `column` on, whole packets before them,
  /// quantised rowwise. What lies `ahead` elements further on is fetched, if that is not 0.
  template <class Factors>
  static void encode_row(const QuantizeProblem& p, int64_t batch, int64_t row, int64_t column, int64_t count,
                         const Storage* x, const Factors& of_rows, int r, const Steps& steps, int64_t ahead) {
    if (of_rows.poisoned(r)) return write_zeros(p, batch, row, column, count);
    uint8_t* data = codes_of(p, batch, row, column);
    const bool streams =
        p.batch * p.rows * p.columns >= kStreamedFrom && reinterpret_cast<uintptr_t>(data) % JLP_VECTOR_BYTES == 0;
    const LineFactors<F32> factors = of_rows.of(r);
    const Random random = p.rowwise.random.of(batch);
    const float least = least_integer(p.format);
    alignas(64) uint8_t bytes[kPacket];
    const auto codes_at = [&](const Storage* from, int64_t i) {
      if constexpr (!kStochastic) return codes_to_nearest(from, least, factors);
      if (i % kPacket == 0) random_bytes(random, row, column + i, count - i, bytes);
      F32 v[4];
      load_step(from, v);
      return line_codes<Element, kStochastic, kDivides>(
          v, least, [&](int) -> const LineFactors<F32>& { return factors; },
          [&](int k) { return load_u8(bytes + i % kPacket + k * kLanes); });
    };
    const int64_t whole = count / kStep * kStep;
    for (int64_t i = 0; i < whole; i += kStep) {
      for (size_t line = 0; ahead && line < kStep * sizeof *x; line += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(x + i + ahead) + line, 0, 2);  // to the second cache
      U8 codes;
      if (!steps.encode(x + i, codes)) codes = codes_at(x + i, i);
      streams ? stream(data + i, codes) : store(data + i, codes);
    }
    if (whole == count) return;
    alignas(64) Storage padded[kStep] = {};
    memcpy(padded, x + whole, (count - whole) * sizeof *x);
    const U8 rest = codes_at(padded, whole);
    memcpy(data + whole, &rest, count - whole);
  }

  /// Those of a packet of a row from `column` on, of which `count` elements are there.
  static void random_bytes(const Random& random, int64_t row, int64_t column, int64_t count, uint8_t* bytes) {
    alignas(64) uint32_t sixteens[kLanes] = {};
    const int64_t there = std::min<int64_t>(kLanes, divide_up(count, kBlock));
    memcpy(sixteens, random.sixteens + column / kBlock, there * sizeof *sixteens);
    random_row_packet(RandomKey(random), random.rows[row], load<U32>(sixteens), bytes);
  }

  struct Tile {
    alignas(64) uint8_t codes[kColumnTileRows][kTile];
    alignas(64) uint32_t random[4][kTile];  // of 16 rows: byte r of a column's four words is row r's
    alignas(64) Storage padded[kTile];

    void take_random(const Random& given, int64_t row, int64_t column, int columns) {
      const RandomKey key(given);
      alignas(64) uint32_t ids[kTile] = {};
      memcpy(ids, given.rows + column, columns * sizeof *ids);
      for (int i = 0; i < columns; i += kLanes) {
        U32 words[4];
        random_columns(key, load<U32>(ids + i), given.sixteens[row / kBlock], words);
        for (int w = 0; w < 4; ++w) store(&random[w][i], words[w]);
      }
    }
  };

  /// A tile of up to kColumnTileRows x kTile: its columns' codes are made row by row, then transposed.
  static void encode_tile(const QuantizeProblem& p, const LineScales& rule, int64_t batch, int64_t first_row, int rows,
                          int64_t column, const Storage* x, const FactorsOfRows& of_rows, const Steps* steps) {
    const int columns = static_cast<int>(std::min<int64_t>(kTile, p.columns - column));
    const int64_t line = batch * p.columns + column;
    const FactorsOfColumns of_columns(rule, p.columnwise.tensor + line, columns,
                                      first_row == 0 ? p.columnwise.scale : nullptr, line);
    auto& t = *new (thread_scratch(sizeof(Tile))) Tile;
    if (columns < kTile) memset(t.padded, 0, sizeof t.padded);
    const float least = least_integer(p.format);
    for (int r = 0; r < rows; ++r, x += p.columns) {
      for (size_t i = 0; i < columns * sizeof *x; i += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(x + 4 * p.columns) + i);
      if (p.rowwise.data) encode_row(p, batch, first_row + r, column, columns, x, of_rows, r, steps[r], 0);
      if (kStochastic && r % kBlock == 0) t.take_random(p.columnwise.random.of(batch), first_row + r, column, columns);
      const Storage* from = x;
      if (columns < kTile) memcpy(t.padded, x, columns * sizeof *x), from = t.padded;
      for (int i = 0; i < columns; i += kStep) {
        F32 v[4];
        load_step(from + i, v);
        const auto byte = [&](int k) {
          return kStochastic ? (load<U32>(&t.random[r % kBlock / 4][i + k * kLanes]) >> (8 * (r % 4))) & 0xFFu : U32{};
        };
        store(&t.codes[r][i], line_codes<Element, kStochastic, kDivides>(
                                  v, least, [&](int k) { return of_columns.from(i + k * kLanes); }, byte));
      }
    }
    const int64_t stride = p.columnwise.data_stride ? p.columnwise.data_stride : p.rows;
    uint8_t* data = p.columnwise.data + line * stride + first_row;
    store_transposed(t.codes[0], kTile, rows, columns, data, rows, stride);
    for (int c = 0; c < columns; ++c)
      if (of_columns.poisoned(c)) memset(data + c * stride, 0, rows);
  }
};

// The amaxes of all rows, and of all columns: bits that sort like magnitudes.
// Bytes moved: the input once.

template <class E>
struct LineAmaxes {
  using Storage = typename E::Storage;
  static constexpr bool kHalves = sizeof(Storage) == 2;        // two elements a lane, compared as they are
  static constexpr int kStep = kHalves ? 2 * kLanes : kLanes;  // elements of a vector
  static constexpr int64_t kRows = 64, kColumns = 2048;
  static constexpr int kTogether = 4;  // rows

  static int64_t chunks_per_matrix(const LineAmaxesProblem& p) { return divide_up(p.rows, kRows); }

  static void chunk(const LineAmaxesProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * kRows, last = std::min(first + kRows, p.rows);
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    alignas(64) Storage most[kColumns];
    for (int64_t column = 0; column < p.columns; column += kColumns) {
      const int64_t columns = std::min(kColumns, p.columns - column);
      memset(most, 0, sizeof most);
      for (int64_t row = first; row < last; row += kTogether) {
        U32 of_rows[kTogether] = {};
        const int count = static_cast<int>(std::min<int64_t>(kTogether, last - row));
        count == kTogether ? add_rows<kTogether>(x + row * p.columns + column, p.columns, columns, most, of_rows)
                           : add_few(x + row * p.columns + column, p.columns, count, columns, most, of_rows);
        for (int r = 0; p.of_rows && r < count; ++r) {
          uint32_t& found = p.of_rows[batch * p.rows + row + r];
          found = std::max(column == 0 ? 0 : found, largest(of_rows[r]));
        }
      }
      for (int64_t i = 0; p.of_columns && i < columns; i += kLanes) {
        const U32 bits = magnitude(E::load_lanes(most + i));
        for (int k = 0; k < std::min<int64_t>(kLanes, columns - i); ++k)
          raise(&p.of_columns[batch * p.columns + column + i + k], bits[k]);
      }
    }
  }

 private:
  JLP_RULE U32 larger(U32 a, U32 b) { return kHalves ? max_halves(a, b) : max_magnitude(a, b); }
  JLP_RULE U32 magnitudes(const Storage* x) { return load<U32>(x) & (kHalves ? 0x7FFF7FFFu : kMagnitudeBits); }

  /// The largest of all lanes, as float32 magnitude bits.
  static uint32_t largest(U32 found) {
    alignas(64) Storage each[kStep];
    store(each, found);
    U32 most = U32{};
    for (int i = 0; i < kStep; i += kLanes) most = max_magnitude(most, magnitude(E::load_lanes(each + i)));
    return max_lane(most);
  }

  /// Raises the columns' amaxes, and the rows'.
  template <int kCount>
  static void add_rows(const Storage* x, int64_t stride, int64_t columns, Storage* most, U32* of_rows) {
    U32 rows[kCount] = {};
    const int64_t whole = columns / kStep * kStep;
    const auto add = [&](const Storage* from, int64_t step, int64_t to) {
      U32 of_columns = load<U32>(most + to);
      JLP_UNROLL(4)
      for (int r = 0; r < kCount; ++r) {
        const U32 v = magnitudes(from + r * step);
        rows[r] = larger(rows[r], v), of_columns = larger(of_columns, v);
      }
      store(most + to, of_columns);
    };
    for (int64_t i = 0; i < whole; i += kStep) add(x + i, stride, i);
    if (whole < columns) {
      alignas(64) Storage padded[kCount][kStep] = {};
      for (int r = 0; r < kCount; ++r) memcpy(padded[r], x + r * stride + whole, (columns - whole) * sizeof *x);
      add(padded[0], kStep, whole);
    }
    for (int r = 0; r < kCount; ++r) of_rows[r] = rows[r];
  }
  static void add_few(const Storage* x, int64_t stride, int count, int64_t columns, Storage* most, U32* of_rows) {
    for (int r = 0; r < count; ++r) add_rows<1>(x + r * stride, stride, columns, most, of_rows + r);
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
