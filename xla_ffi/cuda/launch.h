// The GPU's side of every operation: launches on a stream, with pointers into the device's memory. The same problems as the
// CPU's kernels take, and the same bytes. Nothing here waits for the device, allocates, or reads what the device holds, so
// every launch can be captured in a graph.
#pragma once

#include <cuda_runtime.h>

#include "../problems.h"

namespace jaxlowprec {
namespace cuda {

cudaError_t launch(const AmaxProblem& problem, cudaStream_t stream);        // zeroes the results first
cudaError_t launch(const LineAmaxesProblem& problem, cudaStream_t stream);  // the same
cudaError_t launch(const QuantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const RowScaledQuantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const DequantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const HadamardProblem& problem, cudaStream_t stream);  // only its sign_bits are in the host's memory
cudaError_t launch(const ActivationProblem& problem, cudaStream_t stream);
cudaError_t launch(const ActivationGradientProblem& problem, cudaStream_t stream);
cudaError_t launch(const ActivationQuantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const ActivationGradientQuantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const NormProblem& problem, cudaStream_t stream);  // without a result: of the other results
cudaError_t launch(const NormQuantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const NormGradientProblem& problem, cudaStream_t stream);  // parts: those of norm_parts.h
cudaError_t launch(const SumOverRowsProblem& problem, cudaStream_t stream);
cudaError_t launch(const AddPartsProblem& problem, cudaStream_t stream);
cudaError_t launch(const Int4FakeQuantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const Int4QuantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const Int4DequantizeProblem& problem, cudaStream_t stream);
cudaError_t launch(const OptimizerUpdateProblem& problem, cudaStream_t stream);

}  // namespace cuda
}  // namespace jaxlowprec
