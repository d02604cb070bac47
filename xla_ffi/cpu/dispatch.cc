#include <atomic>
#include <cstdlib>

#include "kernels.h"
#include "matmul/amx_kernels.h"
#include "matmul/bf16_kernels.h"
#include "processor.h"

namespace jaxlowprec {

#if defined(JLP_HAVE_AVX512)
namespace avx512 {
extern const Kernels kernels;
}
#endif
#if defined(JLP_HAVE_AVX2)
namespace avx2 {
extern const Kernels kernels;
}
#endif
namespace portable {
extern const Kernels kernels;
}

namespace {

#if defined(JLP_HAVE_AVX512_BF16)
/// Null where the processor does not have it, or its dot product gives other bytes. It must have AVX-512.
const Kernels* bf16_kernels() {
  static const bool usable = processor::has_avx512_bf16() && avx512_bf16::dot_gives_the_same_bytes();
  static const Kernels kernels = usable ? avx512_bf16::kernels() : Kernels{};
  return usable ? &kernels : nullptr;
}
#endif

#if defined(JLP_HAVE_AVX512_AMX)
/// The kernels `others` with AMX's; null where the processor or the system does not let us have it.
const Kernels* amx_kernels(const Kernels& others) {
  static const bool usable = processor::has_amx_int8();
  static const Kernels kernels = avx512_amx::kernels(others);
  return usable ? &kernels : nullptr;
}
#endif

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(JLP_HAVE_AVX512)
  if (processor::has_avx512()) {
    found.push_back(&avx512::kernels);
#if defined(JLP_HAVE_AVX512_BF16)
    if (const Kernels* kernels = bf16_kernels())
      found.insert(processor::bf16_dot_is_slow() ? found.end() : found.begin(), kernels);
#endif
#if defined(JLP_HAVE_AVX512_AMX)
    if (const Kernels* kernels = amx_kernels(*found.front())) found.insert(found.begin(), kernels);
#endif
  }
#endif
#if defined(JLP_HAVE_AVX2)
  if (processor::has_avx2()) found.push_back(&avx2::kernels);
#endif
  found.push_back(&portable::kernels);
  return found;
}

const Kernels* find(const std::string& name) {
  for (const Kernels* k : available())
    if (name == k->isa) return k;
  return nullptr;
}

const Kernels* choose() {
  const char* wanted = std::getenv("JAXLOWPREC_ISA");
  const Kernels* found = wanted ? find(wanted) : nullptr;
  return found ? found : available().front();
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> chosen{choose()};
  return chosen;
}

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Kernels* k : available()) names.push_back(k->isa);
  return names;
}

const Kernels& kernels() { return *current().load(); }

bool use_isa(const std::string& name) {
  const Kernels* found = find(name);
  if (found) current().store(found);
  return found != nullptr;
}

uint8_t* thread_scratch(int64_t bytes) {
  struct Buffer {
    uint8_t* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffer;
  if (bytes > buffer.size) {
    std::free(buffer.data);
    buffer.size = (bytes + 63) / 64 * 64;
    buffer.data = static_cast<uint8_t*>(std::aligned_alloc(64, buffer.size));
  }
  return buffer.data;
}

}  // namespace jaxlowprec
