#include "hadamard.cuh"
#include "launch.h"
#include "launch_blocks.h"

namespace jaxlowprec {
namespace cuda {
namespace {

template <ElementType kType, int kSize, bool kDrawn>
cudaError_t launch_kernel(HadamardArguments a, bool vertical, cudaStream_t stream) {
  if (vertical) {
    using Columns = HadamardColumns<kType, kSize, kDrawn>;
    const int64_t column_tiles = divide_up(divide_up(a.columns, kPerWord<kType>), Columns::kWords);
    if (column_tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
    a.column_tiles = static_cast<uint32_t>(column_tiles);
    const Blocks blocks{column_tiles * (a.rows / kSize), 1, 1, Columns::kThreads,
                        kSize == 16 ? 0 : sizeof(typename Columns::Shared)};
    return launch_blocks(hadamard_columns_kernel<kType, kSize, kDrawn>, blocks, stream, a);
  }
  using Rows = HadamardRows<kType, kSize>;
  const Blocks blocks{divide_up(a.rows * (a.columns / kSize), Rows::kPerBlock), 1, 1, Rows::kThreads};
  return launch_blocks(hadamard_rows_kernel<kType, kSize, kDrawn>, blocks, stream, a);
}

template <ElementType kType, int kSize>
cudaError_t launch_size(const HadamardArguments& a, bool vertical, cudaStream_t stream) {
  if (a.drawn_signs == nullptr) return launch_kernel<kType, kSize, false>(a, vertical, stream);
  if constexpr (kSize <= kDrawnSigns) return launch_kernel<kType, kSize, true>(a, vertical, stream);
  return cudaErrorInvalidValue;
}

template <ElementType kType>
cudaError_t launch_type(int32_t size, const HadamardArguments& a, bool vertical, cudaStream_t stream) {
  switch (size) {
    case 16: return launch_size<kType, 16>(a, vertical, stream);
    case 32: return launch_size<kType, 32>(a, vertical, stream);
    case 64: return launch_size<kType, 64>(a, vertical, stream);
    case 128: return launch_size<kType, 128>(a, vertical, stream);
    case 256: return launch_size<kType, 256>(a, vertical, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch(const HadamardProblem& p, cudaStream_t stream) {
  if (p.size <= 0 || (p.vertical ? p.rows : p.columns) % p.size != 0) return cudaErrorInvalidValue;
  if (p.batch * p.rows * p.columns == 0) return cudaSuccess;
  const int64_t bytes = p.vertical ? 4 : 16;
  if (!aligned(p.x, bytes) || !aligned(p.result, bytes)) return cudaErrorInvalidValue;
  HadamardArguments a{};
  a.x = p.x, a.result = p.result, a.inverse = p.inverse;
  a.rows = p.batch * p.rows, a.columns = p.columns;  // matrices are whole transforms along either axis
  a.whole_words = p.columns % 2 == 0;
  a.drawn_signs = p.drawn_signs, a.matrix_rows = p.rows;
  for (int i = 0; i < p.size && i < 256 && p.drawn_signs == nullptr; ++i)
    if (p.sign_bits[i] != 0) a.signs.words[i / 32] |= 1u << (i % 32);
  switch (p.type) {
    case ElementType::kBF16: return launch_type<ElementType::kBF16>(p.size, a, p.vertical, stream);
    case ElementType::kF16: return launch_type<ElementType::kF16>(p.size, a, p.vertical, stream);
    default: return launch_type<ElementType::kF32>(p.size, a, p.vertical, stream);
  }
}

}  // namespace cuda
}  // namespace jaxlowprec
