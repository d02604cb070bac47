// Sums over rows among a handler's results: parts of the rows are summed by the operation's kernel, and added up here.
#pragma once

#include <cstdint>
#include <vector>

#include "engine.h"
#include "producer_operands.h"

namespace jaxlowprec {

// Memory of CPU handlers whose chunks leave numbers for each part of an array, which are added up afterwards.

/// Memory for what parts find, kept per thread: in a large heap, allocating it takes as long as counting a small array. No
/// handler runs within another.
template <class T>
T* memory_of_parts(int64_t count) {
  static thread_local std::vector<T> memory;
  if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
  return memory.data();
}

using Sums = std::vector<float*>;

/// How many of the results from `first` on are sums: on GPUs the last result is memory for those of parts.
inline size_t count_of_sums(ffi::ThreadPool&, size_t results, size_t first) { return results - first; }

/// Sums of so many columns from `first` on among the results; nothing if they are other buffers.
inline std::optional<Sums> sums_at(const ffi::RemainingRets& results, size_t first, size_t count, int64_t columns) {
  Sums found;
  for (size_t i = 0; i < count; ++i) {
    found.push_back(floats(results, first + i, columns));
    if (!found.back()) return std::nullopt;
  }
  return found;
}

/// Sums over parts of the rows, added up here.
template <class Problem>
std::vector<AddPartsProblem> parts_of_sums(const Problem& p, int64_t parts, const Sums& sums) {
  std::vector<AddPartsProblem> all;
  for (size_t i = 0; i < sums.size(); ++i)
    all.push_back({p.sums + static_cast<int64_t>(i) * p.columns, p.sums_each(), p.batch, parts, p.columns, sums[i]});
  return all;
}

/// Runs a gradient whose rows are taken in that many parts, and adds up their sums.
template <class Problem>
ffi::Error run_with_sums(ffi::ThreadPool& pool, const char*, Problem p, int64_t parts, const Sums& sums,
                         ffi::RemainingRets&) {
  p.sums = sums.empty() ? nullptr : memory_of_parts<float>(p.batch * parts * p.sums_each());
  run(pool, p);
  run_all(pool, parts_of_sums(p, parts, sums));
  return ffi::Error::Success();
}

#if defined(JLP_CUDA)
inline size_t count_of_sums(cudaStream_t, size_t results, size_t first) { return results > first ? results - first - 1 : 0; }

template <class Problem>
ffi::Error run_with_sums(cudaStream_t stream, const char* name, Problem p, int64_t parts, const Sums& sums,
                         ffi::RemainingRets& results) {
  if (!sums.empty()) {
    p.sums = floats(results, results.size() - 1, p.batch * parts * p.sums_each());
    JLP_REQUIRE(p.sums != nullptr);
  }
  const ffi::Error error = run_on(stream, name, p);
  if (error.failure()) return error;
  for (const AddPartsProblem& problem : parts_of_sums(p, parts, sums)) {
    const cudaError_t status = cuda::launch(problem, stream);
    if (status != cudaSuccess) return ffi::Error::Internal(cuda::failure(name, p, cuda::reason(status)));
  }
  return ffi::Error::Success();
}
#endif

}  // namespace jaxlowprec
