// GEMMs of activations in high precision with a quantised weight; for AVX512_BF16 those that it has of its own
// (bf16_kernels.cc).
#include <algorithm>
#include <array>

#include "../entry.h"
#include "../matmul/matmul_epilogue.h"
#include "weight_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Activations in high precision by a quantised weight: y = x @ w.T, each result a sum in 16 lanes (operands.h) whatever
// computes it, so that a row's bytes are the same in training, prefill and decoding.
//
// A few rows of x: bound by reading w. Its codes become numbers in registers, for several columns in turn, so that their
// chains of multiply-adds overlap. x, in the lanes' order, stays in the first cache.
// Bytes moved per element of w: its code.
//
// More rows: bound by multiplying. K is walked in spans, for which x's rows of a chunk are unpacked, and these in steps. The
// columns of a tile are unpacked for a step and multiplied by all rows: tiles of results keep their sums in registers for a
// step while the columns stay in the first cache and x's rows in the second. Sums wait for the next step in scratch memory.
// Meanwhile the codes that come next are prefetched.

/// The totals of a chunk, which its epilogue starts from.
struct Totals {
  float* y;
  int64_t stride;

  JLP_RULE int64_t stride_of(const MatmulRange& range) { return divide_up(range.columns, kSums) * kSums; }

  void finish(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range) const {
    float alpha = 1;
    if (p.weight.format.scaling == Scaling::kTwoLevel) alpha = Lanes<float>::flush(p.weight.amax[batch] * kNvfp4WeightScale);
    if (p.weight.format.scaling == Scaling::kTensor) memcpy(&alpha, p.weight.scale + 4 * batch, 4);
    F32 factors[kMostFinished / kLanes];
    std::fill_n(factors, kMostFinished / kLanes, L::splat(alpha));
    for (int64_t column = 0; column < range.columns; column += kMostFinished) {
      const MatmulRange part = {range.first_row, range.rows, range.first_column + column,
                                std::min(kMostFinished, range.columns - column)};
      for (int64_t i = 0; p.weight.format.scaling == Scaling::kRows && i < part.columns; i += kLanes)
        factors[i / kLanes] =
            load_elements(p.weight.scale, p.weight.format.scale_type, batch * p.columns + part.first_column + i,
                          static_cast<int>(std::min<int64_t>(kLanes, part.columns - i)));
      finish_range(p, batch, part, [&](int64_t r, int64_t v) {
        return L::flush(load<F32>(y + r * stride + column + v * kLanes) * factors[v]);
      });
    }
  }

 private:
  static constexpr float kNvfp4WeightScale = 3.7202381645329296588897705078125e-4f;  // 1 / 2688
};

/// Tiles of many rows of x by unpacked columns of w: the same for every kind of weight.
template <class Operands>
struct WeightOnlyTiles {
  using Unit = typename Operands::Unit;

#if defined(JLP_ISA_AVX512)
  static constexpr int kRows = 4, kColumns = 6;
#elif defined(JLP_ISA_AVX2)
  static constexpr int kRows = 2, kColumns = 3;
#else
  static constexpr int kRows = 1, kColumns = 3;
#endif
  static constexpr bool kPairs = Operands::kPerUnit == 2;
  static constexpr int64_t kStep = kPairs ? 2048 : 512;         // of K, that sums stay in registers for; whole runs of E2M1
  static constexpr int64_t kSpan = kPairs ? 2 * kStep : kStep;  // of K, that x's rows are unpacked for
  static constexpr int64_t kTile = kRows * kColumns * kSums;
  using NextColumns = Ahead<4>;

  JLP_RULE int64_t units(int64_t numbers) { return numbers / Operands::kPerUnit; }

  /// Calls visit with `rows`, 1 to kMost, as a constant.
  template <int kMost, class Visit>
  JLP_RULE void with_rows(int64_t rows, Visit visit) {
    if constexpr (kMost > 1)
      if (rows < kMost) return with_rows<kMost - 1>(rows, visit);
    visit(std::integral_constant<int, kMost>{});
  }

  /// A chunk's scratch memory.
  struct Part {
    Unit* x;      // [row tiles][units(kSpan) / kSums][kRows][kSums]
    Unit* w;      // [units(kStep) / kSums][kColumns][kSums]
    float* sums;  // [column tiles, or 1 if none waits for another span][row tiles][kRows][kColumns][kSums]
    Totals totals;
    int64_t x_stride, sums_stride;  // of tiles

    Part(const MatmulRange& range, int64_t depth) : x_stride(kRows * units(std::min(depth, kSpan))) {
      const int64_t row_tiles = divide_up(range.rows, kRows), column_tiles = divide_up(range.columns, kColumns);
      sums_stride = depth > kSpan ? row_tiles * kTile : 0;
      const int64_t x_size = row_tiles * x_stride, w_size = kColumns * units(kStep),
                    sums_size = row_tiles * kTile + (column_tiles - 1) * sums_stride, stride = Totals::stride_of(range);
      static_assert(sizeof(Unit) == sizeof(float));
      x = reinterpret_cast<Unit*>(thread_scratch((x_size + w_size + sums_size + range.rows * stride) * sizeof(float)));
      w = x + x_size, sums = reinterpret_cast<float*>(w + w_size), totals = {sums + sums_size, stride};
    }
  };

  /// Which sums a step begins with and what it leaves.
  struct Step {
    int64_t at, units;  // in the span
    bool first, last;   // of the sums: not waiting yet, or to be added up
  };

  /// All rows by the unpacked columns, `columns` from the range's `column` on, for one step.
  __attribute__((noinline)) static void multiply_columns_of_step(const MatmulRange& range, const Part& part, int64_t column,
                                                                 int64_t columns, Step step, NextColumns next) {
    float* sums = part.sums + column / kColumns * part.sums_stride;
    const Unit* x = part.x + step.at * kRows;
    for (int64_t row = 0; row < range.rows; row += kRows, sums += kTile, x += part.x_stride) {
      with_rows<kRows>(std::min<int64_t>(kRows, range.rows - row), [&](auto rows) {
        with_rows<kColumns>(columns, [&](auto wide) {
          multiply_tile<rows, wide>(x, part.w, sums, step, part.totals.y + row * part.totals.stride + column,
                                    part.totals.stride);
        });
      });
      next.fetch();
    }
  }

  template <int kHigh, int kWide>
  __attribute__((noinline)) static void multiply_tile(const Unit* x, const Unit* w, float* waiting, Step step, float* totals,
                                                      int64_t stride) {
    using Vector = typename Operands::Vector;
    Sixteen sums[kHigh][kWide];
    for_each<kHigh, kWide>(
        [&](int r, int c) { sums[r][c] = step.first ? Sixteen{} : load_sixteen(waiting + (r * kWide + c) * kSums); });
    for (int64_t at = 0; at < step.units; at += kSums) {
      JLP_UNROLL(4)
      for (int i = 0; i < kParts; ++i) {
        Vector numbers[kHigh];
        JLP_UNROLL(4)
        for (int r = 0; r < kHigh; ++r) numbers[r] = load<Vector>(x + (at * kRows + r * kSums) + i * kLanes);
        JLP_UNROLL(8)
        for (int c = 0; c < kWide; ++c) {
          Vector weight = load<Vector>(w + (at * kColumns + c * kSums) + i * kLanes);
          keep_in_register(weight);
          JLP_UNROLL(4)
          for (int r = 0; r < kHigh; ++r)
            sums[r][c].part[i] = Operands::multiply_add(numbers[r], weight, sums[r][c].part[i]);
        }
      }
    }
    for_each<kHigh, kWide>([&](int r, int c) {
      if (step.last)
        totals[r * stride + c] = Operands::total(sums[r][c]);
      else
        store_sixteen(waiting + (r * kWide + c) * kSums, sums[r][c]);
    });
  }

  /// Calls visit(row, column), unrolled, so that what it indexes can stay in registers.
  template <int kHigh, int kWide, class Visit>
  JLP_RULE void for_each(Visit visit) {
    JLP_UNROLL(8)
    for (int r = 0; r < kHigh; ++r) {
      JLP_UNROLL(8)
      for (int c = 0; c < kWide; ++c) visit(r, c);
    }
  }
};

template <class Row>
struct WeightOnly : WeightOnlyTiles<typename Row::Operands> {
  static int64_t chunks_per_matrix(const WeightOnlyProblem& p) { return cut(p).per_matrix(); }

  static void chunk(const WeightOnlyProblem& given, int64_t batch, int64_t chunk) {
    WeightOnlyProblem p = given;  // with strides, which rows would otherwise divide for: a tenth of the time of one row of x
    p.weight.given_data_stride = p.weight.data_stride(), p.weight.given_scale_stride = p.weight.scale_stride();
    const MatmulRange range = cut(p).range(chunk);
    if (!few_rows(p)) return multiply_steps(p, batch, range);
#if defined(JLP_ISA_AVX512)
    if constexpr (std::is_same_v<Row, Int4Row<BF16>>)
      if (Int4ModerateRow::fits(p, batch, range.first_column, range.columns))
        return WeightOnly<Int4ModerateRow>::multiply_few_rows(p, batch, range);
#endif
    multiply_few_rows(p, batch, range);
  }

 private:
  template <class OtherRow>
  friend struct WeightOnly;
  using Operands = typename Row::Operands;
  using Tiles = WeightOnlyTiles<Operands>;
  using Tiles::kColumns, Tiles::kPairs, Tiles::kRows, Tiles::kSpan, Tiles::kStep, Tiles::units;
  using typename Tiles::NextColumns;
  using typename Tiles::Part;
  using typename Tiles::Unit;

  // --- how the result is cut

  static constexpr int kFewRows = kPairs ? 8 : 4;
  static constexpr int kMostByLines = 4;  // rows, beside whose sums the registers hold lines
  static constexpr int64_t kLine = 64 / Row::byte_of(kUnpacked) * kUnpacked;  // numbers in a cache line

  /// Chains of multiply-adds, as many as registers hold beside the tables.
  static constexpr int chains(int rows) {
    if (kPairs) return rows > 4 ? 24 : 16;
    return kLanes == 16 ? 8 : 4;
  }

  // Of a chunk. Its unpacked rows stay in the second cache; so do the sums that wait, if they wait for every step.
  static constexpr int64_t kMostRows = kPairs ? 96 : 64, kMostColumns = kPairs ? 384 : 48;

  static bool few_rows(const WeightOnlyProblem& p) { return Row::kInRegisters && p.rows <= kFewRows; }

  static MatmulChunks cut(const WeightOnlyProblem& p) {
    if (few_rows(p)) return {p, {kFewRows, 128}, {kFewRows, kSums}, {1, kSums}};
    return {p, {kMostRows, kMostColumns}, {8 * kRows, 48}, {kRows, 48}};
  }

  static int64_t padded_depth(const WeightOnlyProblem& p) { return divide_up(p.depth, kUnpacked) * kUnpacked; }

  /// Rows of x, row r at place(r), their vectors `apart`.
  template <class Place>
  JLP_RULE void arrange_rows(const WeightOnlyProblem& p, int64_t batch, int64_t first, int64_t rows, int64_t k,
                             int64_t count, int64_t apart, Place place) {
    Operands::with_element(p.x_type, [&](auto element) {
      for (int64_t r = 0; r < rows; ++r)
        Operands::template arrange_row<decltype(element)>(p, batch * p.rows + first + r, k, count, apart, place(r));
    });
  }

  // --- a few rows

  static void multiply_few_rows(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range) {
    const int64_t depth = padded_depth(p), row = units(depth), stride = Totals::stride_of(range);
    Unit* x = reinterpret_cast<Unit*>(thread_scratch((row + stride) * p.rows * sizeof(float)));
    const Totals totals = {reinterpret_cast<float*>(x + row * p.rows), stride};
    arrange_rows(p, batch, 0, p.rows, 0, depth, kSums, [&](int64_t r) { return x + r * row; });
    Tiles::template with_rows<kFewRows>(p.rows, [&](auto rows) {
      constexpr int kMost = Row::kByLines && rows > 1 ? 4 : Row::kMostTogether;
      constexpr int kWide = std::clamp(chains(rows) / (rows * kParts), 1, kMost);  // columns together
      const auto multiply = [&](int64_t c) {
        multiply_columns<rows, kWide>(p, batch, range.first_column + c, x, depth, totals, c);
      };
      int64_t c = 0;
      for (; c + kWide <= range.columns; c += kWide) multiply(c);
      if (c == range.columns) return;
      if (range.columns >= kWide) return multiply(range.columns - kWide);  // some of them once more
      for (int64_t r = 0; r < rows; ++r)
        for (c = 0; c < range.columns; ++c)
          multiply_columns<1, 1>(p, batch, range.first_column + c, x + r * row, depth, {totals.y + r * stride, stride}, c);
    });
    totals.finish(p, batch, range);
  }

  template <int... kColumn>
  JLP_RULE std::array<Row, sizeof...(kColumn)> rows_of_weight(const WeightOnlyProblem& p, int64_t batch, int64_t column,
                                                              std::integer_sequence<int, kColumn...>) {
    return {Row(p, batch, column + kColumn)...};
  }

  template <int... kColumn>
  JLP_RULE std::array<typename Row::Run, sizeof...(kColumn)> runs_of(const std::array<Row, sizeof...(kColumn)>& rows,
                                                                     int64_t run, std::integer_sequence<int, kColumn...>) {
    return {rows[kColumn].run(run)...};
  }

  template <size_t kCount, int... kColumn>
  JLP_RULE auto lines_of(const std::array<typename Row::Run, kCount>& runs, int64_t k,
                         std::integer_sequence<int, kColumn...>) {
    return std::array{runs[kColumn].line(k)...};
  }

  /// All rows by the line of kCount columns at k.
  template <int kWide, size_t kCount>
  JLP_RULE void multiply_line(const std::array<typename Row::Run, kCount>& runs, const Unit* x, int64_t depth, int64_t k,
                              Sixteen (&sums)[kWide][kCount]) {
    const auto lines = lines_of(runs, k, std::make_integer_sequence<int, kCount>());
    JLP_UNROLL(4)
    for (int i = 0; i < kLine / kUnpacked; ++i) {
      JLP_UNROLL(8)
      for (size_t c = 0; c < kCount; ++c) {
        typename Operands::Unpacked w;
        runs[c].look_up(k + i * kUnpacked, lines[c].indices(i), w);
        JLP_UNROLL(8)
        for (int r = 0; r < kWide; ++r) Operands::add_unpacked(sums[r][c], x + units(r * depth + k + i * kUnpacked), w);
      }
    }
  }

  /// All rows by kCount columns from `column` on.
  template <int kWide, int kCount>
  __attribute__((noinline)) static void multiply_columns(const WeightOnlyProblem& p, int64_t batch, int64_t column,
                                                         const Unit* x, int64_t depth, const Totals& totals, int64_t at) {
    const auto rows = rows_of_weight(p, batch, column, std::make_integer_sequence<int, kCount>());
    Sixteen sums[kWide][kCount];
    Tiles::template for_each<kWide, kCount>([&](int r, int c) { sums[r][c] = {}; });
    // The next columns are fetched in the order of memory: the processor does not follow so many short streams by itself.
    const int64_t scale_bytes = kCount * p.weight.scale_stride(), scale_step = scale_bytes / divide_up(depth, kLine);
    const uint8_t *next_codes = rows[0].codes + kCount * rows[0].bytes, *next_scales = rows[0].scales + scale_bytes;
    const int64_t length = rows[0].run_length();
    for (int64_t run = 0, k = 0; k < depth; ++run) {
      const int64_t end = k + std::min(length, depth - k);
      const auto runs = runs_of(rows, run, std::make_integer_sequence<int, kCount>());
      while (k < end) {
        JLP_UNROLL(8)
        for (int c = 0; c < kCount; ++c) __builtin_prefetch(next_codes + 64 * c);
        __builtin_prefetch(next_scales);
        next_codes += 64 * kCount, next_scales += scale_step;
        if constexpr (Row::kByLines && kWide <= kMostByLines)
          if (k + kLine <= end) {
            multiply_line<kWide, kCount>(runs, x, depth, k, sums);
            k += kLine;
            continue;
          }
        for (const int64_t line_end = std::min(k + kLine, end); k < line_end; k += kUnpacked) {
          JLP_UNROLL(8)
          for (int c = 0; c < kCount; ++c) {
            typename Operands::Unpacked w;
            runs[c].unpack(k, w);
            JLP_UNROLL(8)
            for (int r = 0; r < kWide; ++r) Operands::add_unpacked(sums[r][c], x + units(r * depth + k), w);
          }
        }
      }
    }
    Tiles::template for_each<kWide, kCount>(
        [&](int r, int c) { totals.y[r * totals.stride + at + c] = Operands::total(sums[r][c]); });
  }

  // --- many rows

  static constexpr int kTogether = Row::kInRegisters ? kColumns : 1;  // columns that are unpacked for a tile

  static void multiply_steps(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range) {
    const int64_t depth = padded_depth(p);
    const Part part(range, depth);
    for (int64_t k = 0; k < depth || k == 0; k += kSpan) {
      const int64_t end = std::min(k + kSpan, depth);
      arrange_rows(p, batch, range.first_row, range.rows, k, end - k, kRows * kSums,
                   [&](int64_t r) { return part.x + r / kRows * part.x_stride + r % kRows * kSums; });
      for (int64_t column = 0; column < range.columns; column += kColumns)
        for (int64_t step = k; step < end || step == 0; step += kStep)
          multiply_step(p, batch, range, part, column, k, step, end);
    }
    part.totals.finish(p, batch, range);
  }

  /// All rows by the columns of a tile from the range's `column` on: the step of a span [k, end) that begins at `step`.
  static void multiply_step(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range, const Part& part,
                            int64_t column, int64_t k, int64_t step, int64_t end) {
    const int64_t columns = std::min<int64_t>(kColumns, range.columns - column), step_end = std::min(step + kStep, end);
    const bool whole = kTogether > 1 && columns == kColumns;
    const auto unpack = whole ? unpack_columns<kTogether> : unpack_columns<1>;
    for (int64_t c = 0; c < columns; c += whole ? kTogether : 1)  // a last tile is seldom worth code of its own
      unpack(p, batch, range.first_column + column + c, step, step_end, part.w + c * kSums);
    const NextColumns next =
        step_end < end ? columns_at(p, batch, range, column, step_end) : columns_at(p, batch, range, column + kColumns, k);
    Tiles::multiply_columns_of_step(range, part, column, columns,
                                    {units(step - k), units(step_end - step), step == 0, step_end >= padded_depth(p)}, next);
  }

  /// The codes of the columns from the range's `column` on at the step of k, or where that ends the first ones of the next
  /// span.
  static NextColumns columns_at(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range, int64_t column,
                                int64_t k) {
    if (column >= range.columns) column = 0, k += kSpan;
    if (k >= p.depth) return {};
    const Row row(p, batch, range.first_column + column);
    const Format& format = p.weight.format;
    const bool scaled = format.scaling != Scaling::kTensor && format.scaling != Scaling::kRows && !format.tiles;
    const uint8_t* scales = scaled ? row.scales + k / format.block * format.scale_bytes() : nullptr;
    const int64_t bytes = std::min(Row::byte_of(kStep), row.bytes - Row::byte_of(k));
    return {row.codes + Row::byte_of(k),
            row.bytes,
            bytes,
            scales,
            p.weight.scale_stride(),
            std::min<int64_t>(kColumns, range.columns - column),
            divide_up(range.rows, kRows)};
  }

  /// kCount columns from `column` on, of K [k, end), all together: their chains of instructions overlap.
  template <int kCount>
  __attribute__((noinline)) static void unpack_columns(const WeightOnlyProblem& p, int64_t batch, int64_t column, int64_t k,
                                                       int64_t end, Unit* out) {
    const auto rows = rows_of_weight(p, batch, column, std::make_integer_sequence<int, kCount>());
    const int64_t length = rows[0].run_length();
    for (int64_t index = k / length; k < end; ++index) {
      const auto runs = runs_of(rows, index, std::make_integer_sequence<int, kCount>());
      const int64_t run_end = std::min((index + 1) * length, end);
      for (; k < run_end; k += kUnpacked, out += units(kUnpacked) * kColumns) {
        JLP_UNROLL(8)
        for (int c = 0; c < kCount; ++c) {
          typename Operands::Unpacked w;
          runs[c].unpack(k, w);
          Operands::store_unpacked(out + c * kSums, kColumns * kSums, w);
        }
      }
    }
  }
};

namespace {

template <class Visit>
auto resolve(const WeightOnlyProblem& p, Visit visit) {
  return with_weight_rows(p.weight.format, [&](auto kind) { return visit(WeightOnly<typename decltype(kind)::type>{}); });
}

}  // namespace

JLP_DEFINE_ENTRY(weight_only, WeightOnlyProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
