// Hadamard transforms of 16 to 256 elements along rows or columns (numerics.md 3): strides 1, 2, 4, ... in float32, each
// pair (a, b) to (a + b, a - b), then times size^-1/2, rounded to the input's type. Signs are flipped first, or last of an
// inverse. Every arrangement below does these additions in this order; which thread does one changes no byte.
//
// Bytes moved per element: it is read once and written once, in 16 bytes per lane along rows and 4 along columns.
//
// Rows: `lanes` threads share a transform, each with `vectors` of 16 bytes of it, lanes * 16 bytes apart. Strides within
// 16 bytes are done in registers, then those across lanes by shuffles (p + v or p - v as one fused multiply-add by 1 or -1,
// which rounds once, as the addition does), then those across vectors in registers. Rows are whole transforms, so
// the array is one line of them.
// Columns: a thread has 16 rows of one word (two 16-bit columns), so strides 1 to 8 are in registers; a warp reads 128 bytes
// of each row. Longer transforms meet in shared memory: there, a thread takes every 16th row.
#include "../numerics/hadamard.h"
#include "launch.h"
#include "launch_blocks.h"
#include "vectors.cuh"

namespace jaxlowprec {
namespace cuda {

/// Bit i of the words is set where element i of a transform is negated.
struct HadamardSigns {
  uint32_t words[8];
};

struct HadamardArguments {
  const void* x;
  void* result;
  int64_t rows, columns;  // all matrices as one
  HadamardSigns signs;
  const uint32_t* drawn_signs;  // [matrices, 4], of kernels for drawn signs
  int64_t matrix_rows;          // of each matrix
  uint32_t column_tiles;        // vertical
  bool inverse;
  bool whole_words;  // vertical: rows are whole words, and aligned
};

/// The word whose low bits say which elements of a transform of a matrix are negated, from `element` on.
template <bool kDrawn>
JLP_DEVICE uint32_t negations(const HadamardArguments& a, int64_t matrix, uint32_t element) {
  const uint32_t word = kDrawn ? a.drawn_signs[4 * matrix + element / 32] : a.signs.words[element / 32];
  return word >> (element % 32);
}

/// size^-1/2 rounded once.
template <int kSize>
constexpr float kHadamardScale = kSize == 16    ? 0.25f
                                 : kSize == 32  ? 0.17677669529663688f
                                 : kSize == 64  ? 0.125f
                                 : kSize == 128 ? 0.08838834764831844f
                                                : 0.0625f;

/// The sign bits of a word's elements, whose negations are the low bits.
template <ElementType kType>
JLP_DEVICE uint32_t word_signs(uint32_t negations) {
  return kPerWord<kType> == 1 ? negations << 31 : (negations << 15 & 0x8000u) | (negations << 30 & kSignBit);
}

// --- along rows

template <ElementType kType, int kSize>
struct HadamardRows {
  static constexpr int kPerVector = 4 * kPerWord<kType>;
  static constexpr int kLanes = kSize / kPerVector < 16 ? kSize / kPerVector : 16;  // that share a transform
  static constexpr int kVectors = kSize / (kPerVector * kLanes);
  static constexpr int kThreads = 256;
  static constexpr int kTransforms = 4 / kVectors;  // a thread, for 64 bytes in flight
  static constexpr int kPerBlock = kThreads / kLanes * kTransforms;

  using Values = float[kVectors * kPerVector];
  using Words = uint32_t[4 * kVectors];

  /// Stride kStride and those above it, in elements of the transform.
  template <int kStride>
  __device__ __forceinline__ static void butterfly(Values& v, uint32_t lane) {
    if constexpr (kStride < kPerVector * kLanes) {
      constexpr int kDistance = kStride / kPerVector;
      const float side = lane & kDistance ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < kVectors * kPerVector; ++i) v[i] = fmaf(v[i], side, __shfl_xor_sync(0xFFFFFFFFu, v[i], kDistance));
      butterfly<2 * kStride>(v, lane);
    } else if constexpr (kStride < kSize) {
      constexpr int kDistance = kStride / kLanes;
#pragma unroll
      for (int i = 0; i < kVectors * kPerVector; ++i) {
        if (i & kDistance) continue;
        const float a = v[i], b = v[i + kDistance];
        v[i] = a + b, v[i + kDistance] = a - b;
      }
      butterfly<2 * kStride>(v, lane);
    }
  }

  __device__ __forceinline__ static void transform(uint4 (&vectors)[kVectors], const Words& signs, uint32_t lane,
                                                   bool inverse) {
    Values v;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const uint32_t words[4] = {vectors[i].x, vectors[i].y, vectors[i].z, vectors[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        widen<kType>(words[j] ^ (inverse ? 0u : signs[4 * i + j]), &v[(4 * i + j) * kPerWord<kType>]);
      hadamard_butterfly<kPerVector>(&v[i * kPerVector]);
    }
    butterfly<kPerVector>(v, lane);
#pragma unroll
    for (int i = 0; i < kVectors * kPerVector; ++i) v[i] *= kHadamardScale<kSize>;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        words[j] = narrow<kType>(&v[(4 * i + j) * kPerWord<kType>]) ^ (inverse ? signs[4 * i + j] : 0u);
      vectors[i] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
};

/// Transforms along rows. kDrawn: each matrix has signs of its own, in the device's memory.
template <ElementType kType, int kSize, bool kDrawn>
static __global__ void __launch_bounds__(256) hadamard_rows_kernel(const __grid_constant__ HadamardArguments a) {
  using Rows = HadamardRows<kType, kSize>;
  typename Rows::Words signs;  // of the thread's elements
  const uint32_t lane = threadIdx.x % Rows::kLanes;
  const auto take_signs = [&](int64_t matrix) {
#pragma unroll
    for (int i = 0; i < 4 * Rows::kVectors; ++i) {
      const uint32_t element = (i / 4 * Rows::kLanes + lane) * Rows::kPerVector + i % 4 * kPerWord<kType>;
      signs[i] = word_signs<kType>(negations<kDrawn>(a, matrix, element));
    }
  };
  if constexpr (!kDrawn) take_signs(0);
  constexpr int kStep = Rows::kThreads / Rows::kLanes;  // transforms between two of a thread's
  const int64_t first = static_cast<int64_t>(blockIdx.x) * Rows::kPerBlock + threadIdx.x / Rows::kLanes;
  const int64_t remaining = a.rows * (a.columns / kSize) - first;
  const int count = remaining < Rows::kPerBlock ? static_cast<int>(remaining) : Rows::kPerBlock;
  const int64_t start = first * (kSize / Rows::kPerVector) + lane;
  const uint4* x = static_cast<const uint4*>(a.x) + start;
  uint4* y = static_cast<uint4*>(a.result) + start;
  uint4 vectors[Rows::kTransforms][Rows::kVectors] = {};
#pragma unroll
  for (int t = 0; t < Rows::kTransforms; ++t)
#pragma unroll
    for (int i = 0; i < Rows::kVectors; ++i)
      if (t * kStep < count) vectors[t][i] = x[t * kStep * (kSize / Rows::kPerVector) + i * Rows::kLanes];
#pragma unroll
  for (int t = 0; t < Rows::kTransforms; ++t) {
    if constexpr (kDrawn) {
      const int64_t transform = t * kStep < count ? first + t * kStep : 0;
      take_signs(a.matrix_rows == a.rows ? 0 : transform / (a.matrix_rows * (a.columns / kSize)));
    }
    Rows::transform(vectors[t], signs, lane, a.inverse);
#pragma unroll
    for (int i = 0; i < Rows::kVectors; ++i)
      if (t * kStep < count) y[t * kStep * (kSize / Rows::kPerVector) + i * Rows::kLanes] = vectors[t][i];
  }
}

// --- along columns

/// Words of kRows rows, `stride` elements apart, of which element `index` is the first. Where rows are not whole words, of
/// as many elements as the row has.
template <ElementType kType, int kRows>
JLP_DEVICE void load_column(const HadamardArguments& a, int64_t index, int64_t stride, bool pair, uint32_t (&words)[kRows]) {
  if (kPerWord<kType> == 1 || a.whole_words) {
    const uint8_t* x = static_cast<const uint8_t*>(a.x) + index * kElementBytes<kType>;
#pragma unroll
    for (int row = 0; row < kRows; ++row, x += stride * kElementBytes<kType>)
      words[row] = *reinterpret_cast<const uint32_t*>(x);
  } else {
    const uint16_t* x = static_cast<const uint16_t*>(a.x) + index;
#pragma unroll
    for (int row = 0; row < kRows; ++row, x += stride) words[row] = x[0] | (pair ? static_cast<uint32_t>(x[1]) << 16 : 0u);
  }
}

template <ElementType kType, int kRows>
JLP_DEVICE void store_column(const HadamardArguments& a, int64_t index, int64_t stride, bool pair,
                             const uint32_t (&words)[kRows]) {
  if (kPerWord<kType> == 1 || a.whole_words) {
    uint8_t* y = static_cast<uint8_t*>(a.result) + index * kElementBytes<kType>;
#pragma unroll
    for (int row = 0; row < kRows; ++row, y += stride * kElementBytes<kType>) *reinterpret_cast<uint32_t*>(y) = words[row];
  } else {
    uint16_t* y = static_cast<uint16_t*>(a.result) + index;
#pragma unroll
    for (int row = 0; row < kRows; ++row, y += stride) {
      y[0] = static_cast<uint16_t>(words[row]);
      if (pair) y[1] = static_cast<uint16_t>(words[row] >> 16);
    }
  }
}

template <ElementType kType, int kSize, bool kDrawn>
struct HadamardColumns {
  static constexpr int kRowWarps = kSize / 16;  // that share a transform, 16 rows each
  static constexpr int kWarps = kRowWarps < 8 ? 8 : kRowWarps;
  static constexpr int kColumnWarps = kWarps / kRowWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWords = kColumnWarps * 32;  // of a block's columns

  struct Shared {
    float v[kColumnWarps][kSize][kPerWord<kType>][32];
  };

  /// The word of a row, which is finished but for its scale and, of an inverse, its sign: the lowest bit of `negated`.
  __device__ __forceinline__ static uint32_t finished(const HadamardArguments& a, uint32_t negated,
                                                      float (&v)[kPerWord<kType>]) {
#pragma unroll
    for (int i = 0; i < kPerWord<kType>; ++i) v[i] *= kHadamardScale<kSize>;
    return narrow<kType>(v) ^ (a.inverse ? signs_of_row(negated) : 0u);
  }
  __device__ __forceinline__ static uint32_t signs_of_row(uint32_t negated) {
    return word_signs<kType>((negated & 1u) * 3u);
  }
};

/// Transforms along columns. kDrawn: as above.
template <ElementType kType, int kSize, bool kDrawn>
static __global__ void __launch_bounds__(HadamardColumns<kType, kSize, kDrawn>::kThreads)
    hadamard_columns_kernel(const __grid_constant__ HadamardArguments a) {
  using Columns = HadamardColumns<kType, kSize, kDrawn>;
  constexpr int kPer = kPerWord<kType>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_warp = warp % Columns::kRowWarps, column_warp = warp / Columns::kRowWarps;
  const int64_t first = static_cast<int64_t>(blockIdx.x / a.column_tiles) * kSize;
  const int64_t matrix = kDrawn ? first / a.matrix_rows : 0;
  const uint32_t negated = negations<kDrawn>(a, matrix, row_warp * 16);  // of the thread's rows
  const int64_t word = static_cast<int64_t>(blockIdx.x % a.column_tiles) * Columns::kWords + column_warp * 32 + lane;
  const int64_t column = word * kPer;
  const bool inside = column < a.columns, pair = column + 1 < a.columns;

  uint32_t words[16] = {};
  if (inside) load_column<kType>(a, (first + row_warp * 16) * a.columns + column, a.columns, pair, words);
  float v[kPer][16];  // by column
#pragma unroll
  for (int row = 0; row < 16; ++row) {
    float elements[kPer];
    widen<kType>(words[row] ^ (a.inverse ? 0u : Columns::signs_of_row(negated >> row)), elements);
#pragma unroll
    for (int i = 0; i < kPer; ++i) v[i][row] = elements[i];
  }
#pragma unroll
  for (int i = 0; i < kPer; ++i) hadamard_butterfly<16>(v[i]);

  if constexpr (kSize == 16) {
#pragma unroll
    for (int row = 0; row < 16; ++row) {
      float elements[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) elements[i] = v[i][row];
      words[row] = Columns::finished(a, negated >> row, elements);
    }
    if (inside) store_column<kType>(a, first * a.columns + column, a.columns, pair, words);
  } else {
    auto& shared = block_shared<typename Columns::Shared>().v[column_warp];
#pragma unroll
    for (int row = 0; row < 16; ++row)
#pragma unroll
      for (int i = 0; i < kPer; ++i) shared[row_warp * 16 + row][i][lane] = v[i][row];
    __syncthreads();
    if (!inside) return;
    for (int start = row_warp; start < 16; start += Columns::kRowWarps) {  // rows start, start + 16, ...
      float far[kPer][Columns::kRowWarps];
      uint32_t done[Columns::kRowWarps];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
#pragma unroll
        for (int k = 0; k < Columns::kRowWarps; ++k) far[i][k] = shared[start + 16 * k][i][lane];
        hadamard_butterfly<Columns::kRowWarps>(far[i]);
      }
#pragma unroll
      for (int k = 0; k < Columns::kRowWarps; ++k) {
        float elements[kPer];
#pragma unroll
        for (int i = 0; i < kPer; ++i) elements[i] = far[i][k];
        done[k] = Columns::finished(a, negations<kDrawn>(a, matrix, start + 16 * k), elements);
      }
      store_column<kType>(a, (first + start) * a.columns + column, 16 * a.columns, pair, done);
    }
  }
}

namespace {

template <ElementType kType, int kSize, bool kDrawn>
cudaError_t launch_kernel(HadamardArguments a, bool vertical, cudaStream_t stream) {
  if (vertical) {
    using Columns = HadamardColumns<kType, kSize, kDrawn>;
    const int64_t column_tiles = divide_up(divide_up(a.columns, kPerWord<kType>), Columns::kWords);
    if (column_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
    a.column_tiles = static_cast<uint32_t>(column_tiles);
    const Blocks blocks{column_tiles * (a.rows / kSize), 1, 1, Columns::kThreads,
                        kSize == 16 ? 0 : sizeof(typename Columns::Shared)};
    return launch_blocks(hadamard_columns_kernel<kType, kSize, kDrawn>, blocks, stream, a);
  }
  using Rows = HadamardRows<kType, kSize>;
  const Blocks blocks{divide_up(a.rows * (a.columns / kSize), Rows::kPerBlock), 1, 1, Rows::kThreads};
  return launch_blocks(hadamard_rows_kernel<kType, kSize, kDrawn>, blocks, stream, a);
}

template <ElementType kType, int kSize>
cudaError_t launch_size(const HadamardArguments& a, bool vertical, cudaStream_t stream) {
  if (a.drawn_signs == nullptr) return launch_kernel<kType, kSize, false>(a, vertical, stream);
  if constexpr (kSize <= kDrawnSigns) return launch_kernel<kType, kSize, true>(a, vertical, stream);
  return cudaErrorInvalidValue;
}

template <ElementType kType>
cudaError_t launch_type(int32_t size, const HadamardArguments& a, bool vertical, cudaStream_t stream) {
  switch (size) {
    case 16: return launch_size<kType, 16>(a, vertical, stream);
    case 32: return launch_size<kType, 32>(a, vertical, stream);
    case 64: return launch_size<kType, 64>(a, vertical, stream);
    case 128: return launch_size<kType, 128>(a, vertical, stream);
    case 256: return launch_size<kType, 256>(a, vertical, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch(const HadamardProblem& p, cudaStream_t stream) {
  if (p.size <= 0 || (p.vertical ? p.rows : p.columns) % p.size != 0) return cudaErrorInvalidValue;
  if (p.batch * p.rows * p.columns == 0) return cudaSuccess;
  const int64_t bytes = p.vertical ? 4 : 16;
  if (!aligned(p.x, bytes) || !aligned(p.result, bytes)) return cudaErrorInvalidValue;
  HadamardArguments a{};
  a.x = p.x, a.result = p.result, a.inverse = p.inverse;
  a.rows = p.batch * p.rows, a.columns = p.columns;  // matrices are whole transforms along either axis
  a.whole_words = p.columns % 2 == 0;
  a.drawn_signs = p.drawn_signs, a.matrix_rows = p.rows;
  for (int i = 0; i < p.size && i < 256 && p.drawn_signs == nullptr; ++i)
    if (p.sign_bits[i] != 0) a.signs.words[i / 32] |= 1u << (i % 32);
  switch (p.type) {
    case ElementType::kBF16: return launch_type<ElementType::kBF16>(p.size, a, p.vertical, stream);
    case ElementType::kF16: return launch_type<ElementType::kF16>(p.size, a, p.vertical, stream);
    default: return launch_type<ElementType::kF32>(p.size, a, p.vertical, stream);
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
