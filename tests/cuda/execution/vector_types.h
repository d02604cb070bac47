// CUDA's vector types, with its alignments.
#pragma once

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define CUDA_ON_CPU_VECTORS(name, element)                                                        \
  struct name##1 { element x; };                                                                  \
  struct alignas(2 * sizeof(element)) name##2 { element x, y; };                                  \
  struct name##3 { element x, y, z; };                                                            \
  struct alignas(sizeof(element) < 4 ? 4 * sizeof(element) : 16) name##4 { element x, y, z, w; }; \
  inline name##1 make_##name##1(element x) { return {x}; }                                        \
  inline name##2 make_##name##2(element x, element y) { return {x, y}; }                          \
  inline name##3 make_##name##3(element x, element y, element z) { return {x, y, z}; }            \
  inline name##4 make_##name##4(element x, element y, element z, element w) { return {x, y, z, w}; }

CUDA_ON_CPU_VECTORS(char, signed char)
CUDA_ON_CPU_VECTORS(uchar, unsigned char)
CUDA_ON_CPU_VECTORS(short, short)
CUDA_ON_CPU_VECTORS(ushort, unsigned short)
CUDA_ON_CPU_VECTORS(int, int)
CUDA_ON_CPU_VECTORS(uint, unsigned)
CUDA_ON_CPU_VECTORS(longlong, long long)
CUDA_ON_CPU_VECTORS(ulonglong, unsigned long long)
CUDA_ON_CPU_VECTORS(float, float)
CUDA_ON_CPU_VECTORS(double, double)

#undef CUDA_ON_CPU_VECTORS
