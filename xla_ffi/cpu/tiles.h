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

/// Elements of a chunk of a matrix of so many that are read one after another. Where a chunk begins, nothing has been
/// fetched ahead, so chunks are long; yet there are enough of them for many threads.
inline int64_t elements_of_chunk(int64_t elements) {
  constexpr int64_t kStep = 32 * 1024, kMost = 16 * kStep, kEnough = 64;
  return std::clamp(elements / kEnough / kStep * kStep, kStep, kMost);
}

/// How a matrix that is only quantised along its rows is cut into chunks: runs of whole rows; or of elements as of one long
/// row, where blocks are whole and, without random bits, need not know their row.
class RowRuns {
 public:
  RowRuns(const QuantizeProblem& p, bool stochastic)
      : one_row_(!stochastic && p.columns % p.format.block == 0),
        rows_(one_row_ ? 1 : p.rows),
        columns_(one_row_ ? p.rows * p.columns : p.columns),
        each_(elements_of_chunk(p.rows * p.columns)) {}

  int64_t count() const { return one_row_ ? divide_up(columns_, each_) : divide_up(rows_, rows_each()); }

  /// Calls visit(row, first column, columns) for the parts of a chunk.
  template <class Visit>
  void visit(int64_t chunk, Visit visit) const {
    if (one_row_) return visit(0, chunk * each_, std::min(each_, columns_ - chunk * each_));
    for (int64_t row = chunk * rows_each(); row < std::min((chunk + 1) * rows_each(), rows_); ++row) visit(row, 0, columns_);
  }

 private:
  int64_t rows_each() const { return std::max<int64_t>(1, each_ / std::max<int64_t>(columns_, 1)); }

  bool one_row_;
  int64_t rows_, columns_, each_;
};

/// One number a block, for the lanes of the j-th 2 * kLanes elements of a packet: a block is 8 lanes of pairs.
JLP_RULE F32 expand_blocks(const float* per_block, int j) {
  if (kLanes <= 8) return L::splat(per_block[j * kLanes / 8]);
  F32 factors;
  for (int i = 0; i < kLanes; ++i) factors[i] = per_block[(j * kLanes + i) / 8];
  return factors;
}

/// Elements that will be read soon and that the processor does not fetch ahead by itself: kPackets packets every `stride`.
/// Fetching them a packet at a time, while others are worked on, leaves room for other loads.
template <class E, int kPackets = 1>
struct PacketsAhead {
  const typename E::Storage* x;
  int64_t stride;

  /// The elements `rows` rows further down.
  PacketsAhead down(int rows) const { return {x + rows * stride, stride}; }

  /// The g-th packet of them.
  void fetch(int g) const { fetch_part(g / kPackets, g % kPackets * kPacket, kPacket); }

  /// `count` elements of a row from `first` on.
  void fetch_part(int row, int first, int count) const {
    const auto* from = reinterpret_cast<const char*>(x + row * stride + first);
    for (size_t line = 0; line < count * sizeof *x; line += 64) __builtin_prefetch(from + line);
  }
};

/// kRows rows of kColumns elements, copied so that they lie together (rows of a matrix whose stride is a power of two fall
/// into the same few cache sets) and padded with zeros where the matrix ends.
///
/// kFetchesAhead: rows of the next slab are fetched into the cache; not for a matrix that is there
/// already, or that the caller fetches.
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
      : Staged(matrix, matrix_rows, matrix_columns, row, column, kRows) {}

  /// The first `count` rows; `take` has to take the others.
  Staged(const Storage* matrix, int64_t matrix_rows, int64_t matrix_columns, int64_t row, int64_t column, int count)
      : Staged(matrix_rows, matrix_columns, row, column) {
    source_ = matrix + row * matrix_columns + column, stride_ = matrix_columns;
    take(0, count);
  }

  /// Rows from `first` on.
  void take(int first, int count) {
    if (rows == kRows && columns == kColumns) {
      for (int r = first; r < first + count; ++r) {
        const Storage* from = source_ + r * stride_;
        for (size_t line = 0; kFetchesAhead && line < sizeof x[r]; line += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(from + kBlock * stride_) + line);
        for (int i = 0; i < kColumns; i += static_cast<int>(JLP_VECTOR_BYTES / sizeof(Storage)))
          store(&x[r][i], load<U32>(from + i));
      }
    } else {
      for (int r = first; r < std::min(first + count, rows); ++r)
        memcpy(x[r], source_ + r * stride_, columns * sizeof(Storage));
    }
  }

 private:
  const Storage* source_ = nullptr;
  int64_t stride_ = 0;
};

template <class E>
using Slab = Staged<E, kBlock, kPacket>;
template <class E>
using CachedSlab = Staged<E, kBlock, kPacket, false>;

}  // namespace JLP_ISA
}  // namespace jaxlowprec
