// NVFP4 codes back to numbers: E2M1 * block scale * amax / 2688 (numerics.md 2), a rotation of 16 undone where asked.
// Bytes moved per element: 9/16 read, the element written.
#pragma once

#include "../numerics/nvfp4.h"
#include "kernels.h"
#include "rotate.h"

namespace jaxlowprec {
namespace JLP_ISA {

struct Dequantize {
  static constexpr int64_t kRowsPerChunk = 16;

  static int64_t chunks_per_matrix(const DequantizeProblem& p) { return divide_up(p.rows, kRowsPerChunk); }

  static void chunk(const DequantizeProblem& p, int64_t batch, int64_t chunk) {
    const int64_t blocks = divide_up(p.columns, kBlock), scale_rows = p.format.tiles ? divide_up(p.rows, kBlock) : p.rows;
    const int64_t last = std::min((chunk + 1) * kRowsPerChunk, p.rows);
    for (int64_t row = chunk * kRowsPerChunk; row < last; ++row) {
      const uint8_t* data = p.data + (batch * p.rows + row) * blocks * 8;
      const uint8_t* scale = p.scale + (batch * scale_rows + (p.format.tiles ? row / kBlock : row)) * blocks;
      for (int64_t block = 0; block < blocks; block += kLanes) {
        const int count = static_cast<int>(std::min<int64_t>(kLanes, blocks - block));
        Pair v[kPairs];
        decode_group(data + block * 8, scale + block, count, p.amax[batch], v);
        if (p.rotate) undo_rotation(p.sign_mask, v);
        store_group(p, v, (batch * p.rows + row) * p.columns, block * kBlock);
      }
    }
  }

 private:
  JLP_RULE void decode_group(const uint8_t* data, const uint8_t* scale, int count, float amax, Pair (&v)[kPairs]) {
    alignas(64) uint8_t codes[kGroup / 2] = {};
    alignas(64) uint32_t bytes[kLanes] = {};
    alignas(64) float scales[kLanes];
    if (count < kLanes) memcpy(codes, data, count * 8), data = codes;
    for (int b = 0; b < count; ++b) bytes[b] = scale[b];
    store(scales, e4m3_decode<F32>(load<U32>(bytes)));
    JLP_UNROLL(8)
    for (int j = 0; j < kPairs; ++j) {
      const U32 two = load_u8(data + j * kLanes);
      const F32 factor = expand_blocks(scales, j);
      v[j] = {nvfp4_decode(two & 15u, factor, amax), nvfp4_decode(two >> 4, factor, amax)};
    }
  }

  JLP_RULE void undo_rotation(uint32_t sign_mask, Pair (&v)[kPairs]) {
    butterfly_rows<kBlock>(v, kPairs);
    for (int j = 0; j < kPairs; ++j) {
      U32 even, odd;
      for (int i = 0; i < kLanes; ++i) {
        const int element = 2 * (j * kLanes + i) % kBlock;
        even[i] = ((sign_mask >> element) & 1u) << 31, odd[i] = ((sign_mask >> (element + 1)) & 1u) << 31;
      }
      v[j] = {L::from_bits(L::bits(v[j].even * 0.25f) ^ even), L::from_bits(L::bits(v[j].odd * 0.25f) ^ odd)};
    }
  }

  JLP_RULE void store_group(const DequantizeProblem& p, const Pair (&v)[kPairs], int64_t row_start, int64_t column) {
    for (int j = 0; j < kPairs; ++j)
      for (int half = 0; half < 2; ++half) {
        const int64_t at = column + (2 * j + half) * kLanes;
        const int count = static_cast<int>(std::clamp<int64_t>(p.columns - at, 0, kLanes));
        const F32 values = half ? shuffle<InterleaveHigh>(v[j].even, v[j].odd) : shuffle<InterleaveLow>(v[j].even, v[j].odd);
        store_elements(p.result, p.type, row_start + at, count, values);
      }
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
