// Tensor amax: the largest magnitude of a matrix, and of its columnwise random Hadamard transform (numerics.md 1 and 3).
// Bytes moved: the input once, both maxima together.
#pragma once

#include "gather_amaxes.h"

namespace jaxlowprec {
namespace JLP_ISA {

template <class E>
struct Amax {
  using Storage = typename E::Storage;

  static int64_t chunks_per_matrix(const AmaxProblem& p) {
    if (p.rotated) return divide_up(p.rows, kColumnTileRows) * divide_up(p.columns, kPacket);
    return divide_up(p.rows * p.columns, elements_of_chunk(p.rows * p.columns));
  }

  static void chunk(const AmaxProblem& p, int64_t batch, int64_t chunk) {
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    if (!p.rotated) {
      const int64_t size = p.rows * p.columns, each = elements_of_chunk(size);
      const int64_t first = chunk * each, count = std::min(each, size - first);
      return raise(&p.plain[batch], canonical_amax(amax_of<E>(x + first, count)));
    }
    GatheredAmaxes<E> amaxes(ResultAmaxes{p.plain, p.rotated, p.sign_mask});
    const int64_t column_tiles = divide_up(p.columns, kPacket);
    const int64_t first = chunk / column_tiles * kColumnTileRows, column = chunk % column_tiles * kPacket;
    for (int64_t row = first; row < std::min(first + kColumnTileRows, p.rows); row += kBlock)
      amaxes.add(Slab<E>(x, p.rows, p.columns, row, column));
    amaxes.raise(batch);
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
