// Problems of AdamW's and Lion's update in memory of their own, with hostile numbers: for the tests of the CPU's kernels and
// the GPU's.
#pragma once

#include <vector>

#include "check.h"
#include "kernel_data.h"
#include "optimizer_reference.h"

namespace jaxlowprec {

enum class MomentKind { kFloat32, kNearest, kStochastic, kNone };

/// One variant of the operation.
struct UpdateVariant {
  ElementType g;
  WeightKind weight;
  MomentKind mu, nu;  // nu is kNone with Lion
  bool is_update;
  UpdateRule rule = UpdateRule::kAdamW;

  std::string name() const {
    std::string text = "g " + jaxlowprec::name(g);
    for (const int part :
         {static_cast<int>(weight), static_cast<int>(mu), static_cast<int>(nu), int{is_update}, static_cast<int>(rule)})
      text += " " + std::to_string(part);
    return text;
  }
};

inline std::vector<UpdateVariant> update_variants() {
  constexpr MomentKind kMoments[] = {MomentKind::kFloat32, MomentKind::kNearest, MomentKind::kStochastic};
  std::vector<UpdateVariant> all;
  for (const ElementType g : {ElementType::kBF16, ElementType::kF32})
    for (const WeightKind weight :
         {WeightKind::kFloat32, WeightKind::kNearest, WeightKind::kDrawn, WeightKind::kRest8, WeightKind::kRest16})
      for (const bool is_update : {false, true})
        for (const MomentKind mu : kMoments) {
          for (const MomentKind nu : kMoments) all.push_back({g, weight, mu, nu, is_update});
          all.push_back({g, weight, mu, MomentKind::kNone, is_update, UpdateRule::kLion});
        }
  return all;
}

/// The operands and results of a problem. A copy has memory of its own, of the same contents.
class UpdateData {
 public:
  UpdateData(UpdateVariant v, int64_t batch, int64_t rows, int64_t columns, Data data, std::mt19937& random)
      : variant(v), batch_(batch), rows_(rows), columns_(columns) {
    const int64_t count = batch * rows * columns, blocks = batch * rows * ((columns + 31) / 32);
    const auto floats = [&](Bytes& to, ElementType type, Data kind, int64_t first, int64_t some) {
      to.resize((first + some) * reference::element_size(type));
      if (some > 0) fill_elements(to.data(), type, first, some, kind, random);
    };
    const auto bytes = [&](Bytes& to, int64_t size) {
      to.resize(size);
      for (uint8_t& byte : to) byte = static_cast<uint8_t>(random());
    };
    floats(g_, v.g, data, 0, count);
    floats(p_, v.weight == WeightKind::kFloat32 ? ElementType::kF32 : ElementType::kBF16, data, 0, count);
    if (v.weight == WeightKind::kRest8 || v.weight == WeightKind::kRest16) bytes(rest_, count * rest_bytes());
    for (int k = 0; k < moments(); ++k) {
      if (kind(k) == MomentKind::kFloat32) {
        floats(moment_[k], ElementType::kF32, data, 0, count);
        for (int64_t i = 0; k == 1 && data == Data::kNormal && i < count; ++i) moment_[k][4 * i + 3] &= 0x7F;
        continue;
      }
      bytes(moment_[k], count), bytes(exponents_[k], blocks);
      for (uint8_t& e : exponents_[k])  // most are those of ordinary moments
        if (random() % 4) e = static_cast<uint8_t>(100 + random() % 40);
    }
    for (int64_t b = 0; b < batch; ++b) {
      scalars_.insert(scalars_.end(), {0.9f, 0.1f, 0.999f, 0.001f});
      if (v.rule == UpdateRule::kAdamW)
        scalars_.insert(scalars_.end(), {correction(0.9, random), correction(0.999, random), b % 2 ? 0.0f : 1e-8f});
      scalars_.insert(scalars_.end(), {0.1f, -1e-3f});
      for (int i = 0; i < 4; ++i) words_.push_back(random());
    }
    const uint32_t first_row = random(), first_block = random() % 1000;
    for (int64_t r = 0; r < rows; ++r) row_numbers_.push_back(first_row + static_cast<uint32_t>(r));
    for (int64_t b = 0; b < (columns + 31) / 32; ++b) block_numbers_.push_back(first_block + static_cast<uint32_t>(b));
    if (v.is_update) update_.assign(4 * count, 0xA5);
  }

  bool drawn() const {
    return variant.weight == WeightKind::kDrawn || variant.mu == MomentKind::kStochastic ||
           variant.nu == MomentKind::kStochastic;
  }

  /// The problem, whose results take the place of operands.
  OptimizerUpdateProblem problem() {
    OptimizerUpdateProblem p{};
    p.rule = variant.rule, p.batch = batch_, p.rows = rows_, p.columns = columns_, p.g = g_.data(), p.g_type = variant.g;
    p.weight = variant.weight, p.p = p_.data(), p.rest = p.new_rest = rest_.empty() ? nullptr : rest_.data();
    if (variant.is_update)
      p.update = reinterpret_cast<float*>(update_.data());
    else
      p.new_p = p_.data();
    for (int k = 0; k < moments(); ++k) {
      MomentState& m = k == 0 ? p.mu : p.nu;
      if (kind(k) == MomentKind::kFloat32) {
        m.numbers = m.new_numbers = reinterpret_cast<float*>(moment_[k].data());
        continue;
      }
      m.codes = m.new_codes = moment_[k].data(), m.exponents = m.new_exponents = exponents_[k].data();
      m.stochastic = kind(k) == MomentKind::kStochastic;
    }
    p.scalars = scalars_.data();
    if (drawn()) p.words = words_.data(), p.row_numbers = row_numbers_.data(), p.block_numbers = block_numbers_.data();
    return p;
  }

  using Bytes = std::vector<uint8_t>;
  /// What may have changed, with names for messages.
  std::vector<std::pair<const char*, const Bytes*>> results() const {
    return {{"p", &p_},          {"update", &update_},       {"rest", &rest_},          {"mu", &moment_[0]},
            {"nu", &moment_[1]}, {"mu's e", &exponents_[0]}, {"nu's e", &exponents_[1]}};
  }

  const UpdateVariant variant;

 private:
  /// 1 - decay^step in some step, or another number.
  static float correction(double decay, std::mt19937& random) {
    const float others[] = {1.0f, 0x1.fffffep-1f, 0x1.fffffep-3f, 0x1p-21f, 1e-30f, 0.0f, 3e30f, -0.5f};
    if (random() % 8 == 0) return others[random() % 8];
    if (random() % 2) return Lanes<float>::from_bits((random() & 0x007FFFFFu) | ((127 - random() % 12) << 23));
    return static_cast<float>(1 - std::pow(decay, 1 + random() % 3000));
  }

  int moments() const { return variant.rule == UpdateRule::kAdamW ? 2 : 1; }
  MomentKind kind(int k) const { return k == 0 ? variant.mu : variant.nu; }
  int64_t rest_bytes() const { return variant.weight == WeightKind::kRest8 ? 1 : 2; }

  int64_t batch_, rows_, columns_;
  Bytes g_, p_, rest_, moment_[2], exponents_[2], update_;
  std::vector<float> scalars_;
  std::vector<uint32_t> words_, row_numbers_, block_numbers_;
};

/// The results of one are those of the other, byte for byte.
inline void check_results(UpdateData& found, UpdateData& expected) {
  for (size_t i = 0; i < found.results().size(); ++i) {
    const auto [name, bytes] = found.results()[i];
    const auto& wanted = *expected.results()[i].second;
    const auto at = std::mismatch(bytes->begin(), bytes->end(), wanted.begin(), wanted.end()).first - bytes->begin();
    const check::Given of(std::string(name) + " at byte " + std::to_string(at));
    CHECK(*bytes == wanted);
  }
}

}  // namespace jaxlowprec
