// Activations and their gradients that are quantised and not stored, executed on a CPU: byte for byte the activation's rule
// and then the quantisation's, and each operand read once.
// Kernels: activation_gradient_quantize.cu
#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/producers_reference.h"
#include "device_direction.h"

namespace jaxlowprec {
namespace {

using reference::ActivationCase;
using reference::Activations;
using reference::kActivations;
using reference::kAnyData;

/// A result that is quantised, in the device's memory.
struct DeviceCodes {
  const QuantizeCase& c;
  int64_t misalignment;
  bool column_major;
  DeviceBytes key{c.key, 0, "key"};
  DeviceDirection rowwise{c.rowwise, misalignment, column_major}, columnwise{c.columnwise, misalignment, column_major};

  QuantizeProblem problem(bool stochastic) const {
    QuantizeProblem p = c.problem;
    p.x = nullptr, p.format.column_major = column_major;
    p.rowwise = rowwise.problem(stochastic ? &key : nullptr, 0);
    p.columnwise = columnwise.problem(stochastic ? &key : nullptr, 1);
    return p;
  }
  void check() const { rowwise.check(), columnwise.check(); }
};

struct Given {
  ActivationCase c;
  Shape shape;
  NamedFormat format;
  Mode mode;
  bool stochastic;  // the activation; gradients are rounded to nearest
  int64_t misalignment;

  std::string text() const {
    return name(shape) + " " + c.text() + " " + format.name + " " + mode.name + (stochastic ? " stochastic" : "") +
           " misaligned by " + std::to_string(misalignment);
  }
};

void check_quantized_activation(const Given& given, std::mt19937& random) {
  const check::Given shown(given.text());
  const ActivationCase& c = given.c;
  const Activations a(c, random);
  const Numbers* const numbers[2] = {&kNumbers[0], &kNumbers[0]};  // no amax is given
  const auto quantized = [&](const Buffer& x, bool stochastic) {
    return QuantizeCase(x, given.shape, c.type, given.format, given.mode, stochastic, numbers, random);
  };
  const QuantizeCase of_y = quantized(a.y, given.stochastic), of_dx = quantized(a.dx, false),
                     of_dup = quantized(a.dup, false);
  const bool column_major = is_column_major(given.format.format, random);
  const auto in_device = [&](const QuantizeCase& of) { return DeviceCodes{of, given.misalignment, column_major}; };
  const DeviceCodes y = in_device(of_y), dx = in_device(of_dx), dup = in_device(of_dup);
  const DeviceBytes x(a.x, given.misalignment, "x"), up(a.up, given.misalignment, "up"), dy(a.dy, given.misalignment, "dy");
  const void* const gate = c.gated ? up.as() : nullptr;
  const int64_t size = c.size / 2;
  vary_order(random);
  cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;  // one block for all tiles, or about one for each

  const ActivationQuantizeProblem p{{x.as(), gate, c.type, 2, size, c.kind, nullptr, given.shape.columns},
                                    y.problem(given.stochastic)};
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  y.check();
  const uint64_t bytes = a.x.size(), of_gate = c.gated ? bytes : 0;
  CHECK_EQ(x.traffic().read, bytes);
  CHECK_EQ(up.traffic().read, of_gate);

  const ActivationGradientQuantizeProblem g{
      {dy.as(), x.as(), gate, c.type, 2, size, c.kind, nullptr, nullptr, given.shape.columns},
      {dx.problem(false), c.gated ? dup.problem(false) : QuantizeProblem{}}};
  CHECK_EQ(cuda::launch(g, nullptr), cudaSuccess);
  dx.check();
  if (c.gated) dup.check();
  const uint64_t launches = c.gated && c.type == ElementType::kF32 ? 2 : 1;
  CHECK_EQ(dy.traffic().read, launches * bytes);
  CHECK_EQ(x.traffic().read, (1 + launches) * bytes);
  CHECK_EQ(up.traffic().read, 2 * of_gate);
}

/// Calls visit(format, mode, kind, gated) for each that activations are quantised in.
template <class Visit>
void for_each_quantized_activation(Visit visit) {
  for (const NamedFormat& format : kOtherFormats) {
    if (format.format.scaling == Scaling::kTensor) continue;
    for (const Mode& mode : kModes) {
      if (mode.rotate) continue;
      for (const ActivationKind kind : kActivations)
        for (const bool gated : {false, true}) visit(format, mode, kind, gated);
    }
  }
}

TEST(quantized_activations_have_the_bytes_of_both_rules) {
  std::mt19937 random(7);
  const Shape shapes[] = {{1, 1}, {33, 40}, {130, 264}, {40, 300}, {7, 129}};
  int turn = 0;
  for_each_quantized_activation([&](const NamedFormat& format, const Mode& mode, ActivationKind kind, bool gated) {
    const Shape shape = shapes[turn++ % 5];
    const ElementType type = kTypes[random() % 3];
    const ActivationCase c{kind, type, 2 * shape.rows * shape.columns, gated, kAnyData[random() % 6]};
    check_quantized_activation({c, shape, format, mode, random() % 3 == 0, random() % 3 ? 0 : 4}, random);
  });
}

/// Whole tiles of bfloat16 that are aligned have kernels of their own where scales are powers of two.
TEST(whole_tiles_of_quantized_activations_have_the_bytes_of_both_rules) {
  std::mt19937 random(9);
  const Shape shape = {128, 256};
  int turn = 0;
  for_each_quantized_activation([&](const NamedFormat& format, const Mode& mode, ActivationKind kind, bool gated) {
    const ActivationCase c{kind, ElementType::kBF16, 2 * shape.rows * shape.columns, gated, kAnyData[turn++ % 6]};
    check_quantized_activation({c, shape, format, mode, false, 0}, random);
  });
}

TEST(nothing_is_launched_for_nothing) {
  CHECK_EQ(cuda::launch(ActivationQuantizeProblem{}, nullptr), cudaSuccess);
  CHECK_EQ(cuda::launch(ActivationGradientQuantizeProblem{}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace jaxlowprec
