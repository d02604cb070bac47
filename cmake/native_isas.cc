// Prints the instruction sets that dispatch.cc would choose on this processor, as JAXLOWPREC_ISAS names them. Run by
// instruction_sets.cmake.
#include <cstdio>

#include "../xla_ffi/cpu/processor.h"

int main() {
  using namespace jaxlowprec::processor;
  if (has_avx512()) {
    std::fputs(has_avx512_bf16() && !bf16_dot_is_slow() ? "avx512_bf16" : "avx512", stdout);
    std::puts(has_amx_int8() ? ";avx512_amx" : "");
  } else {
    std::puts(has_avx2() ? "avx2" : "portable");
  }
}
