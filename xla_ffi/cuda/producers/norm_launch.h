// What launches of norms and of their gradients have in common.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../launch.h"
#include "../launch_blocks.h"
#include "../vectors.cuh"

namespace jaxlowprec {
namespace cuda {

template <class... Pointer>
bool all_aligned(Pointer... pointers) {
  return (aligned(pointers, 16) && ...);  // null is
}

/// A row as a kernel takes it: pieces of 16 bytes if it is `whole`, else elements.
struct RowPieces {
  bool whole;
  int count, bytes;

  RowPieces(int64_t columns, ElementType type, bool aligned)
      : whole(aligned && columns * element_bytes(type) % 16 == 0),
        count(static_cast<int>(whole ? columns * element_bytes(type) / 16 : columns)),
        bytes(whole ? 16 : static_cast<int>(element_bytes(type))) {}
};

/// Calls visit with the element type, whether rows are whole pieces, and the kind, as constants.
template <class Visit>
cudaError_t with_norm(ElementType type, bool whole, NormKind kind, Visit visit) {
  return with_type(type, [&](auto of_type) {
    const auto with_kind = [&](auto whole_pieces) {
      return kind == NormKind::kRms ? visit(of_type, whole_pieces, std::integral_constant<NormKind, NormKind::kRms>())
                                    : visit(of_type, whole_pieces, std::integral_constant<NormKind, NormKind::kLayer>());
    };
    return whole ? with_kind(std::true_type()) : with_kind(std::false_type());
  });
}

/// How many pieces of each row a block keeps that has `lines` of them, and `fixed` bytes beside: as many as let a
/// multiprocessor hold two such blocks. Where that is less than three quarters of a row, as many as one block can have: what
/// many blocks read again might not be in the L2 cache any more.
inline cudaError_t kept_pieces(const RowPieces& row, int lines, size_t fixed, int& keeps) {
  constexpr int kReserved = 1024;  // of each block, for the system
  int device = 0, of_multiprocessor = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&of_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const auto fit = [&](int bytes) {
    const int pieces = (bytes - static_cast<int>(fixed)) / (lines * row.bytes);
    return pieces < row.count ? pieces / 32 * 32 : row.count;
  };
  keeps = fit(of_multiprocessor / 2 - kReserved);
  if (4 * int64_t{keeps} < 3 * int64_t{row.count}) keeps = fit(most);
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jaxlowprec
