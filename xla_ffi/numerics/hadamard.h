// The Hadamard transform as an in-place butterfly of float32 values: strides 1, 2, 4, ... (numerics.md 3).
#pragma once

#include "lanes.h"

namespace jaxlowprec {

constexpr uint32_t kDefaultSignMask = 0xD7E8u;  // bit i set where sign i is -1

/// v -> v H for the Sylvester matrix H of N = 2^n rows; the factor N^-1/2 is the caller's.
///
/// Both halves are finished before they meet: the additions are those of the loop over strides, but only half of the
/// values are live at a time.
template <int N, class F>
JLP_RULE void hadamard_butterfly(F* v) {
  static_assert((N & (N - 1)) == 0, "Hadamard sizes are powers of two");
  if constexpr (N > 1) {
    hadamard_butterfly<N / 2>(v);
    hadamard_butterfly<N / 2>(v + N / 2);
    JLP_UNROLL(16)
    for (int i = 0; i < N / 2; ++i) {
      const F a = v[i], b = v[i + N / 2];
      v[i] = a + b;
      v[i + N / 2] = a - b;
    }
  }
}

}  // namespace jaxlowprec
