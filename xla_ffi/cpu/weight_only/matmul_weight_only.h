// Activations in high precision by a quantised weight: y = x @ w.T, each result a sum in 16 lanes (sixteen_lanes.h) whatever
// computes it, so that a row's bytes are the same in training, prefill and decoding.
//
// A few rows of x: bound by reading w. Its codes become numbers in registers, for several columns in turn, so that their
// chains of multiply-adds overlap. x, as float32 in the lanes' order, stays in the first cache.
// Bytes moved per element of w: its code.
//
// More rows: bound by multiplying. K is walked in steps: x's rows of a chunk are unpacked for one step, then w's columns;
// tiles of results keep their sums in registers for a step while the tile's columns stay in the first cache and the rest in
// the second. Sums wait for the next step in scratch memory.
#pragma once

#include <algorithm>
#include <array>

#include "../matmul/matmul_epilogue.h"
#include "weight_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Rows of x as float32 in the lanes' order: K from `k` on, zeros beyond its end up to k + count.
template <class E>
__attribute__((noinline)) void arrange_row(const WeightOnlyProblem& p, int64_t row, int64_t k, int64_t count, float* out) {
  const auto* x = static_cast<const typename E::Storage*>(p.x) + row * p.depth;
  for (int64_t at = 0; at < count; at += kSums) {
#if defined(JLP_ISA_AVX2)
    if constexpr (std::is_same_v<E, BF16>) {
      if (k + at + kSums <= p.depth) {
        store_sixteen(out + at, arrange(load<__m256i>(x + k + at)));
        continue;
      }
    }
#endif
    F32 numbers[kParts];
    for (int i = 0; i < kParts; ++i) {
      const int64_t from = k + at + i * kLanes, left = std::clamp<int64_t>(p.depth - from, 0, kLanes);
      numbers[i] = L::flush(
          left == kLanes ? E::load_lanes(x + from)
                         : load_elements(p.x, p.x_type, row * p.depth + std::min(from, p.depth), static_cast<int>(left)));
    }
    store_sixteen(out + at, arrange(numbers));
  }
}

JLP_RULE void arrange_rows(const WeightOnlyProblem& p, int64_t batch, int64_t first, int64_t rows, int64_t k, int64_t count,
                           int64_t stride, float* out) {
  with_element(p.x_type, [&](auto element) {
    for (int64_t r = 0; r < rows; ++r)
      arrange_row<decltype(element)>(p, batch * p.rows + first + r, k, count, out + r * stride);
  });
}

/// The totals of a chunk, which its epilogue starts from.
struct Totals {
  float* y;
  int64_t stride;

  JLP_RULE int64_t stride_of(const MatmulRange& range) { return divide_up(range.columns, kSums) * kSums; }

  void finish(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range) const {
    float alpha = 1;
    if (p.weight.format.scaling == Scaling::kTwoLevel) alpha = Lanes<float>::flush(p.weight.amax[batch] * kNvfp4WeightScale);
    if (p.weight.format.scaling == Scaling::kTensor) memcpy(&alpha, p.weight.scale + 4 * batch, 4);
    finish_range(p, batch, range,
                 [&](int64_t r, int64_t v) { return L::flush(load<F32>(y + r * stride + v * kLanes) * alpha); });
  }

 private:
  static constexpr float kNvfp4WeightScale = 3.7202381645329296588897705078125e-4f;  // 1 / 2688
};

/// Tiles of many rows of x by unpacked columns of w: the same for every kind of weight.
struct WeightOnlyTiles {
#if defined(JLP_ISA_AVX512)
  static constexpr int kRows = 4, kColumns = 6;
#elif defined(JLP_ISA_AVX2)
  static constexpr int kRows = 2, kColumns = 3;
#else
  static constexpr int kRows = 1, kColumns = 3;
#endif
  static constexpr int64_t kStep = 512;  // of K, that a tile's sums stay in registers for; whole runs of E2M1

  /// Calls visit with `rows`, 1 to kMost, as a constant.
  template <int kMost, class Visit>
  JLP_RULE void with_rows(int64_t rows, Visit visit) {
    if constexpr (kMost > 1)
      if (rows < kMost) return with_rows<kMost - 1>(rows, visit);
    visit(std::integral_constant<int, kMost>{});
  }

  /// A chunk's scratch memory.
  struct Part {
    float* x;     // [rows][kStep]
    float* w;     // [columns][kStep]
    float* sums;  // [tiles][kRows][kColumns][kSums]
    Totals totals;

    explicit Part(const MatmulRange& range) {
      const int64_t row_tiles = divide_up(range.rows, kRows), column_tiles = divide_up(range.columns, kColumns);
      const int64_t x_size = range.rows * kStep, w_size = range.columns * kStep,
                    sums_size = row_tiles * column_tiles * kTile, stride = Totals::stride_of(range);
      x = reinterpret_cast<float*>(thread_scratch((x_size + w_size + sums_size + range.rows * stride) * sizeof(float)));
      w = x + x_size, sums = w + w_size, totals = {sums + sums_size, stride};
    }
  };
  static constexpr int64_t kTile = kRows * kColumns * kSums;

  /// The products of one step, `count` of K: added to the sums that wait, or the first, and if it is the last their totals.
  __attribute__((noinline)) static void multiply_step(const MatmulRange& range, const Part& part, int64_t count, bool first,
                                                      bool last) {
    float* sums = part.sums;
    for (int64_t c = 0; c < range.columns; c += kColumns)
      for (int64_t r = 0; r < range.rows; r += kRows, sums += kTile)
        multiply_tile_of(range, part, r, c, count, sums, first, last);
  }

  /// A tile of 1 to kRows rows and 1 to kColumns columns.
  static void multiply_tile_of(const MatmulRange& range, const Part& part, int64_t row, int64_t column, int64_t count,
                               float* sums, bool first, bool last) {
    with_rows<kRows>(std::min<int64_t>(kRows, range.rows - row), [&](auto rows) {
      with_rows<kColumns>(std::min<int64_t>(kColumns, range.columns - column), [&](auto columns) {
        multiply_tile<rows, columns>(part.x + row * kStep, part.w + column * kStep, count, sums, first,
                                     last ? part.totals.y + row * part.totals.stride + column : nullptr, part.totals.stride);
      });
    });
  }

  template <int kHigh, int kWide>
  __attribute__((noinline)) static void multiply_tile(const float* x, const float* w, int64_t count, float* waiting,
                                                      bool first, float* totals, int64_t stride) {
    Sixteen sums[kHigh][kWide];
    for_each<kHigh, kWide>(
        [&](int r, int c) { sums[r][c] = first ? Sixteen{} : load_sixteen(waiting + (r * kWide + c) * kSums); });
    for (int64_t k = 0; k < count; k += kSums) {
      JLP_UNROLL(4)
      for (int i = 0; i < kParts; ++i) {
        F32 numbers[kHigh];
        JLP_UNROLL(4)
        for (int r = 0; r < kHigh; ++r) numbers[r] = load<F32>(x + r * kStep + k + i * kLanes);
        JLP_UNROLL(8)
        for (int c = 0; c < kWide; ++c) {
          F32 weight = load<F32>(w + c * kStep + k + i * kLanes);
          keep_in_register(weight);
          JLP_UNROLL(4)
          for (int r = 0; r < kHigh; ++r) sums[r][c].part[i] = L::fused_multiply_add(numbers[r], weight, sums[r][c].part[i]);
        }
      }
    }
    for_each<kHigh, kWide>([&](int r, int c) {
      if (totals)
        totals[r * stride + c] = total(sums[r][c]);
      else
        store_sixteen(waiting + (r * kWide + c) * kSums, sums[r][c]);
    });
  }

  /// Calls visit(row, column), unrolled, so that what it indexes can stay in registers.
  template <int kHigh, int kWide, class Visit>
  JLP_RULE void for_each(Visit visit) {
    JLP_UNROLL(4)
    for (int r = 0; r < kHigh; ++r) {
      JLP_UNROLL(8)
      for (int c = 0; c < kWide; ++c) visit(r, c);
    }
  }
};

template <class Row>
struct WeightOnly : WeightOnlyTiles {
  static int64_t chunks_per_matrix(const WeightOnlyProblem& p) { return cut(p).per_matrix(); }

  static void chunk(const WeightOnlyProblem& p, int64_t batch, int64_t chunk) {
    const MatmulRange range = cut(p).range(chunk);
    if (few_rows(p))
      multiply_few_rows(p, batch, range);
    else
      multiply_steps(p, batch, range);
  }

 private:
  // --- how the result is cut

  static constexpr int kFewRows = 4;
  static constexpr int kChains = kLanes == 16 ? 8 : 4;  // of multiply-adds, as many as registers hold beside the tables
  static constexpr int64_t kMostRows = 64,
                           kMostColumns = 48;  // of a chunk: what it unpacks and its sums stay in the second cache

  static bool few_rows(const WeightOnlyProblem& p) { return Row::kInRegisters && p.rows <= kFewRows; }

  static MatmulChunks cut(const WeightOnlyProblem& p) {
    if (few_rows(p)) return {p, {kFewRows, 128}, {kFewRows, kSums}, {1, kSums}};
    return {p, {kMostRows, kMostColumns}, {8 * kRows, kMostColumns}, {kRows, kMostColumns}};
  }

  static int64_t padded_depth(const WeightOnlyProblem& p) { return divide_up(p.depth, kUnpacked) * kUnpacked; }

  // --- a few rows

  static void multiply_few_rows(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range) {
    const int64_t depth = padded_depth(p), stride = Totals::stride_of(range);
    float* x = reinterpret_cast<float*>(thread_scratch((depth + stride) * p.rows * sizeof(float)));
    const Totals totals = {x + depth * p.rows, stride};
    arrange_rows(p, batch, 0, p.rows, 0, depth, depth, x);
    with_rows<kFewRows>(p.rows, [&](auto rows) {
      constexpr int kTogether = std::max(1, kChains / (rows * kParts));  // columns
      int64_t c = 0;
      for (; c + kTogether <= range.columns; c += kTogether)
        multiply_columns<rows, kTogether>(p, batch, range.first_column + c, x, depth, totals, c);
      for (; c < range.columns; ++c) multiply_columns<rows, 1>(p, batch, range.first_column + c, x, depth, totals, c);
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

  /// All rows by kCount columns from `column` on.
  template <int kWide, int kCount>
  __attribute__((noinline)) static void multiply_columns(const WeightOnlyProblem& p, int64_t batch, int64_t column,
                                                         const float* x, int64_t depth, const Totals& totals, int64_t at) {
    const auto rows = rows_of_weight(p, batch, column, std::make_integer_sequence<int, kCount>());
    Sixteen sums[kWide][kCount];
    for_each<kWide, kCount>([&](int r, int c) { sums[r][c] = {}; });
    const int64_t next = kCount * rows[0].bytes;  // the processor does not prefetch so many short streams by itself
    const int64_t length = rows[0].run_length();
    for (int64_t run = 0, k = 0; k < depth; ++run) {
      const int64_t end = k + std::min(length, depth - k);
      const auto runs = runs_of(rows, run, std::make_integer_sequence<int, kCount>());
      for (; k < end; k += kUnpacked) {
        JLP_UNROLL(8)
        for (int c = 0; c < kCount; ++c) {
          __builtin_prefetch(rows[c].codes + next + Row::byte_of(k));
          Sixteen w[2];
          runs[c].unpack(k, w);
          JLP_UNROLL(4)
          for (int r = 0; r < kWide; ++r) {
            add_products(sums[r][c], load_sixteen(x + r * depth + k), w[0]);
            add_products(sums[r][c], load_sixteen(x + r * depth + k + kSums), w[1]);
          }
        }
      }
    }
    for_each<kWide, kCount>([&](int r, int c) { totals.y[r * totals.stride + at + c] = total(sums[r][c]); });
  }

  // --- many rows

  static void multiply_steps(const WeightOnlyProblem& p, int64_t batch, const MatmulRange& range) {
    const Part part(range);
    const int64_t depth = padded_depth(p);
    for (int64_t k = 0; k < depth || k == 0; k += kStep) {
      const int64_t count = std::min(kStep, depth - k);
      arrange_rows(p, batch, range.first_row, range.rows, k, count, kStep, part.x);
      for (int64_t c = 0; c < range.columns; ++c)
        unpack_column(p, batch, range.first_column + c, k, k + count, part.w + c * kStep);
      multiply_step(range, part, count, k == 0, k + kStep >= depth);
    }
    part.totals.finish(p, batch, range);
  }

  __attribute__((noinline)) static void unpack_column(const WeightOnlyProblem& p, int64_t batch, int64_t column, int64_t k,
                                                      int64_t end, float* out) {
    const Row row(p, batch, column);
    __builtin_prefetch(row.codes + 4 * row.bytes + Row::byte_of(k));
    const int64_t length = row.run_length();
    for (int64_t index = k / length; k < end; ++index) {
      const auto run = row.run(index);
      const int64_t run_end = std::min((index + 1) * length, end);
      for (; k < run_end; k += kUnpacked, out += kUnpacked) {
        Sixteen w[2];
        run.unpack(k, w);
        store_sixteen(out, w[0]), store_sixteen(out + kSums, w[1]);
      }
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
