// Activations and their gradients that are quantised and not stored, to MXFP8, MXFP4 and Float8Block: bytes are those of the
// activation's kernel and then the quantisation's (numerics.md 12.1 and 4 to 7).
//
// Chunks are those of the quantisation. Elements are made in the memory where it stages its tiles; or, where rows are only
// quantised along themselves, a few KiB at a time. The gradients of gate and up are made at once, each in a tile of its own.
// Bytes moved per element: the operands once, and what is written. Formats with a tensor scale need the amax first.
#include "../quantize/quantize_blocks.h"
#include "activation.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// Makes elements of one or two matrices from the operands: `fill` is compiled for each rule, the rest of the kernel once
/// for each type of elements.
template <class E>
struct ElementMaker {
  using Storage = typename E::Storage;
  const void* problem;
  const Storage* operands[3];  // null: none
  /// Elements from the one at `index` on, to each result.
  void (*fill)(const void* problem, int64_t index, int64_t count, Storage* const* results);

  /// The operands' elements there are fetched into the cache.
  void fetch(int64_t index, int64_t count) const {
    for (const Storage* x : operands)
      for (int64_t i = 0; x && i < count; i += static_cast<int64_t>(64 / sizeof *x)) __builtin_prefetch(x + index + i);
  }
};

/// kResults matrices, quantised alike.
template <class E, int kResults>
struct QuantizeMade {
  using Storage = typename E::Storage;
  using Blocks = QuantizeBlocks<E>;
  using Tile = typename Blocks::Tile;

  const ElementMaker<E>& maker;
  const QuantizeProblem* results;
  const Blocks& blocks;

  void chunk(int64_t batch, int64_t chunk) const {
    const QuantizeProblem& p = results[0];
    if (Blocks::by_tiles(p))
      Blocks::visit_tiles(p, chunk, [&](int64_t row, int64_t column, bool more) { tile(batch, row, column, more); });
    else
      RowRuns(p, blocks.encoder.stochastic).visit(chunk, [&](int64_t row, int64_t column, int64_t columns) {
        run(batch, row, column, columns);
      });
  }

 private:
  static constexpr int kRowsAhead = 16;

  /// more: whether the tile to its right follows.
  void tile(int64_t batch, int64_t row, int64_t column, bool more) const {
    const QuantizeProblem& p = results[0];
    uint8_t* memory = Blocks::scratch((kResults - 1) * Blocks::kTileBytes);
    Tile* tiles[kResults];
    for (int i = 0; i < kResults; ++i)
      tiles[i] = new (memory + i * Blocks::kTileBytes) Tile(nullptr, results[i], batch, row, column);
    const auto& input = tiles[0]->input;
    const int64_t start = (batch * p.rows + row) * p.columns + column;
    const auto make = [&](int first, int rows) {
      for (int r = first; r < first + rows; ++r) {
        const int64_t index = start + r * p.columns;
        const int below = input.rows - r - kRowsAhead;
        if (below > 0)
          maker.fetch(index + kRowsAhead * p.columns, input.columns);
        else if (more)
          maker.fetch(start - below * p.columns + kUnit, kUnit);
        Storage* to[kResults];
        for (int i = 0; i < kResults; ++i) to[i] = tiles[i]->input.x[r];
        maker.fill(maker.problem, index, input.columns, to);
      }
    };
    blocks.finish(p, *tiles[0], make);
    for (int i = 1; i < kResults; ++i) blocks.finish(results[i], *tiles[i], [](int, int) {});
  }

  void run(int64_t batch, int64_t row, int64_t column, int64_t columns) const {
    constexpr int64_t kMost = kSpan * kPacket;
    Storage* to[kResults];
    uint8_t* memory = thread_scratch(kResults * kMost * sizeof(Storage));
    for (int i = 0; i < kResults; ++i) to[i] = reinterpret_cast<Storage*>(memory) + i * kMost;
    for (const int64_t end = column + columns; column < end; column += kMost) {
      const int64_t count = std::min(kMost, end - column);
      maker.fill(maker.problem, (batch * results[0].rows + row) * results[0].columns + column, count, to);
      for (int i = 0; i < kResults; ++i) blocks.along_row(results[i], batch, row, column, count, to[i]);
    }
  }
};

template <class E, class Rule, bool kGated>
struct ActivationQuantize {
  static QuantizeBlocks<E> blocks(const QuantizeProblem& p) { return {block_encoder<E>(p.format.code, p.stochastic())}; }
  static int64_t chunks_per_matrix(const ActivationQuantizeProblem& p) {
    return blocks(p.quantize).chunks_per_matrix(p.quantize);
  }

  static void chunk(const ActivationQuantizeProblem& p, int64_t batch, int64_t chunk) {
    const ElementMaker<E> maker = {&p, {from<E>(p.x, 0), from<E>(p.up, 0)}, fill};
    QuantizeMade<E, 1>{maker, &p.quantize, blocks(p.quantize)}.chunk(batch, chunk);
  }

 private:
  static void fill(const void* problem, int64_t index, int64_t count, typename E::Storage* const* results) {
    activate<E, Rule, kGated>(*static_cast<const ActivationQuantizeProblem*>(problem), index, count, results[0]);
  }
};

template <class E, class Rule, bool kGated>
struct ActivationGradientQuantize {
  static QuantizeBlocks<E> blocks(const QuantizeProblem& p) { return {block_encoder<E>(p.format.code, p.stochastic())}; }
  static int64_t chunks_per_matrix(const ActivationGradientQuantizeProblem& p) {
    return blocks(p.quantize[0]).chunks_per_matrix(p.quantize[0]);
  }

  static void chunk(const ActivationGradientQuantizeProblem& p, int64_t batch, int64_t chunk) {
    const ElementMaker<E> maker = {&p, {from<E>(p.dy, 0), from<E>(p.x, 0), from<E>(p.up, 0)}, fill};
    QuantizeMade<E, 1 + kGated>{maker, p.quantize, blocks(p.quantize[0])}.chunk(batch, chunk);
  }

 private:
  static void fill(const void* problem, int64_t index, int64_t count, typename E::Storage* const* results) {
    const auto& p = *static_cast<const ActivationGradientQuantizeProblem*>(problem);
    activation_gradients<E, Rule, kGated>(p, index, count, results[0], kGated ? results[1] : nullptr);
  }
};

namespace {

constexpr ByActivation<ActivationQuantize> resolve_activation_quantize;
constexpr ByActivation<ActivationGradientQuantize> resolve_activation_gradient_quantize;

}  // namespace

JLP_DEFINE_ENTRY(activation_quantize, ActivationQuantizeProblem, resolve_activation_quantize)
JLP_DEFINE_ENTRY(activation_gradient_quantize, ActivationGradientQuantizeProblem, resolve_activation_gradient_quantize)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
