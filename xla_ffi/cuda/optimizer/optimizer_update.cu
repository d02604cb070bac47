// AdamW and Lion in one pass over parameters, remainders, moments and gradients (numerics.md 19), in place where the new
// arrays are the old ones.
//
// Bytes moved per element, of 8-bit moments, a remainder of int16 and a gradient and a parameter of bfloat16: 8.06 read and
// 6.06 written. Launch: blocks of 128 threads, as many as the device holds at once; a warp takes 8 blocks of 32 elements.
#include "../launch.h"
#include "../launch_grid.cuh"
#include "update_eights.cuh"

namespace jaxlowprec {
namespace cuda {

constexpr int kUpdateThreads = 128, kUpdateWarpBlocks = 8;  // blocks of 32 that a warp takes at a time
constexpr int kUpdatePiece = kUpdateThreads / 32 * kUpdateWarpBlocks;

/// The round keys of a matrix's draws; barriers before and after.
JLP_DEVICE void start_draws(const OptimizerUpdateProblem& p, int64_t batch, UpdateShared& shared) {
  __syncthreads();
  const uint32_t i = threadIdx.x % 20, which = threadIdx.x / 20;
  if (p.words && which < 2)
    shared.keys[which][i] = p.words[4 * batch + 2 * which + i % 2] + i / 2 * (i % 2 ? kPhiloxKeyStep1 : kPhiloxKeyStep0);
  __syncthreads();
}

/// Calls visit(block, row, column of blocks) with the first of a warp's blocks, and so on.
template <class Visit>
JLP_DEVICE void over_blocks(const UpdateArguments& a, uint32_t all, Visit visit) {
  const uint32_t step = gridDim.x * kUpdatePiece;
  uint32_t at = blockIdx.x * kUpdatePiece + threadIdx.x / 32 * kUpdateWarpBlocks;
  const uint32_t mine = at + threadIdx.x % 32 / 4;
  uint32_t row = mine / a.blocks, block = mine - row * a.blocks;
#pragma unroll 1
  for (; at < all; at += step) {
    visit(at, row, block);
    block += a.step_blocks, row += a.step_rows;
    if (block >= a.blocks) block -= a.blocks, ++row;
  }
}

/// Of elements whose rows are whole blocks.
template <class Rule, WeightKind kWeight, ElementType kG, bool kCoded>
__global__ void __launch_bounds__(kUpdateThreads, 5) optimizer_update(const __grid_constant__ UpdateArguments a) {
  UpdateShared& shared = block_shared<UpdateShared>();
  const uint32_t all = static_cast<uint32_t>(a.p.rows) * a.blocks;
  for (int64_t batch = blockIdx.y; batch < a.p.batch; batch += gridDim.y) {
    start_draws(a.p, batch, shared);
    const auto stepper = UpdateStepper<Rule>::of(a.p.scalars + kUpdateScalars<Rule> * batch);
    const uint32_t first = static_cast<uint32_t>(batch) * all,
                   whole = kept(stepper.in_range ? kUpdateWarpBlocks : UINT32_MAX);
    over_blocks(a, all, [&](uint32_t at, uint32_t row, uint32_t block) {
      const uint32_t left = min(all - at, static_cast<uint32_t>(kUpdateWarpBlocks));
      if (left == whole) {
        const uint32_t eight = 4 * (first + at) + threadIdx.x % 32;
        const auto updated = UpdatedEight<Rule, kWeight, kG, kCoded>::of(a.p, shared, stepper, eight, row, block);
        if (!__any_sync(0xFFFFFFFFu, updated.is_rare)) return updated.store(a.p, eight);
      }
#pragma unroll 1
      for (uint32_t i = 0; i < left; ++i) update_block<Rule>(a, shared, stepper.s, batch, at + i);
    });
  }
}

/// Of all others.
template <class Rule>
__global__ void __launch_bounds__(kUpdateThreads, 8) optimizer_update_any(const __grid_constant__ UpdateArguments a) {
  UpdateShared& shared = block_shared<UpdateShared>();
  const uint32_t all = static_cast<uint32_t>(a.p.rows) * a.blocks;
  for (int64_t batch = blockIdx.y; batch < a.p.batch; batch += gridDim.y) {
    start_draws(a.p, batch, shared);
    typename Rule::Scalars scalars;
    memcpy(&scalars, a.p.scalars + kUpdateScalars<Rule> * batch, sizeof scalars);
    over_blocks(a, all, [&](uint32_t at, uint32_t, uint32_t) {
      const uint32_t left = min(all - at, static_cast<uint32_t>(kUpdateWarpBlocks));
#pragma unroll 1
      for (uint32_t i = 0; i < left; ++i) update_block<Rule>(a, shared, scalars, batch, at + i);
    });
  }
}

namespace {

template <auto kKernel>
cudaError_t launch_update(UpdateArguments a, cudaStream_t stream) {
  const int64_t pieces = divide_up(a.p.rows * int64_t{a.blocks}, kUpdatePiece);
  uint32_t grid = 0;
  const cudaError_t error = grid_over<kKernel, UpdateShared>(static_cast<uint32_t>(pieces), kUpdateThreads, grid);
  if (error != cudaSuccess) return error;
  const uint32_t step = grid * kUpdatePiece;
  a.step_rows = step / a.blocks, a.step_blocks = step % a.blocks;
  const int64_t batches = a.p.batch < 65535 ? a.p.batch : 65535;
  return launch_allowed(kKernel, {grid, batches, 1, kUpdateThreads, sizeof(UpdateShared)}, stream, a);
}

/// Calls visit with the kind as a constant.
template <class Visit>
cudaError_t with_weight(WeightKind kind, Visit visit) {
  switch (kind) {
    case WeightKind::kFloat32: return visit(std::integral_constant<WeightKind, WeightKind::kFloat32>());
    case WeightKind::kNearest: return visit(std::integral_constant<WeightKind, WeightKind::kNearest>());
    case WeightKind::kDrawn: return visit(std::integral_constant<WeightKind, WeightKind::kDrawn>());
    case WeightKind::kRest8: return visit(std::integral_constant<WeightKind, WeightKind::kRest8>());
    case WeightKind::kRest16: return visit(std::integral_constant<WeightKind, WeightKind::kRest16>());
  }
  return cudaErrorInvalidValue;
}

bool are_aligned(const OptimizerUpdateProblem& p) {
  bool all = true;
  for (const void* each : {p.g, p.p, p.rest, static_cast<const void*>(p.new_p), static_cast<const void*>(p.update),
                           static_cast<const void*>(p.new_rest)})
    all &= aligned(each, 16);
  for (const MomentState& s : {p.mu, p.nu})
    all &= aligned(s.numbers, 16) && aligned(s.new_numbers, 16) && aligned(s.codes, 8) && aligned(s.new_codes, 8);
  return all;
}

template <class Rule>
cudaError_t launch_rule(const UpdateArguments& a, cudaStream_t stream) {
  const OptimizerUpdateProblem& p = a.p;
  const bool coded = p.mu.codes, alike = !Rule::kHasNu || coded == (p.nu.codes != nullptr);
  if (!alike || p.columns % kStateBlock != 0 || !are_aligned(p)) return launch_update<optimizer_update_any<Rule>>(a, stream);
  return with_weight(p.weight, [&](auto weight) {
    if (p.g_type == ElementType::kF32)
      return coded ? launch_update<optimizer_update<Rule, weight, ElementType::kF32, true>>(a, stream)
                   : launch_update<optimizer_update<Rule, weight, ElementType::kF32, false>>(a, stream);
    return coded ? launch_update<optimizer_update<Rule, weight, ElementType::kBF16, true>>(a, stream)
                 : launch_update<optimizer_update<Rule, weight, ElementType::kBF16, false>>(a, stream);
  });
}

}  // namespace

cudaError_t launch(const OptimizerUpdateProblem& p, cudaStream_t stream) {
  if (p.batch == 0 || p.rows == 0 || p.columns == 0) return cudaSuccess;
  constexpr int64_t kMostBlocks = UINT32_MAX / 4;  // whose eighths have numbers of 32 bits: of more than 2^34 elements
  if (p.blocks() > kMostBlocks / p.batch / p.rows || (p.g_type != ElementType::kBF16 && p.g_type != ElementType::kF32))
    return cudaErrorInvalidValue;
  const UpdateArguments a{p, static_cast<uint32_t>(p.blocks()), 0, 0};
  return p.rule == UpdateRule::kLion ? launch_rule<Lion>(a, stream) : launch_rule<AdamW>(a, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
