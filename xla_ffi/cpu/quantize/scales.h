// Block scales that follow from the block's own amax: those of MX and 8-bit floats (numerics.md 5 to 7).
#pragma once

#include "../../numerics/e2m1.h"
#include "../../numerics/float8_block.h"
#include "../../numerics/mx.h"
#include "../../problems.h"
#include "../vec.h"

namespace jaxlowprec {
namespace JLP_ISA {

struct BlockScales {
  bool e8m0, up;
  MxElement mx;
  uint32_t mx_rounding;
  Float8ScaleRule float8;

  explicit BlockScales(const Format& format)
      : e8m0(format.scaling == Scaling::kE8M0), up(format.scale_rule == ScaleRule::kUp) {
    with_float(format.code, [&](auto element) { set<decltype(element)>(format); });
  }

  /// From the magnitude bits of kLanes blocks' amaxes: what is stored, a byte or a float32's bits, and what elements are
  /// multiplied by. Blocks that hold NaN or infinity are poisoned: both are NaN. False if there is one.
  bool compute(U32 amax, U32& stored, F32& encode) const {
    if (e8m0) {
      stored = up ? mx_scale_up<F32>(amax, mx) : mx_scale_floor<F32>(amax, mx, mx_rounding);
      encode = mx_encode<F32>(stored);
    } else {
      encode = float8_encode_scale<F32>(amax, float8);
      stored = L::bits(float8_decode_scale(encode));
    }
    return all_below(L::from_bits(amax), __builtin_inff());
  }

  int64_t bytes() const { return e8m0 ? 1 : 4; }

  void store_scales(uint8_t* to, U32 stored) const {
    if (e8m0)
      store_low_bytes(to, stored);
    else
      store(to, stored);
  }

 private:
  template <class Element>
  void set(const Format& format) {
    mx = kMxElement<Element>;
    mx_rounding = format.scale_rule == ScaleRule::kEven ? mx.half_unit : 0u;
    float8 = {Element::kMax, format.amax_epsilon, format.power_of_two};
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
