// The table of the CPU kernels' entry points for one instruction set.
//
// Every operation is cut into chunks that may run in any order on any thread; which elements belong to a chunk, and so the
// bytes it writes, do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../problems.h"

namespace jaxlowprec {

/// The operations, each with its problem: the one list that a new operation is added to. `each(name, Problem)`.
// clang-format off
#define JLP_OPERATIONS(each)                        \
  each(amax, AmaxProblem)                           \
  each(line_amaxes, LineAmaxesProblem)              \
  each(quantize, QuantizeProblem)                   \
  each(row_scaled_quantize, RowScaledQuantizeProblem)       \
  each(dequantize, DequantizeProblem)               \
  each(hadamard, HadamardProblem)                   \
  each(matmul, MatmulProblem)                       \
  each(int4_fake_quantize, Int4FakeQuantizeProblem) \
  each(int4_quantize, Int4QuantizeProblem)          \
  each(int4_dequantize, Int4DequantizeProblem)      \
  each(weight_only, WeightOnlyProblem)              \
  each(activation, ActivationProblem)               \
  each(activation_gradient, ActivationGradientProblem) \
  each(activation_quantize, ActivationQuantizeProblem) \
  each(activation_gradient_quantize, ActivationGradientQuantizeProblem) \
  each(norm, NormProblem)                           \
  each(norm_quantize, NormQuantizeProblem)          \
  each(norm_gradient, NormGradientProblem)          \
  each(sum_over_rows, SumOverRowsProblem)           \
  each(add_parts, AddPartsProblem)                  \
  each(moments, MomentsProblem)                     \
  each(outliers, OutliersProblem)                   \
  each(sums, SumsProblem)                           \
  each(optimizer_update, OptimizerUpdateProblem)
// clang-format on

struct Kernels {
  const char* isa;
#define JLP_MEMBERS(name, Problem)          \
  int64_t (*name##_chunks)(const Problem&); \
  void (*name##_chunk)(const Problem&, int64_t chunk);
  JLP_OPERATIONS(JLP_MEMBERS)
#undef JLP_MEMBERS
};

// The entry points of an operation by the type of its problem.
#define JLP_BY_PROBLEM(name, Problem)                                                    \
  inline auto chunks_entry(const Kernels& k, const Problem&) { return k.name##_chunks; } \
  inline auto chunk_entry(const Kernels& k, const Problem&) { return k.name##_chunk; }
JLP_OPERATIONS(JLP_BY_PROBLEM)
#undef JLP_BY_PROBLEM

/// At least `bytes` bytes, 64-byte aligned, of the calling thread: valid until its next call.
uint8_t* thread_scratch(int64_t bytes);

// --- Chooses the kernels of the best instruction set that was built and that the processor has.

/// Names of the instruction sets that can run here, best first. "portable" is always among them.
std::vector<std::string> available_isas();

/// The kernels in use: those of $JAXLOWPREC_ISA if it names an available set (native.py refuses others), else the best.
const Kernels& kernels();

/// Switches to another available set, for tests and benchmarks. False: not available.
bool use_isa(const std::string& name);

}  // namespace jaxlowprec
