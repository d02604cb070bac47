// The kernels of one instruction set. This file is compiled once for each, with its flags and JLP_ISA_* defined; nothing in
// it may be called before the processor is known to have that set (see dispatch.cc).
#include "kernels.h"

#include "amax.h"
#include "dequantize.h"
#include "matmul_e2m1.h"
#include "matmul_float8.h"
#include "quantize_blocks.h"
#include "quantize_nvfp4.h"
#include "rotate.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

/// Calls visit with the element type's traits.
template <class Visit>
auto with_element(ElementType type, Visit visit) {
  switch (type) {
    case ElementType::kBF16: return visit(BF16{});
    case ElementType::kF16: return visit(F16{});
    default: return visit(Float{});
  }
}

template <class Visit>
auto with_bool(bool value, Visit visit) {
  return value ? visit(std::true_type{}) : visit(std::false_type{});
}

// Each operation is resolved to its compile-time case, a type with chunks_per_matrix and chunk.

template <class Visit>
auto resolve(const AmaxProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) { return visit(Amax<decltype(e)>{}); });
}

template <class Visit>
auto resolve(const QuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    return with_bool(p.rowwise.random.key || p.columnwise.random.key, [&](auto stochastic) {
      constexpr bool kStochastic = decltype(stochastic)::value;
      if (p.format.scaling == Scaling::kTwoLevel)
        return with_bool(p.format.tiles,
                         [&](auto tiles) { return visit(QuantizeNvfp4<E, decltype(tiles)::value, kStochastic>{}); });
      switch (p.format.code) {
        case CodeType::kE2M1: return visit(QuantizeBlocks<E, E2M1, kStochastic>{});
        case CodeType::kE4M3: return visit(QuantizeBlocks<E, E4M3, kStochastic>{});
        default: return visit(QuantizeBlocks<E, E5M2, kStochastic>{});
      }
    });
  });
}

template <class Visit>
auto resolve(const DequantizeProblem&, Visit visit) {
  return visit(Dequantize{});
}

template <class Visit>
auto resolve(const HadamardProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    using E = decltype(e);
    switch (p.size) {
      case 16: return visit(Hadamard<E, 16>{});
      case 32: return visit(Hadamard<E, 32>{});
      case 64: return visit(Hadamard<E, 64>{});
      case 128: return visit(Hadamard<E, 128>{});
      default: return visit(Hadamard<E, 256>{});
    }
  });
}

template <class Visit>
auto resolve(const MatmulProblem& p, Visit visit) {
  if (!p.packed()) return visit(MatmulFloat8{});
  return p.a.format.scaling == Scaling::kTwoLevel ? visit(MatmulE2M1<Nvfp4Scales>{}) : visit(MatmulE2M1<Mxfp4Scales>{});
}

template <class Problem>
int64_t chunks_of(const Problem& p) {
  return p.batch * resolve(p, [&](auto operation) { return operation.chunks_per_matrix(p); });
}

template <class Problem>
void run_chunk(const Problem& p, int64_t chunk) {
  const FlushDenormals flush;
  resolve(p, [&](auto operation) {
    const int64_t per_matrix = operation.chunks_per_matrix(p);
    operation.chunk(p, chunk / per_matrix, chunk % per_matrix);
  });
}

}  // namespace

extern const Kernels kernels;
const Kernels kernels = {
#if defined(JLP_ISA_AVX512)
    "avx512",
#elif defined(JLP_ISA_AVX2)
    "avx2",
#else
    "portable",
#endif
    chunks_of<AmaxProblem>,
    run_chunk<AmaxProblem>,
    chunks_of<QuantizeProblem>,
    run_chunk<QuantizeProblem>,
    chunks_of<DequantizeProblem>,
    run_chunk<DequantizeProblem>,
    chunks_of<HadamardProblem>,
    run_chunk<HadamardProblem>,
    chunks_of<MatmulProblem>,
    run_chunk<MatmulProblem>,
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
