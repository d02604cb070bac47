// The kernels of AdamW's and Lion's update, executed on a CPU, against its definition, byte for byte.
#include "../../xla_ffi/cuda/launch.h"
#include "../cpp/check.h"
#include "../cpp/optimizer_data.h"
#include "device_copies.h"

namespace jaxlowprec {
namespace {

using cuda_on_cpu::Access;
using cuda_on_cpu::Array;

constexpr auto kStochastic = MomentKind::kStochastic, kNearest = MomentKind::kNearest, kFloat32 = MomentKind::kFloat32;
constexpr UpdateVariant kWhole = {ElementType::kBF16, WeightKind::kRest16, kStochastic, kStochastic, false};
constexpr UpdateVariant kWholeOfLion = {kWhole.g, kWhole.weight, kStochastic, MomentKind::kNone, false, UpdateRule::kLion};

/// The arrays of a problem in the device's memory, in the place of those in the host's while this lives; results go back.
class OnDevice {
 public:
  OnDevice(const OptimizerUpdateProblem& host, int64_t misalignment) : problem(host), misalignment_(misalignment) {
    OptimizerUpdateProblem& p = problem;
    const int64_t lines = p.batch * p.rows, count = lines * p.columns, blocks = lines * p.blocks();
    const bool wide = p.weight == WeightKind::kFloat32, rest16 = p.weight == WeightKind::kRest16;
    put(p.g, count * (p.g_type == ElementType::kF32 ? 4 : 2), "g", Access::kReadOnly);
    replace(p.p, p.new_p, count * (wide ? 4 : 2), "p");
    replace(p.rest, p.new_rest, count * (rest16 ? 2 : 1), "rest");
    for (MomentState* m : {&p.mu, &p.nu}) {
      replace(m->numbers, m->new_numbers, 4 * count, "numbers");
      replace(m->codes, m->new_codes, count, "codes");
      replace(m->exponents, m->new_exponents, blocks, "exponents");
    }
    if (p.update) {
      float* const to = p.update;
      updates_.emplace_back(4 * count + misalignment_, "update");
      p.update = reinterpret_cast<float*>(updates_[0].data() + misalignment_);
      back_.push_back({to, p.update, 4 * count});
    }
    large_ = static_cast<int>(arrays_.size());
    put(p.scalars, (p.rule == UpdateRule::kLion ? 24 : 36) * p.batch, "scalars", Access::kReadOnly);
    put(p.words, 16 * p.batch, "words", Access::kReadOnly);
    put(p.row_numbers, 4 * p.rows, "rows", Access::kReadOnly);
    put(p.block_numbers, 4 * p.blocks(), "blocks", Access::kReadOnly);
  }

  void copy_back() {
    for (const auto& [to, from, bytes] : back_) std::memcpy(to, from, bytes);
    for (const auto& update : updates_) CHECK_EQ(static_cast<int64_t>(update.unwritten()), misalignment_);
  }
  /// Bytes read of the gradient; of all that is as large.
  int64_t gradient_read() const { return static_cast<int64_t>(arrays_[0].traffic().read); }
  int64_t arrays_read() const {
    int64_t bytes = 0;
    for (int i = 0; i < large_; ++i) bytes += static_cast<int64_t>(arrays_[i].traffic().read);
    return bytes;
  }

  OptimizerUpdateProblem problem;

 private:
  template <class T>
  void put(const T*& pointer, int64_t bytes, const char* name, Access access) {
    if (!pointer) return;
    std::vector<uint8_t> values(misalignment_);
    const auto* from = reinterpret_cast<const uint8_t*>(pointer);
    values.insert(values.end(), from, from + bytes);
    arrays_.emplace_back(values, name, access);
    pointer = reinterpret_cast<const T*>(arrays_.back().data() + misalignment_);
  }
  /// An operand whose place its result takes, if there is one.
  template <class T>
  void replace(const T*& operand, T*& result, int64_t bytes, const char* name) {
    T* const to = result;
    put(operand, bytes, name, result ? Access::kReadWrite : Access::kReadOnly);
    if (!to) return;
    result = const_cast<T*>(operand);
    back_.push_back({to, result, bytes});
  }

  struct Copy {
    void* to;
    const void* from;
    int64_t bytes;
  };
  int64_t misalignment_;
  int large_ = 0;
  std::vector<Array<uint8_t>> arrays_, updates_;
  std::vector<Copy> back_;
};

/// Runs a problem and checks its bytes; gives how often the gradient was read.
double check_bytes(UpdateData found, std::mt19937& random, int64_t misalignment = 0) {
  UpdateData expected = found;
  reference::optimizer_update(expected.problem());
  OnDevice there(found.problem(), misalignment);
  vary_order(random);
  CHECK_EQ(cuda::launch(there.problem, nullptr), cudaSuccess);
  there.copy_back();
  check_results(found, expected);
  const OptimizerUpdateProblem& p = there.problem;
  const double once = static_cast<double>(p.batch * p.rows * p.columns) * reference::element_size(p.g_type);
  return there.gradient_read() / once;
}

double check_variant(UpdateVariant variant, int64_t batch, int64_t rows, int64_t columns, Data data, std::mt19937& random,
                     int64_t misalignment = 0) {
  const check::Given given(variant.name() + " of " + std::to_string(batch) + ", " + std::to_string(rows) + ", " +
                           std::to_string(columns) + " data " + std::to_string(static_cast<int>(data)) + ", misaligned by " +
                           std::to_string(misalignment));
  return check_bytes(UpdateData(variant, batch, rows, columns, data, random), random, misalignment);
}

TEST(every_variant_has_the_bytes_of_its_definition) {
  std::mt19937 random(1);
  for (const UpdateVariant& variant : update_variants()) {
    check_variant(variant, 1, 3, 96, Data::kNormal, random);
    check_variant(variant, 2, 3, 40, Data::kSparse, random);
  }
}

TEST(rows_of_every_size_and_place) {
  std::mt19937 random(2);
  const std::vector<UpdateVariant> variants = update_variants();
  for (const int64_t columns : {1, 8, 31, 32, 33, 64, 100, 256, 300})
    for (int i = 0; i < 6; ++i)
      check_variant(variants[random() % variants.size()], 1 + random() % 2, 1 + random() % 9, columns, Data::kNormal, random,
                    random() % 3 * 4);
}

TEST(hostile_numbers) {
  std::mt19937 random(3);
  const std::vector<UpdateVariant> variants = update_variants();
  for (const Data data :
       {Data::kWide, Data::kZero, Data::kNaN, Data::kInfinity, Data::kNegativeZero, Data::kAnyBits, Data::kExponents})
    for (int i = 0; i < 30; ++i) check_variant(variants[random() % variants.size()], 1, 4, 128, data, random);
}

/// Moments as training has them, and their corrections: codes from `least` on, in blocks of these exponents.
void make_usual(UpdateData& data, uint32_t exponent_of_mu, uint32_t exponent_of_nu, uint32_t least, std::mt19937& random) {
  const OptimizerUpdateProblem p = data.problem();
  const int64_t lines = p.batch * p.rows;
  for (int64_t batch = 0; p.rule == UpdateRule::kAdamW && batch < p.batch; ++batch) {
    float* const scalars = const_cast<float*>(p.scalars) + 9 * batch;
    scalars[4] = 0.271f, scalars[5] = 0.0029f;
  }
  for (int64_t i = 0; i < lines * p.columns; ++i) {
    const uint32_t of_mu = least + random() % (128 - least), sign = of_mu > 0 ? random() & 0x80u : 0;
    if (p.mu.codes) p.mu.new_codes[i] = static_cast<uint8_t>(of_mu | sign);
    if (p.nu.codes) p.nu.new_codes[i] = static_cast<uint8_t>(least + random() % (256 - least));
    if (p.nu.numbers) p.nu.new_numbers[i] = std::fabs(p.nu.numbers[i]);
  }
  for (int64_t i = 0; i < lines * p.blocks(); ++i) {
    if (p.mu.codes) p.mu.new_exponents[i] = static_cast<uint8_t>(exponent_of_mu);
    if (p.nu.codes) p.nu.new_exponents[i] = static_cast<uint8_t>(exponent_of_nu);
  }
}

/// Makes many gradients and moments zero, each by itself, in blocks that have large moments.
void make_sparse(UpdateData& data, std::mt19937& random) {
  const OptimizerUpdateProblem p = data.problem();
  for (int64_t i = 0; i < p.batch * p.rows * p.columns; ++i) {
    p.mu.new_codes[i] = static_cast<uint8_t>(random() % 2 ? p.mu.codes[i] | 0x78u : 0);
    if (p.nu.codes) p.nu.new_codes[i] = static_cast<uint8_t>(random() % 2 ? p.nu.codes[i] | 0xF8u : 0);
    if (random() % 8) static_cast<uint16_t*>(const_cast<void*>(p.g))[i] = 0;
  }
}

/// Usual numbers, the code 0 among them, take one way: what is read, is read once.
TEST(arrays_are_read_once) {
  std::mt19937 random(4);
  for (const UpdateVariant& variant : update_variants()) {
    if (variant.rule == UpdateRule::kAdamW && (variant.mu == kFloat32) != (variant.nu == kFloat32)) continue;
    for (const uint32_t least : {1, 0}) {
      const check::Given given(variant.name() + ", codes from " + std::to_string(least));
      UpdateData data(variant, 1, 4, 128, Data::kNormal, random);
      make_usual(data, 120, 113, least, random);
      CHECK_EQ(check_bytes(data, random), 1.0);
    }
  }
}

/// Per element 6 bytes read and 4 written, and for each moment 1 1/32; each of four threads asks for a block's exponents.
TEST(no_byte_is_moved_twice) {
  std::mt19937 random(9);
  for (const int moments : {1, 2}) {
    UpdateData data(moments == 2 ? kWhole : kWholeOfLion, 1, 4, 256, Data::kNormal, random);
    make_usual(data, 120, 113, 1, random);
    const OnDevice there(data.problem(), 0);
    cuda_on_cpu::reset_traffic();
    CHECK_EQ(cuda::launch(there.problem, nullptr), cudaSuccess);
    CHECK_EQ(there.arrays_read(), int64_t{4 * 256 * (6 + moments) + 32 * moments * 4});
    CHECK_EQ(cuda_on_cpu::traffic().written, static_cast<uint64_t>(4 * 256 * (4 + moments) + 32 * moments));
  }
}

/// The first step, from zeros.
TEST(zeros_are_usual) {
  std::mt19937 random(5);
  UpdateData data(kWhole, 1, 8, 64, Data::kNormal, random);
  make_usual(data, 0, 0, 1, random);
  const OptimizerUpdateProblem p = data.problem();
  std::fill_n(p.mu.new_codes, 8 * 64, uint8_t{0}), std::fill_n(p.nu.new_codes, 8 * 64, uint8_t{0});
  CHECK_EQ(check_bytes(data, random), 1.0);
  std::memset(const_cast<void*>(p.g), 0, 8 * 64 * 2);
  CHECK_EQ(check_bytes(data, random), 1.0);
}

/// Zeros of a poisoned block are NaN.
TEST(poisoned_blocks_stay_so) {
  std::mt19937 random(10);
  for (const bool is_mu : {false, true}) {
    UpdateData data(kWhole, 1, 1, 256, Data::kNormal, random);
    make_usual(data, 120, 113, 1, random);
    const MomentState m = is_mu ? data.problem().mu : data.problem().nu;
    std::fill_n(m.new_codes + 96, 32, uint8_t{0});
    m.new_exponents[3] = 255;
    CHECK_EQ(check_bytes(data, random), 2.0);
  }
}

/// Lion's moments that overflow, or are infinite, beside weights that do not show it.
TEST(moments_that_only_lose_their_size) {
  std::mt19937 random(13);
  for (const MomentKind kind : {kStochastic, kNearest, kFloat32})
    for (const bool infinite : {false, true})
      for (const float b2 : {1.0f, 0.99f, 0.0f}) {
        UpdateData data({ElementType::kF32, WeightKind::kRest16, kind, MomentKind::kNone, false, UpdateRule::kLion}, 1, 4,
                        256, Data::kNormal, random);
        const OptimizerUpdateProblem p = data.problem();
        make_usual(data, 253, 0, 1, random);
        const_cast<float*>(p.scalars)[2] = b2, const_cast<float*>(p.scalars)[3] = 1.0f - b2;
        for (int i = 0; i < 4 * 256; i += 1 + random() % 64) {
          const float g = infinite ? INFINITY : 0x1.fffffep127f;
          const_cast<float*>(static_cast<const float*>(p.g))[i] = random() % 2 ? g : -g;
        }
        check_bytes(data, random);
      }
}

/// Blocks of every exponent beside usual ones of the other moment.
TEST(moments_of_every_size) {
  std::mt19937 random(6);
  int64_t again = 0;
  for (uint32_t exponent = 0; exponent < 256; ++exponent)
    for (const bool is_mu : {false, true}) {
      const check::Given given("exponent " + std::to_string(exponent) + (is_mu ? " of mu" : " of nu"));
      UpdateData data(kWhole, 1, 1, 256, Data::kNormal, random);
      make_usual(data, is_mu ? exponent : 120, is_mu ? 113 : exponent, random() % 2, random);
      if (exponent % 2) make_sparse(data, random);
      if (exponent % 4 == 1) std::memset(const_cast<void*>(data.problem().g), 0, 256 * 2);
      again += check_bytes(data, random) > 1;
    }
  CHECK(again > 50 && again < 350);
  again = 0;
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    const check::Given given("exponent " + std::to_string(exponent) + " of Lion's");
    UpdateData data(kWholeOfLion, 1, 1, 256, Data::kNormal, random);
    make_usual(data, exponent, 0, random() % 2, random);
    if (exponent % 2) make_sparse(data, random);
    if (exponent % 4 == 1) std::memset(const_cast<void*>(data.problem().g), 0, 256 * 2);
    again += check_bytes(data, random) > 1;
  }
  CHECK(again > 10 && again < 100);
}

/// Warps that take several pieces, of rows that they begin in the middle of, by a grid of two blocks.
TEST(more_blocks_than_the_grid) {
  std::mt19937 random(7);
  const cuda_on_cpu::Device before = cuda_on_cpu::device();
  cuda_on_cpu::device().multiprocessors = 2, cuda_on_cpu::device().resident_blocks = 1, cuda_on_cpu::device().index = 7;
  for (const UpdateVariant variant :
       {kWhole, kWholeOfLion, UpdateVariant{ElementType::kF32, WeightKind::kDrawn, kNearest, kStochastic, true}})
    for (const int64_t columns : {96, 1056, 8192, 31}) {
      const check::Given given(std::to_string(columns));
      UpdateData data(variant, 2, columns < 1000 ? 70 : 3, columns, Data::kNormal, random);
      make_usual(data, 120, 113, 1, random);
      const double read = check_bytes(data, random);
      CHECK(read < 1.1);
    }
  cuda_on_cpu::device() = before;
}

/// Scalars that are out of the usual range, and those at its ends; zeros of one moment only are among the elements.
TEST(scalars_of_every_size) {
  std::mt19937 random(8);
  for (int at = 0; at < 15; ++at)
    for (const float value : {0.0f, -0.0f, -1.0f, 1e-30f, 1e-20f, 0x1p-50f, 0x1p-20f, 0x1p-13f, 0.1f, 0.5f, 0x1.fffffep-1f,
                              1.0f, 1.5f, 1e30f, INFINITY, NAN}) {
      const check::Given given("scalar " + std::to_string(at) + " is " + std::to_string(value));
      UpdateData data(at < 9 ? kWhole : kWholeOfLion, 1, 4, 256, Data::kNormal, random);
      make_usual(data, 120, 113, 0, random);
      make_sparse(data, random);
      const_cast<float*>(data.problem().scalars)[at < 9 ? at : at - 9] = value;
      check_bytes(data, random);
    }
}

/// Second moments that become -0 by scalars.
TEST(zeros_with_a_sign) {
  std::mt19937 random(11);
  UpdateData data(kWhole, 1, 1, 256, Data::kNormal, random);
  make_usual(data, 120, 113, 1, random);
  const_cast<float*>(data.problem().scalars)[2] = const_cast<float*>(data.problem().scalars)[3] = -0.0f;
  check_bytes(data, random);
}

/// Quotients of tiny first moments by large roots, seen in updates: those that are subnormal are zero, and no others.
TEST(quotients_about_the_least_number) {
  std::mt19937 random(12);
  const auto power = [&](int least, int most) {
    const auto exponent = least + static_cast<int>(random() % static_cast<uint32_t>(most - least + 1));
    return std::ldexp(1 + static_cast<float>(random() % 4096) / 4096, exponent) * (random() % 2 ? 1.0f : -1.0f);
  };
  for (int run = 0; run < 40; ++run) {
    UpdateData data({ElementType::kF32, WeightKind::kFloat32, kFloat32, kFloat32, true}, 1, 4, 256, Data::kNormal, random);
    const OptimizerUpdateProblem p = data.problem();
    const int largest = run - 8;  // of the second moment's exponents
    for (int i = 0; i < 4 * 256; ++i) {
      const_cast<float*>(static_cast<const float*>(p.g))[i] = random() % 2 ? 0.0f : power(-126, -110);
      const_cast<float*>(static_cast<const float*>(p.p))[i] = random() % 4 ? power(-126, -90) : random() % 2 ? 0.0f : -0.0f;
      p.mu.new_numbers[i] = random() % 4 ? power(-126, run % 2 ? -90 : -120) : random() % 2 ? 0.0f : -0.0f;
      p.nu.new_numbers[i] = std::fabs(power(largest - 4, largest));
    }
    float* scalars = const_cast<float*>(p.scalars);
    scalars[0] = 1.0f, scalars[1] = 0.5f, scalars[4] = scalars[5] = run % 3 ? 1.0f : 0.7f, scalars[8] = -1.0f;
    check_bytes(data, random);
  }
}

TEST(nothing_is_launched_for_nothing) {
  CHECK_EQ(cuda::launch(OptimizerUpdateProblem{}, nullptr), cudaSuccess);
  OptimizerUpdateProblem large{};
  large.batch = 1, large.rows = int64_t{1} << 30, large.columns = 128;
  CHECK_EQ(cuda::launch(large, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace jaxlowprec
