// Lines with gaps between them, as a group's lines have in an array of several groups: the bytes are those of adjoining
// lines, and the gaps stay as they were.
// And many problems as one list of chunks.
#include <atomic>
#include <thread>

#include "kernel_runs.h"
#include "quantize_cases.h"

namespace jaxlowprec {
namespace {

constexpr int64_t kGap = 24;  // bytes between lines; no multiple of a cache line

/// `lines` of `bytes` each, `stride` apart, in memory that ends with the last of them.
int64_t spread_size(int64_t lines, int64_t bytes, int64_t stride) { return (lines - 1) * stride + bytes; }

Buffer spread(const uint8_t* adjoining, int64_t lines, int64_t bytes, int64_t stride) {
  Buffer out(spread_size(lines, bytes, stride));
  for (int64_t i = 0; i < lines; ++i) memcpy(out.as() + i * stride, adjoining + i * bytes, bytes);
  return out;
}

TEST(quantize_columns_with_lines_apart_has_the_same_bytes) {
  std::mt19937 random(3);
  size_t turn = 0;
  const auto check = [&](const NamedFormat& format) {
    if (format.format.tiles) return;
    for (const Shape shape : {Shape{16, 16}, Shape{33, 70}, Shape{150, 131}})
      for (const Mode& mode : kModes) {
        if (!mode.columnwise || (mode.rotate && format.format.scaling != Scaling::kTwoLevel)) continue;
        const ElementType type = kTypes[turn++ % 3];
        const Numbers* const numbers[2] = {&kNumbers[turn % std::size(kNumbers)], &kNumbers[0]};
        const check::Given given(name(shape) + " " + name(type) + ", " + format.name + " " + mode.name + ", " +
                                 numbers[0]->name);
        const int64_t size = shape.rows * shape.columns;
        const Buffer x(2 * size * reference::element_size(type));
        for (int64_t b = 0; b < 2; ++b) fill_elements(x.as(), type, b * size, size, numbers[b]->data, random);
        QuantizeCase c(x, shape, type, format, mode, turn % 2 == 0, numbers, random);
        QuantizeProblem p = c.problem;
        p.batch = 1;
        const Format& f = format.format;
        const bool per_tensor = f.scaling == Scaling::kTensor;
        const int64_t bytes = f.row_bytes(shape.rows), scales = f.scale_columns(shape.rows) * f.scale_bytes();
        const int64_t scale_lines = per_tensor ? 1 : shape.columns;
        for_all_runs([&](const Kernels& k, bool scrambled) {
          const Buffer row_data(c.rowwise.data.size()), row_scale(c.rowwise.scale.size());
          const Buffer data(shape.columns * bytes), scale(scale_lines * scales);
          const Buffer apart(spread_size(shape.columns, bytes, bytes + kGap));
          const Buffer scale_apart(spread_size(scale_lines, scales, scales + kGap));
          if (mode.rowwise) p.rowwise.data = row_data.as(), p.rowwise.scale = row_scale.as();
          p.columnwise.data = data.as(), p.columnwise.scale = scale.as();
          p.columnwise.data_stride = p.columnwise.scale_stride = 0;
          run_chunks(k, p, scrambled);
          p.columnwise.data = apart.as(), p.columnwise.scale = scale_apart.as();
          p.columnwise.data_stride = bytes + kGap, p.columnwise.scale_stride = per_tensor ? 0 : scales + kGap;
          run_chunks(k, p, scrambled);
          // The gaps keep the pattern that fresh memory has.
          CHECK_EQ(first_difference(apart, spread(data.as(), shape.columns, bytes, bytes + kGap)), -1);
          CHECK_EQ(first_difference(scale_apart, spread(scale.as(), scale_lines, scales, scales + kGap)), -1);
        });
      }
  };
  for (const NamedFormat& format : kNvfp4) check(format);
  for (const NamedFormat& format : kOtherFormats) check(format);
}

TEST(matmul_of_rows_apart_has_the_same_bytes) {
  std::mt19937 random(4);
  for (const NamedFormat* named : {&kNvfp4[0], &kOtherFormats[0], &kOtherFormats[5], &kOtherFormats[10], &kOtherFormats[15]})
    for (const int64_t depth : {16, 70, 300})
      for (const int64_t rows : {1, 5, 67}) {
        const check::Given given(std::string(named->name) + ", " + std::to_string(rows) + " rows, depth " +
                                 std::to_string(depth));
        const Format& f = named->format;
        const int64_t columns = 83, stored = f.packed() ? f.blocks(depth) * f.block : depth;
        const int64_t bytes = f.row_bytes(stored), scales = f.scale_columns(stored) * f.scale_bytes();
        const bool per_tensor = f.scaling == Scaling::kTensor;
        const float amax = 3;
        std::vector<Buffer> buffers;
        const auto operand = [&](int64_t lines, bool apart, const Buffer& data, const Buffer& scale) {
          MatmulOperand o{f, data.as(), scale.as(), f.scaling == Scaling::kTwoLevel ? &amax : nullptr, stored};
          if (!apart) return o;
          buffers.push_back(spread(data.as(), lines, bytes, bytes + kGap));
          o.data = buffers.back().as(), o.given_data_stride = bytes + kGap;
          if (per_tensor) return o;
          buffers.push_back(spread(scale.as(), lines, scales, scales + kGap));
          o.scale = buffers.back().as(), o.given_scale_stride = scales + kGap;
          return o;
        };
        const auto fill = [&](const Buffer& data, const Buffer& scale) {
          for (int64_t i = 0; i < data.size(); ++i) data.as()[i] = static_cast<uint8_t>(random() % 0x70 | (random() & 0x80));
          for (int64_t i = 0; i < scale.size(); ++i)
            scale.as()[i] = static_cast<uint8_t>(f.scale_bytes() == 1 ? 100 + random() % 20 : i % 4 == 3 ? 0x3E : random());
        };
        const Buffer a_data(rows * bytes), a_scale((per_tensor ? 1 : rows) * scales);
        const Buffer b_data(columns * bytes), b_scale((per_tensor ? 1 : columns) * scales);
        fill(a_data, a_scale), fill(b_data, b_scale);
        for_all_runs([&](const Kernels& k, bool scrambled) {
          const Buffer adjoining(rows * columns * 4), apart(rows * columns * 4);
          for (const bool is_apart : {false, true}) {
            buffers.clear(), buffers.reserve(4);
            MatmulProblem p{};
            p.batch = 1, p.rows = rows, p.columns = columns, p.type = ElementType::kF32, p.threads = scrambled ? 16 : 0;
            p.a = operand(rows, is_apart, a_data, a_scale), p.b = operand(columns, is_apart, b_data, b_scale);
            p.result = (is_apart ? apart : adjoining).as();
            run_chunks(k, p, scrambled);
          }
          CHECK_EQ(first_difference(apart, adjoining), -1);
        });
      }
}

/// A stand-in for XLA's thread pool: tasks may start late, or after all work is done.
class Pool {
 public:
  ~Pool() {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return 3; }
  template <class Task>
  void Schedule(Task task) {
    threads_.emplace_back([task] { task(); });
  }

 private:
  std::vector<std::thread> threads_;
};

TEST(many_problems_at_once_are_all_solved) {
  std::mt19937 random(5);
  const int64_t columns = 300;
  std::vector<int64_t> sizes = {0, 1, 700, 0, 0, 33, 128, 1, 0};
  int64_t rows = 0;
  for (const int64_t size : sizes) rows += size;
  const Buffer x(rows * columns * 2);
  fill_elements(x.as(), ElementType::kBF16, 0, rows * columns, Data::kNormal, random);
  std::vector<uint32_t> found(2 * sizes.size()), expected(2 * sizes.size());
  std::vector<AmaxProblem> problems;
  int64_t row = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const AmaxProblem p{x.as<uint16_t>() + row * columns,
                        ElementType::kBF16,
                        1,
                        sizes[i],
                        columns,
                        &found[2 * i],
                        &found[2 * i + 1],
                        kDefaultSignMask};
    row += sizes[i];
    problems.push_back(p);
    if (sizes[i] == 0) continue;
    expected[2 * i] = reference::amax_bits(reference::lines_of(p, 0, false, false));
    expected[2 * i + 1] = reference::amax_bits(reference::lines_of(p, 0, true, true));
  }
  {
    Pool pool;
    run_all(pool, problems);
  }
  CHECK(found == expected);
}

}  // namespace
}  // namespace jaxlowprec
