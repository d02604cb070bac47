// How the rows of a norm's gradient are cut into parts, each of which sums for the gradients of the weight and of beta:
// known when a program is compiled.
#pragma once

#include <cstdint>

namespace jaxlowprec {
namespace cuda {

constexpr int64_t kGradientRows = 8;  // that a block has at once

/// By the shape alone, so that sums are added in the same order on every GPU: about so many parts in all matrices together,
/// which is several blocks for each multiprocessor of the largest GPU.
constexpr int64_t kGradientBlocks = 512;

struct NormGradientParts {
  int64_t rows_each, count;  // of a matrix

  NormGradientParts(int64_t batch, int64_t rows) {
    const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
    const int64_t most = batch > 0 ? up(kGradientBlocks, batch) : 1, turns = up(up(rows, kGradientRows), most);
    rows_each = kGradientRows * (turns > 0 ? turns : 1);
    count = up(rows, rows_each);
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
