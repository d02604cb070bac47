#include "int4.cuh"
#include "launch_grid.cuh"

namespace jaxlowprec {
namespace cuda {
namespace {

Int4Arguments arguments_of(const Int4Matrices& m) {
  Int4Arguments a{};
  a.m = m, a.groups = m.groups(), a.line_bytes = m.line_bytes();
  a.length = m.length(), a.all_lines = m.batch * m.lines(), a.all_elements = m.batch * m.size();
  a.all_groups = a.all_lines * a.groups;
  while (int64_t{8} << a.lane_shift < m.format.group && a.lane_shift < 5) ++a.lane_shift;
  a.row_tiles = static_cast<uint32_t>(divide_up(m.rows, kInt4TileRows));
  a.column_tiles = static_cast<uint32_t>(divide_up(m.columns, kInt4TileColumns));
  return a;
}

/// Whether rows are whole groups of whole eights, at most `most` of them: then all of them are one long row.
bool rows_serve(const Int4Matrices& m, int64_t most, const void* elements, const uint8_t* data) {
  return !m.columnwise && m.format.group % 8 == 0 && m.format.group <= most && m.columns % m.format.group == 0 &&
         aligned(elements, 16) && aligned(data, 4);
}

/// Whether groups of rows are of 16 elements a thread, which are counted in 32 bits, one grid further too.
bool symmetric_rows_serve(const Int4Matrices& m, const void* elements, const uint8_t* data) {
  const int64_t group = m.format.group;
  return m.format.symmetric && (group == 32 || group == 64 || group == 128) && rows_serve(m, group, elements, data) &&
         aligned(data, 8) && m.batch * m.size() / 16 <= INT32_MAX;
}

/// Whether columns are whole groups, and a tile of rows is.
bool columns_serve(const Int4Matrices& m, const void* elements, const uint8_t* data) {
  const int64_t group = m.format.group;
  return m.columnwise && (group == 32 || group == 64 || group == 128) && m.rows % group == 0 && m.columns % 8 == 0 &&
         aligned(elements, 16) && aligned(data, 16);
}

cudaError_t launch_tiles(void (*kernel)(Int4Arguments), const Int4Arguments& a, cudaStream_t stream) {
  const int64_t tiles = int64_t{a.row_tiles} * a.column_tiles * a.m.batch;
  return launch_blocks(kernel, {tiles, 1, 1, kInt4Threads, sizeof(Int4TileShared)}, stream, a);
}

template <ElementType kType, ElementType kDeploy, bool kQuantize>
cudaError_t launch_encoding(const Int4Arguments& a, cudaStream_t stream) {
  const auto aligned_result = kQuantize || aligned(a.result, 16);
  if (aligned_result && symmetric_rows_serve(a.m, a.x, a.data)) {
    const int64_t pieces = divide_up(a.all_elements, 16 * kInt4Threads * kInt4Sixteens), group = a.m.format.group;
    const auto with_lanes = [&](auto lanes) {
      return launch_over_pieces<int4_symmetric_rows<kType, kDeploy, decltype(lanes)::value, kQuantize>>(pieces, kInt4Threads,
                                                                                                        a, stream);
    };
    return group == 32   ? with_lanes(std::integral_constant<int, 2>())
           : group == 64 ? with_lanes(std::integral_constant<int, 4>())
                         : with_lanes(std::integral_constant<int, 8>());
  }
  if (aligned_result && rows_serve(a.m, 256, a.x, a.data)) {
    const int64_t each = int64_t{kInt4Threads >> a.lane_shift} * kInt4Steps;
    return launch_blocks(int4_rows<kType, kDeploy, kQuantize>, {divide_up(a.all_groups, each)}, stream, a);
  }
  if (aligned_result && columns_serve(a.m, a.x, a.data))
    return launch_tiles(int4_columns<kType, kDeploy, kQuantize>, a, stream);
  const int64_t pairs = a.all_lines * divide_up(a.groups, 2);
  return launch_blocks(int4_any<kType, kDeploy, kQuantize>, {divide_up(pairs * 32, kInt4Threads)}, stream, a);
}

template <ElementType kResult, ElementType kDeploy>
cudaError_t launch_decoding(const Int4Arguments& a, cudaStream_t stream) {
  if (rows_serve(a.m, INT64_MAX, a.result, a.data)) {
    const int64_t eights = a.all_elements / 8;
    return launch_blocks(int4_decode_rows<kResult, kDeploy>, {divide_up(eights, kInt4Threads * kInt4Steps)}, stream, a);
  }
  if (columns_serve(a.m, a.result, a.data)) return launch_tiles(int4_decode_columns<kResult, kDeploy>, a, stream);
  return launch_blocks(int4_decode_any<kResult, kDeploy>, {divide_up(a.all_elements, kInt4Threads)}, stream, a);
}

/// Calls visit with the deployment dtype.
template <class Visit>
cudaError_t with_deploy(ElementType deploy, Visit visit) {
  switch (deploy) {
    case ElementType::kBF16: return visit(std::integral_constant<ElementType, ElementType::kBF16>{});
    case ElementType::kF16: return visit(std::integral_constant<ElementType, ElementType::kF16>{});
    default: return cudaErrorInvalidValue;
  }
}

bool empty(const Int4Matrices& m) { return m.batch * m.size() == 0; }

}  // namespace

cudaError_t launch(const Int4FakeQuantizeProblem& p, cudaStream_t stream) {
  if (p.format.group < 1 || (p.type != ElementType::kF32 && p.type != p.format.scale)) return cudaErrorInvalidValue;
  if (empty(p)) return cudaSuccess;
  Int4Arguments a = arguments_of(p);
  a.x = p.x, a.result = p.result;
  return with_deploy(p.format.scale, [&](auto deploy) {
    constexpr ElementType kDeploy = decltype(deploy)::value;
    return p.type == ElementType::kF32 ? launch_encoding<ElementType::kF32, kDeploy, false>(a, stream)
                                       : launch_encoding<kDeploy, kDeploy, false>(a, stream);
  });
}

cudaError_t launch(const Int4QuantizeProblem& p, cudaStream_t stream) {
  if (p.format.group < 1 || p.format.symmetric != (p.zero == nullptr)) return cudaErrorInvalidValue;
  if (empty(p)) return cudaSuccess;
  Int4Arguments a = arguments_of(p);
  a.x = p.x, a.data = p.data, a.scale = p.scale, a.zero = p.zero;
  return with_deploy(p.format.scale, [&](auto deploy) {
    constexpr ElementType kDeploy = decltype(deploy)::value;
    switch (p.type) {
      case ElementType::kBF16: return launch_encoding<ElementType::kBF16, kDeploy, true>(a, stream);
      case ElementType::kF16: return launch_encoding<ElementType::kF16, kDeploy, true>(a, stream);
      default: return launch_encoding<ElementType::kF32, kDeploy, true>(a, stream);
    }
  });
}

cudaError_t launch(const Int4DequantizeProblem& p, cudaStream_t stream) {
  if (p.format.group < 1 || p.format.symmetric != (p.zero == nullptr)) return cudaErrorInvalidValue;
  if (empty(p)) return cudaSuccess;
  Int4Arguments a = arguments_of(p);
  a.result = p.result;
  a.data = const_cast<uint8_t*>(p.data), a.scale = const_cast<uint16_t*>(p.scale), a.zero = const_cast<uint8_t*>(p.zero);
  return with_deploy(p.format.scale, [&](auto deploy) {
    constexpr ElementType kDeploy = decltype(deploy)::value;
    switch (p.type) {
      case ElementType::kBF16: return launch_decoding<ElementType::kBF16, kDeploy>(a, stream);
      case ElementType::kF16: return launch_decoding<ElementType::kF16, kDeploy>(a, stream);
      default: return launch_decoding<ElementType::kF32, kDeploy>(a, stream);
    }
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
