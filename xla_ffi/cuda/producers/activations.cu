// Activations and their gradients (activations.cuh) with the amaxes of each result in the same pass, and with the sums of
// each gradient over rows.
//
// Data flow: a thread takes 16 rows of a pair of columns, as amax_rotated does, four rows of every operand at a time ->
// float32 -> the rule -> each result rounded once, written, and kept in shared memory, where only this thread reads it: 16
// rows, unrolled, would be four times the machine code -> its largest magnitude, that of its transform, and its sum. One
// atomic a block, matrix and amax; the sums of a tile's 64 rows are written, for each column. Arrays whose pairs are not
// aligned, and edges, go one element at a time.
//
// Bytes moved per element: as in activations.cuh; the amaxes read nothing; sums write 1/16 for each gradient.
// Launch: blocks of 256 threads, as many as the device holds at once, each going through tiles of 64 rows by 128 columns.
#include <algorithm>

#include "../launch.h"
#include "activations.cuh"
#include "pairs.cuh"
#include "result_amaxes.h"

namespace jaxlowprec {
namespace cuda {

constexpr int kAmaxedRows = 4;    // of each operand: loaded before the first is used
constexpr int kAmaxedBlocks = 2;  // that registers are to suffice for

template <class Rule>
struct AmaxedArguments {
  const void* operands[Rule::kOperands];
  void* results[Rule::kResults];
  int64_t rows, columns;
  Tiles tiles;
  uint32_t *plain[Rule::kResults], *rotated[Rule::kResults];  // null: not wanted
  float* sums;                                                // [batch, tiles down, results, columns]; null: not wanted
  uint32_t sign_mask;
  bool pairs;  // rows of all arrays begin at multiples of two elements' bytes
};

/// `pairs`: what each thread keeps of each result, as Tile::load_pair gives it.
template <ElementType kType, class Rule>
struct AmaxedShared {
  AmaxShared amaxes;
  uint32_t pairs[Rule::kResults][Tile<ElementOf<kType>>::kPairWords][kAmaxThreads];
  TileSums sums;
};

/// 16 rows of a pair of columns, which begin at element `first` of the arrays. `rows`, `columns`: how many there are. Zeros
/// are kept in place of the others.
template <ElementType kType, class Rule>
JLP_DEVICE void activate_pair(const AmaxedArguments<Rule>& a, int64_t first, int rows, int columns,
                              AmaxedShared<kType, Rule>& shared) {
  using Pair = Neighbours<kType>;
  const bool whole = a.pairs && rows == 16 && columns == 2;
#pragma unroll 1
  for (int start = 0; start < 16; start += kAmaxedRows) {
    typename Pair::Words loaded[kAmaxedRows][Rule::kOperands], words[kAmaxedRows][Rule::kResults];
    const auto each = [&](auto visit) {
#pragma unroll
      for (int i = 0; i < kAmaxedRows; ++i) visit(i, first + (start + i) * a.columns, start + i < rows ? columns : 0);
    };
    const auto load = [&](auto at) {
      each([&](int i, int64_t index, int count) {
#pragma unroll
        for (int j = 0; j < Rule::kOperands; ++j) at(j, index, count, loaded[i][j]);
      });
    };
    // One test for all rows, so that every load is issued before any is used.
    if (whole)
      load([&](int j, int64_t index, int, auto& to) { Pair::load(a.operands[j], index, to); });
    else
      load([&](int j, int64_t index, int count, auto& to) { Pair::load(a.operands[j], index, to, count); });

    each([&](int i, int64_t, int count) {
      float operands[Rule::kOperands][2], results[Rule::kResults][2];
#pragma unroll
      for (int j = 0; j < Rule::kOperands; ++j)
#pragma unroll
        for (int w = 0; w < Pair::kWords; ++w) widen<kType>(loaded[i][j][w], &operands[j][w * kPerWord<kType>]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float v[Rule::kOperands], result[Rule::kResults];
#pragma unroll
        for (int j = 0; j < Rule::kOperands; ++j) v[j] = operands[j][c];
        Rule::apply(v, result);
#pragma unroll
        for (int j = 0; j < Rule::kResults; ++j) results[j][c] = c < count ? result[j] : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < Rule::kResults; ++j)
#pragma unroll
        for (int w = 0; w < Pair::kWords; ++w) {
          words[i][j][w] = narrow<kType>(&results[j][w * kPerWord<kType>]);
          shared.pairs[j][16 * w + start + i][threadIdx.x] = words[i][j][w];
        }
    });
    each([&](int i, int64_t index, int count) {
#pragma unroll
      for (int j = 0; j < Rule::kResults; ++j) {
        if (whole)
          Pair::store(a.results[j], index, words[i][j]);
        else
          Pair::store(a.results[j], index, words[i][j], count);
      }
    });
  }
}

template <ElementType kType, class Rule>
static __global__ void __launch_bounds__(kAmaxThreads, kAmaxedBlocks)
    amaxed_activation_kernel(const __grid_constant__ AmaxedArguments<Rule> a) {
  using E = ElementOf<kType>;
  auto& shared = block_shared<AmaxedShared<kType, Rule>>();
  uint32_t plain[Rule::kResults] = {}, rotated[Rule::kResults] = {};
  TilePlace next;
  for (TilePlace at = Tiles::first(a.tiles); at.batch < a.tiles.count.batch; at = next) {
    const int64_t row = static_cast<int64_t>(at.down) * kRotatedRows + threadIdx.x / kTilePairs * 16;
    const int64_t column = static_cast<int64_t>(at.across) * kTile + threadIdx.x % kTilePairs * 2;
    const int64_t first = (at.batch * a.rows + row) * a.columns + column;
    const int rows = static_cast<int>(max(int64_t{0}, min(int64_t{16}, a.rows - row)));
    const int columns = static_cast<int>(max(int64_t{0}, min(int64_t{2}, a.columns - column)));
    activate_pair<kType>(a, first, rows, columns, shared);
    next = Tiles::next(a.tiles, at);
#pragma unroll
    for (int j = 0; j < Rule::kResults; ++j) {
      uint32_t pairs[Tile<E>::kPairWords];
#pragma unroll
      for (int w = 0; w < Tile<E>::kPairWords; ++w) pairs[w] = shared.pairs[j][w][threadIdx.x];
      if (Rule::kGradients && a.sums) {
        const int64_t part = static_cast<int64_t>(at.batch) * a.tiles.count.down + at.down;
        float* const to = a.sums + (part * Rule::kResults + j) * a.columns + column;
        write_tile_sums(sum_of_pairs<kType>(pairs), to, columns, shared.sums);
      }
      if (a.plain[j]) plain[j] = max(plain[j], magnitude_bits<E>(pairs));
      if (a.rotated[j]) {
        flip_signs<E>(pairs, a.sign_mask);
        rotated[j] = max(rotated[j], max(rotated_amax<E>(pairs, 0), rotated_amax<E>(pairs, 1)));
      }
      if (next.batch == at.batch) continue;
      if (a.plain[j]) raise(a.plain[j] + at.batch, plain[j], shared.amaxes.of_warp[0]);
      if (a.rotated[j]) raise(a.rotated[j] + at.batch, rotated[j], shared.amaxes.of_warp[1]);
      plain[j] = rotated[j] = 0;
    }
  }
}

namespace {

struct NoShared {};

/// What both kernels take: the arrays, of `size` elements a matrix.
template <class Rule>
struct Arrays {
  const void* operands[Rule::kOperands];
  void* results[Rule::kResults];
  ResultAmaxes amaxes[Rule::kResults];
  int64_t batch, size, columns;
  float* sums;  // see ActivationGradientProblem

  bool all_aligned(uint32_t bytes) const {
    bool found = true;
    for (const void* operand : operands) found = found && aligned(operand, bytes);
    for (const void* result : results) found = found && aligned(result, bytes);
    return found;
  }
};

template <ElementType kType, class Rule>
cudaError_t launch_plain(const Arrays<Rule>& arrays, cudaStream_t stream) {
  ActivationArguments<Rule> a{};
  a.size = arrays.batch * arrays.size;
  const int64_t tile = int64_t{kActivationThreads} * kActivationPieces * Piece<kType, true>::kCount;
  if (!cut(1, 1, divide_up(a.size, tile), a.tiles)) return cudaErrorInvalidValue;
  std::copy_n(arrays.operands, Rule::kOperands, a.operands), std::copy_n(arrays.results, Rule::kResults, a.results);
  a.aligned = arrays.all_aligned(16);
  return launch_over_tiles<activation_kernel<kType, Rule>, NoShared>(kActivationThreads, a, stream);
}

template <ElementType kType, class Rule>
cudaError_t launch_amaxed(const Arrays<Rule>& arrays, cudaStream_t stream) {
  AmaxedArguments<Rule> a{};
  a.rows = arrays.size / arrays.columns, a.columns = arrays.columns;
  if (!cut(arrays.batch, divide_up(a.rows, kRotatedRows), divide_up(a.columns, kTile), a.tiles))
    return cudaErrorInvalidValue;
  std::copy_n(arrays.operands, Rule::kOperands, a.operands), std::copy_n(arrays.results, Rule::kResults, a.results);
  a.pairs = arrays.all_aligned(2 * kElementBytes<kType>) && a.columns % 2 == 0;
  for (int j = 0; j < Rule::kResults; ++j) {
    a.plain[j] = arrays.amaxes[j].plain, a.rotated[j] = arrays.amaxes[j].rotated;
    a.sign_mask |= arrays.amaxes[j].sign_mask;
  }
  a.sums = arrays.sums;
  return launch_over_tiles<amaxed_activation_kernel<kType, Rule>, AmaxedShared<kType, Rule>>(kAmaxThreads, a, stream);
}

/// Clears the amaxes, and launches the kernel that takes them where one is wanted, or sums.
template <ElementType kType, class Rule>
cudaError_t launch_rule(const Arrays<Rule>& arrays, cudaStream_t stream) {
  bool wanted = arrays.sums != nullptr;
  for (const ResultAmaxes& amaxes : arrays.amaxes) {
    wanted = wanted || amaxes.wanted();
    const cudaError_t error = clear_amaxes(amaxes, arrays.batch, stream);
    if (error != cudaSuccess) return error;
  }
  if (arrays.batch * arrays.size == 0) return cudaSuccess;
  return wanted ? launch_amaxed<kType>(arrays, stream) : launch_plain<kType>(arrays, stream);
}

/// Calls visit with the element type, the rule and whether it is gated, as constants.
template <class Problem, class Visit>
cudaError_t with_activation(const Problem& p, Visit visit) {
  return with_type(p.type, [&](auto type) {
    return with_rule(p.kind, [&](auto rule) {
      return p.up ? visit(type, rule, std::true_type()) : visit(type, rule, std::false_type());
    });
  });
}

}  // namespace

cudaError_t launch(const ActivationProblem& p, cudaStream_t stream) {
  return with_activation(p, [&](auto type, auto rule, auto gated) {
    Arrays<Activate<decltype(rule), gated>> a{{p.x}, {p.result}, {p.amaxes}, p.batch, p.size, p.columns, nullptr};
    if constexpr (gated) a.operands[1] = p.up;
    return launch_rule<type>(a, stream);
  });
}

cudaError_t launch(const ActivationGradientProblem& p, cudaStream_t stream) {
  return with_activation(p, [&](auto type, auto rule, auto gated) {
    Arrays<ActivateBackward<decltype(rule), gated>> a{{p.dy, p.x}, {p.dx}, {p.of_dx}, p.batch, p.size, p.columns, p.sums};
    if constexpr (gated) a.operands[2] = p.up, a.results[1] = p.dup, a.amaxes[1] = p.of_dup;
    return launch_rule<type>(a, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
