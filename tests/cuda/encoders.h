#pragma once

#include <cuda_runtime.h>

#include "../../xla_ffi/problems.h"

namespace jaxlowprec {
namespace cuda {

struct EncodeProblem {
  const void* x;  // [count], a multiple of 16
  ElementType type;
  int64_t count;
  CodeType code;
  float factor;  // what all of them are multiplied by
  bool stochastic;
  uint32_t random_word;  // byte i % 4 of it drives element i
  uint8_t* codes;        // packed where they are of 4 bits
};
cudaError_t encode(const EncodeProblem& problem);

}  // namespace cuda
}  // namespace jaxlowprec
