// Rows of a quantised weight, 32 numbers at a time as one of the `Operands` (operands.h): codes times block scales, exact
// (of Int4 as its scale's type rounds it, of Float8Block as float32 does). The tensor scale, where there is one, is not in.
//
// run_length() is how many numbers share a prepared table or factor. run(i) prepares the i-th run; its unpack() gives 32
// numbers.
#pragma once

#include "../../numerics/row_scales.h"
#include "../matmul/matmul_chunks.h"
#include "unpack_nibbles.h"
#if defined(JLP_ISA_AVX512_BF16)
#include "unpack_pairs.h"
#endif

namespace jaxlowprec {
namespace JLP_ISA {

/// The base of every kind of row. Constructors are always inlined: with few rows of x
/// they are a noticeable part of the time.
struct WeightRow {
  using Operands = Numbers;
  static constexpr int kMostTogether = 8;  // rows that are unpacked together; fewer where each takes more registers
  static constexpr bool kByLines = false;  // whether 128 codes unpack together, with few rows of x

  const uint8_t* codes;
  int64_t bytes;  // of codes
  const uint8_t* scales;
  int32_t block;

  __attribute__((always_inline)) WeightRow(const WeightOnlyProblem& p, int64_t batch, int64_t row)
      : bytes(p.weight.data_stride()), scales(scales_of_row(p.weight, p.columns, batch, row)), block(p.weight.format.block) {
    codes = p.weight.data + (batch * p.columns + row) * bytes;
  }
  JLP_RULE constexpr int64_t byte_of(int64_t k) { return k >> 1; }
};

/// Int4 with groups of whole 32s and scales of type E: one table of 16 numbers a group.
template <class E>
struct Int4Row : WeightRow {
  static constexpr bool kInRegisters = true;
  const uint8_t* zeros;

  __attribute__((always_inline)) Int4Row(const WeightOnlyProblem& p, int64_t batch, int64_t row)
      : WeightRow(p, batch, row), zeros(nullptr) {
    if (p.zero_point) zeros = p.zero_point + (scales - p.weight.scale) / 2;
  }
  int64_t run_length() const { return block; }

  struct Run {
    NibbleTable<E> table;
    const uint8_t* codes;
    __attribute__((always_inline)) void unpack(int64_t k, Sixteen (&w)[2]) const { table.unpack(codes + (k >> 1), w); }
  };
  __attribute__((always_inline)) Run run(int64_t group) const {
    const uint16_t scale = load<uint16_t>(scales + 2 * group);
    const uint8_t zero = zeros ? zeros[group] : kInt4Middle;
#if defined(JLP_ISA_AVX2)
    if constexpr (std::is_same_v<E, BF16>) return {tables.table(scale, zero), codes};
#endif
    return {NibbleTable<E>::of_int4(scale, zero), codes};
  }

#if defined(JLP_ISA_AVX2)
 private:
  const Int4Tables& tables = Int4Tables::all();
#endif
};

#if defined(JLP_ISA_AVX512)
/// Symmetric Int4Row whose bfloat16 scales are all moderate: its tables take a third of the time. With one row of x that is
/// a tenth of the whole.
struct Int4ModerateRow : Int4Row<BF16> {
  using Int4Row::Int4Row;

  /// Whether rows from `first` on are such.
  static bool fits(const WeightOnlyProblem& p, int64_t batch, int64_t first, int64_t rows) {
    const uint8_t* scales = scales_of_row(p.weight, p.columns, batch, first);
    return !p.zero_point && NibbleTable<BF16>::all_moderate(scales, rows * p.weight.scale_stride() / 2);
  }

  struct Run {
    NibbleTable<BF16> table;
    const uint8_t* codes;
    __attribute__((always_inline)) void unpack(int64_t k, Sixteen (&w)[2]) const { table.unpack(codes + (k >> 1), w); }
  };
  __attribute__((always_inline)) Run run(int64_t group) const {
    return {NibbleTable<BF16>::of_moderate_scale(load<uint16_t>(scales + 2 * group)), codes};
  }
};
#endif

/// Its other group sizes: a scale per element.
template <class E>
struct Int4AnyGroupRow : Int4Row<E> {
  static constexpr bool kInRegisters = false;
  int64_t depth;

  Int4AnyGroupRow(const WeightOnlyProblem& p, int64_t batch, int64_t row) : Int4Row<E>(p, batch, row), depth(p.depth) {}
  int64_t run_length() const { return INT64_MAX; }

  struct Run {
    const Int4AnyGroupRow& row;
    void unpack(int64_t k, Sixteen (&w)[2]) const {
      for (int half = 0; half < 2; ++half, k += kSums) {
        F32 numbers[kParts] = {};
        for (int i = 0; i < kSums && k + i < row.depth; ++i) {  // bytes may hold one nibble more, which has no scale
          const int64_t group = (k + i) / row.block;
          const float step = static_cast<float>(row.codes[(k + i) / 2] >> (k + i) % 2 * 4 & 15);
          const float scale = int4_decode_scale<float, Int4DeployOf<E>>(load<uint16_t>(row.scales + 2 * group));
          numbers[i / kLanes][i % kLanes] = (step - (row.zeros ? row.zeros[group] : kInt4Middle)) * scale;
        }
        for (F32& part : numbers) part = E::round_finite(L::flush(part));
        w[half] = arrange(numbers);
      }
    }
  };
  Run run(int64_t) const { return {*this}; }
};

/// E2M1 with an E4M3 scale for 16 codes or a power of two for 32: a ready-made table for each.
template <int kCodes, class Tables = E2M1Tables>
struct E2M1Row : WeightRow {
  using Operands = typename Tables::Operands;
  static constexpr int kMostTogether = kCodes == kSums ? 4 : 8;
  static constexpr bool kByLines = Operands::kPerUnit == 2;
  static constexpr bool kInRegisters = true;
  static constexpr int64_t kRun = 512;
  const Tables& tables = kCodes == kSums ? Tables::e4m3() : Tables::e8m0();
  __attribute__((always_inline)) E2M1Row(const WeightOnlyProblem& p, int64_t batch, int64_t row)
      : WeightRow(p, batch, row) {}
  int64_t run_length() const { return kRun; }

  struct Run {
    const Tables& tables;
    const uint8_t *codes, *scales;
    uint8_t padded[kCodes == kSums ? kRun / 2 + kRun / kCodes : 1];

    Run(const E2M1Row& row, int64_t k) : tables(row.tables), codes(row.codes + k / 2), scales(row.scales + k / kCodes) {
      if constexpr (kCodes == kSums) {  // an odd number of blocks: not to read beyond the last
        const int64_t left = row.bytes - k / 2;
        if (left < kRun / 2 && left % (kUnpacked / 2) != 0) {
          memset(padded, 0, sizeof padded);
          memcpy(padded, codes, left), memcpy(padded + kRun / 2, scales, left / (kCodes / 2));
          codes = padded, scales = padded + kRun / 2;
        }
      }
    }
    Run(const Run&) = delete;  // it may point into itself

    __attribute__((always_inline)) void unpack(int64_t k, Sixteen (&w)[2]) const {
      const uint8_t* scale = scale_at(k);
      if constexpr (kCodes == kSums)
        tables.unpack(scale[0], scale[1], code_at(k), w);
      else
        tables.unpack(scale[0], code_at(k), w);
    }
#if defined(JLP_ISA_AVX512_BF16)
    __attribute__((always_inline)) void unpack(int64_t k, U32& pairs) const { look_up(k, pair_indices(code_at(k)), pairs); }
    __attribute__((always_inline)) CodeLine line(int64_t k) const { return CodeLine(code_at(k)); }
    __attribute__((always_inline)) void look_up(int64_t k, __m512i indices, U32& pairs) const {
      const uint8_t* scale = scale_at(k);
      if constexpr (kCodes == kSums)
        pairs = tables.pairs(scale[0], scale[1], indices);
      else
        pairs = tables.pairs(scale[0], indices);
    }
#endif

   private:
    JLP_RULE uint64_t place(int64_t k) { return static_cast<uint64_t>(k) % kRun; }
    __attribute__((always_inline)) const uint8_t* code_at(int64_t k) const { return codes + place(k) / 2; }
    __attribute__((always_inline)) const uint8_t* scale_at(int64_t k) const { return scales + place(k) / kCodes; }
  };
  __attribute__((always_inline)) Run run(int64_t index) const { return Run(*this, index * kRun); }
};

/// 8-bit codes, floats of any scaling or integers; blocks are of whole 32s.
template <class Element>
struct ByteRow : WeightRow {
  static constexpr bool kInRegisters = true;
  Scaling scaling;

  __attribute__((always_inline)) ByteRow(const WeightOnlyProblem& p, int64_t batch, int64_t row)
      : WeightRow(p, batch, row), scaling(p.weight.format.scaling) {}
  JLP_RULE constexpr int64_t byte_of(int64_t k) { return k; }
  bool has_blocks() const { return scaling != Scaling::kTensor && scaling != Scaling::kRows; }
  int64_t run_length() const { return has_blocks() ? block : INT64_MAX; }

  struct Run {
    const uint8_t* codes;
    int64_t bytes;
    F32 factor;

    __attribute__((always_inline)) void unpack(int64_t k, Sixteen (&w)[2]) const {
      const uint8_t* from = codes + k;
      uint8_t padded[kUnpacked];
      if (__builtin_expect(k + kUnpacked > bytes, false)) {
        memset(padded, 0, kUnpacked);
        memcpy(padded, from, bytes - k);
        from = padded;
      }
      JLP_UNROLL(2)
      for (int half = 0; half < 2; ++half) {
        F32 numbers[kParts];
        JLP_UNROLL(4)
        for (int i = 0; i < kParts; ++i) {
          const U32 code = load_u8(from + half * kSums + i * kLanes);
          if constexpr (std::is_same_v<Element, Int8>)
            numbers[i] = int8_decode<F32>(code);
          else
            numbers[i] = L::flush(float8_decode<Element, F32>(code) * factor);
        }
        w[half] = arrange(numbers);
      }
    }
  };
  __attribute__((always_inline)) Run run(int64_t index) const { return {codes, bytes, L::splat(scale(index))}; }

 private:
  float scale(int64_t block) const {
    if (!has_blocks()) return 1.0f;
    if (scaling == Scaling::kE8M0) return e8m0_decode<float>(scales[block]);
    return Lanes<float>::flush(load<float>(scales + 4 * block));
  }
};

#if defined(JLP_ISA_AVX512_BF16)
/// Int4 with groups of whole 32s and bfloat16 scales.
struct Int4PairRow : Int4Row<BF16> {
  using Operands = Pairs;
  using Int4Row::Int4Row;
  static constexpr bool kByLines = true;

  struct Run {
    NibblePairTable table;
    const uint8_t* codes;
    __attribute__((always_inline)) void unpack(int64_t k, U32& pairs) const {
      look_up(k, pair_indices(codes + (k >> 1)), pairs);
    }
    __attribute__((always_inline)) CodeLine line(int64_t k) const { return CodeLine(codes + (k >> 1)); }
    __attribute__((always_inline)) void look_up(int64_t, __m512i indices, U32& pairs) const { pairs = table.pairs(indices); }
  };
  __attribute__((always_inline)) Run run(int64_t group) const {
    return {NibblePairTable(load<uint16_t>(scales + 2 * group), zeros ? zeros + group : nullptr), codes};
  }
};

/// Another kind of row, whose numbers bfloat16 holds exactly.
template <class Row>
struct PairsOf : Row {
  using Operands = Pairs;
  using Row::Row;

  struct Run {
    typename Row::Run run;
    __attribute__((always_inline)) void unpack(int64_t k, U32& pairs) const {
      Sixteen w[2];
      run.unpack(k, w);
      pairs = Pairs::of_numbers(w);
    }
  };
  __attribute__((always_inline)) Run run(int64_t index) const { return {Row::run(index)}; }
};

/// 8-bit codes of tensors, or with an E8M0 scale for 32 of them.
template <class Element>
struct Float8PairRow : ByteRow<Element> {
  using Operands = Pairs;
  static constexpr int kMostTogether = 4;
  const PairTable<Element>& table = PairTable<Element>::get();
  const uint8_t* scale_bytes;
  int64_t last_scale;

  __attribute__((always_inline)) Float8PairRow(const WeightOnlyProblem& p, int64_t batch, int64_t row)
      : ByteRow<Element>(p, batch, row) {
    const bool blocks = this->has_blocks();
    scale_bytes = blocks ? this->scales : &kNoScale, last_scale = blocks ? INT64_MAX : 0;
  }
  int64_t run_length() const { return INT64_MAX; }

  struct Run {
    const Float8PairRow& row;

    __attribute__((always_inline)) void unpack(int64_t k, U32& pairs) const {
      const int32_t exponent = row.scale_bytes[std::min(k / kUnpacked, row.last_scale)] - kNoScale;
      const bool moderate = exponent >= -kMost && exponent <= kMost;
      if (__builtin_expect(!moderate || k + kUnpacked > row.bytes, false)) {
        uint32_t stored[kSums];  // through memory, so that g++ keeps the callers' vectors in registers
        row.unpack_any(k, stored);
        pairs = load<U32>(stored);
        return;
      }
      pairs = scale_pairs(decode_pairs(row.codes + k, row.table), exponent);
    }
  };
  __attribute__((always_inline)) Run run(int64_t) const { return {*this}; }

 private:
  static constexpr uint8_t kNoScale = 127;  // 2^0
  static constexpr int32_t kMost = 100;     // of an exponent, with which no number of 8 bits leaves bfloat16's range

  __attribute__((noinline, cold)) void unpack_any(int64_t k, uint32_t* out) const {
    Sixteen w[2];
    ByteRow<Element>::run(k / ByteRow<Element>::run_length()).unpack(k, w);
    store(out, Pairs::of_numbers(w));
  }
};
#endif

template <class Row>
struct Kind {
  using type = Row;
};

/// Calls visit with the kind of a weight's rows.
template <class Visit>
auto with_weight_rows(const Format& format, Visit visit) {
#if defined(JLP_ISA_AVX512_BF16)  // as pairs
  switch (format.code) {
    case CodeType::kInt4:
      return format.block % kUnpacked == 0 ? visit(Kind<Int4PairRow>{}) : visit(Kind<PairsOf<Int4AnyGroupRow<BF16>>>{});
    case CodeType::kE2M1:
      return format.scaling == Scaling::kTwoLevel ? visit(Kind<E2M1Row<16, E2M1PairTables>>{})
                                                  : visit(Kind<E2M1Row<32, E2M1PairTables>>{});
    case CodeType::kInt8: return visit(Kind<PairsOf<ByteRow<Int8>>>{});
    default: return with_float8(format.code, [&](auto element) { return visit(Kind<Float8PairRow<decltype(element)>>{}); });
  }
#else  // as float32
  const auto int4 = [&](auto element) {
    using E = decltype(element);
    return format.block % kUnpacked == 0 ? visit(Kind<Int4Row<E>>{}) : visit(Kind<Int4AnyGroupRow<E>>{});
  };
  switch (format.code) {
    case CodeType::kInt4: return format.scale_type == ElementType::kF16 ? int4(F16{}) : int4(BF16{});
    case CodeType::kE2M1:
      return format.scaling == Scaling::kTwoLevel ? visit(Kind<E2M1Row<16>>{}) : visit(Kind<E2M1Row<32>>{});
    case CodeType::kInt8: return visit(Kind<ByteRow<Int8>>{});
    default: return with_float8(format.code, [&](auto element) { return visit(Kind<ByteRow<decltype(element)>>{}); });
  }
#endif
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
