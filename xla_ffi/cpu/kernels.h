// What the CPU kernels are asked to do, and the table of their entry points for one instruction set.
//
// Every operation is cut into chunks that may run in any order on any thread; which elements belong to a chunk, and so the
// bytes it writes, do not depend on the number of threads.
#pragma once

#include <cstdint>

namespace jaxlowprec {

enum class ElementType : int32_t { kBF16, kF16, kF32 };

/// Where stochastic rounding takes its bits from (numerics.md 4): global indices of the unsharded array.
struct Random {
  const uint32_t* key = nullptr;     // [batch, 2]; null: round to nearest
  const uint32_t* rows = nullptr;    // [rows of the quantised orientation]
  const uint32_t* blocks = nullptr;  // [blocks along the quantised axis]
  uint32_t stream = 0;
};

/// One of the two ways to quantise a matrix: along its rows, or along its columns with the result stored K-major.
struct QuantizeDirection {
  const float* amax = nullptr;  // [batch], after rotation
  uint8_t* data = nullptr;      // null: not wanted
  uint8_t* scale = nullptr;
  Random random;
};

struct QuantizeProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  bool tiles;  // 16x16 blocks instead of 1x16
  QuantizeDirection rowwise, columnwise;
  bool rotate_columns;  // random Hadamard transform along the columns, for the columnwise direction
  uint32_t sign_mask;
};

struct AmaxProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  uint32_t* plain;    // [batch] magnitude bits, zero on entry; null: not wanted
  uint32_t* rotated;  // the same after the random Hadamard transform along the columns
  uint32_t sign_mask;
};

enum class Activation : int32_t { kNone, kGeluTanh };

/// [batch, rows, 16 * blocks] codes, contraction last, and [batch, rows, blocks] scales (16x16: [batch, rows / 16, blocks]).
struct MatmulOperand {
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;  // [batch]
  bool tiles;
};

struct MatmulProblem {
  MatmulOperand a, b;
  int64_t batch, rows, columns, blocks;  // M, N, K / 16
  const float* bias;                     // [batch, columns]; null: none
  const void* accumulate;                // [batch, rows, columns] of `accumulate_type`; null: none
  ElementType accumulate_type;
  Activation activation;
  void* pre_activation;  // of the result's type; null: not wanted
  void* result;          // [batch, rows, columns]
  ElementType type;
};

struct DequantizeProblem {
  const uint8_t* data;   // [batch, rows, 8 * ceil(columns / 16)]
  const uint8_t* scale;  // [batch, rows, ceil(columns / 16)], 16x16: [batch, ceil(rows / 16), ...]
  const float* amax;     // [batch]
  int64_t batch, rows, columns;
  bool tiles;
  bool rotate;  // undo a random Hadamard transform of size 16 along the rows
  uint32_t sign_mask;
  void* result;
  ElementType type;
};

struct HadamardProblem {
  const void* x;  // [rows, columns], transformed along its rows in pieces of `size`; or, if `vertical`, along its columns
  ElementType type;
  int64_t batch, rows, columns;
  int32_t size;
  bool vertical, inverse;
  const uint32_t* sign_bits;  // [size], 0 or the sign bit
  void* result;
};

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
};

/// At least `bytes` bytes, 64-byte aligned, of the calling thread: valid until its next call.
uint8_t* thread_scratch(int64_t bytes);

}  // namespace jaxlowprec
