// What quantisation did to an array.
#include "../entry.h"
#include "moments.h"
#include "sums.h"

namespace jaxlowprec {
namespace JLP_ISA {
namespace {

template <class Operation>
struct Always {
  template <class Problem, class Visit>
  auto operator()(const Problem&, Visit visit) const {
    return visit(Operation{});
  }
};
constexpr Always<Moments> resolve_moments;
constexpr Always<Outliers> resolve_outliers;
constexpr Always<Sums> resolve_sums;

}  // namespace

JLP_DEFINE_ENTRY(moments, MomentsProblem, resolve_moments)
JLP_DEFINE_ENTRY(outliers, OutliersProblem, resolve_outliers)
JLP_DEFINE_ENTRY(sums, SumsProblem, resolve_sums)

}  // namespace JLP_ISA
}  // namespace jaxlowprec
