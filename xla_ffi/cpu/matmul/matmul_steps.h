// GEMMs that walk K in steps: what those of 8-bit floats (matmul_float8.h) and of 8-bit integers (matmul_int8.h) share.
//
// a's rows of a chunk are unpacked for one step, [row][unit], then b a panel at a time, [vector][unit][lane], so that a
// small tile of results keeps its sums in registers while the tile's part of the panel stays in the first cache and a in the
// second. The sums wait for the next step in scratch memory. Meanwhile the next panel's codes are prefetched (Ahead),
// because with few rows the weight is read from memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "matmul_chunks.h"
#include "matmul_epilogue.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kVectors = 2;       // of a tile, whose rows and these fill the registers
constexpr int kPanelVectors = 8;  // unpacked at once for a row or two; for more, Kind::kPanel

/// Calls visit with `count`, 1 to kMost, as a constant.
template <int kMost, class Visit>
JLP_RULE void with_count(int64_t count, Visit visit) {
  if constexpr (kMost > 1)
    if (count < kMost) return with_count<kMost - 1>(count, visit);
  visit(std::integral_constant<int, kMost>{});
}

/// Rows lie far apart, each a few cache lines that the processor does not see coming.
constexpr int64_t kRowsAhead = 4;
JLP_RULE void prefetch(const uint8_t* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
}

JLP_RULE int64_t bytes_of(const MatmulOperand& operand, int64_t codes) {
  return operand.format.packed() ? divide_up(codes, 2) : codes;
}

/// A chunk's place and scratch memory. A unit holds one code or a few neighbours along K.
template <class Kind>
struct MatmulPart {
  using Unit = typename Kind::Unit;
  using Sum = typename Kind::Sum;
  static_assert(sizeof(Unit) == 4 && sizeof(Sum) == 4);
  static constexpr int kUnits = Kind::kStep / Kind::kPerUnit;  // of K that are multiplied at a time
  static constexpr int kRowUnits = kUnits + Kind::kAfterRow;   // from one row to the next

  const MatmulProblem& p;
  int64_t batch;
  MatmulRange range;
  int64_t rows_held;   // of rows and y: whole kRowsTogether
  int64_t vectors;     // of y, whole tiles
  Unit* panel;         // [kPanelVectors][kUnits][kLanes]
  float* panel_scale;  // [kPanelVectors][kMaxBlocks][kLanes]
  Sum* y;              // [vectors][rows_held][kLanes]
  Unit* rows;          // [rows_held][kRowUnits]
  float* rows_scale;   // [rows][kMaxBlocks]
  float* last_factor;  // [rows]: what sums are multiplied by at the end, after their column's factor

  MatmulPart(const MatmulProblem& problem, int64_t batch, MatmulRange range)
      : p(problem),
        batch(batch),
        range(range),
        rows_held(divide_up(range.rows, Kind::kRowsTogether) * Kind::kRowsTogether),
        vectors(divide_up(range.columns, kVectors * kLanes) * kVectors) {
    constexpr int64_t kPanelUnits = kPanelVectors * kUnits * kLanes,
                      kPanelScales = kPanelVectors * Kind::kMaxBlocks * kLanes;
    const int64_t results = vectors * rows_held * kLanes, row_units = rows_held * kRowUnits;
    const int64_t row_scales = range.rows * Kind::kMaxBlocks;
    panel = reinterpret_cast<Unit*>(
        thread_scratch((kPanelUnits + kPanelScales + results + row_units + row_scales + range.rows) * sizeof(float)));
    panel_scale = reinterpret_cast<float*>(panel + kPanelUnits);
    y = reinterpret_cast<Sum*>(panel_scale + kPanelScales);
    rows = reinterpret_cast<Unit*>(y + results);
    rows_scale = reinterpret_cast<float*>(rows + row_units), last_factor = rows_scale + row_scales;
    memset(y, 0, results * sizeof(Sum));
  }
  /// Their tiles are wider, and are finished before a prefetch would be.
  bool few_rows() const { return range.rows <= 2; }
  int64_t panel_vectors() const { return few_rows() ? kPanelVectors : Kind::kPanel; }
  bool scaled_blocks() const { return p.a.format.scaling != Scaling::kTensor && p.a.format.scaling != Scaling::kRows; }
  const uint8_t* codes_of_a(int64_t row, int64_t k) const {
    return p.a.data + (batch * p.rows + range.first_row + row) * p.a.data_stride() + bytes_of(p.a, k);
  }
  const uint8_t* codes_of_b(int64_t column, int64_t k) const {
    return p.b.data + (batch * p.columns + range.first_column + column) * p.b.data_stride() + bytes_of(p.b, k);
  }
};

/// `Kind` says what a unit and a sum are, how codes become units (load_row, load_vector) and how a tile multiplies them
/// (multiply_tile; with kTileOfRows for up to kRows rows, which fetches the next panel as it goes, else for a constant
/// number of rows and vectors).
template <class Kind>
struct MatmulInSteps {
  static int64_t chunks_per_matrix(const MatmulProblem& p) { return cut(p).per_matrix(); }

  static void chunk(const MatmulProblem& p, int64_t batch, int64_t chunk) {
    const Part part(p, batch, cut(p).range(chunk));
    for (int64_t k = 0; k < p.depth(); k += Kind::kStep) {
      const int64_t depth = std::min<int64_t>(Kind::kStep, p.depth() - k);
      load_rows(part, k, depth);
      for (int64_t vector = 0; vector < part.vectors; vector += part.panel_vectors()) {
        const int64_t vectors = std::min(part.panel_vectors(), part.vectors - vector);
        load_panel(part, vector, vectors, k, depth);
        NextPanel next = panel_after(part, vector + vectors, k);
        Kind::with_sums(p, [&](auto sums) { multiply_panel<decltype(sums)>(part, vector, vectors, depth, next); });
      }
    }
    finish(part);
  }

 private:
  using Part = MatmulPart<Kind>;
  using NextPanel = Ahead<Kind::kLinesAhead>;

  static MatmulChunks cut(const MatmulProblem& p) {
    constexpr int64_t kPanelColumns = kPanelVectors * kLanes;
    const int64_t columns = p.rows > 128 ? 512 : 1024;  // few rows are unpacked as seldom
    return {p, {Kind::kMostRows, columns}, {Kind::kLeastRows, kPanelColumns}, {Kind::kRows, kPanelColumns}};
  }

  static void load_rows(const Part& part, int64_t k, int64_t depth) {
    const int64_t bytes = bytes_of(part.p.a, depth);
    for (int64_t row = 0; row < part.range.rows; ++row) {
      const uint8_t* data = part.codes_of_a(row, k);
      if (row + kRowsAhead < part.range.rows) prefetch(data + kRowsAhead * part.p.a.data_stride(), bytes);
      Kind::load_row(part, row, data, k, depth);
    }
  }

  /// The panel from `vector` on at the step of k, or where that ends the first one of the next step.
  static NextPanel panel_after(const Part& part, int64_t vector, int64_t k) {
    if (vector == part.vectors) vector = 0, k += Kind::kStep;
    const int64_t rows = part.range.rows, depth = std::min<int64_t>(Kind::kStep, part.p.depth() - k);
    if (depth <= 0 || part.few_rows()) return {};
    const MatmulOperand& b = part.p.b;
    const int64_t column = vector * kLanes, row = part.range.first_column + column;
    const uint8_t* scales = nullptr;
    if (part.scaled_blocks() && !b.format.tiles)
      scales = scales_of_row(b, part.p.columns, part.batch, row) + k / b.format.block * b.format.scale_bytes();
    const int64_t columns = std::min<int64_t>(part.range.columns - column, Kind::kPanel * kLanes);
    const int64_t tiles = divide_up(rows, Kind::kRows) * (Kind::kPanel / kVectors), fetches = tiles * Kind::kFetchesOfTile;
    return {part.codes_of_b(column, k), b.data_stride(), bytes_of(b, depth), scales, b.scale_stride(), columns, fetches};
  }

  static void load_panel(const Part& part, int64_t vector, int64_t vectors, int64_t k, int64_t depth) {
    const MatmulOperand& b = part.p.b;
    const bool ahead = !part.few_rows() && (vector > 0 || k > 0);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t column = (vector + v) * kLanes;
      const int64_t rows = std::clamp<int64_t>(part.range.columns - column, 0, kLanes);
      const uint8_t* data = part.codes_of_b(column, k);
      for (int64_t r = kLanes; !ahead && v + 1 < vectors && r < 2 * kLanes && column + r < part.range.columns; ++r)
        prefetch(data + r * b.data_stride(), bytes_of(b, depth));
      Kind::load_vector(part, v, column, rows, data, k, depth);
    }
  }

  /// Few rows take wider tiles, so that there are enough independent sums.
  template <class Sums>
  static void multiply_panel(const Part& part, int64_t vector, int64_t vectors, int64_t depth, NextPanel& next) {
    const int64_t rows = part.range.rows;
    constexpr int64_t kTogether = Kind::kRowsTogether;
    // Alike: a last one of few rows would take as long.
    const int64_t tile = divide_up(divide_up(rows, divide_up(rows, Kind::kRows)), kTogether) * kTogether;
    for (int64_t at = 0; at < vectors;) {
      if constexpr (!Kind::kTileOfRows) {
        if (rows == 1 && vectors - at >= 8) {
          Kind::template multiply_tile<Sums, 1, 8>(part, 0, vector, at, depth), at += 8;
          continue;
        }
        if (rows == 2 && vectors - at >= 4) {
          Kind::template multiply_tile<Sums, 2, 4>(part, 0, vector, at, depth), at += 4;
          continue;
        }
      }
      for (int64_t row = 0; row < rows; row += tile) {
        const int64_t count = std::min(tile, rows - row);
        if constexpr (Kind::kTileOfRows) {
          Kind::template multiply_tile<Sums>(part, row, count, vector, at, depth, next);
        } else {
          next.fetch();
          with_count<Kind::kRows>(count, [&](auto constant) {
            Kind::template multiply_tile<Sums, decltype(constant)::value, kVectors>(part, row, vector, at, depth);
          });
        }
      }
      at += kVectors;
    }
  }

  // --- the end: fl(fl(sum * s_a) * s_b) of tensor scales, fl(fl(sum * s_b) * s_a) of scales of lines; else sums are scaled

  static void finish(const Part& part) {
    const MatmulProblem& p = part.p;
    constexpr int64_t kColumns = 64;  // whole cache lines
    alignas(64) float first_factor[kColumns];
    float a_scale = 1, b_scale = 1;
    if (p.a.format.scaling == Scaling::kTensor)
      memcpy(&a_scale, p.a.scale + 4 * part.batch, 4), memcpy(&b_scale, p.b.scale + 4 * part.batch, 4);
    std::fill_n(first_factor, kColumns, a_scale), std::fill_n(part.last_factor, part.range.rows, b_scale);
    if (p.a.format.scaling == Scaling::kRows)
      load_scales_of_lines(p.a, p.rows, part.batch, part.range.first_row, part.range.rows, part.last_factor);
    const auto range_at = [&](int64_t column) {
      return MatmulRange{part.range.first_row, part.range.rows, part.range.first_column + column,
                         std::min(kColumns, part.range.columns - column)};
    };
    for (int64_t column = 0; column < part.range.columns; column += kColumns) {
      const MatmulRange range = range_at(column);
      if (column + kColumns < part.range.columns) fetch_accumulated(p, part.batch, range_at(column + kColumns));
      if (p.b.format.scaling == Scaling::kRows)
        load_scales_of_lines(p.b, p.columns, part.batch, range.first_column, range.columns, first_factor);
      const auto* y = part.y + column * part.rows_held;
      finish_range(p, part.batch, range, [&](int64_t r, int64_t v) {
        const F32 sum = Kind::number(y + (v * part.rows_held + r) * kLanes);
        return (sum * load<F32>(first_factor + v * kLanes)) * part.last_factor[r];
      });
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
