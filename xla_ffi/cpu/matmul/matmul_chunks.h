// Shared by both families of GEMM kernels: cutting the result into chunks, prefetching codes before they are unpacked, and
// finding the scales of a row.
#pragma once

#include <algorithm>

#include "../../problems.h"
#include "../elements.h"
#include "../tiles.h"

namespace jaxlowprec {
namespace JLP_ISA {

struct MatmulSteps {
  int64_t rows, columns;
};

struct MatmulRange {
  int64_t first_row, rows, first_column, columns;
};

/// Chunks of about `most` rows and columns, fewer where that would not make enough chunks for the threads: the longer side
/// is halved, down to `least`, since each chunk unpacks its own rows and columns. Ranges are alike in
/// size and whole multiples of a tile, which divides `least`.
class MatmulChunks {
 public:
  MatmulChunks(const MatmulResult& p, MatmulSteps most, MatmulSteps least, MatmulSteps tile)
      : rows_(p.rows), columns_(p.columns) {
    while (true) {
      row_step_ = even_step(p.rows, most.rows, tile.rows), column_step_ = even_step(p.columns, most.columns, tile.columns);
      row_ranges_ = divide_up(p.rows, row_step_), column_ranges_ = divide_up(p.columns, column_step_);
      if (p.batch * per_matrix() >= kChunksPerThread * p.threads) return;
      const bool rows = most.rows > least.rows, columns = most.columns > least.columns;
      if (columns && (!rows || column_step_ >= row_step_))
        most.columns /= 2;
      else if (rows)
        most.rows /= 2;
      else
        return;
    }
  }
  int64_t per_matrix() const { return row_ranges_ * column_ranges_; }
  MatmulRange range(int64_t chunk) const {
    const int64_t row = chunk / column_ranges_ * row_step_, column = chunk % column_ranges_ * column_step_;
    return {row, std::min(row_step_, rows_ - row), column, std::min(column_step_, columns_ - column)};
  }

 private:
  static constexpr int64_t kChunksPerThread = 4;  // one that starts late leaves its share to the others

  static int64_t even_step(int64_t size, int64_t most, int64_t tile) {
    return divide_up(divide_up(size, divide_up(size, most)), tile) * tile;
  }

  int64_t rows_, columns_, row_step_, column_step_, row_ranges_, column_ranges_;
};

/// The prefetch hint for codes that are read once. Intel's processors, which have AMX, take those into the first cache only,
/// which a panel's codes overflow: there they are wanted in the second.
#if defined(JLP_ISA_AVX512_AMX)
constexpr int kLocalityOfCodes = 2;
#else
constexpr int kLocalityOfCodes = 0;
#endif

/// Rows of codes that are unpacked next, brought near a few lines at a time while others are multiplied: rows that lie apart
/// the processor does not see coming, and all at once are more than it has in flight.
template <int kLines>  // that are asked for together
class Ahead {
 public:
  Ahead() = default;
  /// `bytes` of each of `rows` and, where it is there, the line that the scales of each begin in; by `calls` of fetch.
  Ahead(const uint8_t* data, int64_t stride, int64_t bytes, const uint8_t* scales, int64_t scale_stride, int64_t rows,
        int64_t calls)
      : data_(data),
        scales_(scales),
        stride_(stride),
        bytes_(bytes),
        scale_stride_(scale_stride),
        rows_(rows),
        pieces_(divide_up(rows * divide_up(bytes, 64 * kLines), calls)) {}

  __attribute__((always_inline)) void fetch() {
    for (int64_t i = 0; i < pieces_ && rows_ > 0; ++i) {
      JLP_UNROLL(8)
      for (int line = 0; line < kLines; ++line) __builtin_prefetch(data_ + at_ + 64 * line, 0, kLocalityOfCodes);
      if ((at_ += 64 * kLines) < bytes_) continue;
      if (scales_) __builtin_prefetch(scales_, 0, 3), scales_ += scale_stride_;
      data_ += stride_, at_ = 0, --rows_;
    }
  }

 private:
  const uint8_t *data_ = nullptr, *scales_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0, scale_stride_ = 0, rows_ = 0, pieces_ = 0, at_ = 0;
};

/// Up to 16 bytes, as many as there mostly are without asking how many.
JLP_RULE void copy_few(void* to, const void* from, int64_t count) {
  if (count == 16)
    memcpy(to, from, 16);
  else if (count == 8)
    memcpy(to, from, 8);
  else
    memcpy(to, from, count);
}

/// The stored scales of one row's blocks; `rows` is the number of the operand's rows.
JLP_RULE const uint8_t* scales_of_row(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t row) {
  const Format& format = operand.format;
  const int64_t scale_row = batch * format.scale_rows(rows) + (format.tiles ? row / format.block : row);
  return operand.scale + scale_row * operand.scale_stride();
}

/// The scales of `count` rows from `row` on that have one each (Scaling::kRows).
inline void load_scales_of_lines(const MatmulOperand& operand, int64_t rows, int64_t batch, int64_t row, int64_t count,
                                 float* out) {
  const ElementType type = operand.format.scale_type;
  const uint8_t* from = scales_of_row(operand, rows, batch, row);
  for (int64_t i = 0; i < count; ++i, from += operand.scale_stride()) {
    uint32_t bits = 0;
    memcpy(&bits, from, element_bytes(type));
    out[i] = type == ElementType::kF32    ? Lanes<float>::from_bits(bits)
             : type == ElementType::kBF16 ? bf16_decode<float>(bits)
                                          : f16_decode<float>(bits);
  }
}

/// Scales of one byte of kLanes rows of b, those from `row` on, decoded: a vector for each of `count` blocks from `first`
/// on, `stride` floats apart. Lanes beyond `rows` get those of zero bytes.
template <class Decode>
JLP_RULE void decode_scales_of_lanes(const MatmulOperand& operand, int64_t operand_rows, int64_t batch, int64_t row,
                                     int64_t rows, int64_t first, int64_t count, Decode decode, float* out, int64_t stride) {
  for (int64_t b = 0; b < count; b += 16) {
    const int64_t n = std::min<int64_t>(16, count - b);
    Bytes16 v[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      v[r] = Bytes16{};
      if (r < rows) copy_few(&v[r], scales_of_row(operand, operand_rows, batch, row + r) + first + b, n);
    }
    transpose(v);  // block by block
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(v);
    for (int64_t i = 0; i < n; ++i) store(out + (b + i) * stride, decode(load_u8(bytes + i * kLanes)));
  }
}

/// Scales of one byte, decoded, `stride` floats apart.
template <class Decode>
JLP_RULE void decode_scales(const uint8_t* scale, int64_t count, Decode decode, float* out, int64_t stride) {
  for (int64_t b = 0; b < count; b += kLanes) {
    if (stride == 1 && count - b >= kLanes) {
      store(out + b, decode(load_u8(scale + b)));
      continue;
    }
    const int n = static_cast<int>(std::min<int64_t>(kLanes, count - b));
    alignas(16) uint8_t bytes[16] = {};
    copy_few(bytes, scale + b, n);
    alignas(64) float decoded[kLanes];
    store(decoded, decode(load_u8(bytes)));
    for (int i = 0; i < n; ++i) out[(b + i) * stride] = decoded[i];
  }
}

}  // namespace JLP_ISA
}  // namespace jaxlowprec
