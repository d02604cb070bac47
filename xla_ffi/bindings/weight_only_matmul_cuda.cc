#if defined(JLP_CUDA)

#include "../cuda/weight_only/matmul_decode.h"
#include "engine.h"
#include "handlers.h"
#include "matmul_operands.h"

namespace jaxlowprec {
namespace {

/// x, the weight as data and scale and, where its format has them, what the sums are multiplied by or zero points -> result,
/// workspace. The epilogue is XLA's.
ffi::Error weight_only_matmul(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                              ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                              ffi::Result<ffi::AnyBuffer> workspace, ffi::Dictionary format, bool asymmetric) {
  WeightOnlyProblem p;
  size_t next = 0;
  if (auto error = decode_weight_only(p, x, data, scale, args, next, *result, format, asymmetric); error.failure())
    return error;
  JLP_REQUIRE(args.size() == next);
  JLP_REQUIRE(p.x_type == ElementType::kBF16);
  const cudaError_t status = cuda::launch(p, bytes(*workspace), static_cast<int64_t>(workspace->size_bytes()), stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(cuda::failure("weight_only_matmul", p, cuda::reason(status)));
}

}  // namespace

JLP_DEFINE_CUDA_HANDLER(weight_only_matmul, weight_only_matmul,
                        .Arg<ffi::AnyBuffer>()
                            .Arg<ffi::AnyBuffer>()
                            .Arg<ffi::AnyBuffer>()
                            .RemainingArgs()
                            .Ret<ffi::AnyBuffer>()
                            .Ret<ffi::AnyBuffer>()
                            .Attr<ffi::Dictionary>("format")
                            .Attr<bool>("asymmetric"));

}  // namespace jaxlowprec

#endif
