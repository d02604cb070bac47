#include "cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../errors.h"

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
    case GemmType::kI8: return CUDA_R_8I;
    case GemmType::kI32: return CUDA_R_32I;
    default: return CUDA_R_4F_E2M1;
  }
}

cublasLtMatmulMatrixScale_t scale_mode(GemmScaling scaling) {
  switch (scaling) {
    case GemmScaling::kFloat32Lines: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
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
  const bool integers = gemm.result_type == GemmType::kI32;
  lt.check(
      lt.MatmulDescCreate(&made, integers ? CUBLAS_COMPUTE_32I : CUBLAS_COMPUTE_32F, integers ? CUDA_R_32I : CUDA_R_32F),
      "makes no descriptor");
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

constexpr int kFastest = -1;    // as wanted_suggestion() says it
constexpr int kCandidates = 8;  // that are asked for and timed

std::string_view algorithm_variable() {
  const char* text = std::getenv("JAXLOWPREC_GEMM_ALGORITHM");
  return text ? text : "";
}

/// Which of cuBLASLt's suggestions is taken: the first, another, or the one that is fastest when they are timed.
int wanted_suggestion() {
  const std::string_view text = algorithm_variable();
  if (text == "timed") return kFastest;
  int index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (!text.empty() && (error != std::errc() || end != text.data() + text.size() || index < 0))
    throw Failure{"JAXLOWPREC_GEMM_ALGORITHM is \"" + std::string(text) +
                  "\"; needs the index of one of cuBLASLt's suggestions, or timed"};
  return index;
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

/// Those that a GEMM may take: none where cuBLASLt suggests none, more than one until they have been timed.
using Algorithms = std::vector<cublasLtMatmulAlgo_t>;

Algorithms ask(const Library& lt, cublasLtHandle_t handle, const Gemm& gemm, const Descriptors& d) {
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
  std::vector<cublasLtMatmulHeuristicResult_t> found(wanted == kFastest ? kCandidates : wanted + 1);
  int count = 0;
  const cublasStatus_t status =
      lt.MatmulAlgoGetHeuristic(handle, d.operation.get(), d.a.get(), d.b.get(), d.y.get(), d.y.get(), made,
                                static_cast<int>(found.size()), found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count < 1)) return {};
  lt.check(status, "suggests no algorithm");
  if (wanted >= count)
    throw Failure{"JAXLOWPREC_GEMM_ALGORITHM is " + std::to_string(wanted) + ", cuBLASLt suggests " + std::to_string(count)};
  Algorithms algorithms;
  for (int i = std::max(wanted, 0); i < count; ++i)
    if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(found[i].algo);
  return algorithms;
}

/// By key, of all threads. The mutex is not held while algorithms are timed: what a stream waits for may be another GPU,
/// whose thread may wait for the mutex.
struct Known {
  std::mutex mutex;
  std::map<Key, Algorithms> algorithms;

  static Known& all() {
    static Known known;
    return known;
  }
};

/// A GEMM, and all that cuBLASLt takes beside it.
class Call {
 public:
  Call(const Gemm& gemm, int device)
      : lt_(Library::get()),
        handle_(handle_of(lt_, device)),
        descriptors_(describe(lt_, gemm)),
        key_(key_of(device, gemm)),
        algorithms_(find(gemm)) {
    if (algorithms_.empty()) throw Failure{"cuBLASLt has no algorithm for this GEMM on this GPU", true};
  }

  bool timed() const { return algorithms_.size() == 1; }

  void launch(const Gemm& gemm, cudaStream_t stream) const {
    if (!timed()) throw Failure{"JAXLOWPREC_GEMM_ALGORITHM=timed must be set before jaxlowprec's first operation"};
    launch(gemm, algorithms_[0], stream);
  }

  /// Keeps the fastest algorithm. A later suggestion has to be clearly faster than those before it: noise should not choose.
  void time(const Gemm& gemm, cudaStream_t stream) {
    constexpr int kRounds = 4, kRuns = 4;
    constexpr float kClearly = 0.98f;
    const Event start, end;
    std::vector<float> least(algorithms_.size(), std::numeric_limits<float>::infinity());
    for (int round = 0; round < kRounds; ++round)
      for (size_t i = 0; i < algorithms_.size(); ++i) {
        check(cudaEventRecord(start.event, stream));
        for (int run = 0; run < kRuns; ++run) launch(gemm, algorithms_[i], stream);
        check(cudaEventRecord(end.event, stream));
        check(cudaEventSynchronize(end.event));
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, start.event, end.event));
        least[i] = std::min(least[i], milliseconds);
      }
    size_t best = 0;
    for (size_t i = 1; i < least.size(); ++i)
      if (least[i] < kClearly * least[best]) best = i;
    const std::lock_guard<std::mutex> lock(Known::all().mutex);
    Algorithms& kept = Known::all().algorithms[key_];
    if (kept.size() > 1) kept = {algorithms_[best]};  // else another thread was first
  }

 private:
  const Library& lt_;
  const cublasLtHandle_t handle_;
  const Descriptors descriptors_;
  const Key key_;
  const Algorithms algorithms_;

  static void check(cudaError_t status) {
    if (status != cudaSuccess) throw Failure{"cuBLASLt's algorithms could not be timed: " + reason(status)};
  }

  struct Event {
    cudaEvent_t event = nullptr;
    Event() { check(cudaEventCreate(&event)); }
    ~Event() { cudaEventDestroy(event); }
    Event(const Event&) = delete;
  };

  Algorithms find(const Gemm& gemm) const {
    Known& known = Known::all();
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.algorithms.find(key_);
    if (found != known.algorithms.end()) return found->second;
    return known.algorithms[key_] = ask(lt_, handle_, gemm, descriptors_);
  }

  void launch(const Gemm& gemm, const cublasLtMatmulAlgo_t& algorithm, cudaStream_t stream) const {
    const float floats[2] = {1, gemm.accumulate ? 1.0f : 0.0f};
    const int32_t integers[2] = {1, 0};
    const bool of_integers = gemm.result_type == GemmType::kI32;
    const void* alpha = of_integers ? static_cast<const void*>(integers) : gemm.alpha_beta ? gemm.alpha_beta : floats;
    const void* beta = static_cast<const uint8_t*>(alpha) + 4;
    const void* c = gemm.accumulate ? gemm.accumulate : gemm.result;
    const Descriptors& d = descriptors_;
    lt_.check(lt_.Matmul(handle_, d.operation.get(), alpha, gemm.b.data, d.a.get(), gemm.a.data, d.b.get(), beta, c,
                         d.y.get(), gemm.result, d.y.get(), &algorithm, gemm.workspace, gemm.workspace_bytes, stream),
              "failed");
  }
};

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
  return problem_of([&] { Call(gemm, device).launch(gemm, stream); });
}

bool times_algorithms() { return algorithm_variable() == "timed"; }

GemmLaunch time_algorithms(const Gemm& gemm, int device, const std::function<std::string(Gemm&)>& move,
                           cudaStream_t stream) {
  return problem_of([&] {
    Call call(gemm, device);
    if (call.timed()) return;
    Gemm moved = gemm;
    if (const std::string problem = move(moved); !problem.empty()) throw Failure{problem};
    call.time(moved, stream);
  });
}

}  // namespace cuda
}  // namespace jaxlowprec
