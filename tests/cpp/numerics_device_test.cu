// Every rule of xla_ffi/numerics in device code, F = float: that it compiles, for host and device, without a warning. The
// kernel is never run here; the results are stored only so that nothing is dropped.
#include "../../xla_ffi/numerics/activations.h"
#include "../../xla_ffi/numerics/block_scales.h"
#include "../../xla_ffi/numerics/e2m1.h"
#include "../../xla_ffi/numerics/float16.h"
#include "../../xla_ffi/numerics/float8.h"
#include "../../xla_ffi/numerics/hadamard.h"
#include "../../xla_ffi/numerics/lanes.h"
#include "../../xla_ffi/numerics/nvfp4.h"
#include "../../xla_ffi/numerics/optimizer_states.h"
#include "../../xla_ffi/numerics/philox.h"

namespace jaxlowprec {

/// Calls store(value) with what each rule makes of x and bits.
template <class Store>
__host__ __device__ void apply_formats(float x, uint32_t bits, Store store) {
  using L = Lanes<float>;
  store(bf16_encode(x)), store(bf16_decode<float>(bits));
  store(f16_encode(x)), store(f16_decode<float>(bits));
  store(e2m1_magnitude_bits(x) - kE2M1MagicBits), store(e2m1_encode(x)), store(e2m1_encode_stochastic(x, bits & 0xFFu));
  store(e2m1_decode<float>(bits & 15u)), store(kE2M1Max);
  store(float8_encode_magnitude<E4M3>(x)), store(float8_encode<E4M3>(x)), store(float8_decode<E4M3, float>(bits & 0xFFu));
  store(float8_encode<E5M2>(x)), store(float8_decode<E5M2, float>(bits & 0xFFu));
  store(float8_encode_stochastic<E4M3>(x, bits & 0xFFu)), store(float8_encode_stochastic<E5M2>(x, bits & 0xFFu));
  store(float8_magnitude_bits<E4M3>(x) - kFloat8Offset<E4M3>);
  store(e8m0_encode_up(x)), store(e8m0_decode<float>(bits & 0xFFu));
  store(exp_rule(x)), store(gelu_tanh(x)), store(gelu_tanh_gradient(x));
  store(Gelu::with_slope(x).value), store(Silu::value(x)), store(Silu::with_slope(x).slope);
  store(ReluSquared::value(x)), store(ReluSquared::with_slope(x).slope);
  store(magnitude(x)), store(absolute(x)), store(fill<float>(bits));
  store(L::flush(x)), store(L::scaled(x, 2.0f)), store(L::min(x, 1.0f)), store(L::max(x, 1.0f)), store(L::round_to_even(x));
  store(L::truncate(x)), store(L::to_float(bits >> 1)), store(L::multiply_add_exact(x, 2.0f, 1.0f));
}

template <class Store>
__host__ __device__ void apply_nvfp4(float x, uint32_t bits, Store store) {
  const Nvfp4TensorScale tensor = nvfp4_tensor_scale(x);
  const uint32_t scale = nvfp4_block_scale(x, tensor.multiplier);
  store(tensor.decode), store(tensor.usable ? kNvfp4ProductScale : 0.0f), store(scale);
  store(nvfp4_block_encode<float>(scale, tensor.decode));
  store(nvfp4_decode<float>(bits & 15u, float8_decode<E4M3, float>(scale), x));
}

template <class Store>
__host__ __device__ void apply_mx_and_float8_scales(float x, uint32_t bits, Store store) {
  const MxElement elements[] = {kMxElement<E2M1>, kMxElement<E4M3>, kMxElement<E5M2>};
  for (const MxElement& element : elements) {
    store(mx_scale_up<float>(magnitude(x), element)), store(mx_scale_floor<float>(magnitude(x), element, 0));
    store(mx_encode<float>(mx_scale_floor<float>(magnitude(x), element, element.half_unit)));
  }
  const Float8ScaleRule rule = {E5M2::kMax, 0.0f, (bits & 1u) != 0};
  store(float8_decode_scale(float8_encode_scale<float>(magnitude(x), rule)));
  store(float8_tensor_encode_scale(x, (bits & 2u) != 0, rule));
}

template <int N, class Store>
__host__ __device__ void apply_hadamard(float x, Store store) {
  float v[N];
  for (int i = 0; i < N; ++i) v[i] = (kDefaultSignMask >> (i % 16)) & 1u ? -x : x;
  hadamard_butterfly<N>(v);
  for (int i = 0; i < N; ++i) store(v[i]);
}

template <class Store>
__host__ __device__ void apply_philox(uint32_t bits, Store store) {
  uint32_t counter[4] = {bits, 1, 2, 3};
  philox4x32_10<float>(counter, bits, ~bits);
  for (const uint32_t word : counter) store(word);
}

template <bool kSigned, class Store>
__host__ __device__ void apply_state(float x, uint32_t bits, Store store) {
  const uint32_t rank = state_rank<kSigned>(x, state_rounding<float>(bits & 0xFFFFu)),
                 exponent = state_exponent<float>(rank);
  store(rank), store(exponent), store(state_rank<kSigned>(x, kStateToNearest));
  store(state_code<kSigned>(x, rank, exponent)), store(state_decode<kSigned, float>(bits & 0xFFu, exponent));
}

template <class Store>
__host__ __device__ void apply_optimizer(float x, uint32_t bits, Store store) {
  apply_state<true>(x, bits, store), apply_state<false>(x, bits, store);
  store(master_split<32>(x).rest), store(master_split<24>(x).parameter);
  store(master_join<32, float>(bits >> 16, bits)), store(master_join<24, float>(bits >> 16, bits));
  store(master_drawn(x, bits & 0xFFFFu)), store(master_nearest(x));
  const UpdateStep<float> step =
      update_step<AdamW>(x, x, x, x, {0.9f, 0.1f, 0.999f, 0.001f, 0.1f, 0.001f, 1e-8f, 0.1f, -1e-3f});
  store(step.m), store(step.v), store(step.update), store(kUpdateScalars<AdamW>), store(kUpdateScalars<Lion>);
  store(update_step<Lion>(x, x, x, x, {0.9f, 0.1f, 0.99f, 0.01f, 0.1f, -1e-3f}).update), store(kStateBlock),
      store(kStatePoison);
  store(kDrawsOfCall), store(kDrawnHalves);
}

template <class Store>
__host__ __device__ void apply_all(float x, uint32_t bits, Store store) {
  apply_formats(x, bits, store), apply_nvfp4(x, bits, store), apply_philox(bits, store);
  apply_mx_and_float8_scales(x, bits, store), apply_optimizer(x, bits, store);
  apply_hadamard<16>(x, store), apply_hadamard<32>(x, store), apply_hadamard<64>(x, store);
  apply_hadamard<128>(x, store), apply_hadamard<256>(x, store);
}

struct StoreDouble {
  double* out;
  template <class T>
  __host__ __device__ void operator()(T value) {
    *out++ = static_cast<double>(value);
  }
};

__global__ void on_device(const float* x, const uint32_t* bits, double* out) {
  apply_all(x[threadIdx.x], bits[threadIdx.x], StoreDouble{out + 1024 * threadIdx.x});
}

void on_host(const float* x, const uint32_t* bits, double* out) { apply_all(*x, *bits, StoreDouble{out}); }

}  // namespace jaxlowprec
