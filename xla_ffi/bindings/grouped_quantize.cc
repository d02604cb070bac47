// Amax and quantisation of rows in groups, each group a tensor of its own: see groups.h.
#include "../numerics/nvfp4.h"
#include "engine.h"
#include "format.h"
#include "groups.h"
#include "handlers.h"

namespace jaxlowprec {
namespace {

/// x [..., rows, columns], sizes [..., groups] -> [amax], [amax after the columnwise rotation] [..., groups].
ffi::Error grouped_amax(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer sizes, ffi::RemainingRets results, bool plain,
                        bool rotated, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value() && Groups::fits(sizes));
  JLP_REQUIRE(results.size() == static_cast<size_t>(plain + rotated));
  const Matrices m(x);
  const Groups groups(sizes, m.rows);
  JLP_REQUIRE(groups.batch() == m.batch || groups.all().empty());
  uint32_t *plain_bits = nullptr, *rotated_bits = nullptr;
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    JLP_REQUIRE((*result)->element_type() == ffi::DataType::F32);
    JLP_REQUIRE((*result)->element_count() == groups.all().size());
    uint32_t* bits = static_cast<uint32_t*>((*result)->untyped_data());
    clear(pool, bits, static_cast<int64_t>(groups.all().size()));
    (plain && i == 0 ? plain_bits : rotated_bits) = bits;
  }
  std::vector<AmaxProblem> problems;
  for (const Group& group : groups.all()) {
    if (group.rows * m.columns == 0) continue;
    const auto* first = static_cast<const uint8_t*>(x.untyped_data()) +
                        (group.batch * m.rows + group.row) * m.columns * element_bytes(*type);
    problems.push_back({first, *type, 1, group.rows, m.columns, plain_bits ? plain_bits + group.index : nullptr,
                        rotated_bits ? rotated_bits + group.index : nullptr, static_cast<uint32_t>(sign_mask)});
  }
  run_all(pool, problems);
  return ffi::Error::Success();
}

/// x [..., rows, columns], sizes [..., groups] -> [amaxes of rows [..., rows]], amaxes of each group's columns [..., groups,
/// columns]; 0 in rows that are in no group, and in groups without rows.
ffi::Error grouped_line_amaxes(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer sizes, ffi::RemainingRets results,
                               bool rows) {
  const auto type = element_type(x.element_type());
  JLP_REQUIRE(type.has_value() && Groups::fits(sizes) && results.size() == static_cast<size_t>(rows) + 1);
  const Matrices m(x);
  const Groups groups(sizes, m.rows);
  JLP_REQUIRE(groups.batch() == m.batch || groups.all().empty());
  uint32_t *of_rows = nullptr, *of_columns = nullptr;
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (result.has_error()) return result.error();
    const bool is_rows = rows && i == 0;
    const int64_t count = is_rows ? m.batch * m.rows : static_cast<int64_t>(groups.all().size()) * m.columns;
    JLP_REQUIRE(static_cast<int64_t>((*result)->element_count()) == count);
    uint32_t* bits = reinterpret_cast<uint32_t*>((*result)->typed_data());
    clear(pool, bits, count);
    (is_rows ? of_rows : of_columns) = bits;
  }
  std::vector<LineAmaxesProblem> problems;
  for (const Group& group : groups.all()) {
    if (group.rows * m.columns == 0) continue;
    const int64_t row = group.batch * m.rows + group.row;
    const auto* first = static_cast<const uint8_t*>(x.untyped_data()) + row * m.columns * element_bytes(*type);
    problems.push_back(
        {first, *type, 1, group.rows, m.columns, of_rows ? of_rows + row : nullptr, of_columns + group.index * m.columns});
  }
  run_all(pool, problems);
  return ffi::Error::Success();
}

/// A direction's results for all groups: where a group's lie, and zeros where none does.
struct GroupedResult {
  const Format& format;
  bool columnwise;
  int64_t rows, columns, groups;  // of a matrix
  uint8_t *data, *scale;

  bool per_group() const { return format.scaling == Scaling::kTensor; }
  /// Whether each column has a scale in each group: those of a group lie together.
  bool per_column() const { return format.scaling == Scaling::kRows && columnwise; }
  int64_t lines() const { return columnwise ? columns : rows; }
  int64_t slots() const { return jaxlowprec::slots(rows, groups, format.block); }
  int64_t slot_bytes() const { return format.block / 2; }  // of packed codes
  int64_t line_bytes() const {
    if (!columnwise) return format.row_bytes(columns);
    return format.packed() ? slots() * slot_bytes() : rows;
  }
  int64_t scale_bytes() const {  // of a line
    return (per_column() ? groups : columnwise ? slots() : format.scale_columns(columns)) * format.scale_bytes();
  }
  int64_t scales(int64_t batch) const { return per_group() ? batch * groups * 4 : batch * lines() * scale_bytes(); }

  void point(QuantizeDirection& direction, const Group& group) const {
    const int64_t line = group.batch * lines() + (columnwise ? 0 : group.row);
    const int64_t slot = group.slot(format.block);
    direction.data = data + line * line_bytes();
    direction.scale = per_group() ? scale + group.index * 4 : scale + line * scale_bytes();
    if (!columnwise) return;
    direction.data += format.packed() ? slot * slot_bytes() : group.row;
    direction.data_stride = line_bytes();
    if (per_column()) direction.scale = scale + group.index * columns * format.scale_bytes();
    if (per_group() || per_column()) return;
    direction.scale += slot * format.scale_bytes();
    direction.scale_stride = scale_bytes();
  }

  void clear_rest(ffi::ThreadPool& pool, const Groups& all) const {
    const float one = 1.0f;
    for (const Group& group : all.all())
      if (per_group() && group.rows == 0) std::memcpy(scale + group.index * 4, &one, 4);
    for (int64_t b = 0; b < all.batch(); ++b) {
      if (columnwise) {
        clear_slots(pool, all, b);
      } else {
        const int64_t first = b * rows + all.end(b), count = rows - all.end(b);
        std::memset(data + first * line_bytes(), 0, count * line_bytes());
        if (!per_group()) std::memset(scale + first * scale_bytes(), 0, count * scale_bytes());
      }
    }
  }

 private:
  struct Gap {
    int64_t first, count;
  };

  void clear_slots(ffi::ThreadPool& pool, const Groups& all, int64_t batch) const {
    std::vector<Gap> gaps;
    int64_t next = 0;
    const auto until = [&](int64_t slot) {
      if (slot > next) gaps.push_back({next, slot - next});
    };
    for (const Group& group : all.all()) {
      if (group.batch != batch || group.rows == 0) continue;
      until(group.slot(format.block));
      next = group.slot(format.block) + format.blocks(group.rows);
    }
    until(slots());
    constexpr int64_t kLines = 64;
    const int64_t size = format.scale_bytes();
    parallel_for(pool, (lines() + kLines - 1) / kLines, lines() * static_cast<int64_t>(gaps.size()) / 4096,
                 [&](int64_t chunk) {
                   for (int64_t i = chunk * kLines; i < std::min((chunk + 1) * kLines, lines()); ++i) {
                     const int64_t line = batch * lines() + i;
                     for (const Gap& gap : gaps) {
                       if (format.packed())
                         std::memset(data + line * line_bytes() + gap.first * slot_bytes(), 0, gap.count * slot_bytes());
                       if (!per_group() && !per_column())
                         std::memset(scale + line * scale_bytes() + gap.first * size, 0, gap.count * size);
                     }
                     if (!format.packed())
                       std::memset(data + line * line_bytes() + all.end(batch), 0, rows - all.end(batch));
                   }
                 });
  }
};

/// x [..., rows, columns], sizes [..., groups], for formats with a tensor scale an amax [..., groups] a direction, or the
/// encode scale (only kTensor), for scales of lines the amaxes of rows [..., rows], which may be left out if only rows are
/// quantised, and those of each group's columns [..., groups, columns], and for stochastic rounding keys [..., groups, 2]
/// and, a direction, the indices of its lines and of their sixteens, those along the rows counted from each group's first ->
/// data and scale per direction.
ffi::Error grouped_quantize(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer sizes, ffi::RemainingArgs args,
                            ffi::RemainingRets results, ffi::Dictionary format_attributes, bool rowwise, bool columnwise,
                            bool rotate_columns, bool stochastic, bool encode_scale_given, bool eden, int32_t sign_mask) {
  const auto type = element_type(x.element_type());
  auto format = decode_format(format_attributes);
  JLP_REQUIRE(type.has_value() && format.has_value() && format->code != CodeType::kInt4);
  JLP_REQUIRE(!format->tiles && Groups::fits(sizes));
  const size_t directions = rowwise + columnwise, random = stochastic ? 1 + 2 * directions : 0;
  const bool by_lines = format->scaling == Scaling::kRows;
  const bool has_tensor = format->scaling == Scaling::kTwoLevel || format->scaling == Scaling::kTensor ||
                          (by_lines && (columnwise || args.size() > random));
  const size_t tensors = has_tensor ? directions : 0;
  JLP_REQUIRE(!rotate_columns || format->scaling == Scaling::kTwoLevel);
  JLP_REQUIRE(!encode_scale_given || format->scaling == Scaling::kTensor);
  JLP_REQUIRE(!eden || (stochastic && format->scaling == Scaling::kTwoLevel));
  JLP_REQUIRE(args.size() == tensors + random);
  JLP_REQUIRE(results.size() == 2 * directions);
  const Matrices m(x);
  const Groups groups(sizes, m.rows);
  JLP_REQUIRE(groups.batch() == m.batch || groups.all().empty());

  QuantizeProblem whole{};
  whole.type = *type, whole.batch = 1, whole.columns = m.columns;
  whole.rotate_columns = rotate_columns, whole.sign_mask = static_cast<uint32_t>(sign_mask);
  whole.encode_scale_given = encode_scale_given, whole.eden = eden;
  std::vector<GroupedResult> wanted;
  for (size_t i = 0; i < directions; ++i) {
    const bool is_row = rowwise && i == 0;
    auto data = results.get<ffi::AnyBuffer>(2 * i), scale = results.get<ffi::AnyBuffer>(2 * i + 1);
    if (data.has_error()) return data.error();
    if (scale.has_error()) return scale.error();
    JLP_REQUIRE(take_scale_type(*format, **scale));
    wanted.push_back({*format, !is_row, m.rows, m.columns, groups.count(), static_cast<uint8_t*>(written(pool, **data)),
                      static_cast<uint8_t*>(written(pool, **scale))});
    const GroupedResult& result = wanted.back();
    JLP_REQUIRE(static_cast<int64_t>((*data)->size_bytes()) == m.batch * result.lines() * result.line_bytes());
    JLP_REQUIRE(static_cast<int64_t>((*scale)->size_bytes()) == result.scales(m.batch));
    QuantizeDirection& direction = is_row ? whole.rowwise : whole.columnwise;
    if (has_tensor) {
      const auto tensor = args.get<ffi::Buffer<ffi::F32>>(i);
      if (tensor.has_error()) return tensor.error();
      const int64_t of_groups = static_cast<int64_t>(groups.all().size());
      const int64_t each = !by_lines ? of_groups : is_row ? m.batch * m.rows : of_groups * m.columns;
      JLP_REQUIRE(static_cast<int64_t>(tensor->element_count()) == each);
      direction.tensor = tensor->typed_data();
    }
    if (!stochastic) continue;
    const auto key = args.get<ffi::Buffer<ffi::U32>>(tensors);
    const auto line_ids = args.get<ffi::Buffer<ffi::U32>>(tensors + 1 + 2 * i);
    const auto sixteen_ids = args.get<ffi::Buffer<ffi::U32>>(tensors + 2 + 2 * i);
    if (key.has_error()) return key.error();
    if (line_ids.has_error()) return line_ids.error();
    if (sixteen_ids.has_error()) return sixteen_ids.error();
    JLP_REQUIRE(key->element_count() == 2 * groups.all().size());
    JLP_REQUIRE(static_cast<int64_t>(line_ids->element_count()) == result.lines());
    JLP_REQUIRE(static_cast<int64_t>(sixteen_ids->element_count()) == ((is_row ? m.columns : m.rows) + 15) / 16);
    direction.random = {key->typed_data(), line_ids->typed_data(), sixteen_ids->typed_data(),
                        static_cast<uint32_t>(!is_row) + (eden ? kEdenStream : 0)};
  }
  whole.format = *format;
  for (const GroupedResult& result : wanted) result.clear_rest(pool, groups);

  std::vector<QuantizeProblem> problems;
  for (const Group& group : groups.all()) {
    if (group.rows * m.columns == 0) continue;
    QuantizeProblem p = whole;
    p.rows = group.rows;
    p.x = static_cast<const uint8_t*>(x.untyped_data()) +
          (group.batch * m.rows + group.row) * m.columns * element_bytes(*type);
    for (const GroupedResult& result : wanted) {
      QuantizeDirection& direction = result.columnwise ? p.columnwise : p.rowwise;
      result.point(direction, group);
      if (has_tensor)
        direction.tensor += !by_lines           ? group.index
                            : result.columnwise ? group.index * m.columns
                                                : group.batch * m.rows + group.row;
      if (stochastic) direction.random.key += 2 * group.index;
    }
    problems.push_back(p);
  }
  run_all(pool, problems);
  return ffi::Error::Success();
}

}  // namespace

JLP_DEFINE_CPU_HANDLER(
    grouped_amax, grouped_amax,
    .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().RemainingRets().Attr<bool>("plain").Attr<bool>("rotated").Attr<int32_t>(
        "sign_mask"));

JLP_DEFINE_CPU_HANDLER(grouped_line_amaxes, grouped_line_amaxes,
                       .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().RemainingRets().Attr<bool>("rows"));

JLP_DEFINE_CPU_HANDLER(grouped_quantize, grouped_quantize,
                       .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<ffi::Dictionary>("format")
                           .Attr<bool>("rowwise")
                           .Attr<bool>("columnwise")
                           .Attr<bool>("rotate_columns")
                           .Attr<bool>("stochastic")
                           .Attr<bool>("encode_scale_given")
                           .Attr<bool>("eden")
                           .Attr<int32_t>("sign_mask"));

}  // namespace jaxlowprec
