// Norms that are quantised and not stored, to MXFP8, MXFP4 and Float8Block: bytes are those of the norm's kernel and then
// the quantisation's (numerics.md 12.2 and 4 to 7).
//
// A chunk is a strip of rows: up to 128 where columns are quantised, so that the lines of the K-major result are whole.
// First the rows' numbers are found. Then tiles of kUnit columns are normalised into the memory where the quantisation
// stages its tiles, while x is still in the cache. Rows that are only quantised along themselves are normalised one by one.
// Bytes moved per element of 16 bits: x once, 2, and what is written; 2 + 2 more for a residual and the sum. NVFP4 and
// Float8Tensor need the amax first, which takes a pass of its own: it saves no time to find rows again in the second one.
#include "../entry.h"
#include "../quantize/quantize_blocks.h"
#include "norm_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

template <class E, bool kLayer>
struct NormQuantize {
  using Storage = typename E::Storage;
  using Row = NormedRow<E, kLayer>;
  using Blocks = QuantizeBlocks<E>;

  static int64_t strip_rows(const NormQuantizeProblem& p) { return Blocks::by_tiles(p.quantize) ? kColumnTileRows : kBlock; }
  static int64_t chunks_per_matrix(const NormQuantizeProblem& p) { return divide_up(p.rows, strip_rows(p)); }

  static void chunk(const NormQuantizeProblem& p, int64_t batch, int64_t chunk) {
    const int64_t row = chunk * strip_rows(p);
    const Strip strip{batch, row, std::min(strip_rows(p), p.rows - row)};
    const Blocks blocks{block_encoder<E>(p.quantize.format.code, p.quantize.stochastic())};
    Blocks::by_tiles(p.quantize) ? tiles(p, blocks, strip) : rows(p, blocks, strip);
  }

 private:
  /// Some rows of a matrix.
  struct Strip {
    int64_t batch, row, rows;
  };

  static void tiles(const NormQuantizeProblem& p, const Blocks& blocks, const Strip& strip) {
    const int64_t first = strip.batch * p.rows, line = first + strip.row;
    for (int64_t r = 0; r < strip.rows; ++r) Row::template found<true>(p, line + r);
    const Storage* source = from<E>(p.total ? p.total : p.x, first * p.columns);
    uint8_t* memory = Blocks::scratch(NormParameters::bytes(p));
    const NormParameters parameters(p, strip.batch, memory + Blocks::kTileBytes);
    for (int64_t column = 0; column < p.columns; column += kUnit) {
      auto& t = *new (memory) typename Blocks::Tile(source, p.quantize, strip.batch, strip.row, column);
      blocks.finish(p.quantize, t, [&](int first_row, int rows) {
        for (int r = first_row; r < first_row + rows; ++r)
          Row::recalled(p, line + r).write(parameters, column, t.input.columns, t.input.x[r]);
      });
    }
  }

  static void rows(const NormQuantizeProblem& p, const Blocks& blocks, const Strip& strip) {
    uint8_t* memory = thread_scratch(NormParameters::bytes(p) + p.columns * sizeof(Storage));
    const NormParameters parameters(p, strip.batch, memory);
    Storage* y = reinterpret_cast<Storage*>(memory + NormParameters::bytes(p));
    for (int64_t r = strip.row; r < strip.row + strip.rows; ++r) {
      Row::template found<true>(p, strip.batch * p.rows + r).write(parameters, 0, p.columns, y);
      blocks.along_row(p.quantize, strip.batch, r, 0, p.columns, y);
    }
  }
};

namespace {

template <class Visit>
auto resolve(const NormQuantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    return with_bool(p.kind == NormKind::kLayer,
                     [&](auto layer) { return visit(NormQuantize<decltype(e), decltype(layer)::value>{}); });
  });
}

}  // namespace

JLP_DEFINE_ENTRY(norm_quantize, NormQuantizeProblem, resolve)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
