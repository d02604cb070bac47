// What a test asks of the model beside cuBLASLt's own functions; found by dlsym.
#pragma once

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
}
