// The table of the CPU kernels' entry points for one instruction set.
//
// Every operation is cut into chunks that may run in any order on any thread; which elements belong to a chunk, and so the
// bytes it writes, do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "../problems.h"

namespace jaxlowprec {

struct Kernels {
  const char* isa;
  int64_t (*amax_chunks)(const AmaxProblem&);
  void (*amax_chunk)(const AmaxProblem&, int64_t chunk);
  int64_t (*quantize_chunks)(const QuantizeProblem&);
  void (*quantize_chunk)(const QuantizeProblem&, int64_t chunk);
  int64_t (*dequantize_chunks)(const DequantizeProblem&);
  void (*dequantize_chunk)(const DequantizeProblem&, int64_t chunk);
  int64_t (*hadamard_chunks)(const HadamardProblem&);
  void (*hadamard_chunk)(const HadamardProblem&, int64_t chunk);
  int64_t (*matmul_chunks)(const MatmulProblem&);
  void (*matmul_chunk)(const MatmulProblem&, int64_t chunk);
  int64_t (*weight_only_chunks)(const WeightOnlyProblem&);
  void (*weight_only_chunk)(const WeightOnlyProblem&, int64_t chunk);
  int64_t (*int4_fake_quantize_chunks)(const Int4FakeQuantizeProblem&);
  void (*int4_fake_quantize_chunk)(const Int4FakeQuantizeProblem&, int64_t chunk);
  int64_t (*int4_quantize_chunks)(const Int4QuantizeProblem&);
  void (*int4_quantize_chunk)(const Int4QuantizeProblem&, int64_t chunk);
  int64_t (*int4_dequantize_chunks)(const Int4DequantizeProblem&);
  void (*int4_dequantize_chunk)(const Int4DequantizeProblem&, int64_t chunk);
};

/// At least `bytes` bytes, 64-byte aligned, of the calling thread: valid until its next call.
uint8_t* thread_scratch(int64_t bytes);

}  // namespace jaxlowprec
