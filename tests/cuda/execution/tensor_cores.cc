// Matrix operations of a warp, by the fragment layouts that the PTX manual draws (mma.m16n8k16 of bfloat16, mma.m16n8k32 of
// 8-bit integers, ldmatrix .m8n8.x4).
#include "collectives.h"
#include "machine.h"
#include "report.h"
#include "rounding.h"
#include "shadow.h"

namespace cuda_on_cpu {
namespace {

constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

struct Product {
  float* d;
  const uint32_t *a, *b;
};

float bfloat16(uint32_t pair, int which) {
  const uint32_t bits = which ? pair & 0xFFFF0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Lane i holds of A the rows i / 4 and + 8, columns 2 (i % 4), + 1, and those + 8; of B these as rows, column i / 4; of D
/// the rows i / 4 and + 8, columns 2 (i % 4), + 1.
void multiply(void* const* arguments) {
  float a[16][16], b[16][8];
  for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
    const Product& held = *static_cast<const Product*>(arguments[lane]);
    const uint32_t group = lane / 4, pair = lane % 4 * 2;
    for (uint32_t i = 0; i < 8; ++i) a[group + (i / 2 % 2) * 8][pair + i % 2 + (i / 4) * 8] = bfloat16(held.a[i / 2], i % 2);
    for (uint32_t i = 0; i < 4; ++i) b[pair + i % 2 + (i / 2) * 8][group] = bfloat16(held.b[i / 2], i % 2);
  }
  const FloatMode mode = keeping_subnormals();
  for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
    float* const d = static_cast<const Product*>(arguments[lane])->d;
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = lane / 4 + (i / 2) * 8, column = lane % 4 * 2 + i % 2;
      for (uint32_t k = 0; k < 16; ++k) d[i] += a[row][k] * b[k][column];  // the order is ours: the manual leaves it open
    }
  }
  set_float_mode(mode);
}

struct IntegerProduct {
  int32_t* d;
  const uint32_t *a, *b;
  const int32_t* c;
};

int32_t byte_of(uint32_t word, uint32_t which) { return static_cast<int8_t>(word >> (8 * which)); }

/// Lane i holds of A the rows i / 4 and + 8, columns 4 (i % 4) to + 3, and those + 16; of B these as rows, column i / 4; of
/// C and D the rows i / 4 and + 8, columns 2 (i % 4), + 1. Sums wrap around.
void multiply_integers(void* const* arguments) {
  int32_t a[16][32], b[32][8];
  for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
    const IntegerProduct& held = *static_cast<const IntegerProduct*>(arguments[lane]);
    const uint32_t group = lane / 4, first = lane % 4 * 4;
    for (uint32_t i = 0; i < 16; ++i)
      a[group + (i / 4 % 2) * 8][first + i % 4 + (i / 8) * 16] = byte_of(held.a[i / 4], i % 4);
    for (uint32_t i = 0; i < 8; ++i) b[first + i % 4 + (i / 4) * 16][group] = byte_of(held.b[i / 4], i % 4);
  }
  for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
    const IntegerProduct& held = *static_cast<const IntegerProduct*>(arguments[lane]);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t row = lane / 4 + (i / 2) * 8, column = lane % 4 * 2 + i % 2;
      uint32_t sum = static_cast<uint32_t>(held.c[i]);
      for (uint32_t k = 0; k < 32; ++k) sum += static_cast<uint32_t>(a[row][k] * b[k][column]);
      held.d[i] = static_cast<int32_t>(sum);
    }
  }
}

struct MatrixRows {
  uint32_t* r;
  const void* row;
};

/// Register j of lane i: elements 2 (i % 4) and + 1 of row i / 4 of matrix j.
void load_matrices(void* const* arguments) {
  for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
    uint32_t* const r = static_cast<const MatrixRows*>(arguments[lane])->r;
    for (uint32_t j = 0; j < 4; ++j) {
      const void* const row = static_cast<const MatrixRows*>(arguments[j * 8 + lane / 4])->row;
      std::memcpy(&r[j], static_cast<const char*>(row) + lane % 4 * 4, 4);
    }
  }
}

}  // namespace

void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const char* file, int line) {
  Product argument{d, a, b};
  warp_collective({"mma_m16n8k16_bf16", file, line}, kWholeWarp, &argument, multiply);
}

void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const int32_t (&c)[4],
                     const char* file, int line) {
  IntegerProduct argument{d, a, b, c};
  warp_collective({"mma_m16n8k32_s8", file, line}, kWholeWarp, &argument, multiply_integers);
}

void ldmatrix_x4(uint32_t (&r)[4], const void* shared_row, const char* file, int line) {
  const PlaceInCode place = place_of(__builtin_return_address(0));
  if (!in_shared_memory(shared_row)) fail("ldmatrix_x4 of an address outside of shared memory at " + placeholder(place));
  if (reinterpret_cast<uintptr_t>(shared_row) % 16)
    fail("ldmatrix_x4 of an address that is not a multiple of 16 at " + placeholder(place));
  use(shared_row, 16, Use::kRead, place);
  MatrixRows argument{r, shared_row};
  warp_collective({"ldmatrix_x4", file, line}, kWholeWarp, &argument, load_matrices);
}

}  // namespace cuda_on_cpu
