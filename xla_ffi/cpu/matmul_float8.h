// GEMMs with 8-bit codes on one side or both (numerics.md 9). Operands become float32 again, and every result is one chain
// of multiply-adds along K, so that its bytes depend neither on the tiling nor on the instruction set:
//   tensor scale    over all of K: the product of two codes is exact, so fusing changes nothing; both scales at the end
//   block of 128    over a block: y = fma(fl(sum * s_a), s_b, y) at its end
//   MX              over all of K, of fma: a scale is a power of two, so that it goes into the operand exactly
//
// K is walked in steps: a's rows of a chunk are unpacked for one step, [row][k], then b a panel at a time,
// [vector][k][lane], so that a small tile of results keeps its sums in registers while the tile's part of the panel stays
// in the first cache and a in the second. y waits for the next step in scratch memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../numerics/e2m1.h"
#include "../numerics/float8.h"
#include "matmul_chunks.h"
#include "matmul_epilogue.h"
#include "unpack_float8.h"

namespace jaxlowprec {
namespace JLP_ISA {

struct MatmulFloat8 {
  static int64_t chunks_per_matrix(const MatmulProblem& p) { return cut(p).per_matrix(); }

  static void chunk(const MatmulProblem& p, int64_t batch, int64_t chunk) {
    const Part part(p, batch, cut(p).range(chunk));
    for (int64_t k = 0; k < p.depth(); k += kStep) {
      const int64_t depth = std::min<int64_t>(kStep, p.depth() - k);
      load_rows(part, k, depth);
      for (int64_t vector = 0; vector < part.vectors; vector += kPanelVectors) {
        const int64_t vectors = std::min<int64_t>(kPanelVectors, part.vectors - vector);
        load_panel(part, vector, vectors, k, depth);
        switch (p.a.format.scaling) {
          case Scaling::kFloat32: multiply_panel<Sum::kBlock>(part, vector, vectors, depth); break;
          case Scaling::kE8M0: multiply_panel<Sum::kFused>(part, vector, vectors, depth); break;
          default: multiply_panel<Sum::kExactProducts>(part, vector, vectors, depth);
        }
      }
    }
    finish(part);
  }

 private:
#if defined(JLP_ISA_AVX512)
  static constexpr int kRows = 12, kStep = 128;
#elif defined(JLP_ISA_AVX2)
  static constexpr int kRows = 6, kStep = 256;
#else
  static constexpr int kRows = 4, kStep = 256;
#endif
  static constexpr int kVectors = 2;       // a tile is kRows x kVectors: with the rest it fills the registers
  static constexpr int kPanelVectors = 8;  // unpacked at once
  static constexpr int kMxBlock = 32,
                       kMaxBlocks =
                           kStep / kMxBlock;  // kStep is whole blocks of every format, and whole vectors of packed codes

  /// What a chain of multiply-adds is over: a block's codes, which enter y through their scales; or all of K, of codes or of
  /// numbers whose products may underflow.
  enum class Sum { kBlock, kExactProducts, kFused };

  static MatmulChunks cut(const MatmulProblem& p) {
    constexpr int64_t kPanelColumns = kPanelVectors * kLanes;
    return {p, {256, 512}, {8 * kRows, kPanelColumns}, {kRows, kPanelColumns}};
  }

  /// A chunk's place and scratch memory.
  struct Part {
    const MatmulProblem& p;
    int64_t batch;
    MatmulRange range;
    int64_t vectors;     // of y, whole tiles
    float* panel;        // [kPanelVectors][kStep][kLanes]
    float* panel_scale;  // [kPanelVectors][kMaxBlocks][kLanes]
    float* y;            // [vectors][rows][kLanes]
    float* rows;         // [rows][kStep]
    float* rows_scale;   // [rows][kMaxBlocks]

    Part(const MatmulProblem& problem, int64_t batch, MatmulRange range)
        : p(problem), batch(batch), range(range), vectors(divide_up(range.columns, kVectors * kLanes) * kVectors) {
      constexpr int64_t kPanel = kPanelVectors * kStep * kLanes, kPanelScales = kPanelVectors * kMaxBlocks * kLanes;
      const int64_t results = vectors * range.rows * kLanes;
      panel = reinterpret_cast<float*>(
          thread_scratch((kPanel + kPanelScales + results + range.rows * (kStep + kMaxBlocks)) * sizeof(float)));
      panel_scale = panel + kPanel, y = panel_scale + kPanelScales;
      rows = y + results, rows_scale = rows + range.rows * kStep;
      memset(y, 0, results * sizeof(float));
    }
    bool scaled_blocks() const { return p.a.format.scaling != Scaling::kTensor; }
  };

  // --- unpacking

  /// What the numbers of a code type at k are multiplied by: nothing, or the MX scales of a row or of kLanes rows.
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

  template <CodeType kCode>
  JLP_RULE F32 decode(U32 bits) {  // the upper bits are ignored
    if constexpr (kCode == CodeType::kE2M1) return e2m1_decode<F32>(bits);
    if constexpr (kCode == CodeType::kE5M2) return e5m2_decode<F32>(bits);
    return e4m3_decode<F32>(bits);
  }

  template <class Visit>
  static void with_code(CodeType code, Visit visit) {
    switch (code) {
      case CodeType::kE2M1: return visit(std::integral_constant<CodeType, CodeType::kE2M1>{});
      case CodeType::kE5M2: return visit(std::integral_constant<CodeType, CodeType::kE5M2>{});
      default: return visit(std::integral_constant<CodeType, CodeType::kE4M3>{});
    }
  }

  static int64_t bytes_of(const MatmulOperand& operand, int64_t codes) {
    return operand.format.packed() ? divide_up(codes, 2) : codes;
  }

  /// Rows lie far apart, each a few cache lines that the processor does not see coming.
  static constexpr int64_t kAhead = 4;
  JLP_RULE void prefetch(const uint8_t* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
  }

  /// Up to 16 bytes; what follows the last is zero.
  JLP_RULE Bytes16 load_some(const uint8_t* data, int64_t count) {
    if (count >= 16) return load<Bytes16>(data);
    Bytes16 bytes = Bytes16{};
    memcpy(&bytes, data, count);
    return bytes;
  }

  /// Numbers of one row of a; what follows the last byte's is zero.
  template <CodeType kCode, class Scaled>
  __attribute__((noinline)) static void unpack_row(const uint8_t* data, int64_t bytes, Scaled scaled, float* out) {
#if defined(JLP_HAVE_HALF_CONVERSION)
    if constexpr (kCode != CodeType::kE2M1) {
      NaNCodes nan;
      for (int64_t at = 0; at < bytes; at += 16) {
        const Bytes16 codes = load_some(data + at, bytes - at);
        nan.look(codes);
        store_numbers<kCode>(codes, [&](F32 numbers) { return scaled(numbers, at); }, out + at);
      }
      if (__builtin_expect(kCode == CodeType::kE5M2 || !nan.any(), 1)) return;
    }
#endif
    for (int64_t at = 0; at < bytes; at += kLanes) {
      alignas(64) uint8_t padded[kLanes] = {};
      const uint8_t* from = data + at;
      if (bytes - at < kLanes) memcpy(padded, from, bytes - at), from = padded;
      const U32 codes = load_u8(from);
      if constexpr (kCode == CodeType::kE2M1)
        Float::store_pair(out + 2 * at, {scaled(decode<kCode>(codes), 2 * at), scaled(decode<kCode>(codes >> 4), 2 * at)});
      else
        store(out + at, scaled(decode<kCode>(codes), at));
    }
  }

  /// Numbers of kLanes rows of b, `stride` bytes apart; those beyond `rows` are zero.
  template <CodeType kCode, class Scaled>
  __attribute__((noinline)) static void unpack_vector(const uint8_t* data, int64_t stride, int64_t rows, int64_t bytes,
                                                      Scaled scaled, float* out) {
#if defined(JLP_HAVE_HALF_CONVERSION)
    if constexpr (kCode != CodeType::kE2M1) {
      NaNCodes nan;
      for (int64_t at = 0; at < bytes; at += 16) {
        Bytes16 v[kLanes];
        for (int r = 0; r < kLanes; ++r) {
          v[r] = r < rows ? load_some(data + r * stride + at, bytes - at) : Bytes16{};
          nan.look(v[r]);
        }
        store_numbers_transposed<kCode>(v, [&](F32 numbers) { return scaled(numbers, at); }, out + at * kLanes);
      }
      if (__builtin_expect(kCode == CodeType::kE5M2 || !nan.any(), 1)) return;
    }
#endif
    constexpr int kBits = kCode == CodeType::kE2M1 ? 4 : 8, kPerWord = 32 / kBits;
    int64_t k = 0;
    for (int64_t at = 0; at < bytes; at += JLP_VECTOR_BYTES) {
      const int64_t count = std::min<int64_t>(JLP_VECTOR_BYTES, bytes - at);
      U32 v[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        v[r] = U32{};
        if (r < rows && count == JLP_VECTOR_BYTES)
          v[r] = load<U32>(data + r * stride + at);
        else if (r < rows)
          memcpy(&v[r], data + r * stride + at, count);
      }
      transpose(v);  // v[w]: word w of every row
      for (int w = 0; w < kLanes && 4 * w < count; ++w) {
        JLP_UNROLL(8)
        for (int i = 0; i < kPerWord; ++i, ++k) store(out + k * kLanes, scaled(decode<kCode>(v[w] >> (i * kBits)), k));
      }
    }
  }

  /// The scales of `count` blocks of one row from block `first` on, `stride` floats apart.
  static void load_scales(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t row, int64_t first,
                          int64_t count, float* out, int64_t stride) {
    const uint8_t* scales = scales_of_row(operand, rows, batch, row) + first * operand.format.scale_bytes();
    if (operand.format.scaling == Scaling::kE8M0)
      decode_scales(scales, count, e8m0_decode<F32>, out, stride);
    else
      for (int64_t b = 0; b < count; ++b) memcpy(out + b * stride, scales + 4 * b, 4);
  }

  static void load_rows(const Part& part, int64_t k, int64_t depth) {
    const MatmulOperand& a = part.p.a;
    for (int64_t i = 0; i < part.range.rows; ++i) {
      const int64_t row = part.range.first_row + i;
      const int64_t stride = a.format.row_bytes(a.columns);
      const uint8_t* data = a.data + (part.batch * part.p.rows + row) * stride + bytes_of(a, k);
      if (i + kAhead < part.range.rows) prefetch(data + kAhead * stride, bytes_of(a, depth));
      float *out = part.rows + i * kStep, *scales = part.rows_scale + i * kMaxBlocks;
      if (part.scaled_blocks())
        load_scales(a, part.p.rows, part.batch, row, k / a.format.block, a.format.blocks(depth), scales, 1);
      with_code(a.format.code, [&](auto code) {
        if (a.format.scaling == Scaling::kE8M0)
          unpack_row<decltype(code)::value>(data, bytes_of(a, depth), RowScaled{scales}, out);
        else
          unpack_row<decltype(code)::value>(data, bytes_of(a, depth), Unscaled{}, out);
      });
    }
  }

  static void load_panel(const Part& part, int64_t vector, int64_t vectors, int64_t k, int64_t depth) {
    const MatmulOperand& b = part.p.b;
    const int64_t stride = b.format.row_bytes(b.columns);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t column = (vector + v) * kLanes, row = part.range.first_column + column;
      const int64_t rows = std::clamp<int64_t>(part.range.columns - column, 0, kLanes);
      const uint8_t* data = b.data + (part.batch * part.p.columns + row) * stride + bytes_of(b, k);
      for (int64_t r = kLanes; v + 1 < vectors && r < 2 * kLanes && column + r < part.range.columns; ++r)
        prefetch(data + r * stride, bytes_of(b, depth));
      float *out = part.panel + v * kStep * kLanes, *scales = part.panel_scale + v * kMaxBlocks * kLanes;
      for (int64_t r = 0; part.scaled_blocks() && r < rows; ++r)
        load_scales(b, part.p.columns, part.batch, row + r, k / b.format.block, b.format.blocks(depth), scales + r, kLanes);
      with_code(b.format.code, [&](auto code) {
        if (b.format.scaling == Scaling::kE8M0)
          unpack_vector<decltype(code)::value>(data, stride, rows, bytes_of(b, depth), RowsScaled{scales}, out);
        else
          unpack_vector<decltype(code)::value>(data, stride, rows, bytes_of(b, depth), Unscaled{}, out);
      });
    }
  }

  // --- one tile

  /// sums += a * b over `depth` elements of K, one after the other.
  template <Sum kSum, int kCount, int kWidth>
  JLP_RULE void add_products(const float* a, const float* b, int64_t depth, F32 (&sums)[kCount][kWidth]) {
    for (int64_t k = 0; k < depth; ++k) {
      F32 vectors[kWidth];
      JLP_UNROLL(8)
      for (int v = 0; v < kWidth; ++v) vectors[v] = load<F32>(b + (v * kStep + k) * kLanes);
      JLP_UNROLL(12)
      for (int r = 0; r < kCount; ++r) {
        const F32 number = L::splat(a[r * kStep + k]);
        JLP_UNROLL(8)
        for (int v = 0; v < kWidth; ++v)
          sums[r][v] = kSum == Sum::kFused ? L::fused_multiply_add_short(number, vectors[v], sums[r][v])
                                           : L::multiply_add_exact(number, vectors[v], sums[r][v]);
      }
    }
  }

  /// kCount rows from `row` on by kWidth vectors of the panel from `at` on, which lies at `vector` in y.
  template <Sum kSum, int kCount, int kWidth>
  __attribute__((noinline)) static void multiply_tile(const Part& part, int64_t row, int64_t vector, int64_t at,
                                                      int64_t depth) {
    const float* a = part.rows + row * kStep;
    const float* b = part.panel + at * kStep * kLanes;
    const float* a_scale = part.rows_scale + row * kMaxBlocks;
    const float* b_scale = part.panel_scale + at * kMaxBlocks * kLanes;
    float* y = part.y + ((vector + at) * part.range.rows + row) * kLanes;
    constexpr bool kBlocks = kSum == Sum::kBlock;
    const int64_t stride = part.range.rows * kLanes, size = kBlocks ? part.p.a.format.block : depth;
    for (int64_t k = 0; k < depth; k += size, ++a_scale, b_scale += kLanes) {
      F32 sums[kCount][kWidth];
      for (int r = 0; r < kCount; ++r)
        for (int v = 0; v < kWidth; ++v) sums[r][v] = kBlocks ? F32{} : load<F32>(y + v * stride + r * kLanes);
      add_products<kSum, kCount, kWidth>(a + k, b + k * kLanes, std::min(size, depth - k), sums);
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

  /// A tile of 1 to kMost rows.
  template <Sum kSum, int kMost>
  static void multiply_rows(const Part& part, int64_t row, int64_t vector, int64_t at, int64_t depth) {
    if constexpr (kMost > 1)
      if (part.range.rows - row < kMost) return multiply_rows<kSum, kMost - 1>(part, row, vector, at, depth);
    multiply_tile<kSum, kMost, kVectors>(part, row, vector, at, depth);
  }

  /// Few rows take wider tiles, so that there are enough independent sums.
  template <Sum kSum>
  static void multiply_panel(const Part& part, int64_t vector, int64_t vectors, int64_t depth) {
    const int64_t rows = part.range.rows;
    for (int64_t at = 0; at < vectors;) {
      if (rows == 1 && vectors - at >= 8) {
        multiply_tile<kSum, 1, 8>(part, 0, vector, at, depth), at += 8;
      } else if (rows == 2 && vectors - at >= 4) {
        multiply_tile<kSum, 2, 4>(part, 0, vector, at, depth), at += 4;
      } else {
        for (int64_t row = 0; row < rows; row += kRows) multiply_rows<kSum, kRows>(part, row, vector, at, depth);
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
    for (int64_t column = 0; column < part.range.columns; column += kColumns) {
      const float* y = part.y + column * part.range.rows;
      const MatmulRange range = {part.range.first_row, part.range.rows, part.range.first_column + column,
                                 std::min(kColumns, part.range.columns - column)};
      finish_range(p, part.batch, range, [&](int64_t r, int64_t v) {
        return (load<F32>(y + (v * part.range.rows + r) * kLanes) * a_scale) * b_scale;
      });
    }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
