// Included ahead of everything in instrumented code: the compiler announces only the copies that it makes itself, so calls
// of these go to hooks.cc.
#pragma once

#include <string.h>

extern "C" {
void* memcpy(void* __restrict to, const void* __restrict from, size_t bytes) noexcept __asm__("cuda_on_cpu_memcpy");
void* memmove(void* to, const void* from, size_t bytes) noexcept __asm__("cuda_on_cpu_memmove");
void* memset(void* to, int value, size_t bytes) noexcept __asm__("cuda_on_cpu_memset");
}
