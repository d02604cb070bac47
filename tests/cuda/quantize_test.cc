// The quantisation kernels, executed on a CPU, against the reference, byte for byte.
// Kernels: quantize_*.cu
#include "../../xla_ffi/cuda/launch.h"
#include "device_direction.h"

namespace jaxlowprec {
namespace {

/// Parts of sixteens, blocks, segments and tiles on either side.
constexpr Shape kShapes[] = {{1, 1}, {17, 33}, {3, 50}, {40, 300}, {130, 144}, {200, 20}, {1, 1040}, {128, 128}, {9, 520}};

/// Both matrices of x.
void check_quantize(const Buffer& x, int64_t misalignment, Shape shape, ElementType type, const NamedFormat& format,
                    const Mode& mode, bool stochastic, const Numbers* const (&numbers)[2], std::mt19937& random) {
  QuantizeCase c(x, shape, type, format, mode, stochastic, numbers, random);
  QuantizeProblem& p = c.problem;

  const DeviceBytes elements(x, misalignment, "x"), device_key(c.key, 0, "key");
  p.format.column_major = is_column_major(p.format, random);
  const DeviceDirection device_rowwise(c.rowwise, misalignment, p.format.column_major);
  const DeviceDirection device_columnwise(c.columnwise, misalignment, p.format.column_major);
  p.x = elements.as();
  p.rowwise = device_rowwise.problem(stochastic ? &device_key : nullptr, format.stream(false));
  p.columnwise = device_columnwise.problem(stochastic ? &device_key : nullptr, format.stream(true));
  vary_order(random);
  cuda_on_cpu::device().multiprocessors = random() % 2 ? 132 : 1;  // one block for all tiles, or about one for each
  CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
  device_rowwise.check(), device_columnwise.check();
}

/// Every format, shape and mode `repeat` times, each with a type and with some of the numbers in turn.
template <size_t N>
void quantize_agrees_with_the_reference(const NamedFormat (&formats)[N], int repeat, bool stochastic) {
  std::mt19937 random(stochastic);
  const size_t count = std::size(kNumbers);
  size_t turn = 0;
  for (const NamedFormat& format : formats)
    for (const Shape shape : kShapes)
      for (int i = 0; i < repeat; ++i)
        for (const Mode& mode : kModes) {
          if (mode.rotate && (format.format.scaling != Scaling::kTwoLevel || format.format.tiles)) continue;
          const ElementType type = kTypes[(turn + turn / count) % 3];  // every type meets all numbers
          ++turn;
          const Numbers* const numbers[2] = {&kNumbers[turn % count], &kNumbers[(turn * 5 + 3) % count]};
          const check::Given given(name(shape) + " " + name(type) + ", " + format.name + " " + mode.name + ", " +
                                   numbers[0]->name + "; " + numbers[1]->name);
          const int64_t size = shape.rows * shape.columns, misalignment = random() % 2 * 4;
          const Buffer x(2 * size * reference::element_size(type));
          for (int64_t b = 0; b < 2; ++b) fill_elements(x.as(), type, b * size, size, numbers[b]->data, random);
          check_quantize(x, misalignment, shape, type, format, mode, stochastic, numbers, random);
        }
}

TEST(quantize_nvfp4_to_nearest_agrees_with_the_reference) { quantize_agrees_with_the_reference(kNvfp4, 7, false); }
TEST(quantize_by_chosen_scales_agrees_with_the_reference) { quantize_agrees_with_the_reference(kChosenScales, 3, false); }
TEST(quantize_nvfp4_stochastically_agrees_with_the_reference) { quantize_agrees_with_the_reference(kNvfp4, 5, true); }
TEST(quantize_by_eden_agrees_with_the_reference) { quantize_agrees_with_the_reference(kEden, 5, true); }
TEST(quantize_to_nearest_agrees_with_the_reference) { quantize_agrees_with_the_reference(kOtherFormats, 1, false); }
TEST(quantize_stochastically_agrees_with_the_reference) { quantize_agrees_with_the_reference(kOtherFormats, 1, true); }
TEST(quantize_lines_to_nearest_agrees_with_the_reference) { quantize_agrees_with_the_reference(kLineFormats, 3, false); }
TEST(quantize_lines_stochastically_agrees_with_the_reference) { quantize_agrees_with_the_reference(kLineFormats, 2, true); }

/// Whole blocks and tiles of bfloat16 that are aligned have kernels of their own: with every kind of numbers.
template <size_t N>
void quantize_whole_tiles_agrees_with_the_reference(const NamedFormat (&formats)[N], bool stochastic) {
  std::mt19937 random(7);
  const Shape shape = {128, 256};
  for (const NamedFormat& format : formats)
    for (const Mode& mode : kModes)
      for (const Numbers& numbers : kNumbers) {
        if (mode.rotate && (format.format.scaling != Scaling::kTwoLevel || format.format.tiles)) continue;
        const check::Given given(std::string(format.name) + " " + mode.name + ", " + numbers.name);
        const int64_t size = shape.rows * shape.columns;
        const Buffer x(2 * size * 2);
        fill_elements(x.as(), ElementType::kBF16, 0, 2 * size, numbers.data, random);
        check_quantize(x, 0, shape, ElementType::kBF16, format, mode, stochastic, {&numbers, &numbers}, random);
      }
}
TEST(quantize_whole_tiles_to_nvfp4) { quantize_whole_tiles_agrees_with_the_reference(kNvfp4, false); }
TEST(quantize_whole_tiles_to_nvfp4_stochastically) { quantize_whole_tiles_agrees_with_the_reference(kNvfp4, true); }
TEST(quantize_whole_tiles_to_other_formats) { quantize_whole_tiles_agrees_with_the_reference(kOtherFormats, false); }

/// Rows that take a tile's whole width, half of it, or less: what a warp does next is beside or below.
TEST(quantize_long_rows_agrees_with_the_reference) {
  std::mt19937 random(11);
  const Numbers* const numbers[2] = {&kNumbers[0], &kNumbers[2]};
  for (const NamedFormat& format : {kNvfp4[0], kOtherFormats[0], kOtherFormats[11]})
    for (const Shape shape : {Shape{5, 2300}, {3, 4200}, {4, 8192}, {2, 9000}})
      for (const bool stochastic : {false, true}) {
        const check::Given given(name(shape) + " " + format.name + (stochastic ? " stochastic" : ""));
        const int64_t size = shape.rows * shape.columns;
        const Buffer x(2 * size * 2);
        for (int64_t b = 0; b < 2; ++b) fill_elements(x.as(), ElementType::kBF16, b * size, size, numbers[b]->data, random);
        check_quantize(x, 0, shape, ElementType::kBF16, format, kModes[0], stochastic, numbers, random);
      }
}

/// Rows that one warp has, two, four or eight, and rows that these hold in part.
TEST(quantize_lines_of_every_length_agrees_with_the_reference) {
  std::mt19937 random(13);
  const Numbers* const numbers[2] = {&kNumbers[0], &kNumbers[2]};
  for (const NamedFormat& format : {kLineFormats[0], kLineFormats[4]})
    for (const Shape shape : {Shape{11, 1024}, {5, 1040}, {3, 3000}, {3, 4096}, {2, 8192}, {3, 17000}})
      for (const bool stochastic : {false, true}) {
        const check::Given given(name(shape) + " " + format.name + (stochastic ? " stochastic" : ""));
        const int64_t size = shape.rows * shape.columns;
        const Buffer x(2 * size * 2);
        for (int64_t b = 0; b < 2; ++b) fill_elements(x.as(), ElementType::kBF16, b * size, size, numbers[b]->data, random);
        check_quantize(x, 0, shape, ElementType::kBF16, format, kModes[0], stochastic, numbers, random);
      }
}

/// Scales of one matrix, as Hopper's GEMM reads them: those of the other order, transposed.
TEST(scales_of_rows_column_by_column) {
  std::mt19937 random(9);
  for (const Format& format : {kOtherFormats[10].format, kOtherFormats[11].format})
    for (const Shape shape : {Shape{1, 128}, {4, 640}, {300, 384}, {37, 8192}, {130, 300}}) {
      const check::Given given(name(shape));
      const int64_t size = shape.rows * shape.columns, blocks = format.blocks(shape.columns);
      const Buffer x(2 * size);
      fill_elements(x.as(), ElementType::kBF16, 0, size, Data::kWide, random);
      const DeviceBytes elements(x, 0, "x"), data(size, 0, "data");
      QuantizeProblem p{elements.as(), ElementType::kBF16, 1, shape.rows, shape.columns, format};
      const auto scales = [&](bool column_major) {
        DeviceBytes scale(4 * shape.rows * blocks, 0, "scale");
        p.format.column_major = column_major, p.rowwise.data = data.as(), p.rowwise.scale = scale.as();
        CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
        CHECK_EQ(scale.unwritten(), 0);
        return std::vector<uint32_t>(scale.as<uint32_t>(), scale.as<uint32_t>() + shape.rows * blocks);
      };
      const auto by_rows = scales(false), by_columns = scales(true);
      int64_t differing = 0;
      for (int64_t i = 0; i < shape.rows; ++i)
        for (int64_t j = 0; j < blocks; ++j) differing += by_rows[i * blocks + j] != by_columns[j * shape.rows + i];
      CHECK_EQ(differing, 0);
    }
}

/// The bytes that the headers of quantize_rows.cuh and quantize_tiles.cuh say are read and written.
TEST(quantize_reads_the_elements_once_and_writes_the_results_once) {
  std::mt19937 random(3);
  const int64_t rows = 256, columns = 1024, size = rows * columns;
  for (const NamedFormat& format :
       {kNvfp4[0], kNvfp4[1], kOtherFormats[0], kOtherFormats[5], kOtherFormats[10], kOtherFormats[12], kOtherFormats[15]})
    for (const Mode& mode : kModes) {
      if (mode.rotate && (format.format.scaling != Scaling::kTwoLevel || format.format.tiles)) continue;
      const check::Given given(std::string(format.name) + " " + mode.name);
      const Buffer x(size * 2), tensor(4);
      fill_elements(x.as(), ElementType::kBF16, 0, size, Data::kNormal, random);
      *tensor.as<float>() = 5;
      const DeviceBytes elements(x, 0, "x"), amax(tensor, 0, "tensor");
      const Format& f = format.format;
      const auto scales = [&](int64_t lines, int64_t length) { return f.scales(lines, length) * f.scale_bytes(); };
      const DeviceBytes row_data(rows * f.row_bytes(columns), 0, "data"), row_scale(scales(rows, columns), 0, "scale");
      const DeviceBytes column_data(columns * f.row_bytes(rows), 0, "data");
      const DeviceBytes column_scale(scales(columns, rows), 0, "scale");
      QuantizeProblem p{elements.as(), ElementType::kBF16, 1, rows, columns, f, false, {}, {},
                        mode.rotate,   kDefaultSignMask};
      if (mode.rowwise) p.rowwise = {amax.as<float>(), row_data.as(), row_scale.as(), {}};
      if (mode.columnwise) p.columnwise = {amax.as<float>(), column_data.as(), column_scale.as(), {}};
      CHECK_EQ(cuda::launch(p, nullptr), cudaSuccess);
      CHECK_EQ(elements.traffic().read, static_cast<uint64_t>(2 * size));
      const auto check_written = [&](bool wanted, const DeviceBytes& data, const DeviceBytes& scale, uint64_t scale_bytes) {
        CHECK_EQ(data.traffic().written, wanted ? static_cast<uint64_t>(size) / (f.packed() ? 2 : 1) : 0u);
        CHECK_EQ(scale.traffic().written, wanted ? scale_bytes : 0u);
      };
      check_written(mode.rowwise, row_data, row_scale, scales(rows, columns));
      check_written(mode.columnwise, column_data, column_scale, scales(columns, rows));
    }
}

}  // namespace
}  // namespace jaxlowprec
