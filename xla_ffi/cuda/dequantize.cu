// Codes back to numbers (dequantize.cuh), and operands of GEMMs, whose rows are whole blocks, to bfloat16.
#include <algorithm>

#include "decode.h"
#include "dequantize.cuh"
#include "launch_grid.cuh"

namespace jaxlowprec {
namespace cuda {

// --- Operands of a GEMM to bfloat16 where rows are whole blocks of at least 16 without padding: all matrices are one row of
// sixteens. A thread has 16 codes, 8 or 16 bytes, and one scale for them, of four sixteens on their way at a time.
//
// Bytes moved per element: its code, 1/2 or 1, read; 2 written; a scale for every 16, 32 or 128. Launch: blocks of 256
// threads, as many as the device holds at once.

constexpr int kDecodeAhead = 4;

struct DecodeSixteensArguments {
  const uint8_t *data, *scale;
  uint4* result;
  uint32_t sixteens, of_row;          // all of them; of a row
  int32_t row_shift, sixteens_shift;  // log2 of the rows, and of the sixteens of a row, that share a scale
  uint32_t scale_stride;              // from the scales of a row, or of rows that share them, to the next
  ScaleKind scale_kind;
};

/// Two eights of codes.
template <class Element>
struct SixteenCodes {
  EightCodes<Element> eights[2];

  JLP_DEVICE SixteenCodes load(const uint8_t* data, uint32_t at) {
    SixteenCodes codes;
    if constexpr (Element::kPacked) {
      const uint2 words = __ldg(reinterpret_cast<const uint2*>(data) + at);
      codes.eights[0].words[0] = words.x, codes.eights[1].words[0] = words.y;
    } else {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(data) + at);
      codes.eights[0].words[0] = words.x, codes.eights[0].words[1] = words.y;
      codes.eights[1].words[0] = words.z, codes.eights[1].words[1] = words.w;
    }
    return codes;
  }
};

/// Where a sixteen's scale lies.
JLP_DEVICE uint32_t scale_of_sixteen(const DecodeSixteensArguments& a, uint32_t at) {
  if (a.row_shift == 0) return at >> a.sixteens_shift;  // rows of scales are whole, too
  const uint32_t row = at / a.of_row;
  return (row >> a.row_shift) * a.scale_stride + ((at - row * a.of_row) >> a.sixteens_shift);
}

template <class Element>
static __global__ void __launch_bounds__(kDequantizeThreads, 4) decode_sixteens(const DecodeSixteensArguments a) {
  constexpr uint32_t kPiece = kDequantizeThreads * kDecodeAhead;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kPiece + threadIdx.x; first < a.sixteens; first += gridDim.x * kPiece) {
    SixteenCodes<Element> codes[kDecodeAhead] = {};
    uint32_t scales[kDecodeAhead] = {};
#pragma unroll
    for (int i = 0; i < kDecodeAhead; ++i) {
      const uint32_t at = first + i * kDequantizeThreads;
      if (at >= a.sixteens) continue;
      codes[i] = SixteenCodes<Element>::load(a.data, at);
      scales[i] = load_scale(a.scale_kind, a.scale, scale_of_sixteen(a, at));
    }
#pragma unroll
    for (int i = 0; i < kDecodeAhead; ++i) {
      const uint32_t at = first + i * kDequantizeThreads;
      if (at >= a.sixteens) continue;
      const float scale = decode_scale(a.scale_kind, scales[i]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[8];
        codes[i].eights[half].decode(v);
        apply_scale<Decoding::kProduct>(v, scale, 0.0f);
        store_eight<ElementType::kBF16, true>(a.result + 2 * int64_t{at} + half, 0, v, 8);
      }
    }
  }
}

namespace {

/// Calls visit with the type of codes.
template <class Visit>
cudaError_t with_code(CodeType code, Visit visit) {
  return code == CodeType::kInt8 ? visit(Int8{}) : with_float(code, visit);
}

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
      return with_code(code, [&](auto element) {
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
  if (operand.format.scaling == Scaling::kTensor || operand.format.scaling == Scaling::kRows)
    a.scale_kind = ScaleKind::kOne, a.scale_type = ElementType::kF32;
  a.columns = p.depth, a.width = p.width, a.result = p.result;
  if (sixteens_serve(operand.format, p) && p.batch * p.rows * p.depth > 0)
    return with_float(operand.format.code,
                      [&](auto element) { return launch_sixteens<decltype(element)>(a, p.batch, stream); });
  return launch_for<ElementType::kBF16>(operand.format.code, Decoding::kProduct, a, p.batch, stream);
}

}  // namespace cuda
}  // namespace jaxlowprec
