#include <algorithm>
#include <cmath>
#include <vector>

#include "../statistics_vector.h"
#include "buffers.h"
#include "engine.h"
#include "format.h"
#include "handlers.h"
#include "sums_of_parts.h"

#if defined(JLP_CUDA)
#include "../cuda/statistics/statistics.h"
#endif

namespace jaxlowprec {
namespace {

// --- the CPU: parts, added up here

/// Runs a problem whose results are `each` numbers for each part, and adds up those of a matrix's parts.
template <class Problem, class T>
void run_parts(ffi::ThreadPool& pool, Problem p, T* Problem::*result, int64_t each, T* to) {
  const int64_t parts = p.parts();
  T* const found = memory_of_parts<T>(p.batch * parts * each);
  p.*result = found;
  if (p.batch * parts * each > 0) run(pool, p);
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t i = 0; i < each; ++i) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) total += found[(batch * parts + part) * each + i];
      to[batch * each + i] = static_cast<T>(total);
    }
}

ffi::Error find_moments(ffi::ThreadPool& pool, MomentsProblem p, const Matrices&, ffi::RemainingRets&) {
  float* result = p.result;
  const float* const found = p.result = memory_of_parts<float>(p.batch * p.parts() * 2);
  run(pool, p);
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    float largest = 0;
    double energy = 0;
    for (int64_t part = 0; part < p.parts(); ++part) {
      const float* of_part = &found[2 * (batch * p.parts() + part)];
      largest = std::max(largest, of_part[0]);
      energy += static_cast<double>(of_part[1]) * of_part[1] * p.size_of(part);
    }
    result[2 * batch] = largest;
    result[2 * batch + 1] = static_cast<float>(std::sqrt(energy / p.size));
  }
  return ffi::Error::Success();
}

ffi::Error count_outliers(ffi::ThreadPool& pool, const OutliersProblem& p) {
  run_parts(pool, p, &OutliersProblem::result, p.columns, p.result);
  return ffi::Error::Success();
}

ffi::Error find_sums(ffi::ThreadPool& pool, const SumsProblem& p, ffi::RemainingRets&) {
  run_parts(pool, p, &SumsProblem::result, kSums, p.result);
  return ffi::Error::Success();
}

/// Tensors that have formats by turns, and their vectors.
struct Tensors {
  int64_t count;
  const float *sums, *amax, *rms, *outliers, *channels;
  std::vector<Scaling> scalings;  // of the formats
  float* result;
};

ffi::Error find_vectors(ffi::ThreadPool&, const Tensors& t) {
  for (int64_t i = 0; i < t.count; ++i) {
    const KnownOfTensor known{t.amax[i], t.rms[i], t.outliers[i], t.channels + 2 * kChannels * i};
    finish(t.sums + kSums * i, known, t.scalings[i % t.scalings.size()], t.result + kVector * i);
  }
  return ffi::Error::Success();
}

// --- the GPU: into the workspace that is the last result

#if defined(JLP_CUDA)

template <class Shape>
ffi::Error outcome(cudaError_t status, const char* operation, const Shape& shape) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(cuda::failure(operation, shape, cuda::reason(status)));
}

/// The workspace, if it is one and large enough; else null.
template <class Part>
void* workspace(const ffi::RemainingRets& results, int64_t batch) {
  if (results.size() != 2) return nullptr;
  auto buffer = results.get<ffi::AnyBuffer>(1);
  if (buffer.has_error()) return nullptr;
  const ffi::AnyBuffer& memory = **buffer;
  const bool fits = static_cast<int64_t>(memory.size_bytes()) >= cuda::workspace_for<Part>(batch) &&
                    reinterpret_cast<uintptr_t>(memory.untyped_data()) % sizeof(double) == 0;
  return fits ? memory.untyped_data() : nullptr;
}

ffi::Error find_moments(cudaStream_t stream, const MomentsProblem& p, const Matrices& m, ffi::RemainingRets& results) {
  void* const parts = workspace<cuda::MomentsOfPart>(results, p.batch);
  JLP_REQUIRE(parts != nullptr);
  return outcome(cuda::launch(p, parts, stream), "moments", m);
}

ffi::Error count_outliers(cudaStream_t stream, const OutliersProblem& p) {
  return outcome(cuda::launch(p, stream), "outliers", p);
}

ffi::Error find_sums(cudaStream_t stream, const SumsProblem& p, ffi::RemainingRets& results) {
  void* const parts = workspace<cuda::SumsOfPart>(results, p.batch);
  JLP_REQUIRE(parts != nullptr);
  return outcome(cuda::launch(p, parts, stream), "sums", p);
}

ffi::Error find_vectors(cudaStream_t stream, const Tensors& t) {
  const cuda::VectorsProblem p{
      t.count, t.sums, t.amax, t.rms, t.outliers, t.channels, t.scalings.data(), static_cast<int64_t>(t.scalings.size()),
      t.result};
  struct {
    int64_t batch, rows, columns;
  } const shape = {1, t.count, kSums};
  return outcome(cuda::launch(p, stream), "statistics", shape);
}

#endif

// --- the handlers

/// The first result, if it is that many float32; else null. A second one is the GPU's workspace.
float* result_of(const ffi::RemainingRets& results, int64_t count) {
  auto buffer = results.get<ffi::Buffer<ffi::F32>>(0);
  return buffer.has_value() && static_cast<int64_t>((*buffer)->element_count()) == count ? (*buffer)->typed_data() : nullptr;
}

/// x -> largest finite magnitude and root mean square of each matrix.
template <class Engine>
ffi::Error moments(Engine engine, ffi::AnyBuffer x, ffi::RemainingRets results) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value());
  const Matrices m(x);
  const MomentsProblem p{x.untyped_data(), *type, m.batch, m.rows * m.columns, result_of(results, 2 * m.batch)};
  JLP_REQUIRE(p.result != nullptr && p.size > 0);
  return find_moments(engine, p, m, results);
}

/// x, a threshold for each matrix -> how many elements of each column are beyond it.
template <class Engine>
ffi::Error outliers(Engine engine, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> threshold,
                    ffi::Result<ffi::Buffer<ffi::S32>> result) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value());
  const Matrices m(x);
  const OutliersProblem p{x.untyped_data(), *type, m.batch, m.rows, m.columns, threshold.typed_data(), result->typed_data()};
  JLP_REQUIRE(static_cast<int64_t>(threshold.element_count()) == m.batch);
  JLP_REQUIRE(static_cast<int64_t>(result->element_count()) == m.batch * m.columns);
  return count_outliers(engine, p);
}

/// x, a unit for each matrix, data, scale and, for two-level formats, the amax -> the sums of each matrix.
template <class Engine>
ffi::Error sums(Engine engine, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> unit, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary format_attributes, bool columnwise) {
  const auto type = element_type(x.element_type());
  const auto format = decode_format(format_attributes);
  JLP_REQUIRE(type.has_value() && format.has_value() && format->code != CodeType::kInt4 &&
              format->scaling != Scaling::kRows);
  const bool two_level = format->scaling == Scaling::kTwoLevel;
  JLP_REQUIRE(args.size() == static_cast<size_t>(two_level));
  const Matrices m(x);
  SumsProblem p{};
  p.x = x.untyped_data(), p.type = *type, p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.columnwise = columnwise, p.format = *format, p.data = bytes(data), p.scale = bytes(scale);
  p.unit = unit.typed_data(), p.result = result_of(results, m.batch * kSums);
  JLP_REQUIRE(static_cast<int64_t>(unit.element_count()) == m.batch);
  JLP_REQUIRE(static_cast<int64_t>(data.size_bytes()) == m.batch * p.lines() * format->row_bytes(p.length()));
  JLP_REQUIRE(static_cast<int64_t>(scale.size_bytes()) ==
              m.batch * format->scales(p.lines(), p.length()) * format->scale_bytes());
  JLP_REQUIRE(p.result != nullptr);
  if (two_level) {
    const auto amax = args.get<ffi::Buffer<ffi::F32>>(0);
    if (amax.has_error()) return amax.error();
    JLP_REQUIRE(static_cast<int64_t>(amax->element_count()) == m.batch);
    p.amax = amax->typed_data();
  }
  return find_sums(engine, p, results);
}

/// The vectors of statistics of tensors, of formats with these scalings by turns: names with spaces between.
template <class Engine>
ffi::Error statistics(Engine engine, ffi::Buffer<ffi::F32> sums, ffi::Buffer<ffi::F32> amax, ffi::Buffer<ffi::F32> rms,
                      ffi::Buffer<ffi::F32> outliers, ffi::Buffer<ffi::F32> channels,
                      ffi::Result<ffi::Buffer<ffi::F32>> result, std::string_view scalings) {
  const int64_t count = static_cast<int64_t>(amax.element_count());
  Tensors t{count, sums.typed_data(),   amax.typed_data(), rms.typed_data(), outliers.typed_data(), channels.typed_data(),
            {},    result->typed_data()};
  while (!scalings.empty()) {
    const size_t end = std::min(scalings.find(' '), scalings.size());
    const auto scaling = scaling_named(scalings.substr(0, end));
    JLP_REQUIRE(scaling.has_value());
    t.scalings.push_back(*scaling);
    scalings.remove_prefix(std::min(end + 1, scalings.size()));
  }
  const auto fits = [&](const auto& buffer, int64_t each) {
    return static_cast<int64_t>(buffer.element_count()) == count * each;
  };
  JLP_REQUIRE(!t.scalings.empty() && count % static_cast<int64_t>(t.scalings.size()) == 0);
  JLP_REQUIRE(fits(sums, kSums) && fits(rms, 1) && fits(outliers, 1) && fits(channels, 2 * kChannels));
  JLP_REQUIRE(fits(*result, kVector));
  return find_vectors(engine, t);
}

}  // namespace

JLP_DEFINE_HANDLERS(moments, .Arg<ffi::AnyBuffer>().RemainingRets());
JLP_DEFINE_HANDLERS(outliers, .Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S32>>());
JLP_DEFINE_HANDLERS(sums, .Arg<ffi::AnyBuffer>()
                              .Arg<ffi::Buffer<ffi::F32>>()
                              .Arg<ffi::AnyBuffer>()
                              .Arg<ffi::AnyBuffer>()
                              .RemainingArgs()
                              .RemainingRets()
                              .Attr<ffi::Dictionary>("format")
                              .Attr<bool>("columnwise"));
JLP_DEFINE_HANDLERS(statistics, .Arg<ffi::Buffer<ffi::F32>>()
                                    .Arg<ffi::Buffer<ffi::F32>>()
                                    .Arg<ffi::Buffer<ffi::F32>>()
                                    .Arg<ffi::Buffer<ffi::F32>>()
                                    .Arg<ffi::Buffer<ffi::F32>>()
                                    .Ret<ffi::Buffer<ffi::F32>>()
                                    .Attr<std::string_view>("scalings"));

}  // namespace jaxlowprec
