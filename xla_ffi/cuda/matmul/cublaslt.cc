#include "cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

namespace jaxlowprec {
namespace cuda {
namespace {

// --- the library

constexpr size_t kLeastVersion = 120900;  // the first with float32 scales of 128 elements

#define JLP_CUBLASLT_FUNCTIONS(use)                                                                                         \
  use(Create) use(GetVersion) use(GetStatusString) use(MatmulDescCreate) use(MatmulDescDestroy) use(MatmulDescSetAttribute) \
      use(MatrixLayoutCreate) use(MatrixLayoutDestroy) use(MatmulPreferenceCreate) use(MatmulPreferenceDestroy)             \
          use(MatmulPreferenceSetAttribute) use(MatmulAlgoGetHeuristic) use(Matmul)

struct Failure {
  std::string what;
  bool no_algorithm = false;
};

std::string version_text(size_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

class Library {
 public:
#define JLP_DECLARE(name) decltype(&::cublasLt##name) name = nullptr;
  JLP_CUBLASLT_FUNCTIONS(JLP_DECLARE)
#undef JLP_DECLARE

  /// The one of this process; a failure to find it is found again by every call.
  static const Library& get() {
    static const Library library;
    if (!library.problem_.empty()) throw Failure{library.problem_};
    return library;
  }

  void check(cublasStatus_t status, const char* what) const {
    if (status != CUBLAS_STATUS_SUCCESS) throw Failure{std::string("cuBLASLt ") + what + ": " + GetStatusString(status)};
  }

 private:
  std::string problem_;

  Library() {
    void* library = open();
    if (!library) {
      problem_ =
          std::string("cuBLASLt was not found (") + dlerror() + "): install jax[cuda13] or jax[cuda12], which brings it";
      return;
    }
#define JLP_FIND(name) find(library, "cublasLt" #name, name);
    JLP_CUBLASLT_FUNCTIONS(JLP_FIND)

#undef JLP_FIND
    if (problem_.empty() && GetVersion() < kLeastVersion)
      problem_ = "cuBLASLt " + version_text(GetVersion()) + " is loaded, " + version_text(kLeastVersion) +
                 " or newer is needed: pip install -U nvidia-cublas (or nvidia-cublas-cu12)";
  }

  /// The copy that JAX has loaded, else the one that the system finds.
  static void* open() {
    if (const char* path = std::getenv("JAXLOWPREC_CUBLASLT"); path && *path) return dlopen(path, RTLD_NOW | RTLD_LOCAL);
    for (const int loaded : {RTLD_NOLOAD, 0})
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
        if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | loaded)) return library;
    return nullptr;
  }

  template <class Function>
  void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) problem_ = std::string("cuBLASLt has no ") + name + ": jaxlowprec needs " + version_text(kLeastVersion);
  }
};

// --- handles

/// Made once a device and kept until the process ends, when it is too late to give them back.
cublasLtHandle_t handle_of(const Library& lt, int device) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  if (!handle) lt.check(lt.Create(&handle), "could not be started");
  return handle;
}

// --- descriptors

template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, cublasStatus_t (*)(T)>;

cudaDataType_t data_type(GemmType type) {
  switch (type) {
    case GemmType::kF32: return CUDA_R_32F;
    case GemmType::kBF16: return CUDA_R_16BF;
    case GemmType::kE4M3: return CUDA_R_8F_E4M3;
    case GemmType::kE5M2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_4F_E2M1;
  }
}

cublasLtMatmulMatrixScale_t scale_mode(GemmScaling scaling) {
  switch (scaling) {
    case GemmScaling::kE4M3x16: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    case GemmScaling::kE8M0x32: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case GemmScaling::kFloat32x128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case GemmScaling::kFloat32x128x128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    default: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  }
}

struct Descriptors {
  Owned<cublasLtMatmulDesc_t> operation;
  Owned<cublasLtMatrixLayout_t> a, b, y;
};

Owned<cublasLtMatrixLayout_t> layout(const Library& lt, GemmType type, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t made = nullptr;
  lt.check(lt.MatrixLayoutCreate(&made, data_type(type), rows, columns, rows), "makes no layout");
  return {made, lt.MatrixLayoutDestroy};
}

/// cuBLASLt's matrices are column-major, so each of ours is its transpose: what it computes is y^T = (b^T)^T a^T. Its A is
/// our b, transposed, and its B our a: the "TN" form, the only one that narrow types have on every GPU. What is not set here
/// stays off: above all "fast accumulation", with which FP8 sums of compute capability 8.9 and 9.0 are never promoted to
/// float32. Without it they are promoted now and then (gemm_error.h).
Descriptors describe(const Library& lt, const Gemm& gemm) {
  cublasLtMatmulDesc_t made = nullptr;
  lt.check(lt.MatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "makes no descriptor");
  Descriptors found{{made, lt.MatmulDescDestroy},
                    layout(lt, gemm.b.type, gemm.depth, gemm.b.rows),
                    layout(lt, gemm.a.type, gemm.depth, gemm.a.rows),
                    layout(lt, gemm.result_type, gemm.b.rows, gemm.a.rows)};
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    lt.check(lt.MatmulDescSetAttribute(made, attribute, &value, sizeof value), "refuses an attribute");
  };
  const cublasOperation_t transposed = CUBLAS_OP_T;
  set(CUBLASLT_MATMUL_DESC_TRANSA, transposed);
  if (gemm.alpha_beta) {
    const cublasLtPointerMode_t mode = CUBLASLT_POINTER_MODE_DEVICE;
    set(CUBLASLT_MATMUL_DESC_POINTER_MODE, mode);
  }
  const auto scaled = [&](const GemmOperand& operand, auto mode_attribute, auto pointer_attribute) {
    if (operand.scaling == GemmScaling::kNone) return;
    set(mode_attribute, scale_mode(operand.scaling));
    set(pointer_attribute, operand.scale);
  };
  scaled(gemm.b, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
  scaled(gemm.a, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
  return found;
}

// --- heuristics

/// What the addresses of a GEMM are all multiples of, as far as cuBLASLt cares: a slice of a batch may begin anywhere.
uint32_t alignment(const Gemm& gemm) {
  uintptr_t all = 256;
  for (const void* pointer : {gemm.a.data, gemm.b.data, gemm.accumulate, static_cast<const void*>(gemm.result)})
    all |= reinterpret_cast<uintptr_t>(pointer);
  return static_cast<uint32_t>(all & (0 - all));
}

/// Which of cuBLASLt's suggestions is taken: the first, or another to measure what the choice is worth (benchmarks/gpu.py).
int wanted_suggestion() {
  const char* text = std::getenv("JAXLOWPREC_GEMM_ALGORITHM");
  return text ? std::atoi(text) : 0;
}

/// All that their choice depends on.
using Key = std::array<int64_t, 14>;

Key key_of(int device, const Gemm& gemm) {
  return {device,
          gemm.a.rows,
          gemm.b.rows,
          gemm.depth,
          static_cast<int64_t>(gemm.a.type),
          static_cast<int64_t>(gemm.b.type),
          static_cast<int64_t>(gemm.a.scaling),
          static_cast<int64_t>(gemm.b.scaling),
          static_cast<int64_t>(gemm.result_type),
          gemm.alpha_beta != nullptr,
          gemm.accumulate != nullptr,
          gemm.workspace_bytes,
          alignment(gemm),
          wanted_suggestion()};
}

using Algorithm = std::optional<cublasLtMatmulAlgo_t>;  // none: cuBLASLt suggests none

Algorithm ask(const Library& lt, cublasLtHandle_t handle, const Gemm& gemm, const Descriptors& d) {
  cublasLtMatmulPreference_t made = nullptr;
  lt.check(lt.MatmulPreferenceCreate(&made), "makes no preference");
  const Owned<cublasLtMatmulPreference_t> preference{made, lt.MatmulPreferenceDestroy};
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    lt.check(lt.MatmulPreferenceSetAttribute(made, attribute, &value, sizeof value), "refuses a preference");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(gemm.workspace_bytes));
  // The partial sums of a split K meet in float32: by default they may in the result's type, rounded more than once.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(attribute, alignment(gemm));
  const int wanted = wanted_suggestion();
  std::vector<cublasLtMatmulHeuristicResult_t> found(std::max(wanted, 0) + 1);
  int count = 0;
  const cublasStatus_t status =
      lt.MatmulAlgoGetHeuristic(handle, d.operation.get(), d.a.get(), d.b.get(), d.y.get(), d.y.get(), made,
                                static_cast<int>(found.size()), found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count < 1)) return std::nullopt;
  lt.check(status, "suggests no algorithm");
  if (wanted < 0 || wanted >= count)
    throw Failure{"JAXLOWPREC_GEMM_ALGORITHM is " + std::to_string(wanted) + ", cuBLASLt suggests " + std::to_string(count)};
  return found[wanted].algo;
}

Algorithm algorithm(const Library& lt, cublasLtHandle_t handle, int device, const Gemm& gemm,
                    const Descriptors& descriptors) {
  static std::mutex mutex;
  static std::map<Key, Algorithm> known;
  const Key key = key_of(device, gemm);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known[key] = ask(lt, handle, gemm, descriptors);
}

void run(const Gemm& gemm, int device, cudaStream_t stream) {
  const Library& lt = Library::get();
  const cublasLtHandle_t handle = handle_of(lt, device);
  const Descriptors d = describe(lt, gemm);
  const Algorithm algo = algorithm(lt, handle, device, gemm, d);
  if (!algo) throw Failure{"cuBLASLt has no algorithm for this GEMM on this GPU", true};
  const float host[2] = {1, gemm.accumulate ? 1.0f : 0.0f};
  const float* scalars = gemm.alpha_beta ? gemm.alpha_beta : host;
  const void* c = gemm.accumulate ? gemm.accumulate : gemm.result;
  lt.check(lt.Matmul(handle, d.operation.get(), &scalars[0], gemm.b.data, d.a.get(), gemm.a.data, d.b.get(), &scalars[1], c,
                     d.y.get(), gemm.result, d.y.get(), &*algo, gemm.workspace, gemm.workspace_bytes, stream),
           "failed");
}

template <class Body>
GemmLaunch problem_of(const Body& body) {
  try {
    body();
    return {};
  } catch (const Failure& failure) {
    return {failure.what, failure.no_algorithm};
  }
}

}  // namespace

std::string prepare_gemm(int device) {
  return problem_of([&] { handle_of(Library::get(), device); }).problem;
}

GemmLaunch launch(const Gemm& gemm, int device, cudaStream_t stream) {
  return problem_of([&] { run(gemm, device, stream); });
}

}  // namespace cuda
}  // namespace jaxlowprec
