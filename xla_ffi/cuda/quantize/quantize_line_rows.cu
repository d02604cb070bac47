// Quantisation along rows, each by its own scale (numerics.md 18): one warp or several have a row, every thread takes 16
// elements at a time from memory to its registers.
//
//   elements (once or twice 32 bytes a thread, 64 of float32) -> amax of the row over its threads, unless it is given -> the
//   row's scale -> codes of the same registers (16 bytes a thread)
//
// A row that is longer than its threads' registers is read again for its codes, from the L2 cache: from its end, which the
// registers hold.
// Bytes moved per element: 2 or 4 read, 1 written; 2 or 4 a row.
// Launch: blocks of 256 threads that have 8 rows of up to 1,024 elements, or fewer longer ones.
#include "../launch.h"
#include "amax.cuh"
#include "line_codes.cuh"
#include "quantize_launch.cuh"
#include "quantize_lines.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kLineHeld = 2;  // sixteens that a thread loads before the first is used, and then holds

struct LineRowsArguments {
  const void* x;
  int64_t lines, columns, rows;  // of all matrices; of a line; of a matrix
  const float* amax;             // [lines]; null: they are found
  uint8_t *data, *scale;
  Random random;
  LineRule rule;
  int32_t log_warps;    // that have a row
  bool whole, aligned;  // rows are sixteens at multiples of 16 bytes; at multiples of 16 bytes at all
  bool pieces;          // codes of 16 elements may be stored at once
};

struct LineRowsShared {
  uint32_t of_warp[kRowWarps];
};

/// The largest of what the threads of a row found, to all of them: by all of the block's threads.
JLP_DEVICE uint32_t max_of_row(uint32_t found, int log_warps, LineRowsShared& shared) {
  if (log_warps == 0) return __reduce_max_sync(0xFFFFFFFFu, found);
  share_amaxes(found, shared.of_warp);
  const int warps = 1 << log_warps, first = threadIdx.x / 32 & -warps;
  uint32_t most = 0;
  for (int i = 0; i < warps; ++i) most = max(most, shared.of_warp[first + i]);
  return most;
}

/// Blocks that registers are to suffice for.
template <class E, bool kStochastic>
constexpr int kLineRowBlocks = (E::kBytes == 4 ? 3 : 4) - kStochastic;

template <class E, class Code, bool kStochastic>
__global__ void __launch_bounds__(kRowThreads, kLineRowBlocks<E, kStochastic>)
    quantize_line_rows(const __grid_constant__ LineRowsArguments a) {
  LineRowsShared& shared = block_shared<LineRowsShared>();
  const int log_threads = 5 + a.log_warps, threads = 1 << log_threads, place = threadIdx.x & (threads - 1);
  const int64_t line = static_cast<int64_t>(blockIdx.x) * (kRowThreads >> log_threads) + (threadIdx.x >> log_threads);
  const int64_t columns = line < a.lines ? a.columns : 0;  // of a row that is not there, nothing is read
  const auto* row = static_cast<const typename E::Storage*>(a.x) + line * a.columns;
  const int64_t step = 16 * threads, at_once = kLineHeld * step, end = (a.columns - 1) / at_once * at_once;
  Sixteen<E> held[kLineHeld];
  const auto load = [&](int64_t first) { load_held(row, first + 16 * place, step, columns, a.whole, a.aligned, held); };
  uint32_t most = 0;
  if (a.amax) {
    load(end);
    if (columns > 0) most = as_bits(a.amax[line]) & kMagnitudeBits;
  } else {
#pragma unroll 1
    for (int64_t first = 0; first <= end; first += at_once) {
      load(first);
#pragma unroll
      for (const Sixteen<E>& sixteen : held) most = max(most, magnitude_bits<E>(sixteen.words));
    }
    most = max_of_row(most, a.log_warps, shared);
  }
  if (columns == 0) return;

  const LineFactors<float> factors = factors_of_line(a.rule, most);
  if (place == 0) store_line_scale(a.rule.type, a.scale, line, factors.scale);
  const int64_t batch = kStochastic ? line / a.rows : 0, of_matrix = line - batch * a.rows;
#pragma unroll 1
  for (int64_t first = end;; first -= at_once, load(first)) {
#pragma unroll
    for (int j = 0; j < kLineHeld; ++j) {
      const int64_t column = first + 16 * place + j * step;
      if (column >= columns) break;
      uint32_t random[4] = {}, codes[4];
      random_bytes_of<kStochastic>(a.random, batch, of_matrix, column / 16, random);
      encode_line_sixteen<Code, kStochastic>(held[j], factors, a.rule, random, codes);
      store_codes(a.data + line * columns + column, left(columns, column, 16), a.pieces, codes);
    }
    if (first == 0) return;
  }
}

cudaError_t launch_line_rows(const QuantizeProblem& p, cudaStream_t stream) {
  const Format& f = p.format;
  LineRowsArguments a = {};
  a.x = p.x, a.lines = p.batch * p.rows, a.columns = p.columns, a.rows = p.rows;
  a.amax = p.rowwise.tensor, a.data = p.rowwise.data, a.scale = p.rowwise.scale, a.random = p.rowwise.random;
  a.rule = line_rule(f);
  while (a.log_warps < 3 && (kLineHeld * 512 << a.log_warps) < p.columns) ++a.log_warps;
  const Blocks blocks{divide_up(a.lines, kRowWarps >> a.log_warps), 1, 1, kRowThreads, sizeof(LineRowsShared)};
  return with_line_code(f.code, [&](auto code) {
    return with_element(p.type, [&](auto element) {
      using E = decltype(element);
      using Code = decltype(code);
      a.aligned = aligned(p.x, 16) && p.columns * E::kBytes % 16 == 0;
      a.whole = a.aligned && p.columns % 16 == 0, a.pieces = aligned(a.data, 16) && p.columns % 16 == 0;
      return p.random() ? launch_blocks(quantize_line_rows<E, Code, true>, blocks, stream, a)
                        : launch_blocks(quantize_line_rows<E, Code, false>, blocks, stream, a);
    });
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
