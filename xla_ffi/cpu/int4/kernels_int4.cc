// Int4: fake quantisation, codes, and codes back to numbers.
#include "../entry.h"
#include "int4_columns.h"
#include "int4_dequantize.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Visit>
auto with_deploy(const Int4Format& f, Visit visit) {
  return f.scale == ElementType::kF16 ? visit(DeployF16{}) : visit(DeployBF16{});
}

template <class E, class Deploy, bool kSymmetric>
struct FakeQuantize {
  static int64_t chunks_per_matrix(const Int4FakeQuantizeProblem& p) {
    return p.columnwise ? Int4Tiles(p, false).tiles : Int4Runs(p).chunks();
  }
  static void chunk(const Int4FakeQuantizeProblem& p, int64_t batch, int64_t chunk) {
    if (p.columnwise) {
      const Int4Tile tile(p, Int4Tiles(p, false), chunk);
      return Int4Columns<E, Deploy, kSymmetric>::fake_quantize_tile(p, batch, tile);
    }
    const Int4Runs runs(p);
    runs.visit(chunk, [&](int64_t line, int64_t first, int64_t count) {
      const int64_t at = batch * p.size() + line * runs.length + first;
      Int4Rows<E, Deploy, kSymmetric>::fake_quantize_line(static_cast<const typename E::Storage*>(p.x) + at, count,
                                                          p.format.group, static_cast<typename E::Storage*>(p.result) + at);
    });
  }
};

template <class E, class Deploy, bool kSymmetric>
struct Quantize {
  static constexpr int64_t kColumns = 4 * kStrip;  // of a chunk

  static int64_t chunks_per_matrix(const Int4QuantizeProblem& p) {
    return p.columnwise ? Int4Tiles(p, true, kColumns).tiles : Int4Runs(p).chunks();
  }
  static void chunk(const Int4QuantizeProblem& p, int64_t batch, int64_t chunk) {
    if (p.columnwise) {
      const Int4Tile tiles(p, Int4Tiles(p, true, kColumns), chunk, kColumns);
      return Int4Columns<E, Deploy, kSymmetric>::quantize_tiles(p, batch, tiles);
    }
    const Int4Runs runs(p);
    runs.visit(chunk, [&](int64_t line, int64_t first, int64_t count) {
      const int64_t byte = (batch * p.rows + line) * p.line_bytes() + first / 2;
      const int64_t group = (batch * p.rows + line) * p.groups() + first / p.format.group;
      Int4Rows<E, Deploy, kSymmetric>::quantize_line(
          static_cast<const typename E::Storage*>(p.x) + batch * p.size() + line * runs.length + first, count,
          p.format.group, p.data + byte, p.scale + group, kSymmetric ? nullptr : p.zero + group);
    });
  }
};

template <class E, class Deploy>
struct Dequantize {
  static int64_t chunks_per_matrix(const Int4DequantizeProblem& p) {
    return p.columnwise ? Int4Tiles(p, true).tiles : Int4Runs(p).chunks();
  }
  static void chunk(const Int4DequantizeProblem& p, int64_t batch, int64_t chunk) {
    if (p.columnwise) return Int4Decoded<E, Deploy>::tile(p, batch, Int4Tile(p, Int4Tiles(p, true), chunk));
    const Int4Runs runs(p);
    runs.visit(chunk, [&](int64_t line, int64_t first, int64_t count) {
      const int64_t group = (batch * p.rows + line) * p.groups() + first / p.format.group;
      Int4Decoded<E, Deploy>::line(
          p.data + (batch * p.rows + line) * p.line_bytes() + first / 2, count, p.format.group, p.scale + group,
          p.zero ? p.zero + group : nullptr,
          static_cast<typename E::Storage*>(p.result) + batch * p.size() + line * runs.length + first);
    });
  }
};

template <template <class, class, bool> class Operation, class Problem, class Visit>
auto resolve_encoding(const Problem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    return with_deploy(p.format, [&](auto deploy) {
      return with_bool(p.format.symmetric, [&](auto symmetric) {
        return visit(Operation<decltype(e), decltype(deploy), decltype(symmetric)::value>{});
      });
    });
  });
}

/// The result holds numbers of the deployment dtype: it is of that type, or float32.
template <class Visit>
auto resolve_fake_quantize(const Int4FakeQuantizeProblem& p, Visit visit) {
  return with_bool(p.format.symmetric, [&](auto symmetric) {
    constexpr bool kSymmetric = decltype(symmetric)::value;
    const bool half = p.format.scale == ElementType::kF16;
    if (p.type == ElementType::kF32)
      return half ? visit(FakeQuantize<Float, DeployF16, kSymmetric>{})
                  : visit(FakeQuantize<Float, DeployBF16, kSymmetric>{});
    return half ? visit(FakeQuantize<F16, DeployF16, kSymmetric>{}) : visit(FakeQuantize<BF16, DeployBF16, kSymmetric>{});
  });
}

template <class Visit>
auto resolve_quantize(const Int4QuantizeProblem& p, Visit visit) {
  return resolve_encoding<Quantize>(p, visit);
}

template <class Visit>
auto resolve_dequantize(const Int4DequantizeProblem& p, Visit visit) {
  return with_element(p.type, [&](auto e) {
    return with_deploy(p.format, [&](auto deploy) { return visit(Dequantize<decltype(e), decltype(deploy)>{}); });
  });
}

}  // namespace

JLP_DEFINE_ENTRY(int4_fake_quantize, Int4FakeQuantizeProblem, resolve_fake_quantize)
JLP_DEFINE_ENTRY(int4_quantize, Int4QuantizeProblem, resolve_quantize)
JLP_DEFINE_ENTRY(int4_dequantize, Int4DequantizeProblem, resolve_dequantize)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
