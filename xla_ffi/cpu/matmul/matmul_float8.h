// GEMMs with 8-bit floats on one side or both (numerics.md 9), in matmul_steps.h's walk. Operands become numbers again,
// float32 (matmul_numbers.h) or pairs of bfloat16 (matmul_pairs.h), and every result is one chain of multiply-adds along K,
// so that its bytes depend neither on the tiling nor on the instruction set:
//   tensor, line    over all of K: the product of two codes is exact, so fusing changes nothing; both scales at the end
//   block of 128    over a block: y = fma(fl(sum * s_a), s_b, y) at its end
//   MX              over all of K, of fma: a scale is a power of two, so that it goes into the operand exactly
//   block by MX     over a block of a, of fma with b's scaled numbers: y = fl(y + fl(sum * s_a)) at its end
#pragma once

#include "../../numerics/float8.h"
#include "matmul_steps.h"
#if defined(JLP_ISA_AVX512_BF16)
#include "matmul_pairs.h"
#else
#include "matmul_numbers.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {

struct Float8Numbers {
  using Unit = JLP_ISA::Unit;
  using Sum = float;
  using Part = MatmulPart<Float8Numbers>;
  static constexpr int kPerUnit = JLP_ISA::kPerUnit;
#if defined(JLP_ISA_AVX512_BF16)
  static constexpr int kRows = 12, kMostRows = 384, kStep = 256, kPanel = 2;
#elif defined(JLP_ISA_AVX512)
  static constexpr int kRows = 12, kMostRows = 256, kStep = 128, kPanel = 8;
#elif defined(JLP_ISA_AVX2)
  static constexpr int kRows = 6, kMostRows = 256, kStep = 256, kPanel = 8;
#else
  static constexpr int kRows = 4, kMostRows = 256, kStep = 256, kPanel = 8;
#endif
  static constexpr int kLeastRows = 8 * kRows, kRowsTogether = 1, kAfterRow = 0, kLinesAhead = kStep / 64,
                       kFetchesOfTile = 1;
  static constexpr bool kTileOfRows = false;
  static constexpr int kMxBlock = 32,
                       kMaxBlocks =
                           kStep / kMxBlock;  // kStep is whole blocks of every format, and whole vectors of packed codes

  /// The operands of one chain of multiply-adds.
  struct Block {};          // a block's codes; its sum is scaled and added to y
  struct BlockByMx {};      // a block's codes and b's scaled numbers, whose products may underflow; the same by a's scale
  struct ExactProducts {};  // the codes of all of K
  struct Fused {};          // the scaled numbers of all of K, whose products may underflow

  template <class Visit>
  static void with_sums(const MatmulProblem& p, Visit visit) {
    switch (p.a.format.scaling) {
      case Scaling::kFloat32: return p.b.format.scaling == Scaling::kE8M0 ? visit(BlockByMx{}) : visit(Block{});
      case Scaling::kE8M0: return visit(Fused{});
      default: visit(ExactProducts{});
    }
  }

  static F32 number(const float* sums) { return load<F32>(sums); }

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

  static void load_row(const Part& part, int64_t i, const uint8_t* data, int64_t k, int64_t depth) {
    const MatmulOperand& a = part.p.a;
    const int64_t row = part.range.first_row + i;
    Unit* out = part.rows + i * Part::kRowUnits;
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

  /// Vector v of the panel: `rows` rows of b from `column` of the chunk on.
  static void load_vector(const Part& part, int64_t v, int64_t column, int64_t rows, const uint8_t* data, int64_t k,
                          int64_t depth) {
    const MatmulOperand& b = part.p.b;
    const int64_t row = part.range.first_column + column, bytes = bytes_of(b, depth), stride = b.data_stride();
    Unit* out = part.panel + v * Part::kUnits * kLanes;
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

  // --- one tile

  /// sums += a * b over `depth` elements of K.
  template <class Sums, int kCount, int kWidth>
  JLP_RULE void add_products(const Unit* a, const Unit* b, int64_t depth, F32 (&sums)[kCount][kWidth]) {
    constexpr bool kMayUnderflow = std::is_same_v<Sums, Fused> || std::is_same_v<Sums, BlockByMx>;
    for (int64_t k = 0; k < divide_up(depth, kPerUnit); ++k) {
      UnitVector vectors[kWidth];
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) vectors[v] = load<UnitVector>(b + (v * Part::kUnits + k) * kLanes);
      JLP_UNROLL(12)
      for (int r = 0; r < kCount; ++r) {
        const UnitVector unit = splat_unit(a[r * Part::kRowUnits + k]);
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v) sums[r][v] = add_products_of<kMayUnderflow>(unit, vectors[v], sums[r][v]);
      }
    }
  }

  /// kCount rows from `row` on by kWidth vectors of the panel from `at` on, which lies at `vector` in y.
  template <class Sums, int kCount, int kWidth>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t vector, int64_t at,
                                                      int64_t depth) {
    const Unit* a = part.rows + row * Part::kRowUnits;
    const Unit* b = part.panel + at * Part::kUnits * kLanes;
    const float* a_scale = part.rows_scale + row * kMaxBlocks;
    const float* b_scale = part.panel_scale + at * kMaxBlocks * kLanes;
    float* y = part.y + ((vector + at) * part.rows_held + row) * kLanes;
    constexpr bool kBothScaled = std::is_same_v<Sums, Block>, kBlocks = kBothScaled || std::is_same_v<Sums, BlockByMx>;
    const int64_t stride = part.rows_held * kLanes, size = kBlocks ? part.p.a.format.block : depth;
    for (int64_t k = 0; k < depth; k += size, ++a_scale, b_scale += kLanes) {
      F32 sums[kCount][kWidth];
      for (int r = 0; r < kCount; ++r)
        for (int v = 0; v < kWidth; ++v) sums[r][v] = kBlocks ? F32{} : load<F32>(y + v * stride + r * kLanes);
      add_products<Sums, kCount, kWidth>(a + k / kPerUnit, b + k / kPerUnit * kLanes, std::min(size, depth - k), sums);
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) {
        const F32 columns_scale = kBothScaled ? load<F32>(b_scale + v * kMaxBlocks * kLanes) : L::splat(1);
        JLP_UNROLL(12)
        for (int r = 0; r < kCount; ++r) {
          float* to = y + v * stride + r * kLanes;
          const F32 sum = sums[r][v];
          store(to, kBlocks ? L::fused_multiply_add(sum * a_scale[r * kMaxBlocks], columns_scale, load<F32>(to)) : sum);
        }
      }
    }
  }
};

using MatmulFloat8 = MatmulInSteps<Float8Numbers>;

}  // namespace JLP_ISA
}  // namespace jaxlowprec
