// Norms (norms.cuh) with the amaxes of the result in the same pass, plain and after the rotation along the columns.
//
// Data flow: a block has 16 rows of a matrix, a warp each. The warp finds the row's numbers as norm_kernel does, and keeps
// the first pieces of the row in shared memory. Then a thread takes the 16 rows of a pair of columns: kept, or once more
// from the L2 cache -> normalised, its weights loaded once for all rows -> rounded, written, and still in registers -> its
// largest magnitude, and that of its transform. One atomic a block and amax. Arrays whose rows are not whole pieces go one
// element at a time.
//
// Bytes moved per element: those of norm_kernel; the amaxes read nothing. A block keeps what lets a multiprocessor hold two,
// so that one loads while the other stores: on sm_90 and sm_100 113 KiB, 3600 columns of 16 bits. Of 4096 columns an eighth
// is read again, 4 MB of all blocks that run together. Of rows that are longer than 4/3 of that, a block keeps what it can
// have alone, 7168 columns: of 8192 an eighth is read again, 4 MB, and of 16384 9/16, 39 MB; the L2 cache has 50 MB.
// Launch: blocks of 512 threads.
#include "../quantize/amax.cuh"
#include "norm_launch.h"
#include "norms.cuh"
#include "pairs.cuh"
#include "result_amaxes.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kAmaxedNormRows = 16;  // what a rotation takes
constexpr int kAmaxedNormThreads = 32 * kAmaxedNormRows;

/// That registers are to suffice for; the code of sm_80 would spill with two, and its bandwidth asks for less.
template <ElementType kType>
constexpr int kAmaxedNormBlocks = kType == ElementType::kF32 || kArch < 900 ? 1 : 2;

struct AmaxedNormArguments {
  NormArguments norm;  // its `rows` are those of a matrix
  int64_t columns;
  uint32_t down;              // blocks of a matrix
  uint32_t *plain, *rotated;  // null: not wanted
  uint32_t sign_mask;
};

/// Before the rows that are kept.
struct alignas(16) AmaxedNormShared {
  RowNumbers numbers[kAmaxedNormRows];
  uint32_t of_warp[2][kAmaxedNormRows];
};

/// Elements of a kept row from its beginning to the next one's: rows are aligned to 16 bytes.
template <ElementType kType>
JLP_DEVICE int kept_stride(int keeps) {
  constexpr int kAligned = 16 / kElementBytes<kType>;
  return (keeps + kAligned - 1) / kAligned * kAligned;
}

/// The rows of a block: the first `keeps` elements of each in shared memory.
template <class Element>
struct BlockOfRows {
  uint32_t batch;
  int rows;       // at most kAmaxedNormRows
  int64_t first;  // element of the arrays
  const Element* kept;
  int keeps;
  const RowNumbers (&numbers)[kAmaxedNormRows];
};

/// The largest magnitudes that a thread has found, as bits.
struct Magnitudes {
  uint32_t plain = 0, rotated = 0;
};

/// The rows of a pair of columns. kAll: there are 16.
///
/// What depends on the number of a row alone, the compiler computes for all 16 before the loop over columns, for which
/// registers do not suffice: so addresses are compared where rows may lack.
template <ElementType kType, bool kWhole, bool kLayer, bool kAll>
struct NormedPair {
  using E = ElementOf<kType>;
  using Pair = Neighbours<kType>;
  using Element = typename Piece<kType, false>::Storage;
  using Block = BlockOfRows<Element>;
  using Words = typename Pair::Words[kAmaxedNormRows];

  const AmaxedNormArguments& a;
  const Block& block;
  int column, count;  // the first one, and how many exist

  __device__ __forceinline__ void run(Magnitudes& most) const {
    Words words;
    load(words);
    norm(words);
    uint32_t pairs[Tile<E>::kPairWords];
#pragma unroll
    for (int r = 0; r < kAmaxedNormRows; ++r)
#pragma unroll
      for (int w = 0; w < Pair::kWords; ++w) pairs[16 * w + r] = words[r][w];
    if (a.plain) most.plain = max(most.plain, magnitude_bits<E>(pairs));
    if (!a.rotated) return;
    flip_signs<E>(pairs, not_kept(a.sign_mask));
    most.rotated = max(most.rotated, max(rotated_amax<E>(pairs, 0), rotated_amax<E>(pairs, 1)));
  }

 private:
  /// As the block's warps read them: kept, or x, or x + residual, which they have written.
  __device__ __forceinline__ void load(Words& words) const {
    if (column + count <= block.keeps)
      load(block.kept + column, kept_stride<kType>(block.keeps), words);
    else
      load(static_cast<const Element*>(a.norm.residual ? a.norm.total : a.norm.x) + block.first + column, a.columns, words);
  }

  /// Every load is issued before any is used: rows that do not exist repeat the last one.
  __device__ __forceinline__ void load(const Element* from, int64_t stride, Words& words) const {
    const auto* const last = from + (block.rows - 1) * stride;
#pragma unroll
    for (int r = 0; r < kAmaxedNormRows; ++r) {
      read(from, words[r]);
      from = kAll || from < last ? from + stride : last;
    }
  }

  /// Not through the read-only cache, which does not see what the block has written.
  __device__ __forceinline__ void read(const Element* from, typename Pair::Words& words) const {
    if constexpr (kWhole)
      Pair::split(*reinterpret_cast<const typename Pair::Both*>(from), words);
    else
      Pair::join(from[0], count > 1 ? from[1] : 0u, words);
  }

  __device__ __forceinline__ void load_floats(const float* of_matrices, float (&v)[2]) const {
    const float* const from = of_matrices + block.batch * a.columns + column;
    if constexpr (kWhole) {
      const uint2 both = __ldg(reinterpret_cast<const uint2*>(from));
      v[0] = as_float(both.x), v[1] = as_float(both.y);
    } else {
      v[0] = __ldg(from), v[1] = count > 1 ? __ldg(from + 1) : 0.0f;
    }
  }

  /// Replaces the rows by their norm, which is written. Zeros are left in place of what does not exist.
  __device__ __forceinline__ void norm(Words& words) const {
    float weight[2], beta[2] = {};
    load_floats(a.norm.weight, weight);
    if (a.norm.beta) load_floats(a.norm.beta, beta);
    int64_t index = block.first + column;
    const int64_t end = index + block.rows * a.columns;
#pragma unroll
    for (int r = 0; r < kAmaxedNormRows; ++r, index += a.columns) {
      const bool exists = kAll || index < end;
      float v[2];
#pragma unroll
      for (int w = 0; w < Pair::kWords; ++w) widen<kType>(words[r][w], &v[w * kPerWord<kType>]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        v[c] = block.numbers[r].template normed<kLayer>(v[c], weight[c]);
        if (a.norm.beta) v[c] = v[c] + beta[c];
        if (!kWhole && c >= count) v[c] = 0.0f;
      }
#pragma unroll
      for (int w = 0; w < Pair::kWords; ++w) {
        const uint32_t word = narrow<kType>(&v[w * kPerWord<kType>]);
        words[r][w] = exists ? word : 0u;
      }
      if (!exists) continue;
      if constexpr (kWhole)
        Pair::store(a.norm.result, index, words[r]);
      else
        Pair::store(a.norm.result, index, words[r], count);
    }
  }
};

/// Every thread's pairs of columns.
template <class Columns>
JLP_DEVICE void norm_columns(const AmaxedNormArguments& a, const typename Columns::Block& block, Magnitudes& most) {
  const int count = static_cast<int>(a.columns);
#pragma unroll 1
  for (int column = 2 * threadIdx.x; column < count; column += 2 * kAmaxedNormThreads)
    Columns{a, block, column, min(2, count - column)}.run(most);
}

template <ElementType kType, bool kWhole, NormKind kKind>
static __global__ void __launch_bounds__(kAmaxedNormThreads, kAmaxedNormBlocks<kType>)
    amaxed_norm_kernel(const __grid_constant__ AmaxedNormArguments a) {
  using P = Piece<kType, kWhole>;
  using Element = typename Piece<kType, false>::Storage;
  constexpr bool kLayer = kKind == NormKind::kLayer;
  auto& shared = block_shared<AmaxedNormShared>();
  auto* const kept = reinterpret_cast<Element*>(&shared + 1);
  const int keeps = a.norm.keeps * P::kCount, warp = threadIdx.x / 32;
  const uint32_t batch = blockIdx.x / a.down;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x % a.down) * kAmaxedNormRows;
  const int rows = static_cast<int>(min(int64_t{kAmaxedNormRows}, a.norm.rows - first_row));
  const int64_t line = batch * a.norm.rows + first_row;

  RowNumbers numbers = {};
  if (warp < rows) {
    auto* const of_row = reinterpret_cast<typename P::Storage*>(kept + warp * kept_stride<kType>(keeps));
    numbers = find_numbers<P, kLayer>(a.norm, WarpRow<P>(line + warp, a.norm.pieces, of_row, a.norm.keeps));
  }
  if (threadIdx.x % 32 == 0) shared.numbers[warp] = numbers;
  __syncthreads();

  Magnitudes most;
  const BlockOfRows<Element> block = {batch, rows, line * a.columns, kept, keeps, shared.numbers};
  if (rows == kAmaxedNormRows)
    norm_columns<NormedPair<kType, kWhole, kLayer, true>>(a, block, most);
  else
    norm_columns<NormedPair<kType, kWhole, kLayer, false>>(a, block, most);
  if (a.plain) raise(a.plain + batch, most.plain, shared.of_warp[0]);
  if (a.rotated) raise(a.rotated + batch, most.rotated, shared.of_warp[1]);
}

namespace {

constexpr int64_t kKeptBytes = 48 * 1024;  // every device has this much for a block

NormArguments norm_arguments(const NormProblem& p, const RowPieces& row) {
  NormArguments a{};
  a.x = p.x, a.residual = p.residual, a.weight = p.weight, a.beta = p.beta;
  a.result = p.result, a.total = p.total, a.mean = p.mean, a.inverse = p.inverse;
  a.lines = p.batch * p.rows, a.rows = p.rows, a.pieces = row.count;
  a.each = static_cast<float>(1.0 / p.columns), a.epsilon = p.epsilon;
  return a;
}

/// Rows are kept whole, or not at all.
cudaError_t launch_plain(const NormProblem& p, const RowPieces& row, cudaStream_t stream) {
  NormArguments a = norm_arguments(p, row);
  const int64_t row_bytes = int64_t{row.count} * row.bytes;
  const bool again = p.result || p.kind == NormKind::kLayer;
  a.keeps = again && row_bytes <= kKeptBytes ? row.count : 0;
  int64_t warps = kRowsOfBlock;
  while (a.keeps && warps * row_bytes > kKeptBytes) warps /= 2;
  const Blocks blocks{divide_up(a.lines, warps), 1, 1, static_cast<int>(32 * warps),
                      a.keeps ? static_cast<size_t>(warps * row_bytes) : 0};
  return with_norm(p.type, row.whole, p.kind, [&](auto type, auto whole, auto kind) {
    return launch_blocks(norm_kernel<type, whole, kind>, blocks, stream, a);
  });
}

cudaError_t launch_amaxed(const NormProblem& p, const RowPieces& row, cudaStream_t stream) {
  AmaxedNormArguments a{};
  a.norm = norm_arguments(p, row);
  const cudaError_t error = kept_pieces(row, kAmaxedNormRows, sizeof(AmaxedNormShared), a.norm.keeps);
  if (error != cudaSuccess) return error;
  const int64_t down = divide_up(p.rows, kAmaxedNormRows);
  if (down > INT32_MAX || p.batch > INT32_MAX) return cudaErrorInvalidValue;
  a.columns = p.columns, a.down = static_cast<uint32_t>(down);
  a.plain = p.amaxes.plain, a.rotated = p.amaxes.rotated, a.sign_mask = p.amaxes.sign_mask;
  const size_t kept = kAmaxedNormRows * static_cast<size_t>(divide_up(int64_t{a.norm.keeps} * row.bytes, 16) * 16);
  const Blocks blocks{p.batch * down, 1, 1, kAmaxedNormThreads, sizeof(AmaxedNormShared) + kept};
  return with_norm(p.type, row.whole, p.kind, [&](auto type, auto whole, auto kind) {
    return launch_blocks(amaxed_norm_kernel<type, whole, kind>, blocks, stream, a);
  });
}

}  // namespace

cudaError_t launch(const NormProblem& p, cudaStream_t stream) {
  const cudaError_t error = clear_amaxes(p.amaxes, p.batch, stream);
  if (error != cudaSuccess || p.batch * p.rows == 0 || p.columns == 0) return error;
  if (p.columns > INT32_MAX / 2) return cudaErrorInvalidValue;
  const RowPieces row(p.columns, p.type, all_aligned(p.x, p.residual, p.weight, p.beta, p.result, p.total));
  return p.amaxes.wanted() ? launch_amaxed(p, row, stream) : launch_plain(p, row, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
