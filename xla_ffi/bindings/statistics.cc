#include <algorithm>
#include <cmath>
#include <vector>

#include "../statistics_vector.h"
#include "buffers.h"
#include "engine.h"
#include "format.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

/// Runs a problem whose results are `each` numbers for each part, and adds up those of a matrix's parts.
template <class Problem, class T>
void run_parts(ffi::ThreadPool& pool, Problem p, T* Problem::*result, int64_t each, T* to) {
  const int64_t parts = p.parts();
  std::vector<T> found(p.batch * parts * each);
  p.*result = found.data();
  if (!found.empty()) run(pool, p);
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t i = 0; i < each; ++i) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) total += found[(batch * parts + part) * each + i];
      to[batch * each + i] = static_cast<T>(total);
    }
}

/// x -> largest finite magnitude and root mean square of each matrix.
ffi::Error moments(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::Buffer<ffi::F32>> result) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value());
  const Matrices m(x);
  MomentsProblem p{x.untyped_data(), *type, m.batch, m.rows * m.columns, nullptr};
  JLP_REQUIRE(static_cast<int64_t>(result->element_count()) == 2 * m.batch && p.size > 0);
  std::vector<float> found(p.batch * p.parts() * 2);
  p.result = found.data();
  run(pool, p);
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    float largest = 0;
    double energy = 0;
    for (int64_t part = 0; part < p.parts(); ++part) {
      const float* of_part = &found[2 * (batch * p.parts() + part)];
      largest = std::max(largest, of_part[0]);
      energy += static_cast<double>(of_part[1]) * of_part[1] * p.size_of(part);
    }
    result->typed_data()[2 * batch] = largest;
    result->typed_data()[2 * batch + 1] = static_cast<float>(std::sqrt(energy / p.size));
  }
  return ffi::Error::Success();
}

/// x, a threshold for each matrix -> how many elements of each column are beyond it.
ffi::Error outliers(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> threshold,
                    ffi::Result<ffi::Buffer<ffi::S32>> result) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value());
  const Matrices m(x);
  const OutliersProblem p{x.untyped_data(), *type, m.batch, m.rows, m.columns, threshold.typed_data(), nullptr};
  JLP_REQUIRE(static_cast<int64_t>(threshold.element_count()) == m.batch);
  JLP_REQUIRE(static_cast<int64_t>(result->element_count()) == m.batch * m.columns);
  run_parts(pool, p, &OutliersProblem::result, m.columns, result->typed_data());
  return ffi::Error::Success();
}

/// x, a unit for each matrix, data, scale and, for two-level formats, the amax -> the sums of each matrix.
ffi::Error sums(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> unit, ffi::AnyBuffer data,
                ffi::AnyBuffer scale, ffi::RemainingArgs args, ffi::Result<ffi::Buffer<ffi::F32>> result,
                ffi::Dictionary format_attributes, bool columnwise) {
  const auto type = element_type(x.element_type());
  const auto format = decode_format(format_attributes);
  JLP_REQUIRE(type.has_value() && format.has_value() && format->code != CodeType::kInt4);
  const bool two_level = format->scaling == Scaling::kTwoLevel;
  JLP_REQUIRE(args.size() == static_cast<size_t>(two_level));
  const Matrices m(x);
  SumsProblem p{};
  p.x = x.untyped_data(), p.type = *type, p.batch = m.batch, p.rows = m.rows, p.columns = m.columns;
  p.columnwise = columnwise, p.format = *format, p.data = bytes(data), p.scale = bytes(scale);
  p.unit = unit.typed_data();
  JLP_REQUIRE(static_cast<int64_t>(unit.element_count()) == m.batch);
  JLP_REQUIRE(static_cast<int64_t>(data.size_bytes()) == m.batch * p.lines() * format->row_bytes(p.length()));
  JLP_REQUIRE(static_cast<int64_t>(scale.size_bytes()) ==
              m.batch * format->scales(p.lines(), p.length()) * format->scale_bytes());
  JLP_REQUIRE(static_cast<int64_t>(result->element_count()) == m.batch * kSums);
  if (two_level) {
    const auto amax = args.get<ffi::Buffer<ffi::F32>>(0);
    if (amax.has_error()) return amax.error();
    JLP_REQUIRE(static_cast<int64_t>(amax->element_count()) == m.batch);
    p.amax = amax->typed_data();
  }
  run_parts(pool, p, &SumsProblem::result, kSums, result->typed_data());
  return ffi::Error::Success();
}

/// The vectors of statistics of tensors, of formats with these scalings by turns.
ffi::Error statistics(ffi::Buffer<ffi::F32> sums, ffi::Buffer<ffi::F32> amax, ffi::Buffer<ffi::F32> rms,
                      ffi::Buffer<ffi::F32> outliers, ffi::Buffer<ffi::F32> channels,
                      ffi::Result<ffi::Buffer<ffi::F32>> result, ffi::Span<const int32_t> scalings) {
  const int64_t count = static_cast<int64_t>(amax.element_count()), formats = static_cast<int64_t>(scalings.size());
  const auto fits = [&](const auto& buffer, int64_t each) {
    return static_cast<int64_t>(buffer.element_count()) == count * each;
  };
  JLP_REQUIRE(formats > 0 && count % formats == 0);
  JLP_REQUIRE(fits(sums, kSums) && fits(rms, 1) && fits(outliers, 1) && fits(channels, 2 * kChannels));
  JLP_REQUIRE(fits(*result, kVector));
  for (int64_t i = 0; i < count; ++i) {
    const KnownOfTensor known{amax.typed_data()[i], rms.typed_data()[i], outliers.typed_data()[i],
                              channels.typed_data() + 2 * kChannels * i};
    finish(sums.typed_data() + kSums * i, known, static_cast<Scaling>(scalings[i % formats]),
           result->typed_data() + kVector * i);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxlowprec_statistics, statistics,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<ffi::Span<const int32_t>>("scalings"));
JLP_DEFINE_CPU_HANDLER(moments, moments, .Arg<ffi::AnyBuffer>().Ret<ffi::Buffer<ffi::F32>>());
JLP_DEFINE_CPU_HANDLER(outliers, outliers, .Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::S32>>());
JLP_DEFINE_CPU_HANDLER(sums, sums,
                       .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::Buffer<ffi::F32>>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::Buffer<ffi::F32>>()
                           .Attr<ffi::Dictionary>("format")
                           .Attr<bool>("columnwise"));

}  // namespace jaxlowprec
