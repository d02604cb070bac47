// Norms that are quantised and not stored, executed on a CPU: byte for byte the norm's rule and then the quantisation's.
// Kernels: norms.cu
#include "../../xla_ffi/cuda/launch.h"
#include "device_direction.h"
#include "device_norm.h"

namespace jaxlowprec {
namespace {

using reference::kAnyData;
using reference::NormCase;
using reference::Norms;

void check_quantized_norm(const Norms& n, int64_t misalignment, const NamedFormat& format, const Mode& mode, bool stochastic,
                          std::mt19937& random) {
  const NormCase& c = n.c;
  const Numbers* const numbers[2] = {&kNumbers[0], &kNumbers[0]};  // no amax is given
  const QuantizeCase q(n.y, {c.rows, c.columns}, c.type, format, mode, stochastic, numbers, random);
  const DeviceNorm arrays{n, misalignment};
  const DeviceBytes key(q.key, 0, "key");
  const bool column_major = is_column_major(format.format, random);
  const DeviceDirection rowwise(q.rowwise, misalignment, column_major), columnwise(q.columnwise, misalignment, column_major);
  NormQuantizeProblem p{};
  static_cast<NormProblem&>(p) = arrays.problem();
  p.result = nullptr, p.quantize = q.problem, p.quantize.x = nullptr, p.quantize.format.column_major = column_major;
  p.quantize.rowwise = rowwise.problem(stochastic ? &key : nullptr, 0);
  p.quantize.columnwise = columnwise.problem(stochastic ? &key : nullptr, 1);
  vary_order(random);
  cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;  // one block for all tiles, or about one for each
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  rowwise.check(), columnwise.check();
  arrays.check_others(n.x.size());
  CHECK_EQ(arrays.y.unwritten(), n.y.size());
}

TEST(quantized_norms_have_the_bytes_of_both_rules) {
  std::mt19937 random(6);
  for (const NamedFormat& format : kOtherFormats) {
    if (format.format.scaling == Scaling::kTensor) continue;
    for (const Mode& mode : kModes) {
      if (mode.rotate) continue;
      for (const ElementType type : kTypes)
        for (const Shape shape : {Shape{1, 1}, {33, 40}, {130, 300}, {140, 264}}) {
          const NormKind kind = random() % 2 ? NormKind::kLayer : NormKind::kRms;
          const bool has_beta = kind == NormKind::kLayer && random() % 2, stochastic = random() % 3 == 0;
          const NormCase c{kind, type, 2, shape.rows, shape.columns, random() % 2 == 0, has_beta, kAnyData[random() % 6]};
          const check::Given given(c.text() + " " + format.name + " " + mode.name + (stochastic ? " stochastic" : ""));
          check_quantized_norm(Norms(c, random), random() % 3 ? 0 : 4, format, mode, stochastic, random);
        }
    }
  }
}

/// Whole tiles of bfloat16 that are aligned have kernels of their own where scales are powers of two.
TEST(whole_tiles_of_quantized_norms_have_the_bytes_of_both_rules) {
  std::mt19937 random(8);
  for (const NamedFormat& format : kOtherFormats) {
    if (format.format.scaling == Scaling::kTensor) continue;
    for (const Mode& mode : kModes)
      for (const auto data : kAnyData) {
        if (mode.rotate) continue;
        const NormKind kind = random() % 2 ? NormKind::kLayer : NormKind::kRms;
        const bool has_beta = kind == NormKind::kLayer && random() % 2, has_residual = random() % 2;
        const NormCase c{kind, ElementType::kBF16, 2, 128, 256, has_residual, has_beta, data};
        const check::Given given(c.text() + " " + format.name + " " + mode.name);
        check_quantized_norm(Norms(c, random), 0, format, mode, false, random);
      }
  }
}

TEST(nothing_is_launched_for_nothing) {
  NormQuantizeProblem p{};
  p.batch = 1, p.columns = 8;
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace jaxlowprec
