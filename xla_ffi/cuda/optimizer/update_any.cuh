// AdamW's and Lion's update of one block of 32 elements by a warp, a lane for each: of arrays of any shape and place, and of
// all numbers.
#pragma once

#include "../../numerics/optimizer_states.h"
#include "../../numerics/philox.h"
#include "../../problems.h"
#include "../vectors.cuh"

namespace jaxlowprec {
namespace cuda {

struct UpdateArguments {
  OptimizerUpdateProblem p;
  uint32_t blocks;                  // of a row
  uint32_t step_rows, step_blocks;  // from a warp's blocks to its next ones
};

/// Philox's ten pairs of round keys for the draws of a matrix's moments and of its weights.
struct UpdateShared {
  alignas(16) uint32_t keys[2][20];
};

/// Where a block is: its number and its row's in the whole array, its elements, and its exponents.
struct BlockPlace {
  uint32_t block, row;
  int64_t first, exponent;
  int count;  // of its elements
};

JLP_DEVICE BlockPlace place_of_block(const UpdateArguments& a, int64_t batch, uint32_t at) {
  const uint32_t row = at / a.blocks, block = at - row * a.blocks;
  const int64_t line = batch * a.p.rows + row, left = a.p.columns - int64_t{32} * block;
  BlockPlace place = {block, row, line * a.p.columns + int64_t{32} * block, line * a.blocks + block, 32};
  if (left < 32) place.count = static_cast<int>(left);
  if (a.p.words) place.block = a.p.block_numbers[block], place.row = a.p.row_numbers[row];
  return place;
}

/// What a lane draws for its element.
JLP_DEVICE uint32_t draw_one(const uint32_t (&keys)[20], const BlockPlace& place) {
  const uint32_t lane = threadIdx.x % 32;
  uint32_t draws[4] = {4 * place.block + lane / 8, place.row, kDrawnHalves, 0};
#pragma unroll 1
  for (int round = 0; round < 10; ++round) philox_round<float>(draws, keys[2 * round], keys[2 * round + 1]);
  const uint32_t first = lane & 4 ? draws[2] : draws[0], second = lane & 4 ? draws[3] : draws[1];
  return ((lane & 2 ? second : first) >> (16 * (lane & 1))) & 0xFFFFu;
}

template <bool kSigned>
JLP_DEVICE float load_moment(const MomentState& state, int64_t at, int64_t exponent) {
  return state.numbers ? state.numbers[at] : state_decode<kSigned, float>(state.codes[at], state.exponents[exponent]);
}

template <bool kSigned>
JLP_DEVICE void store_moment(const MomentState& state, const BlockPlace& place, const uint32_t (&keys)[20], float x,
                             bool there) {
  const int lane = threadIdx.x % 32;
  const int64_t at = place.first + lane;
  if (state.new_numbers) {
    if (there) state.new_numbers[at] = Lanes<float>::from_bits(stored_bits(x));
    return;
  }
  const uint32_t d = state.stochastic ? state_rounding<float>(draw_one(keys, place)) : kStateToNearest;
  const uint32_t rank = there ? state_rank<kSigned>(x, d) : 0u;
  const uint32_t exponent = state_exponent<float>(__reduce_max_sync(0xFFFFFFFFu, rank));
  if (there) state.new_codes[at] = static_cast<uint8_t>(state_code<kSigned>(x, rank, exponent));
  if (lane == 0) state.new_exponents[place.exponent] = static_cast<uint8_t>(exponent);
}

JLP_DEVICE float load_number(const void* from, ElementType type, int64_t at) {
  return type == ElementType::kF32 ? static_cast<const float*>(from)[at]
                                   : bf16_decode<float>(static_cast<const uint16_t*>(from)[at]);
}

JLP_DEVICE float load_weight(const OptimizerUpdateProblem& p, int64_t at) {
  if (p.weight == WeightKind::kFloat32) return static_cast<const float*>(p.p)[at];
  const uint32_t upper = static_cast<const uint16_t*>(p.p)[at];
  if (p.weight == WeightKind::kRest16) return master_join<32, float>(upper, static_cast<const uint16_t*>(p.rest)[at]);
  if (p.weight == WeightKind::kRest8) return master_join<24, float>(upper, static_cast<const uint8_t*>(p.rest)[at]);
  return bf16_decode<float>(upper);
}

/// The new weight, and the update of the parameter where it is wanted.
JLP_DEVICE void store_weight(const OptimizerUpdateProblem& p, const BlockPlace& place, const uint32_t (&keys)[20],
                             float weight, float update, bool there) {
  const int64_t at = place.first + threadIdx.x % 32;
  uint32_t drawn = 0;
  if (p.weight == WeightKind::kDrawn) drawn = draw_one(keys, place);
  if (!there) return;
  if (p.weight == WeightKind::kFloat32) {
    const uint32_t bits = stored_bits(p.update ? update : weight);
    (p.update ? reinterpret_cast<uint32_t*>(p.update) : static_cast<uint32_t*>(p.new_p))[at] = bits;
    return;
  }
  MasterParts<float> parts;
  if (p.weight == WeightKind::kRest16) {
    parts = master_split<32>(weight);
    static_cast<uint16_t*>(p.new_rest)[at] = static_cast<uint16_t>(parts.rest);
  } else if (p.weight == WeightKind::kRest8) {
    parts = master_split<24>(weight);
    static_cast<uint8_t*>(p.new_rest)[at] = static_cast<uint8_t>(parts.rest);
  } else {
    parts.parameter = p.weight == WeightKind::kDrawn ? master_drawn(weight, drawn) : master_nearest(weight);
  }
  if (p.update) {
    const float moved = bf16_decode<float>(parts.parameter) - load_number(p.p, ElementType::kBF16, at);
    p.update[at] = Lanes<float>::from_bits(stored_bits(moved));
  } else {
    static_cast<uint16_t*>(p.new_p)[at] = static_cast<uint16_t>(parts.parameter);
  }
}

/// Updates block `at` of a matrix, by all lanes of a warp.
template <class Rule>
JLP_DEVICE void update_block(const UpdateArguments& a, const UpdateShared& shared, const typename Rule::Scalars& scalars,
                             int64_t batch, uint32_t at) {
  const BlockPlace place = place_of_block(a, batch, at);
  const OptimizerUpdateProblem& p = a.p;
  const int lane = threadIdx.x % 32;
  const bool there = lane < place.count;
  const int64_t mine = place.first + lane;
  float weight = 0;
  UpdateStep<float> step = {};
  if (there) {
    const float m = load_moment<true>(p.mu, mine, place.exponent);
    float v = 0;
    if constexpr (Rule::kHasNu) v = load_moment<false>(p.nu, mine, place.exponent);
    weight = load_weight(p, mine);
    step = update_step<Rule>(load_number(p.g, p.g_type, mine), m, v, weight, scalars);
  }
  __syncwarp();  // the new exponent may take the place of the old one
  store_moment<true>(p.mu, place, shared.keys[0], step.m, there);
  if constexpr (Rule::kHasNu) store_moment<false>(p.nu, place, shared.keys[0], step.v, there);
  store_weight(p, place, shared.keys[1], weight + step.update, step.update, there);
}

}  // namespace cuda
}  // namespace jaxlowprec
