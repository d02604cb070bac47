#include "amx_kernels.h"

#include "../entry.h"
#include "amx_tiles.h"

namespace jaxlowprec {
namespace avx512_amx {
namespace {

Kernels others;

/// In tiles a row or two take as long as 16 rows, and longer than without.
bool by_tiles(const MatmulProblem& p) { return p.a.format.code == CodeType::kInt8 && p.rows > 2; }

int64_t chunks(const MatmulProblem& p) { return by_tiles(p) ? matmul_chunks(p) : others.matmul_chunks(p); }

void chunk(const MatmulProblem& p, int64_t at) {
  if (!by_tiles(p)) return others.matmul_chunk(p, at);
  const Tiles tiles(tile_depth(p.b.format));
  matmul_chunk(p, at);
}

}  // namespace

Kernels kernels(const Kernels& given) {
  others = given;
  Kernels k = given;
  k.isa = "avx512_amx", k.matmul_chunks = chunks, k.matmul_chunk = chunk;
  return k;
}

}  // namespace avx512_amx
}  // namespace jaxlowprec
