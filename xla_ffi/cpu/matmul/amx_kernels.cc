#include "amx_kernels.h"

#include "../entry.h"

namespace jaxlowprec {
namespace avx512_amx {
namespace {

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

/// All eight tiles with 16 rows of 64 bytes, as long as a chunk runs: released, they are not saved when threads change.
class Tiles {
 public:
  Tiles() {
    alignas(64) static constexpr TileConfig kConfig = {
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&kConfig);
  }
  ~Tiles() { _tile_release(); }
};

Kernels others;

bool by_tiles(const MatmulProblem& p) { return p.a.format.code == CodeType::kInt8; }

int64_t chunks(const MatmulProblem& p) { return by_tiles(p) ? matmul_chunks(p) : others.matmul_chunks(p); }

void chunk(const MatmulProblem& p, int64_t at) {
  if (!by_tiles(p)) return others.matmul_chunk(p, at);
  const Tiles tiles;
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
