// GEMMs of rows in groups, each with a weight of its own: see groups.h.
#include "engine.h"
#include "groups.h"
#include "handlers.h"
#include "matmul_operands.h"

namespace jaxlowprec {
namespace {

int64_t element_bytes_of(const ffi::AnyBuffer& buffer) { return element_bytes(*element_type(buffer.element_type())); }

/// Rows of the result that are in no group.
void clear_rows(const Groups& groups, const Matrices& y, ffi::AnyBuffer& result) {
  const int64_t row_bytes = y.columns * element_bytes_of(result);
  for (int64_t b = 0; b < groups.batch(); ++b)
    std::memset(static_cast<uint8_t*>(result.untyped_data()) + (b * y.rows + groups.end(b)) * row_bytes, 0,
                (y.rows - groups.end(b)) * row_bytes);
}

/// Points a problem at a group's rows of the result and at the bias of its weight.
void place(MatmulResult& p, const Group& group, const Groups& groups, const Matrices& y, ffi::AnyBuffer& result,
           const float* bias, int64_t threads) {
  p.batch = 1, p.rows = group.rows, p.columns = y.columns;
  p.result = static_cast<uint8_t*>(result.untyped_data()) +
             (group.batch * y.rows + group.row) * y.columns * element_bytes_of(result);
  p.type = *element_type(result.element_type());
  p.bias = bias ? bias + group.index * y.columns : nullptr;
  p.threads = groups.threads(group, threads);
}

/// a [..., rows, K] in groups and b [..., groups, N, K], each as data and scale, sizes [..., groups]; then, where given, the
/// amaxes of two-level formats [..., groups] and the bias [..., groups, N] -> [..., rows, N].
ffi::Error grouped_matmul(ffi::ThreadPool pool, ffi::AnyBuffer a_data, ffi::AnyBuffer a_scale, ffi::AnyBuffer b_data,
                          ffi::AnyBuffer b_scale, ffi::AnyBuffer sizes, ffi::RemainingArgs args,
                          ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary a_attributes, ffi::Dictionary b_attributes,
                          bool bias) {
  const auto type = element_type(result->element_type());
  JLP_REQUIRE(type.has_value() && Groups::fits(sizes));
  const Groups groups(sizes, Matrices(a_data).rows);
  const int64_t count = static_cast<int64_t>(groups.all().size());
  const auto bound_a = bind_operand(a_data, a_scale, a_attributes, false, std::nullopt, count);
  const auto bound_b = bind_operand(b_data, b_scale, b_attributes);
  JLP_REQUIRE(bound_a.has_value() && bound_b.has_value() && !bound_a->format.tiles);
  const Matrices &a = bound_a->matrices, &b = bound_b->matrices, y(*result);
  JLP_REQUIRE(groups.batch() == a.batch && y.batch == a.batch && b.batch == count);
  JLP_REQUIRE(y.rows == a.rows && y.columns == b.rows);
  const bool per_group = bound_a->format.scaling == Scaling::kTensor;
  const bool two_level = bound_a->format.scaling == Scaling::kTwoLevel;
  const int64_t a_row = bound_a->scale_stride();
  const int64_t b_matrix = bound_b->format.scales(b.rows, bound_b->columns) * bound_b->format.scale_bytes();
  JLP_REQUIRE(args.size() == 2 * two_level + static_cast<size_t>(bias));
  const float* a_amax = two_level ? floats(args, 0, count) : nullptr;
  const float* b_amax = two_level ? floats(args, 1, count) : nullptr;
  const float* bias_values = bias ? floats(args, 2 * two_level, count * y.columns) : nullptr;
  JLP_REQUIRE((!two_level || (a_amax && b_amax)) && (!bias || bias_values || count * y.columns == 0));

  written(pool, *result);
  clear_rows(groups, y, *result);
  std::vector<MatmulProblem> problems;
  for (const Group& group : groups.all()) {
    if (group.rows * y.columns == 0) continue;
    MatmulProblem p{};
    place(p, group, groups, y, *result, bias_values, pool.num_threads());
    const int64_t row = group.batch * a.rows + group.row;
    p.a = *bound_a, p.b = *bound_b;
    p.a.data += row * a.columns, p.a.scale += per_group ? group.index * 4 : row * a_row;
    p.b.data += group.index * b.rows * b.columns, p.b.scale += group.index * b_matrix;
    if (two_level) p.a.amax = a_amax + group.index, p.b.amax = b_amax + group.index;
    JLP_REQUIRE(matmul_supports(p));
    problems.push_back(p);
  }
  run_all(pool, problems);
  return ffi::Error::Success();
}

/// a [..., M, rows] and b [..., N, rows], quantised columnwise in groups, sizes [..., groups]; then, where given, the amaxes
/// of two-level formats [..., groups] and what to accumulate onto [..., groups, M, N], of the result's type and maybe its
/// memory -> [..., groups, M, N], contracted over the rows of each group.
ffi::Error grouped_wgrad(ffi::ThreadPool pool, ffi::AnyBuffer a_data, ffi::AnyBuffer a_scale, ffi::AnyBuffer b_data,
                         ffi::AnyBuffer b_scale, ffi::AnyBuffer sizes, ffi::RemainingArgs args,
                         ffi::Result<ffi::AnyBuffer> result, ffi::Dictionary a_attributes, ffi::Dictionary b_attributes,
                         int64_t rows, bool accumulate) {
  const auto type = element_type(result->element_type());
  auto a_format = decode_format(a_attributes), b_format = decode_format(b_attributes);
  JLP_REQUIRE(type.has_value() && a_format.has_value() && b_format.has_value() && Groups::fits(sizes));
  JLP_REQUIRE(!a_format->tiles && !b_format->tiles && a_format->block == b_format->block && rows >= 0);
  JLP_REQUIRE(take_scale_type(*a_format, a_scale) && take_scale_type(*b_format, b_scale));
  const Matrices a(a_data), b(b_data), y(*result);
  const Groups groups(sizes, rows);
  const int64_t count = static_cast<int64_t>(groups.all().size()), block = a_format->block;
  JLP_REQUIRE(groups.batch() == a.batch && b.batch == a.batch && y.batch == count);
  JLP_REQUIRE(y.rows == a.rows && y.columns == b.rows);
  const int64_t all_slots = slots(rows, groups.count(), block);
  const bool per_group = a_format->scaling == Scaling::kTensor, two_level = a_format->scaling == Scaling::kTwoLevel;
  const bool by_lines = a_format->scaling == Scaling::kRows;  // each group has its own scales of lines
  const auto fits = [&](const Format& format, const Matrices& data, const ffi::AnyBuffer& scale) {
    const int64_t each = by_lines ? count * data.rows : data.batch * data.rows * all_slots;
    const int64_t scales = per_group ? count * 4 : each * format.scale_bytes();
    return data.columns == (format.packed() ? all_slots * block / 2 : rows) &&
           static_cast<int64_t>(scale.size_bytes()) == scales;
  };
  JLP_REQUIRE(fits(*a_format, a, a_scale) && fits(*b_format, b, b_scale));
  JLP_REQUIRE(args.size() == 2u * two_level + accumulate);
  const float* a_amax = two_level ? floats(args, 0, count) : nullptr;
  const float* b_amax = two_level ? floats(args, 1, count) : nullptr;
  JLP_REQUIRE(!two_level || (a_amax && b_amax));
  ElementType total_type{};
  const auto* total =
      accumulate ? static_cast<const uint8_t*>(like_result(args, 2 * two_level, *result, total_type)) : nullptr;
  JLP_REQUIRE(!accumulate || ((total || result->element_count() == 0) && total_type == *type));

  const auto operand = [&](const Group& group, const Format& format, const Matrices& data, const ffi::AnyBuffer& codes,
                           const ffi::AnyBuffer& scale, const float* amax) {
    const int64_t line = group.batch * data.rows, slot = group.slot(block);
    const int64_t stride = (by_lines ? 1 : all_slots) * format.scale_bytes();
    const int64_t first_scale = per_group  ? group.index * 4
                                : by_lines ? group.index * data.rows * stride
                                           : line * stride + slot * format.scale_bytes();
    MatmulOperand o{format, bytes(codes) + line * data.columns + (format.packed() ? slot * block / 2 : group.row),
                    bytes(scale) + first_scale, amax ? amax + group.index : nullptr,
                    format.packed() ? format.blocks(group.rows) * block : group.rows};
    o.given_data_stride = data.columns, o.given_scale_stride = per_group ? 0 : stride;
    return o;
  };
  written(pool, *result);
  const int64_t matrix_bytes = y.rows * y.columns * element_bytes(*type);
  std::vector<MatmulProblem> problems;
  for (const Group& group : groups.all()) {
    uint8_t* to = static_cast<uint8_t*>(result->untyped_data()) + group.index * matrix_bytes;
    const uint8_t* before = total ? total + group.index * matrix_bytes : nullptr;
    if (group.rows == 0) {
      if (!before) std::memset(to, 0, matrix_bytes);
      if (before && before != to) std::memcpy(to, before, matrix_bytes);
    }
    if (group.rows * matrix_bytes == 0) continue;
    MatmulProblem p{};
    p.batch = 1, p.rows = y.rows, p.columns = y.columns, p.result = to, p.type = *type;
    p.accumulate = before, p.accumulate_type = total_type;
    p.threads = groups.threads(group, pool.num_threads());
    p.a = operand(group, *a_format, a, a_data, a_scale, a_amax);
    p.b = operand(group, *b_format, b, b_data, b_scale, b_amax);
    JLP_REQUIRE(matmul_supports(p));
    problems.push_back(p);
  }
  run_all(pool, problems);
  return ffi::Error::Success();
}

/// x [..., rows, K] in groups, weights [..., groups, N, K] as data and scale, sizes [..., groups]; then, where given, the
/// weights' amaxes or zero points and the bias [..., groups, N] -> [..., rows, N].
ffi::Error grouped_weight_only(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer data, ffi::AnyBuffer scale,
                               ffi::AnyBuffer sizes, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> result,
                               ffi::Dictionary attributes, bool asymmetric, bool bias) {
  const auto type = element_type(result->element_type()), x_type = element_type(x.element_type());
  const Matrices rows(x), y(*result);
  const auto weight = bind_operand(data, scale, attributes, false, rows.columns);
  JLP_REQUIRE(type.has_value() && x_type.has_value() && weight.has_value() && Groups::fits(sizes));
  const Matrices& w = weight->matrices;
  const Format& format = weight->format;
  const Groups groups(sizes, rows.rows);
  const int64_t count = static_cast<int64_t>(groups.all().size()), depth = rows.columns;
  JLP_REQUIRE(groups.batch() == rows.batch && y.batch == rows.batch && w.batch == count);
  JLP_REQUIRE(y.rows == rows.rows && y.columns == w.rows);
  const bool two_level = format.scaling == Scaling::kTwoLevel;
  const int64_t scales = format.scales(w.rows, depth);
  JLP_REQUIRE(!asymmetric || format.code == CodeType::kInt4);
  JLP_REQUIRE(args.size() == static_cast<size_t>(two_level + asymmetric + bias));
  const float* amax = two_level ? floats(args, 0, count) : nullptr;
  const uint8_t* zeros = asymmetric ? zero_points(args, 0, count * scales) : nullptr;
  JLP_REQUIRE(!asymmetric || zeros || count * scales == 0);
  const float* bias_values = bias ? floats(args, two_level + asymmetric, count * y.columns) : nullptr;
  JLP_REQUIRE((!two_level || amax) && (!bias || bias_values || count * y.columns == 0));

  written(pool, *result);
  clear_rows(groups, y, *result);
  std::vector<WeightOnlyProblem> problems;
  for (const Group& group : groups.all()) {
    if (group.rows * y.columns == 0) continue;
    WeightOnlyProblem p{};
    place(p, group, groups, y, *result, bias_values, pool.num_threads());
    p.x = static_cast<const uint8_t*>(x.untyped_data()) +
          (group.batch * rows.rows + group.row) * depth * element_bytes(*x_type);
    p.x_type = *x_type, p.depth = depth;
    p.weight = *weight;
    p.weight.data += group.index * w.rows * w.columns, p.weight.scale += group.index * scales * format.scale_bytes();
    if (amax) p.weight.amax = amax + group.index;
    p.zero_point = zeros ? zeros + group.index * scales : nullptr;
    problems.push_back(p);
  }
  run_all(pool, problems);
  return ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_CPU_HANDLER(grouped_matmul, grouped_matmul,
                       .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Dictionary>("a_format")
                           .Attr<ffi::Dictionary>("b_format")
                           .Attr<bool>("bias"));

JLP_DEFINE_CPU_HANDLER(grouped_wgrad, grouped_wgrad,
                       .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Dictionary>("a_format")
                           .Attr<ffi::Dictionary>("b_format")
                           .Attr<int64_t>("rows")
                           .Attr<bool>("accumulate"));

JLP_DEFINE_CPU_HANDLER(grouped_weight_only, grouped_weight_only,
                       .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<ffi::Dictionary>("format")
                           .Attr<bool>("asymmetric")
                           .Attr<bool>("bias"));

}  // namespace jaxlowprec
