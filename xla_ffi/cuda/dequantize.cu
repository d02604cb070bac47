#include <algorithm>

#include "decode.h"
#include "decode_sixteens.cuh"
#include "launch_grid.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

template <class Element, Decoding kDecoding, ElementType kResult>
cudaError_t launch_kernel(DequantizeArguments a, int64_t batch, cudaStream_t stream) {
  const int64_t pieces = divide_up(a.width, 16) * 2;  // of eight; a rotation has pairs of them
  a.lane_shift = std::min(log2_of(pieces), log2_of(kDequantizeThreads));
  a.whole = aligned(a.data, 8) && a.columns % 8 == 0 && a.row_bytes % 8 == 0 && aligned(a.result, 16) && a.width % 8 == 0;
  const int64_t column_tiles = divide_up(pieces, int64_t{1} << a.lane_shift);
  const int64_t row_tiles = divide_up(a.rows, int64_t{kDequantizeThreads >> a.lane_shift} * kDequantizeSteps);
  a.column_tiles = static_cast<uint32_t>(column_tiles), a.row_tiles = static_cast<uint32_t>(row_tiles);
  return launch_blocks(dequantize_kernel<Element, kDecoding, kResult>,
                       {column_tiles * row_tiles * batch, 1, 1, kDequantizeThreads}, stream, a);
}

/// Whether the operand's matrices are one row of sixteens, each with a scale of its own or shared with its neighbours; its
/// codes and its scales have no padding then.
bool sixteens_serve(const Format& f, const DecodeProblem& p) {
  const int64_t columns = p.operand.columns, block = f.block;
  return p.depth == columns && p.width == columns && f.scaling != Scaling::kTensor && block >= 16 && columns % block == 0 &&
         (!f.tiles || p.rows % block == 0) && p.batch * p.rows * columns / 16 <= INT32_MAX &&
         aligned(p.operand.data, f.packed() ? 8 : 16) && aligned(p.result, 16);
}

template <class Element>
cudaError_t launch_sixteens(const DequantizeArguments& a, int64_t batch, cudaStream_t stream) {
  const int64_t of_row = a.columns / 16, sixteens = batch * a.rows * of_row;
  const DecodeSixteensArguments of = {a.data,
                                      a.scale,
                                      static_cast<uint4*>(a.result),
                                      static_cast<uint32_t>(sixteens),
                                      static_cast<uint32_t>(of_row),
                                      a.row_shift,
                                      a.column_shift - 4,
                                      static_cast<uint32_t>(a.scale_stride),
                                      a.scale_kind};
  return launch_over_pieces<decode_sixteens<Element>>(divide_up(sixteens, kDequantizeThreads * kDecodeAhead),
                                                      kDequantizeThreads, of, stream);
}

template <ElementType kResult>
cudaError_t launch_for(CodeType code, Decoding decoding, const DequantizeArguments& a, int64_t batch, cudaStream_t stream) {
  if (batch * a.rows * a.width == 0) return cudaSuccess;
  if (!aligned(a.data, code == CodeType::kE2M1 ? 4 : 1)) return cudaErrorInvalidValue;
  switch (decoding) {
    case Decoding::kTwoLevel: return launch_kernel<E2M1, Decoding::kTwoLevel, kResult>(a, batch, stream);
    case Decoding::kTwoLevelRotated: return launch_kernel<E2M1, Decoding::kTwoLevelRotated, kResult>(a, batch, stream);
    default:
      return with_float(code, [&](auto element) {
        return launch_kernel<decltype(element), Decoding::kProduct, kResult>(a, batch, stream);
      });
  }
}

}  // namespace

cudaError_t launch(const DequantizeProblem& p, cudaStream_t stream) {
  const bool two_level = p.format.scaling == Scaling::kTwoLevel;
  if (!power_of_two(p.format.block) || (p.rotate && !two_level) || (two_level && !p.format.packed()))
    return cudaErrorInvalidValue;
  DequantizeArguments a = dequantize_arguments(p.format, p.data, p.scale, p.rows, p.columns);
  a.columns = a.width = p.columns, a.amax = p.amax, a.result = p.result, a.sign_mask = p.sign_mask;
  const Decoding decoding = !two_level ? Decoding::kProduct : p.rotate ? Decoding::kTwoLevelRotated : Decoding::kTwoLevel;
  switch (p.type) {
    case ElementType::kBF16: return launch_for<ElementType::kBF16>(p.format.code, decoding, a, p.batch, stream);
    case ElementType::kF16: return launch_for<ElementType::kF16>(p.format.code, decoding, a, p.batch, stream);
    default: return launch_for<ElementType::kF32>(p.format.code, decoding, a, p.batch, stream);
  }
}

bool decode_supports(const Format& f) { return power_of_two(f.block) && (f.scaling != Scaling::kFloat32 || f.power_of_two); }

cudaError_t launch(const DecodeProblem& p, cudaStream_t stream) {
  const MatmulOperand& operand = p.operand;
  if (!decode_supports(operand.format) || p.depth > operand.columns || p.width < p.depth) return cudaErrorInvalidValue;
  DequantizeArguments a = dequantize_arguments(operand.format, operand.data, operand.scale, p.rows, operand.columns);
  if (operand.format.scaling == Scaling::kTensor) a.scale_kind = ScaleKind::kOne;
  a.columns = p.depth, a.width = p.width, a.result = p.result;
  if (sixteens_serve(operand.format, p) && p.batch * p.rows * p.depth > 0)
    return with_float(operand.format.code,
                      [&](auto element) { return launch_sixteens<decltype(element)>(a, p.batch, stream); });
  return launch_for<ElementType::kBF16>(operand.format.code, Decoding::kProduct, a, p.batch, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
