// Quantisation of rows that are tensors of their own (numerics.md 2): a block of threads has a row, every thread takes 16
// elements at a time from memory to its registers.
//
//   elements (once or twice 32 bytes a thread, 64 of float32) -> amax of the row over the block's threads -> the row's
//   encode scales -> codes of the same registers
//
// A row that is longer than a block's registers is read again for its codes, from the L2 cache: from its end, which the
// registers hold.
// Bytes moved per element: 2 or 4 read, 9/16 written; 4 a row.
// Launch: a block for each row, of 128 threads or, where these do not hold it, 256.
#include "../launch.h"
#include "amax.cuh"
#include "quantize_launch.cuh"
#include "quantize_rows.cuh"

namespace jaxlowprec {
namespace cuda {

/// Sixteens that a thread loads before the first is used, and then holds. To choose scales takes registers, and more time
/// than the loads.
template <Scales kScales>
constexpr int kRowScaledHeld = kIsChosen<kScales> ? 1 : 2;

struct RowScaledArguments : QuantizeArguments {
  float* amax;
  bool whole;  // rows are sixteens that begin at multiples of 16 bytes
};

struct RowScaledShared {
  RowsShared<false> rows;
  uint32_t of_warp[kRowThreads / 32];
};

/// The amax of what the threads of the block found, to all of them.
JLP_DEVICE float amax_of_block(uint32_t found, uint32_t (&of_warp)[kRowThreads / 32]) {
  share_amaxes(found, of_warp);
  uint32_t of_block = 0;
  for (uint32_t warp = 0; warp < blockDim.x / 32; ++warp) of_block = max(of_block, of_warp[warp]);
  return as_float(canonical_amax(of_block));
}

template <class E, Scales kScales>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<E, kScales, false>)
    row_scaled_quantize(const __grid_constant__ RowScaledArguments a) {
  constexpr int kHeld = kRowScaledHeld<kScales>;
  RowScaledShared& shared = block_shared<RowScaledShared>();
  const int64_t line = blockIdx.x, at_once = kHeld * 16 * blockDim.x;
  const auto* row = static_cast<const typename E::Storage*>(a.x) + line * a.columns;
  const auto load = [&](int64_t first, Sixteen<E>(&held)[kHeld]) {
    load_held(row, first + 16 * threadIdx.x, 16 * blockDim.x, a.columns, a.whole, a.pieces, held);
  };
  Sixteen<E> held[kHeld];
  uint32_t most = 0;
  int64_t first = -at_once;
  do {
    first += at_once;
    load(first, held);
#pragma unroll
    for (const Sixteen<E>& sixteen : held) most = max(most, magnitude_bits<E>(sixteen.words));
  } while (first + at_once < a.columns);

  const float amax = amax_of_block(most, shared.of_warp);
  if (threadIdx.x == 0) a.amax[line] = amax;
  const RowQuantizer<E, E2M1, kScales, false> quantizer = {a, shared.rows,
                                                           Matrix<kScales>::of_amax(amax, shared.rows.table)};
  __syncthreads();

  for (;; first -= at_once, load(first, held)) {
    const RowCursor<E> start = quantizer.cursor(0, line, first + 16 * threadIdx.x);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      const int64_t step = j * 16 * static_cast<int64_t>(blockDim.x);
      if (start.column + step >= a.columns) break;
      const RowCursor<E> at = {nullptr, start.data + step / 2, start.scale + step / 16, line, start.column + step};
      quantizer.quantize(at, held[j], 16, 8, a.rowwise.pieces);  // the codes fill whole blocks, and zeros were loaded
    }
    if (first == 0) return;
  }
}

namespace {

template <Scales kScales>
cudaError_t launch_row_scaled(const RowScaledQuantizeProblem& p, cudaStream_t stream) {
  QuantizeProblem rows{};
  rows.x = p.x, rows.rows = p.batch * p.rows, rows.columns = p.columns, rows.format = p.format;
  rows.rowwise.data = p.data, rows.rowwise.scale = p.scale;
  const int threads = p.columns > kRowThreads / 2 * 16 * kRowScaledHeld<kScales> ? kRowThreads : kRowThreads / 2;
  const Blocks blocks{rows.rows, 1, 1, threads, sizeof(RowScaledShared)};
  return with_element(p.type, [&](auto element) {
    using E = decltype(element);
    const QuantizeArguments a = quantize_arguments<E, E2M1>(rows);
    return launch_blocks(row_scaled_quantize<E, kScales>, blocks, stream,
                         RowScaledArguments{a, p.amax, a.pieces && p.columns % 16 == 0});
  });
}

}  // namespace

cudaError_t launch(const RowScaledQuantizeProblem& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  switch (scales_of(p.format, false)) {
    case Scales::kTwoLevel: return launch_row_scaled<Scales::kTwoLevel>(p, stream);
    case Scales::kBestAbsolute: return launch_row_scaled<Scales::kBestAbsolute>(p, stream);
    case Scales::kBestSquared: return launch_row_scaled<Scales::kBestSquared>(p, stream);
    case Scales::kBestRelativeSquared: return launch_row_scaled<Scales::kBestRelativeSquared>(p, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
