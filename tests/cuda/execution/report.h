// The text of the checks' findings.
#pragma once

#include <cstdint>
#include <string>

#include "machine.h"

namespace cuda_on_cpu {

/// A place in the program's code, as the distance from the start of its image; 0: unknown.
using PlaceInCode = uint32_t;
PlaceInCode place_of(const void* return_address);
/// Stands for "file:line" within a message, and is looked up when the message is finished.
std::string placeholder(PlaceInCode place);

std::string file_and_line(const char* file, uint32_t line);
std::string text_of(const uint3& v);
std::string text_of(const Thread& thread);  // "thread (3,0,0)"
std::string text_of(const Site& site);      // "__syncthreads at file:line"

/// Ends the launch with a report about the current thread: "kernel, block, thread: message".
[[noreturn]] void fail(const std::string& message);
/// A report from the host's side.
void report(const std::string& message);

/// The report that ended the launch, if one did: taken on the host's stack, where there is room to look up places.
bool deliver_failure();

}  // namespace cuda_on_cpu
