// Functions of the model, besides cuBLASLt's own, that a test calls; found by dlsym.
#pragma once

#include <cstdint>

extern "C" {
/// The compute capability that it models: 90 for 9.0.
void cublaslt_model_set_capability(int capability);
/// Which rule the last call that was refused broke.
const char* cublaslt_model_refusal();
/// How many handles were made, and how often the heuristics were asked.
int cublaslt_model_handles();
int cublaslt_model_heuristics();
/// Which of its suggestions the last product used.
int cublaslt_model_algorithm();
/// How long products by one of its suggestions take; the first of each problem takes 50 milliseconds more.
void cublaslt_model_set_milliseconds(int algorithm, float milliseconds);
/// How long all products so far took together.
float cublaslt_model_milliseconds();
/// From now on it has no algorithm for scales of 128 elements where k is smaller: it suggests none, or says that the problem
/// is not supported. Its manual allows either and names no least k; 0, the default, is none.
void cublaslt_model_refuse_blocks_below(int64_t depth, bool by_count);
/// Whether a beta of 0 in the device's memory is multiplied by what C holds, NaN too. By default it is not, as where it is
/// in the host's; the manual does not say.
void cublaslt_model_device_beta_reads(bool reads);
}
