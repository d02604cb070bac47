#if defined(JLP_CUDA)

#include "../cuda/matmul/matmul.h"
#include "engine.h"
#include "handlers.h"
#include "matmul_operands.h"

namespace jaxlowprec {
namespace {

/// a and b as data and scale; then, where given, for formats with a tensor scale what to multiply the sum by and 0 or 1 for
/// what is accumulated onto (numerics.md 9's alpha; [batch, 2]), and what to accumulate onto -> result, workspace. The rest
/// of the epilogue is XLA's. `float32_sums`: no tensor cores that add up in fewer bits. `use` gets the problem and its
/// resources and says what went wrong.
template <class Use>
ffi::Error with_matmul(const Use& use, ffi::AnyBuffer a_data, ffi::AnyBuffer a_scale, ffi::AnyBuffer b_data,
                       ffi::AnyBuffer b_scale, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                       ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary a_attributes, ffi::Dictionary b_attributes,
                       bool accumulate, bool float32_sums) {
  MatmulProblem p;
  if (auto error = decode_matmul(p, a_data, a_scale, b_data, b_scale, *result, a_attributes, b_attributes, true);
      error.failure())
    return error;
  p.float32_sums = float32_sums;
  JLP_REQUIRE(p.type != ElementType::kF16);  // cuBLASLt has none of bfloat16 operands
  for (const Format* f : {&p.a.format, &p.b.format})
    JLP_REQUIRE(f->scaling != Scaling::kRows || f->scale_type == ElementType::kF32);
  JLP_REQUIRE((!p.a.format.column_major || p.rows % 4 == 0) && (!p.b.format.column_major || p.columns % 4 == 0));
  const bool nibbles = p.a.format.code == CodeType::kInt8 && p.b.format.packed();
  for (const Format* f : {&p.a.format, &p.b.format})
    JLP_REQUIRE(f->scaling == Scaling::kFloat32 || f->column_major == (nibbles && f->packed()));
  const bool tensor = p.a.format.scaling == Scaling::kTwoLevel || p.a.format.scaling == Scaling::kTensor;
  JLP_REQUIRE(args.size() == static_cast<size_t>(tensor + accumulate));
  if (result->element_count() == 0) return ffi::Error::Success();
  cuda::MatmulResources resources{nullptr, bytes(*workspace), static_cast<int64_t>(workspace->size_bytes())};
  if (tensor) JLP_REQUIRE((resources.alpha_beta = floats(args, 0, 2 * p.batch)) != nullptr);
  if (accumulate) {
    JLP_REQUIRE((p.accumulate = like_result(args, tensor, *result, p.accumulate_type)) != nullptr);
    JLP_REQUIRE(p.accumulate_type == p.type);
  }
  const std::string problem = use(p, resources);
  return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal(cuda::failure("scaled_matmul", p, problem));
}

constexpr auto scaled_matmul = [](cudaStream_t stream, auto... call) {
  return with_matmul([&](const auto& p, const auto& resources) { return cuda::launch(p, resources, stream); }, call...);
};

/// Before every execution and outside of command buffers: JAXLOWPREC_GEMM_ALGORITHM=timed. What buffers hold is computed
/// later, or was by an earlier execution; some may share memory with what is still needed, so none is written.
constexpr auto initialize = [](cudaStream_t stream, ffi::ScratchAllocator scratch, auto... call) {
  const cuda::Allocate allocate = [&](int64_t bytes) {
    return scratch.Allocate(static_cast<size_t>(bytes)).value_or(nullptr);
  };
  const auto time = [&](const auto& p, const auto& resources) { return cuda::time_matmul(p, resources, allocate, stream); };
  return with_matmul(time, call...);
};

ffi::Error prepare() {
  const std::string problem = cuda::prepare_matmul();
  return problem.empty() ? ffi::Error::Success() : ffi::Error::Internal("jaxlowprec scaled_matmul: " + problem);
}

}  // namespace

#define JLP_MATMUL_OPERANDS              \
  .Arg<ffi::AnyBuffer>()                 \
      .Arg<ffi::AnyBuffer>()             \
      .Arg<ffi::AnyBuffer>()             \
      .Arg<ffi::AnyBuffer>()             \
      .RemainingArgs()                   \
      .Ret<ffi::AnyBuffer>()             \
      .Ret<ffi::AnyBuffer>()             \
      .Attr<ffi::Dictionary>("a_format") \
      .Attr<ffi::Dictionary>("b_format") \
      .Attr<bool>("accumulate")          \
      .Attr<bool>("float32_sums")

JLP_DEFINE_CUDA_HANDLER(scaled_matmul, scaled_matmul, JLP_MATMUL_OPERANDS);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxlowprec_scaled_matmul_cuda_initialize, initialize,
    ffi::Ffi::BindInitialize().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::ScratchAllocator>() JLP_MATMUL_OPERANDS);

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxlowprec_scaled_matmul_cuda_prepare, [](ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) { return prepare(); },
    ffi::Ffi::BindPrepare().RemainingArgs().RemainingRets().Attrs());

}  // namespace jaxlowprec

#endif
