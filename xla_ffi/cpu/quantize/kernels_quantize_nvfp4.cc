// Quantisation to NVFP4.
#include "../entry.h"
#include "../kernels.h"
#include "gather_amaxes.h"
#include "quantize_nvfp4.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Quantisation of rows that are tensors of their own (numerics.md 2): the amaxes of a row's blocks and the largest of them,
// then its codes, which find the row in the cache.
// Bytes moved per element: the input once, 9/16 written; 4 a row.

/// The amaxes of a row's blocks, of whole packets, and the largest.
template <class E>
__attribute__((noinline)) uint32_t block_amaxes(const typename E::Storage* x, int64_t count, uint32_t* amaxes) {
  U32 most = U32{};
  const auto take = [&](const typename E::Storage* packet) {
    const U32 found = E::block_amax(packet);
    store(amaxes, found);
    amaxes += kLanes;
    most = max_magnitude(most, found);
  };
  for (; count >= kPacket; x += kPacket, count -= kPacket) take(x);
  if (count > 0) {
    alignas(64) typename E::Storage padded[kPacket] = {};
    memcpy(padded, x, count * sizeof *x);
    take(padded);
  }
  return max_lane(most);
}

template <class E>
struct RowScaledQuantize {
  using Storage = typename E::Storage;

  static int64_t rows_of_chunk(const RowScaledQuantizeProblem& p) {
    return std::max<int64_t>(1, elements_of_chunk(p.rows * p.columns) / std::max<int64_t>(p.columns, 1));
  }
  static int64_t chunks_per_matrix(const RowScaledQuantizeProblem& p) { return divide_up(p.rows, rows_of_chunk(p)); }

  static void chunk(const RowScaledQuantizeProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * rows_of_chunk(p), last = std::min(first + rows_of_chunk(p), p.rows);
    for (int64_t row = batch * p.rows + first; row < batch * p.rows + last; ++row) quantize(p, row);
  }

 private:
  /// A row of all matrices'.
  static void quantize(const RowScaledQuantizeProblem& p, int64_t row) {
    const Storage* x = static_cast<const Storage*>(p.x) + row * p.columns;
    const int64_t blocks = divide_up(p.columns, kBlock);
    const bool best = p.format.chooses_scales();  // finds the blocks' amaxes itself
    uint8_t *data = p.data + row * blocks * 8, *scale = p.scale + row * blocks;
    auto* amaxes = best ? nullptr : reinterpret_cast<uint32_t*>(thread_scratch(divide_up(p.columns, kPacket) * kLanes * 4));
    const uint32_t amax = best ? amax_of<E>(x, p.columns) : block_amaxes<E>(x, p.columns, amaxes);
    p.amax[row] = Lanes<float>::from_bits(canonical_amax(amax));
    const DirectionContext context({p.amax, nullptr, nullptr, {}}, row, 0);
    if (!context.tensor.usable) {
      memset(data, 0, blocks * 8);
      memset(scale, kFloat8NaN, blocks);
    } else if (best) {
      quantize_row_run_by_best<E>(x, p.columns, p.format.scale_rule, false, context, 0, nullptr, data, scale);
    } else {
      quantize_row_run<E>(x, p.columns, false, context, 0, nullptr, data, scale, amaxes);
    }
  }
};

namespace {

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(QuantizeNvfp4<decltype(e)>{p.stochastic(), p.eden}); });
}

template <class Visit>
auto resolve_row_scaled(const RowScaledQuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(RowScaledQuantize<decltype(e)>{}); });
}

}  // namespace

JLP_DEFINE_ENTRY(quantize_nvfp4, QuantizeProblem, resolve)
JLP_DEFINE_ENTRY(row_scaled_quantize, RowScaledQuantizeProblem, resolve_row_scaled)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
