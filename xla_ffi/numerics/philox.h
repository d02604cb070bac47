// Philox4x32-10 (Salmon et al., SC 2011): 16 random bytes from a 128-bit counter and a 64-bit key (numerics.md 4).
#pragma once

#include "lanes.h"

namespace jaxlowprec {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

/// One round in place. F only names the lanes: counters are Uint<F>.
template <class F>
JLP_RULE void philox_round(Uint<F> (&counter)[4], uint32_t key0, uint32_t key1) {
  Uint<F> high0, low0, high1, low1;
  Lanes<F>::multiply_wide(counter[0], kPhiloxMultiplier0, high0, low0);
  Lanes<F>::multiply_wide(counter[2], kPhiloxMultiplier1, high1, low1);
  counter[0] = high1 ^ counter[1] ^ key0;
  counter[1] = low1;
  counter[2] = high0 ^ counter[3] ^ key1;
  counter[3] = low0;
}

template <class F>
JLP_RULE void philox4x32_10(Uint<F> (&counter)[4], uint32_t key0, uint32_t key1) {
  JLP_UNROLL(10)
  for (int round = 0; round < 10; ++round) {
    philox_round<F>(counter, key0, key1);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
}

}  // namespace jaxlowprec
