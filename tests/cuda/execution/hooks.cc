// The functions that the compiler calls in instrumented code. -fsanitize=thread makes it announce every load and store to
// __tsan_...; that sanitizer's own runtime is not linked, these are. -fsanitize=bounds,alignment,shift calls
// __ubsan_handle_... where the code itself is wrong: that finds an index past an array within the shared struct, and a
// misaligned vector.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "machine.h"
#include "report.h"
#include "shadow.h"

using namespace cuda_on_cpu;

namespace {

inline void announced(const void* address, size_t bytes, Use kind, const void* caller) {
  const Thread* const self = machine.current;
  if (!self) return;  // the host's side
  if (reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(self->stack) < kStackBytes) return;
  use(address, bytes, kind, place_of(caller));
}

}  // namespace

#define CALLER __builtin_return_address(0)
#define HOOKS(bytes)                                                                        \
  void __tsan_read##bytes(void* a) { announced(a, bytes, Use::kRead, CALLER); }             \
  void __tsan_write##bytes(void* a) { announced(a, bytes, Use::kWrite, CALLER); }           \
  void __tsan_unaligned_read##bytes(void* a) { announced(a, bytes, Use::kRead, CALLER); }   \
  void __tsan_unaligned_write##bytes(void* a) { announced(a, bytes, Use::kWrite, CALLER); } \
  void __tsan_volatile_read##bytes(void* a) { announced(a, bytes, Use::kRead, CALLER); }    \
  void __tsan_volatile_write##bytes(void* a) { announced(a, bytes, Use::kWrite, CALLER); }  \
  void __tsan_read_write##bytes(void* a) {                                                  \
    announced(a, bytes, Use::kRead, CALLER), announced(a, bytes, Use::kWrite, CALLER);      \
  }                                                                                         \
  void __tsan_unaligned_read_write##bytes(void* a) {                                        \
    announced(a, bytes, Use::kRead, CALLER), announced(a, bytes, Use::kWrite, CALLER);      \
  }

extern "C" {

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* a, size_t bytes) { announced(a, bytes, Use::kRead, CALLER); }
void __tsan_write_range(void* a, size_t bytes) { announced(a, bytes, Use::kWrite, CALLER); }
// On the host's side: guards of local statics, and what launch code keeps in atomic variables.
char __tsan_atomic8_load(const volatile char* a, int order) { return (void)order, __atomic_load_n(a, __ATOMIC_SEQ_CST); }
int __tsan_atomic32_load(const volatile int* a, int order) { return (void)order, __atomic_load_n(a, __ATOMIC_SEQ_CST); }
void __tsan_atomic32_store(volatile int* a, int value, int order) {
  (void)order, __atomic_store_n(a, value, __ATOMIC_SEQ_CST);
}

// What instrumented code calls instead of the functions of these names: instrumented.h; clang does so by itself.
void* cuda_on_cpu_memcpy(void* to, const void* from, size_t bytes) {
  announced(from, bytes, Use::kRead, CALLER), announced(to, bytes, Use::kWrite, CALLER);
  return std::memcpy(to, from, bytes);
}
void* cuda_on_cpu_memmove(void* to, const void* from, size_t bytes) {
  announced(from, bytes, Use::kRead, CALLER), announced(to, bytes, Use::kWrite, CALLER);
  return std::memmove(to, from, bytes);
}
void* cuda_on_cpu_memset(void* to, int value, size_t bytes) {
  announced(to, bytes, Use::kWrite, CALLER);
  return std::memset(to, value, bytes);
}
void* __tsan_memcpy(void*, const void*, size_t) __attribute__((alias("cuda_on_cpu_memcpy")));
void* __tsan_memmove(void*, const void*, size_t) __attribute__((alias("cuda_on_cpu_memmove")));
void* __tsan_memset(void*, int, size_t) __attribute__((alias("cuda_on_cpu_memset")));

}  // extern "C"

// --- undefined behaviour. The structures are what the compilers pass

namespace {

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor *array, *index;
};
struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  uint8_t log_alignment, kind;
};
struct ShiftOutOfBounds {
  SourceLocation location;
  const TypeDescriptor *left, *right;
};

[[noreturn]] void undefined(const std::string& what, const SourceLocation& location) {
  const std::string message = what + " at " + file_and_line(location.file, location.line);
  if (machine.current) fail(message);
  std::printf("on the host's side: %s\n", message.c_str());
  std::abort();
}

}  // namespace

extern "C" {

void __ubsan_handle_out_of_bounds_abort(const OutOfBounds* data, uintptr_t index) {
  undefined("index " + std::to_string(static_cast<int64_t>(index)) + " is out of the bounds of " + data->array->name,
            data->location);
}
void __ubsan_handle_type_mismatch_v1_abort(const TypeMismatch* data, uintptr_t address) {
  const uintptr_t alignment = uintptr_t{1} << data->log_alignment;
  undefined("misaligned address: " + std::to_string(address % alignment) + " bytes past a multiple of " +
                std::to_string(alignment) + ", used as " + data->type->name,
            data->location);
}
void __ubsan_handle_shift_out_of_bounds_abort(const ShiftOutOfBounds* data, uintptr_t left, uintptr_t right) {
  undefined("shift of " + std::to_string(static_cast<int64_t>(left)) + " (" + data->left->name + ") by " +
                std::to_string(static_cast<int64_t>(right)),
            data->location);
}

}  // extern "C"
