// Cutting a matrix into tiles and slabs of rows; ragged ones are copied into a zero-padded buffer, so that the kernels only
// ever see whole ones.
#pragma once

#include <algorithm>

#include "elements.h"

namespace jaxlowprec {
namespace JLP_ISA {

constexpr int kBlock = 16;  // elements whose maximum, random bytes or dot product come together: a block of NVFP4
constexpr int kPacket = kBlock * kLanes;  // elements of a row handled at once: a block per lane
constexpr int kPairs = 8;                 // vectors of 2 * kLanes elements in a packet
constexpr int kSpan = 16;                 // packets of a row whose scales are computed ahead of their codes
constexpr int kSlabs = 8;                 // slabs of a tile: 128 rows, so that a K-major line of 4-bit codes is 64 bytes
constexpr int kColumnTileRows = kSlabs * kBlock;

JLP_RULE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// How a matrix that is only quantised along its rows is cut into chunks: runs of whole rows; or of elements as of one long
/// row, where blocks are whole and, without random bits, need not know their row.
class RowRuns {
 public:
  RowRuns(const QuantizeProblem& p, bool stochastic)
      : one_row_(!stochastic && p.columns % p.format.block == 0),
        rows_(one_row_ ? 1 : p.rows),
        columns_(one_row_ ? p.rows * p.columns : p.columns) {}

  int64_t count() const { return one_row_ ? divide_up(columns_, kElements) : divide_up(rows_, rows_each()); }

  /// Calls visit(row, first column, columns) for the parts of a chunk.
  template <class Visit>
  void visit(int64_t chunk, Visit visit) const {
    if (one_row_) return visit(0, chunk * kElements, std::min(kElements, columns_ - chunk * kElements));
    for (int64_t row = chunk * rows_each(); row < std::min((chunk + 1) * rows_each(), rows_); ++row) visit(row, 0, columns_);
  }

 private:
  static constexpr int64_t kElements = 32 * 1024;
  int64_t rows_each() const { return std::max<int64_t>(1, kElements / std::max<int64_t>(columns_, 1)); }

  bool one_row_;
  int64_t rows_, columns_;
};

/// One number a block, for the lanes of the j-th 2 * kLanes elements of a packet: a block is 8 lanes of pairs.
JLP_RULE F32 expand_blocks(const float* per_block, int j) {
  if (kLanes <= 8) return L::splat(per_block[j * kLanes / 8]);
  F32 factors;
  for (int i = 0; i < kLanes; ++i) factors[i] = per_block[(j * kLanes + i) / 8];
  return factors;
}

/// kRows rows of kColumns elements, copied so that they lie together (rows of a matrix whose stride is a power of two fall
/// into the same few cache sets) and padded with zeros where the matrix ends.
///
/// kFetchesAhead: rows of the next slab are fetched into the cache; not for a matrix that is there already.
template <class E, int kRows, int kColumns, bool kFetchesAhead = true>
struct Staged {
  using Storage = typename E::Storage;

  int rows, columns;  // that exist
  alignas(64) Storage x[kRows][kColumns];

  /// Whose elements are still to be stored; those beyond the matrix are zero.
  Staged(int64_t matrix_rows, int64_t matrix_columns, int64_t row, int64_t column)
      : rows(static_cast<int>(std::min<int64_t>(kRows, matrix_rows - row))),
        columns(static_cast<int>(std::min<int64_t>(kColumns, matrix_columns - column))) {
    if (rows < kRows || columns < kColumns) memset(x, 0, sizeof x);
  }

  Staged(const Storage* matrix, int64_t matrix_rows, int64_t matrix_columns, int64_t row, int64_t column)
      : Staged(matrix_rows, matrix_columns, row, column) {
    const Storage* source = matrix + row * matrix_columns + column;
    if (rows == kRows && columns == kColumns) {
      for (int r = 0; r < kRows; ++r) {
        const Storage* from = source + r * matrix_columns;
        for (size_t line = 0; kFetchesAhead && line < sizeof x[r]; line += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(from + kBlock * matrix_columns) + line);
        for (int i = 0; i < kColumns; i += static_cast<int>(JLP_VECTOR_BYTES / sizeof(Storage)))
          store(&x[r][i], load<U32>(from + i));
      }
    } else {
      for (int r = 0; r < rows; ++r) memcpy(x[r], source + r * matrix_columns, columns * sizeof(Storage));
    }
  }
};

template <class E>
using Slab = Staged<E, kBlock, kPacket>;
template <class E>
using CachedSlab = Staged<E, kBlock, kPacket, false>;

}  // namespace JLP_ISA
}  // namespace jaxlowprec
