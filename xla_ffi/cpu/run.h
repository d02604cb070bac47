// Runs one operation: serially when it is small, else in chunks on the pool.
#pragma once

#include <type_traits>

#include "dispatch.h"
#include "parallel_for.h"

namespace jaxlowprec {

// Entry points of the current instruction set by problem type.
inline auto chunks_entry(const Kernels& k, const AmaxProblem&) { return k.amax_chunks; }
inline auto chunk_entry(const Kernels& k, const AmaxProblem&) { return k.amax_chunk; }
inline auto chunks_entry(const Kernels& k, const QuantizeProblem&) { return k.quantize_chunks; }
inline auto chunk_entry(const Kernels& k, const QuantizeProblem&) { return k.quantize_chunk; }
inline auto chunks_entry(const Kernels& k, const DequantizeProblem&) { return k.dequantize_chunks; }
inline auto chunk_entry(const Kernels& k, const DequantizeProblem&) { return k.dequantize_chunk; }
inline auto chunks_entry(const Kernels& k, const HadamardProblem&) { return k.hadamard_chunks; }
inline auto chunk_entry(const Kernels& k, const HadamardProblem&) { return k.hadamard_chunk; }
inline auto chunks_entry(const Kernels& k, const MatmulProblem&) { return k.matmul_chunks; }
inline auto chunk_entry(const Kernels& k, const MatmulProblem&) { return k.matmul_chunk; }
inline auto chunks_entry(const Kernels& k, const WeightOnlyProblem&) { return k.weight_only_chunks; }
inline auto chunk_entry(const Kernels& k, const WeightOnlyProblem&) { return k.weight_only_chunk; }

inline auto chunks_entry(const Kernels& k, const Int4FakeQuantizeProblem&) { return k.int4_fake_quantize_chunks; }
inline auto chunk_entry(const Kernels& k, const Int4FakeQuantizeProblem&) { return k.int4_fake_quantize_chunk; }
inline auto chunks_entry(const Kernels& k, const Int4QuantizeProblem&) { return k.int4_quantize_chunks; }
inline auto chunk_entry(const Kernels& k, const Int4QuantizeProblem&) { return k.int4_quantize_chunk; }
inline auto chunks_entry(const Kernels& k, const Int4DequantizeProblem&) { return k.int4_dequantize_chunks; }
inline auto chunk_entry(const Kernels& k, const Int4DequantizeProblem&) { return k.int4_dequantize_chunk; }

// What a problem takes on one AVX2 core, in picoseconds, roughly: enough to tell 20 us from 200.
inline int64_t cost(const AmaxProblem& p) { return p.batch * p.rows * p.columns * (p.rotated ? 150 : 50); }
inline int64_t cost(const QuantizeProblem& p) {
  const int64_t directions = (p.rowwise.data ? 1 : 0) + (p.columnwise.data ? 1 : 0);
  return p.batch * p.rows * p.columns * directions * 500;
}
inline int64_t cost(const DequantizeProblem& p) { return p.batch * p.rows * p.columns * 400; }
inline int64_t cost(const HadamardProblem& p) { return p.batch * p.rows * p.columns * 300; }
inline int64_t cost(const Int4FakeQuantizeProblem& p) { return p.batch * p.size() * 400; }
inline int64_t cost(const Int4QuantizeProblem& p) { return p.batch * p.size() * 400; }
inline int64_t cost(const Int4DequantizeProblem& p) { return p.batch * p.size() * 300; }
inline int64_t cost(const MatmulProblem& p) {
  const int64_t product = p.packed() ? 12 : 25, unpack = p.packed() ? 150 : 300;
  return p.batch * p.depth() * (p.rows * p.columns * product + (p.rows + p.columns) * unpack);
}

inline int64_t cost(const WeightOnlyProblem& p) {
  const int64_t product = 25, unpack = 50;
  return p.batch * p.depth * (p.rows * p.columns * product + (p.rows + p.columns) * unpack);
}

/// Waking a sleeping worker costs the caller 8 us and it arrives 30 us later: less work than this is done sooner alone, and
/// more threads than have this much each are not worth waking.
constexpr int64_t kBreakEven = 50'000'000;

template <class Pool, class Problem>
void run(Pool& pool, const Problem& problem) {
  const Kernels& k = kernels();
  const auto chunk = chunk_entry(k, problem);
  const int64_t chunks = chunks_entry(k, problem)(problem);
  // A cast follows the amax of the same array, whose end is still in the cache.
  constexpr bool kBackwards = std::is_same<Problem, QuantizeProblem>::value;
  parallel_for(pool, chunks, cost(problem) / kBreakEven,
               [&](int64_t i) { chunk(problem, kBackwards ? chunks - 1 - i : i); });
}

}  // namespace jaxlowprec
