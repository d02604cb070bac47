// Chooses the kernels of the best instruction set that was built and that the processor has.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace jaxlowprec {

/// Names of the instruction sets that can run here, best first. "portable" is always among them.
std::vector<std::string> available_isas();

/// The kernels in use: those of $JAXLOWPREC_ISA if it names an available set (native.py refuses others), else the best.
const Kernels& kernels();

/// Switches to another available set, for tests and benchmarks. False: not available.
bool use_isa(const std::string& name);

}  // namespace jaxlowprec
