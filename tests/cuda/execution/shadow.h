// Records of the memory that kernels use: which bytes exist, and which thread used them when.
#pragma once

#include <cstddef>
#include <cstdint>

#include "report.h"
#include "testing.h"

namespace cuda_on_cpu {

enum class Use { kRead, kWrite, kAtomic };

/// The current thread uses these bytes: ends the launch with a report if it must not.
void use(const void* address, size_t bytes, Use use, PlaceInCode place);

bool in_shared_memory(const void* address);

/// The block's dynamic shared memory for the next launch.
void set_shared_memory(size_t bytes);

/// A copy of the host's side to memory, or from it. False: the bytes are not all of one array (memory of the host is fine).
bool host_writes(const void* address, size_t bytes);
bool host_reads(const void* address, size_t bytes);

/// An asynchronous copy to these shared bytes has started (they may not be used), or has landed.
void start_copy(const AsyncCopy& copy);
void land_copy(const AsyncCopy& copy);

}  // namespace cuda_on_cpu
