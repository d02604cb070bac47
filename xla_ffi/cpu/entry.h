// Entry points of the kernels of one instruction set: each family of operations is a file of its own (kernels_*.cc),
// compiled once for each set with its flags and JLP_ISA_* defined; kernels.cc gathers them in a table. Nothing in these
// files may be called before the processor is known to have that set (see dispatch.cc).
#pragma once

#include "elements.h"
#include "kernels.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// The number of chunks of an operation, and one of them.
#define JLP_ENTRY(name, Problem)         \
  int64_t name##_chunks(const Problem&); \
  void name##_chunk(const Problem&, int64_t chunk);
JLP_OPERATIONS(JLP_ENTRY)
JLP_ENTRY(quantize_nvfp4, QuantizeProblem)  // `quantize` is one of these
JLP_ENTRY(quantize_blocks, QuantizeProblem)
JLP_ENTRY(quantize_lines, QuantizeProblem)
#undef JLP_ENTRY

template <class Visit>
auto with_bool(bool value, Visit visit) {
  return value ? visit(std::true_type{}) : visit(std::false_type{});
}

/// Defines the entry points of an operation by `resolve(problem, visit)`, which calls visit with its compile-time case: a
/// type with chunks_per_matrix and chunk.
#define JLP_DEFINE_ENTRY(name, Problem, resolve)                                                 \
  int64_t name##_chunks(const Problem& p) {                                                      \
    return p.batch * resolve(p, [&](auto operation) { return operation.chunks_per_matrix(p); }); \
  }                                                                                              \
  void name##_chunk(const Problem& p, int64_t chunk) {                                           \
    const FlushDenormals flush;                                                                  \
    resolve(p, [&](auto operation) {                                                             \
      const int64_t per_matrix = operation.chunks_per_matrix(p);                                 \
      operation.chunk(p, chunk / per_matrix, chunk % per_matrix);                                \
    });                                                                                          \
  }

}  // namespace JLP_ISA
}  // namespace jaxlowprec
