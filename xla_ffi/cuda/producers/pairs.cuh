// Pairs of neighbours in a row, as the producers hold them whose threads take columns.
#pragma once

#include "../quantize/tile_elements.cuh"
#include "pieces.cuh"

namespace jaxlowprec {
namespace cuda {

template <ElementType kType>
using ElementOf =
    std::conditional_t<kType == ElementType::kF32, F32, std::conditional_t<kType == ElementType::kF16, F16, BF16>>;

/// Two neighbours in a row.
template <ElementType kType>
struct Neighbours {
  static constexpr int kWords = 2 / kPerWord<kType>;
  using Words = uint32_t[kWords];
  using Both = std::conditional_t<kWords == 2, uint2, uint32_t>;
  using One = Piece<kType, false>;

  JLP_DEVICE void load(const void* from, int64_t index, Words& words) {
    split(__ldg(reinterpret_cast<const Both*>(static_cast<const typename One::Storage*>(from) + index)), words);
  }
  JLP_DEVICE void split(const Both& both, Words& words) {
    if constexpr (kWords == 2)
      words[0] = both.x, words[1] = both.y;
    else
      words[0] = both;
  }
  JLP_DEVICE void store(void* to, int64_t index, const Words& words) {
    auto* const both = reinterpret_cast<Both*>(static_cast<typename One::Storage*>(to) + index);
    if constexpr (kWords == 2)
      *both = make_uint2(words[0], words[1]);
    else
      *both = words[0];
  }

  /// The first `count` of them, not aligned; what is not loaded is zero.
  JLP_DEVICE void load(const void* from, int64_t index, Words& words, int count) {
    join(count > 0 ? One::load(from, index) : 0u, count > 1 ? One::load(from, index + 1) : 0u, words);
  }
  JLP_DEVICE void join(uint32_t first, uint32_t second, Words& words) {
    if constexpr (kWords == 2)
      words[0] = first, words[1] = second;
    else
      words[0] = first | second << 16;
  }
  JLP_DEVICE void store(void* to, int64_t index, const Words& words, int count) {
    using Narrow = typename One::Storage;
    if (count > 0) One::store(to, index, static_cast<Narrow>(words[0]));
    if (count > 1) One::store(to, index + 1, static_cast<Narrow>(kWords == 2 ? words[kWords - 1] : words[0] >> 16));
  }
};

}  // namespace cuda
}  // namespace jaxlowprec
