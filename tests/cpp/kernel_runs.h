// Shared by the CPU's kernel tests: the kernels under test, and running all chunks of a problem.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../../xla_ffi/cpu/matmul/bf16_kernels.h"
#include "../../xla_ffi/cpu/run.h"
#include "check.h"
#include "kernel_data.h"

namespace jaxlowprec {

#if defined(JLP_TEST_EMULATED_AVX512)
namespace avx512 {
extern const Kernels kernels;
}
#endif

/// The kernels under test: those of every instruction set that this processor has, or the emulated ones.
inline std::vector<const Kernels*> kernels_under_test() {
#if defined(JLP_TEST_EMULATED_BF16)
  static const Kernels bf16 = avx512_bf16::kernels();
  return {&avx512::kernels, &bf16};
#elif defined(JLP_TEST_EMULATED_AVX512)
  return {&avx512::kernels};
#else
  std::vector<const Kernels*> found;
  for (const std::string& isa : available_isas())
    if (use_isa(isa)) found.push_back(&kernels());
  return found;
#endif
}

/// Emulated instructions are slow: most repetitions of a shape with other numbers are left to the real ones.
#if defined(JLP_TEST_EMULATED_AVX512)
constexpr bool kReduced = true;
#else
constexpr bool kReduced = false;
#endif

/// With the address sanitizer the references are slow: large shapes are smaller there, with edges of the same kinds. The
/// same test without it compares the large ones.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// --- running

/// Every chunk once, in order or scrambled: threads promise no order.
template <class Problem>
void run_chunks(const Kernels& k, const Problem& problem, bool scrambled) {
  std::vector<int64_t> order(chunks_entry(k, problem)(problem));
  std::iota(order.begin(), order.end(), 0);
  if (scrambled) std::shuffle(order.begin(), order.end(), std::mt19937(order.size()));
  for (const int64_t chunk : order) chunk_entry(k, problem)(problem, chunk);
}

/// Calls visit(kernels, scrambled) for all kernels under test and both orders; with the address sanitizer for one of them,
/// for the order changes no chunk's memory.
template <class Visit>
void for_all_runs(Visit visit) {
  for (const Kernels* k : kernels_under_test())
    for (const bool scrambled : {false, true}) {
      if (kSanitized && !scrambled) continue;
      const check::Given given(std::string(k->isa) + (scrambled ? ", chunks scrambled" : ", chunks in order"));
      visit(*k, scrambled);
    }
}

}  // namespace jaxlowprec
