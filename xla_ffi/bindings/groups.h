// Rows that are divided into groups, one for each expert, by sizes that only the device knows: the tokens of a mixture of
// experts, sorted. A handler makes one problem a group and runs them together.
//
// Columnwise, the blocks of group e begin at slot e + (its first row) / block: blocks are never shared by groups, and there
// are rows / block + groups slots, however the rows are divided. Packed codes lie in slots, as scales do; 8-bit codes lie as
// the rows do.
#pragma once

#include <algorithm>
#include <vector>

#include "buffers.h"

namespace jaxlowprec {

struct Group {
  int64_t batch, index;  // of the matrix, and of the group counted through all matrices
  int64_t row, rows;     // its first, within the matrix
  int64_t number;        // within the matrix

  int64_t slot(int64_t block) const { return number + row / block; }
};

inline int64_t slots(int64_t rows, int64_t groups, int64_t block) { return rows / block + groups; }

/// Rows after the last group's belong to no group. Sizes below 0 count as 0, and groups end with the rows.
class Groups {
 public:
  /// `sizes` [batch..., groups].
  Groups(const ffi::AnyBuffer& sizes, int64_t rows) : rows_(rows) {
    const auto dims = sizes.dimensions();
    count_ = dims.size() > 0 ? dims[dims.size() - 1] : 0;
    batch_ = count_ > 0 ? static_cast<int64_t>(sizes.element_count()) / count_ : 0;
    const auto* size = static_cast<const int32_t*>(sizes.untyped_data());
    for (int64_t b = 0; b < batch_; ++b) {
      int64_t row = 0;
      for (int64_t g = 0; g < count_; ++g) {
        const int64_t taken = std::clamp<int64_t>(size[b * count_ + g], 0, rows - row);
        all_.push_back({b, b * count_ + g, row, taken, g});
        row += taken;
      }
      ends_.push_back(row);
    }
  }

  static bool fits(const ffi::AnyBuffer& sizes) {
    return sizes.element_type() == ffi::DataType::S32 && sizes.dimensions().size() > 0;
  }
  const std::vector<Group>& all() const { return all_; }
  int64_t count() const { return count_; }
  int64_t batch() const { return batch_; }
  /// Where the rows in groups end.
  int64_t end(int64_t batch) const { return ends_[batch]; }

  /// How many threads should share a group's GEMM: 0 cuts it no further than the caches ask for.
  int64_t threads(const Group& group, int64_t all) const {
    const int64_t total = std::max<int64_t>(1, batch_ * rows_), share = 4 * all * group.rows / total;
    return share <= 1 ? 0 : (share + 3) / 4;
  }

 private:
  int64_t rows_, count_, batch_;
  std::vector<Group> all_;
  std::vector<int64_t> ends_;
};

}  // namespace jaxlowprec
