// GEMMs with 8-bit codes on one side or both (numerics.md 9). Operands become numbers again, float32 (matmul_numbers.h) or
// pairs of bfloat16 (matmul_pairs.h), and every result is one chain of multiply-adds along K, so that its bytes depend
// neither on the tiling nor on the instruction set:
//   tensor scale    over all of K: the product of two codes is exact, so fusing changes nothing; both scales at the end
//   block of 128    over a block: y = fma(fl(sum * s_a), s_b, y) at its end
//   MX              over all of K, of fma: a scale is a power of two, so that it goes into the operand exactly
//
// K is walked in steps: a's rows of a chunk are unpacked for one step, [row][unit], then b a panel at a time,
// [vector][unit][lane], so that a small tile of results keeps its sums in registers while the tile's part of the panel stays
// in the first cache and a in the second. y waits for the next step in scratch memory. Meanwhile the next panel's codes
// are prefetched (Ahead), because with few rows the weight is read from memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../numerics/float8.h"
#include "matmul_chunks.h"
#include "matmul_epilogue.h"
#if defined(JLP_ISA_AVX512_BF16)
#include "matmul_pairs.h"
#else
#include "matmul_numbers.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {

struct MatmulFloat8 {
  static int64_t chunks_per_matrix(const MatmulProblem& p) { return cut(p).per_matrix(); }

  static void chunk(const MatmulProblem& p, int64_t batch, int64_t chunk) {
    const Part part(p, batch, cut(p).range(chunk));
    for (int64_t k = 0; k < p.depth(); k += kStep) {
      const int64_t depth = std::min<int64_t>(kStep, p.depth() - k);
      load_rows(part, k, depth);
      for (int64_t vector = 0; vector < part.vectors; vector += part.panel_vectors()) {
        const int64_t vectors = std::min(part.panel_vectors(), part.vectors - vector);
        load_panel(part, vector, vectors, k, depth);
        NextPanel next = panel_after(part, vector + vectors, k);
        switch (p.a.format.scaling) {
          case Scaling::kFloat32: multiply_panel<Sum::kBlock>(part, vector, vectors, depth, next); break;
          case Scaling::kE8M0: multiply_panel<Sum::kFused>(part, vector, vectors, depth, next); break;
          default: multiply_panel<Sum::kExactProducts>(part, vector, vectors, depth, next);
        }
      }
    }
    finish(part);
  }

 private:
#if defined(JLP_ISA_AVX512_BF16)
  static constexpr int kRows = 12, kMostRows = 384, kStep = 256, kPanel = 2;
#elif defined(JLP_ISA_AVX512)
  static constexpr int kRows = 12, kMostRows = 256, kStep = 128, kPanel = 8;
#elif defined(JLP_ISA_AVX2)
  static constexpr int kRows = 6, kMostRows = 256, kStep = 256, kPanel = 8;
#else
  static constexpr int kRows = 4, kMostRows = 256, kStep = 256, kPanel = 8;
#endif
  static constexpr int kUnits = kStep / kPerUnit;  // of K that are multiplied at a time
  static constexpr int kVectors = 2;               // a tile is kRows x kVectors: with the rest it fills the registers
  using NextPanel = Ahead<kStep / 64>;
  static constexpr int kPanelVectors = 8;  // unpacked at once for a row or two; for more, kPanel
  static constexpr int kMxBlock = 32,
                       kMaxBlocks =
                           kStep / kMxBlock;  // kStep is whole blocks of every format, and whole vectors of packed codes

  /// The operands of one chain of multiply-adds. kBlock: a block's codes; its sum is scaled and added to y. kExactProducts:
  /// the codes of all of K. kFused: the scaled numbers of all of K, whose products may underflow.
  enum class Sum { kBlock, kExactProducts, kFused };

  static MatmulChunks cut(const MatmulProblem& p) {
    constexpr int64_t kPanelColumns = kPanelVectors * kLanes;
    const int64_t columns = p.rows > 128 ? 512 : 1024;  // few rows are unpacked as seldom
    return {p, {kMostRows, columns}, {8 * kRows, kPanelColumns}, {kRows, kPanelColumns}};
  }

  /// A chunk's place and scratch memory.
  struct Part {
    const MatmulProblem& p;
    int64_t batch;
    MatmulRange range;
    int64_t vectors;     // of y, whole tiles
    Unit* panel;         // [kPanelVectors][kUnits][kLanes]
    float* panel_scale;  // [kPanelVectors][kMaxBlocks][kLanes]
    float* y;            // [vectors][rows][kLanes]
    Unit* rows;          // [rows][kUnits]
    float* rows_scale;   // [rows][kMaxBlocks]

    Part(const MatmulProblem& problem, int64_t batch, MatmulRange range)
        : p(problem), batch(batch), range(range), vectors(divide_up(range.columns, kVectors * kLanes) * kVectors) {
      constexpr int64_t kPanelUnits = kPanelVectors * kUnits * kLanes, kPanelScales = kPanelVectors * kMaxBlocks * kLanes;
      const int64_t results = vectors * range.rows * kLanes;
      static_assert(sizeof(Unit) == sizeof(float));
      panel = reinterpret_cast<Unit*>(
          thread_scratch((kPanelUnits + kPanelScales + results + range.rows * (kUnits + kMaxBlocks)) * sizeof(float)));
      panel_scale = reinterpret_cast<float*>(panel + kPanelUnits), y = panel_scale + kPanelScales;
      rows = reinterpret_cast<Unit*>(y + results), rows_scale = reinterpret_cast<float*>(rows + range.rows * kUnits);
      memset(y, 0, results * sizeof(float));
    }
    /// Their tiles are wider, and are finished before a prefetch would be.
    bool few_rows() const { return range.rows <= 2; }
    int64_t panel_vectors() const { return few_rows() ? kPanelVectors : kPanel; }
    bool scaled_blocks() const { return p.a.format.scaling != Scaling::kTensor; }
  };

  // --- unpacking

  /// How numbers at k are scaled while they are unpacked: not at all, by the MX scales of a row, or by those of kLanes rows.
  struct Unscaled {
    __attribute__((always_inline)) F32 operator()(F32 numbers, int64_t) const { return numbers; }
  };
  struct RowScaled {
    const float* scales;
    __attribute__((always_inline)) F32 operator()(F32 numbers, int64_t k) const { return numbers * scales[k / kMxBlock]; }
  };
  struct RowsScaled {
    const float* scales;
    __attribute__((always_inline)) F32 operator()(F32 numbers, int64_t k) const {
      return numbers * load<F32>(scales + k / kMxBlock * kLanes);
    }
  };

  static int64_t bytes_of(const MatmulOperand& operand, int64_t codes) {
    return operand.format.packed() ? divide_up(codes, 2) : codes;
  }

  /// Rows lie far apart, each a few cache lines that the processor does not see coming.
  static constexpr int64_t kAhead = 4;
  JLP_RULE void prefetch(const uint8_t* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
  }

  static void load_rows(const Part& part, int64_t k, int64_t depth) {
    const MatmulOperand& a = part.p.a;
    for (int64_t i = 0; i < part.range.rows; ++i) {
      const int64_t row = part.range.first_row + i;
      const int64_t stride = a.data_stride();
      const uint8_t* data = a.data + (part.batch * part.p.rows + row) * stride + bytes_of(a, k);
      if (i + kAhead < part.range.rows) prefetch(data + kAhead * stride, bytes_of(a, depth));
      Unit* out = part.rows + i * kUnits;
      float* scales = part.rows_scale + i * kMaxBlocks;
      const int64_t first = k / a.format.block, blocks = a.format.blocks(depth);
      if (a.format.scaling == Scaling::kE8M0)
        decode_scales(scales_of_row(a, part.p.rows, part.batch, row) + first, blocks, e8m0_decode<F32>, scales, 1);
      else if (a.format.scaling == Scaling::kFloat32)
        memcpy(scales, scales_of_row(a, part.p.rows, part.batch, row) + 4 * first, 4 * blocks);
      with_float(a.format.code, [&](auto element) {
        if (a.format.scaling == Scaling::kE8M0)
          unpack_row_units<decltype(element)>(data, bytes_of(a, depth), RowScaled{scales}, out);
        else
          unpack_row_units<decltype(element)>(data, bytes_of(a, depth), Unscaled{}, out);
      });
      end_row(depth, out);
    }
  }

  /// The panel from `vector` on at the step of k, or where that ends the first one of the next step.
  static NextPanel panel_after(const Part& part, int64_t vector, int64_t k) {
    if (vector == part.vectors) vector = 0, k += kStep;
    const int64_t rows = part.range.rows, depth = std::min<int64_t>(kStep, part.p.depth() - k);
    if (depth <= 0 || part.few_rows()) return {};
    const MatmulOperand& b = part.p.b;
    const int64_t column = vector * kLanes, row = part.range.first_column + column, stride = b.data_stride();
    const uint8_t* data = b.data + (part.batch * part.p.columns + row) * stride + bytes_of(b, k);
    const uint8_t* scales = nullptr;
    if (part.scaled_blocks() && !b.format.tiles)
      scales = scales_of_row(b, part.p.columns, part.batch, row) + k / b.format.block * b.format.scale_bytes();
    const int64_t columns = std::min<int64_t>(part.range.columns - column, kPanel * kLanes);
    const int64_t tiles = divide_up(rows, kRows) * (kPanel / kVectors);
    return {data, stride, bytes_of(b, depth), scales, b.scale_stride(), columns, tiles};
  }

  static void load_panel(const Part& part, int64_t vector, int64_t vectors, int64_t k, int64_t depth) {
    const MatmulOperand& b = part.p.b;
    const int64_t stride = b.data_stride(), bytes = bytes_of(b, depth);
    const bool ahead = !part.few_rows() && (vector > 0 || k > 0);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t column = (vector + v) * kLanes, row = part.range.first_column + column;
      const int64_t rows = std::clamp<int64_t>(part.range.columns - column, 0, kLanes);
      const uint8_t* data = b.data + (part.batch * part.p.columns + row) * stride + bytes_of(b, k);
      for (int64_t r = kLanes; !ahead && v + 1 < vectors && r < 2 * kLanes && column + r < part.range.columns; ++r)
        prefetch(data + r * stride, bytes);
      Unit* out = part.panel + v * kUnits * kLanes;
      float* scales = part.panel_scale + v * kMaxBlocks * kLanes;
      const int64_t first = k / b.format.block, blocks = b.format.blocks(depth);
      const uint8_t* from = rows > 0 && part.scaled_blocks()
                                ? scales_of_row(b, part.p.columns, part.batch, row) + first * b.format.scale_bytes()
                                : nullptr;
      const int64_t scale_step = b.format.tiles ? 0 : b.scale_stride();  // a vector lies in one row of tiles
      for (int64_t r = 0; b.format.scaling == Scaling::kFloat32 && r < rows; ++r)
        for (int64_t i = 0; i < blocks; ++i) memcpy(scales + i * kLanes + r, from + r * scale_step + 4 * i, 4);
      with_float(b.format.code, [&](auto element) {
        using Element = decltype(element);
        if (b.format.scaling != Scaling::kE8M0) {
          unpack_vector_units<Element>(data, stride, rows, bytes, Unscaled{}, out);
        } else if (rows < kLanes || !unpack_moderate_units<Element>(data, stride, bytes, from, scale_step, blocks, out)) {
          decode_scales_of_lanes(b, part.p.columns, part.batch, row, rows, first, blocks, e8m0_decode<F32>, scales, kLanes);
          unpack_vector_units<Element>(data, stride, rows, bytes, RowsScaled{scales}, out);
        }
      });
      end_vector(depth, out);
    }
  }

  // --- one tile

  /// sums += a * b over `depth` elements of K.
  template <Sum kSum, int kCount, int kWidth>
  JLP_RULE void add_products(const Unit* a, const Unit* b, int64_t depth, F32 (&sums)[kCount][kWidth]) {
    for (int64_t k = 0; k < divide_up(depth, kPerUnit); ++k) {
      UnitVector vectors[kWidth];
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) vectors[v] = load<UnitVector>(b + (v * kUnits + k) * kLanes);
      JLP_UNROLL(12)
      for (int r = 0; r < kCount; ++r) {
        const UnitVector unit = splat_unit(a[r * kUnits + k]);
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v) sums[r][v] = add_products_of<kSum == Sum::kFused>(unit, vectors[v], sums[r][v]);
      }
    }
  }

  /// kCount rows from `row` on by kWidth vectors of the panel from `at` on, which lies at `vector` in y.
  template <Sum kSum, int kCount, int kWidth>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t vector, int64_t at,
                                                      int64_t depth) {
    const Unit* a = part.rows + row * kUnits;
    const Unit* b = part.panel + at * kUnits * kLanes;
    const float* a_scale = part.rows_scale + row * kMaxBlocks;
    const float* b_scale = part.panel_scale + at * kMaxBlocks * kLanes;
    float* y = part.y + ((vector + at) * part.range.rows + row) * kLanes;
    constexpr bool kBlocks = kSum == Sum::kBlock;
    const int64_t stride = part.range.rows * kLanes, size = kBlocks ? part.p.a.format.block : depth;
    for (int64_t k = 0; k < depth; k += size, ++a_scale, b_scale += kLanes) {
      F32 sums[kCount][kWidth];
      for (int r = 0; r < kCount; ++r)
        for (int v = 0; v < kWidth; ++v) sums[r][v] = kBlocks ? F32{} : load<F32>(y + v * stride + r * kLanes);
      add_products<kSum, kCount, kWidth>(a + k / kPerUnit, b + k / kPerUnit * kLanes, std::min(size, depth - k), sums);
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) {
        const F32 columns_scale = kBlocks ? load<F32>(b_scale + v * kMaxBlocks * kLanes) : F32{};
        JLP_UNROLL(12)
        for (int r = 0; r < kCount; ++r) {
          float* to = y + v * stride + r * kLanes;
          const F32 sum = sums[r][v];
          store(to, kBlocks ? L::fused_multiply_add(sum * a_scale[r * kMaxBlocks], columns_scale, load<F32>(to)) : sum);
        }
      }
    }
  }

  /// A tile of `count` rows, 1 to kMost.
  template <Sum kSum, int kMost>
  static void multiply_rows(const Part& part, int64_t row, int64_t count, int64_t vector, int64_t at, int64_t depth) {
    if constexpr (kMost > 1)
      if (count < kMost) return multiply_rows<kSum, kMost - 1>(part, row, count, vector, at, depth);
    multiply_tile<kSum, kMost, kVectors>(part, row, vector, at, depth);
  }

  /// Few rows take wider tiles, so that there are enough independent sums.
  template <Sum kSum>
  static void multiply_panel(const Part& part, int64_t vector, int64_t vectors, int64_t depth, NextPanel& next) {
    const int64_t rows = part.range.rows;
    const int64_t tile = divide_up(rows, divide_up(rows, kRows));  // alike: a last one of few rows would take as long
    for (int64_t at = 0; at < vectors;) {
      if (rows == 1 && vectors - at >= 8) {
        multiply_tile<kSum, 1, 8>(part, 0, vector, at, depth), at += 8;
      } else if (rows == 2 && vectors - at >= 4) {
        multiply_tile<kSum, 2, 4>(part, 0, vector, at, depth), at += 4;
      } else {
        for (int64_t row = 0; row < rows; row += tile) {
          next.fetch();
          multiply_rows<kSum, kRows>(part, row, std::min(tile, rows - row), vector, at, depth);
        }
        at += kVectors;
      }
    }
  }

  // --- the end

  static void finish(const Part& part) {
    const MatmulProblem& p = part.p;
    float a_scale = 1, b_scale = 1;
    if (p.a.format.scaling == Scaling::kTensor)
      memcpy(&a_scale, p.a.scale + 4 * part.batch, 4), memcpy(&b_scale, p.b.scale + 4 * part.batch, 4);
    constexpr int64_t kColumns = 64;  // whole cache lines
    const auto range_at = [&](int64_t column) {
      return MatmulRange{part.range.first_row, part.range.rows, part.range.first_column + column,
                         std::min(kColumns, part.range.columns - column)};
    };
    for (int64_t column = 0; column < part.range.columns; column += kColumns) {
      const float* y = part.y + column * part.range.rows;
      const MatmulRange range = range_at(column);
      if (column + kColumns < part.range.columns) fetch_accumulated(p, part.batch, range_at(column + kColumns));
      finish_range(p, part.batch, range, [&](int64_t r, int64_t v) {
        return (load<F32>(y + (v * part.range.rows + r) * kLanes) * a_scale) * b_scale;
      });
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
