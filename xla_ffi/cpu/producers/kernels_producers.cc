// What makes the operands of GEMMs: activations and norms; and sums over rows.
#include <algorithm>

#include "../entry.h"
#include "../quantize/gather_amaxes.h"
#include "../tiles.h"
#include "activation.h"
#include "norm_rows.h"
#include "sum_over_rows.h"

namespace jaxlowprec {
namespace JLP_ISA {

// Norms of rows (numerics.md 12.2). A row is read two or three times, from memory once: it is fetched into the cache while
// the row before is written. With amaxes, 16 rows are then read again from there. Bytes moved: the operands once, the
// results once.

constexpr int64_t kNormElements = 64 * 1024;  // of a chunk: whole rows

template <class E>
struct NormKernel {
  using Storage = typename E::Storage;

  static int64_t rows_of_chunk(const NormProblem& p) {
    const int64_t rows = std::max<int64_t>(1, kNormElements / p.columns);
    return p.amaxes.wanted() ? divide_up(rows, kBlock) * kBlock : rows;
  }
  static int64_t chunks_per_matrix(const NormProblem& p) { return divide_up(p.rows, rows_of_chunk(p)); }

  static void chunk(const NormProblem& p, int64_t batch, int64_t chunk) {
    const int64_t first = chunk * rows_of_chunk(p), last = std::min(first + rows_of_chunk(p), p.rows);
    const NormParameters parameters(p, batch, thread_scratch(NormParameters::bytes(p)));
    GatheredAmaxes<E> amaxes(p.amaxes);
    for (int64_t r = first; r < last; r += kBlock) {
      const int64_t rows = std::min<int64_t>(kBlock, last - r), line = batch * p.rows + r;
      Storage* y = from<E>(p.result, line * p.columns);
      for (int64_t i = 0; i < rows; ++i) {
        Storage* to = y + i * p.columns;
        p.kind == NormKind::kLayer ? row<true>(p, parameters, line + i, to) : row<false>(p, parameters, line + i, to);
      }
      for (int64_t column = 0; p.amaxes.wanted() && column < p.columns; column += kPacket)
        amaxes.add(CachedSlab<E>(y, rows, p.columns, 0, column));
    }
    if (p.amaxes.wanted()) amaxes.raise(batch);
  }

 private:
  template <bool kLayer>
  static void row(const NormProblem& p, const NormParameters& parameters, int64_t line, Storage* y) {
    const auto row = NormedRow<E, kLayer>::template found<false>(p, line);
    const Storage* next = from<E>(p.x, (line + 1) * p.columns);  // its sum would wait for it
    row.write(parameters, 0, p.columns, y, [&](int64_t k) { __builtin_prefetch(next + k); });
  }
};

// --- Gradients of norms (numerics.md 12.2): of the rows, and of the weight and beta, which are sums over rows.
//
// A chunk is a part of the rows. kAtOnce rows at a time are read twice, from memory once: they are fetched into the cache
// while the rows before are written. The second time they give dx and, four rows' products at once, are added to the part's
// own sums, which stay in the cache. The parts' sums are added up afterwards (sum_over_rows.h), so that the result does not
// depend on which thread had which part.
// Bytes moved per element of 16 bits: 6, with a residual 8; and for parts of 32 rows or more at most 1/4 for each sum.

template <class E>
struct NormGradientKernel {
  using Storage = typename E::Storage;

  static int64_t chunks_per_matrix(const NormGradientProblem& p) { return p.parts(); }

  static void chunk(const NormGradientProblem& p, int64_t batch, int64_t part) {
    p.mean ? part_of<true>(p, batch, part) : part_of<false>(p, batch, part);
  }

 private:
  static constexpr int kAtOnce = 4;

  /// A row and its numbers.
  template <bool kLayer>
  struct Row {
    const Storage *x, *dy, *of_total;
    Storage* dx;
    float inverse, center, slope, mean;

    Row(const NormGradientProblem& p, int64_t batch, int64_t r) {
      const int64_t line = batch * p.rows + r, index = line * p.columns;
      x = from<E>(p.x, index), dy = from<E>(p.dy, index), of_total = from<E>(p.of_total, index), dx = from<E>(p.dx, index);
      inverse = p.inverse[line], center = kLayer ? p.mean[line] : 0.0f;
      const float* weight = p.weight + batch * p.columns;
      const float each = static_cast<float>(1.0 / p.columns);
      const auto scaled = [&](auto at) { return L::flush(at.load(dy)) * at.load_floats(weight); };
      const auto product = [&](auto at) { return at.only(scaled(at) * normed(at)); };
      slope = sum_of_row<E>(p.columns, p.type, product) * each;
      mean = kLayer ? sum_of_row<E>(p.columns, p.type, scaled) * each : 0.0f;
    }

    template <class Place>
    F32 normed(Place at) const {
      const F32 v = L::flush(at.load(x));
      return (kLayer ? v - center : v) * inverse;
    }
  };

  template <bool kLayer>
  static void part_of(const NormGradientProblem& p, int64_t batch, int64_t part) {
    float* sums = p.sums ? p.sums + (batch * p.parts() + part) * p.sums_each() : nullptr;
    if (sums) std::fill_n(sums, p.sums_each(), 0.0f);
    int64_t r = part * p.rows_each();
    const int64_t last = std::min(r + p.rows_each(), p.rows);
    for (; r + kAtOnce <= last; r += kAtOnce) rows<kLayer, kAtOnce>(p, batch, r, sums);
    for (; r < last; ++r) rows<kLayer, 1>(p, batch, r, sums);
  }

  template <bool kLayer, int kRows>
  static void rows(const NormGradientProblem& p, int64_t batch, int64_t first, float* sums) {
    const auto row = [&](int i) { return Row<kLayer>(p, batch, first + i); };
    if constexpr (kRows == 1) {
      write<kLayer>(p, batch, {row(0)}, sums);
    } else {
      write<kLayer>(p, batch, {row(0), row(1), row(2), row(3)}, sums);
    }
  }

  /// dx of the rows, and their sums.
  template <bool kLayer, int kRows>
  static void write(const NormGradientProblem& p, int64_t batch, const Row<kLayer> (&rows)[kRows], float* sums) {
    const float* weight = p.weight + batch * p.columns;
    along_run<E>(p.columns, p.type, [&](auto at) {
      const F32 w = at.load_floats(weight);
      F32 products = F32{}, all = F32{};
      JLP_UNROLL(4)
      for (int i = 0; i < kRows; ++i) {
        const Row<kLayer>& row = rows[i];
        const int64_t next = kRows * p.columns + at.k;
        __builtin_prefetch(row.x + next), __builtin_prefetch(row.dy + next);
        const F32 dy = L::flush(at.load(row.dy)), normed = row.normed(at), scaled = dy * w;
        const F32 d = ((kLayer ? scaled - row.mean : scaled) - normed * row.slope) * row.inverse;
        at.store(row.dx, row.of_total ? d + at.load(row.of_total) : d);
        products += dy * normed, all += dy;
      }
      if (!sums) return;
      at.add_floats(sums, products);
      if (p.has_beta) at.add_floats(sums + p.columns, all);
    });
  }
};

namespace {

template <template <class> class Kernel>
struct ByElement {
  template <class Problem, class Visit>
  auto operator()(const Problem& p, Visit visit) const {
    return with_element(p.type, [&](auto element) { return visit(Kernel<decltype(element)>{}); });
  }
};

constexpr ByActivation<ActivationKernel> resolve_activation;
constexpr ByActivation<ActivationGradientKernel> resolve_activation_gradient;
constexpr ByElement<NormKernel> resolve_norm;
constexpr ByElement<NormGradientKernel> resolve_norm_gradient;
constexpr ByElement<SumOverRowsKernel> resolve_sum_over_rows;
constexpr auto resolve_add_parts = [](const AddPartsProblem&, auto visit) { return visit(AddPartsKernel{}); };

}  // namespace

JLP_DEFINE_ENTRY(activation, ActivationProblem, resolve_activation)
JLP_DEFINE_ENTRY(activation_gradient, ActivationGradientProblem, resolve_activation_gradient)
JLP_DEFINE_ENTRY(norm, NormProblem, resolve_norm)
JLP_DEFINE_ENTRY(norm_gradient, NormGradientProblem, resolve_norm_gradient)
JLP_DEFINE_ENTRY(sum_over_rows, SumOverRowsProblem, resolve_sum_over_rows)
JLP_DEFINE_ENTRY(add_parts, AddPartsProblem, resolve_add_parts)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
