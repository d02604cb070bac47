// A model of cuBLASLt: the functions that xla_ffi/cuda/matmul/cublaslt.cc uses, by NVIDIA's documentation of them, in the
// host's memory and in double precision. What the documentation forbids is refused, with the rule that it breaks.
//
// FP8 products on compute capability 8.9 and 9.0 are added up as the tensor cores there do (fp8_sum): by the documentation
// "periodically promoted to a higher precision", by measurements in 13 bits below the leading one.
//
// Source: cuBLAS documentation, cublasLtMatmul() and "Narrow precision data types usage". Written from the text: what a GPU
// does beyond it (the order of additions) is not modelled.
#include "cublaslt_model.h"

#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

int capability = 90, handles = 0, heuristics = 0;
std::atomic<int> algorithm;
float durations[4] = {}, milliseconds = 0;
std::set<std::pair<uint64_t, uint64_t>> loaded;  // problem and algorithm
int64_t least_block_depth = 0;
bool refuses_by_count = false, device_beta_reads = false;
std::string refusal;
std::mutex mutex;

// --- numbers

/// A binary floating-point number by its definition; `bits` without the sign.
double number(uint32_t bits, int mantissa_bits, int bias) {
  const int exponent = static_cast<int>(bits >> mantissa_bits);
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const double significand = mantissa + (exponent ? std::ldexp(1, mantissa_bits) : 0);
  return std::ldexp(significand, std::max(exponent, 1) - bias - mantissa_bits);
}

double signed_number(uint32_t bits, int width, int mantissa_bits, int bias) {
  const uint32_t sign = 1u << (width - 1);
  const double magnitude = number(bits & (sign - 1), mantissa_bits, bias);
  return bits & sign ? -magnitude : magnitude;
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double e4m3(uint32_t code) { return (code & 0x7F) == 0x7F ? kNaN : signed_number(code, 8, 3, 7); }
double e5m2(uint32_t code) {
  if ((code & 0x7C) != 0x7C) return signed_number(code, 8, 2, 15);
  return code & 3 ? kNaN : std::copysign(std::numeric_limits<double>::infinity(), code & 0x80 ? -1 : 1);
}
double ue8m0(uint32_t code) { return code == 0xFF ? kNaN : std::ldexp(1, static_cast<int>(code) - 127); }

float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/// Element `index` of memory of a type.
double element(const void* data, cudaDataType_t type, int64_t index) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  switch (type) {
    case CUDA_R_32F: return static_cast<const float*>(data)[index];
    case CUDA_R_16BF: return as_float(uint32_t{static_cast<const uint16_t*>(data)[index]} << 16);
    case CUDA_R_8I: return static_cast<int8_t>(bytes[index]);
    case CUDA_R_32I: return static_cast<const int32_t*>(data)[index];
    case CUDA_R_8F_E4M3: return e4m3(bytes[index]);
    case CUDA_R_8F_E5M2: return e5m2(bytes[index]);
    case CUDA_R_4F_E2M1: return signed_number(bytes[index / 2] >> (index % 2 * 4) & 15, 4, 1, 1);
    default: std::abort();
  }
}

int bits_of(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_32F:
    case CUDA_R_32I: return 32;
    case CUDA_R_16BF: return 16;
    case CUDA_R_4F_E2M1: return 4;
    default: return 8;
  }
}

bool narrow(cudaDataType_t type) { return bits_of(type) <= 8; }

// --- the objects behind the handles

struct Operation {
  cublasComputeType_t compute;
  cudaDataType_t scale_type;
  cublasOperation_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  cublasLtPointerMode_t pointer_mode = CUBLASLT_POINTER_MODE_HOST;
  cublasLtMatmulMatrixScale_t a_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  cublasLtMatmulMatrixScale_t b_mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
};

struct Layout {
  cudaDataType_t type;
  int64_t rows, columns, ld;
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C and D
};

template <class Own, class Handle>
const Own& as(Handle handle) {
  return *reinterpret_cast<const Own*>(handle);
}

struct Refused {
  cublasStatus_t status;
};

void require(bool condition, const char* rule, cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED) {
  if (condition) return;
  refusal = rule;
  throw Refused{status};
}

cublasStatus_t guarded(const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(mutex);
  try {
    body();
    return CUBLAS_STATUS_SUCCESS;
  } catch (const Refused& refused) {
    return refused.status;
  }
}

// --- scales

/// Where scale (outer, inner) lies in tiles of 128 by 4.
int64_t tiled(int64_t outer, int64_t inner, int64_t inner_size) {
  const int64_t padded = (inner_size + 3) / 4 * 4;
  const int64_t tile = (inner / 4 * 4 + outer / 128 * padded) * 128;
  return tile + outer % 32 * 16 + outer % 128 / 32 * 4 + inner % 4;
}

int64_t blocks(int64_t depth, int64_t size) { return (depth + size - 1) / size; }

/// The scale of element l of line `outer` of an operand with that many lines.
double scale(cublasLtMatmulMatrixScale_t mode, const void* scales, int64_t outer, int64_t lines, int64_t l, int64_t depth) {
  const auto* bytes = static_cast<const uint8_t*>(scales);
  const auto* floats = static_cast<const float*>(scales);
  switch (mode) {
    case CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: return floats[outer];
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3: return e4m3(bytes[tiled(outer, l / 16, blocks(depth, 16))] & 0x7F);
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0: return ue8m0(bytes[tiled(outer, l / 32, blocks(depth, 32))]);
    case CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F: return floats[l / 128 * lines + outer];
    case CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F:
      return floats[outer / 128 * ((blocks(depth, 128) + 3) / 4 * 4) + l / 128];
    default: return scales ? floats[0] : 1;
  }
}

bool tiled_mode(cublasLtMatmulMatrixScale_t mode) {
  return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 || mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
}
bool block128_mode(cublasLtMatmulMatrixScale_t mode) {
  return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

/// Tiles that lines or blocks do not fill hold zeros.
void require_zero_padding(cublasLtMatmulMatrixScale_t mode, const void* scales, int64_t lines, int64_t depth) {
  if (!tiled_mode(mode)) return;
  const int64_t inner = blocks(depth, mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 ? 16 : 32);
  for (int64_t i = 0; i < (lines + 127) / 128 * 128; ++i)
    for (int64_t j = 0; j < (inner + 3) / 4 * 4; ++j)
      if (i >= lines || j >= inner)
        require(static_cast<const uint8_t*>(scales)[tiled(i, j, inner)] == 0, "scales beyond the matrix are zero",
                CUBLAS_STATUS_INVALID_VALUE);
}

// --- the rules

struct Sizes {
  int64_t m, n, k;
};

void check_narrow(const Operation& op, const Layout& a, const Layout& b, const Layout& d, const Sizes& s) {
  const auto whole = [](int64_t elements, cudaDataType_t type) { return elements * bits_of(type) % 128 == 0; };
  const auto fp8 = [](cudaDataType_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; };
  require(op.transpose_a == CUBLAS_OP_T && op.transpose_b == CUBLAS_OP_N, "narrow types: A transposed, B not");
  require(whole(s.k, a.type) && whole(s.k, b.type), "narrow types: k is a multiple of 16 bytes");
  require(whole(s.m, d.type), "narrow types: m is a multiple of 16 bytes");
  require(whole(a.ld, a.type) && whole(b.ld, b.type) && whole(d.ld, d.type), "narrow types: rows of 16 bytes");
  require(fp8(a.type) == fp8(b.type), "FP4 and FP8 do not mix");
  if (!fp8(a.type)) {
    require(op.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 && op.b_mode == op.a_mode, "FP4: E4M3 scales of 16");
    require(capability >= 100, "FP4: compute capability 10.0");
    return;
  }
  require(a.type != CUDA_R_8F_E5M2 || b.type != CUDA_R_8F_E5M2, "E5M2 does not meet itself");
  require(capability >= 89, "FP8: compute capability 8.9");
  require(op.a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 && op.b_mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3,
          "FP8 has no scales of 16");
  if (block128_mode(op.a_mode) || block128_mode(op.b_mode)) {
    require(block128_mode(op.a_mode) && block128_mode(op.b_mode), "scales of 128 on both sides");
    require(op.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F || op.b_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
            "128x128 does not meet itself");
    require(capability == 90, "scales of 128: compute capability 9.0");
    require(s.m % 4 == 0 && s.n % 4 == 0, "scales of 128: m and n are multiples of 4");
  } else {
    require(op.a_mode == op.b_mode, "scale modes differ");
    require(op.a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 || capability >= 100, "E8M0: compute capability 10.0");
    require(op.a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F || capability == 90, "vectors: compute capability 9.0");
  }
}

/// Products of 8-bit integers in the regular order of elements.
void check_integers(const Operation& op, const Layout& a, const Layout& b, const Layout& d, const Sizes& s) {
  require(a.type == CUDA_R_8I && b.type == CUDA_R_8I && d.type == CUDA_R_32I, "int8 operands, an int32 result");
  require(op.compute == CUBLAS_COMPUTE_32I && op.scale_type == CUDA_R_32I, "integers: computes in int32");
  require(op.transpose_a == CUBLAS_OP_T && op.transpose_b == CUBLAS_OP_N, "integers: A transposed, B not");
  require(s.m % 4 == 0 && s.k % 4 == 0, "integers: m and k are multiples of 4");
  require(a.ld % 4 == 0 && b.ld % 4 == 0 && d.ld % 4 == 0, "integers: leading dimensions are multiples of 4");
  require(!op.a_scale && !op.b_scale, "integers are not scaled");
}

/// What heuristics check, too: everything but pointers.
Sizes check(const Operation& op, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const auto invalid = CUBLAS_STATUS_INVALID_VALUE;
  const bool ta = op.transpose_a == CUBLAS_OP_T, tb = op.transpose_b == CUBLAS_OP_T;
  const Sizes s{ta ? a.columns : a.rows, tb ? b.rows : b.columns, ta ? a.rows : a.columns};
  require((tb ? b.columns : b.rows) == s.k, "A and B have one k", invalid);
  require(d.rows == s.m && d.columns == s.n, "D is m x n", invalid);
  require(c.rows == d.rows && c.columns == d.columns && c.type == d.type, "C is like D", invalid);
  for (const Layout* layout : {&a, &b, &c, &d}) require(layout->ld >= layout->rows, "columns overlap", invalid);
  if (a.type == CUDA_R_8I || d.type == CUDA_R_32I) return check_integers(op, a, b, d, s), s;
  require(op.compute == CUBLAS_COMPUTE_32F && op.scale_type == CUDA_R_32F, "computes in float32");
  require(d.type == CUDA_R_32F || d.type == CUDA_R_16BF, "D is float32 or bfloat16");
  require(narrow(a.type) == narrow(b.type), "A and B are both narrow or neither");
  if (narrow(a.type)) {
    check_narrow(op, a, b, d, s);
  } else {
    require(a.type == CUDA_R_16BF && b.type == CUDA_R_16BF, "A and B are bfloat16");
    require(!op.a_scale && !op.b_scale && op.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && op.b_mode == op.a_mode,
            "only narrow types are scaled");
  }
  return s;
}

bool aligned(const void* pointer, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

/// Tells algorithms of different problems apart.
uint64_t fingerprint(const Operation& op, const Layout& a, const Layout& b, const Layout& d) {
  uint64_t hash = 14695981039346656037u;
  const auto add = [&](int64_t value) { hash = (hash ^ static_cast<uint64_t>(value)) * 1099511628211u; };
  for (const Layout* layout : {&a, &b, &d}) add(layout->type), add(layout->rows), add(layout->columns), add(layout->ld);
  add(op.transpose_a), add(op.transpose_b), add(op.pointer_mode), add(op.a_mode), add(op.b_mode), add(capability);
  return hash;
}

constexpr size_t kWorkspace = size_t{4} << 20;  // that its algorithms need

/// How its algorithms add up the parts of a split K, in the order of its suggestions. Those that do not split it reduce
/// nothing, and a mask of schemes does not exclude them.
constexpr cublasLtReductionScheme_t kAlgorithms[] = {CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, CUBLASLT_REDUCTION_SCHEME_NONE,
                                                     CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_NONE};

template <class T>
void take(T& to, const void* from, size_t size) {
  require(size == sizeof(T), "an attribute of another size", CUBLAS_STATUS_INVALID_VALUE);
  std::memcpy(&to, from, size);
}

// --- the arithmetic

/// The unit of the last of 13 bits below the leading one of `largest`, which is 0 or a normal number.
double unit_of(double largest) {
  uint64_t bits;
  std::memcpy(&bits, &largest, 8);
  bits &= uint64_t{0x7FF} << 52;
  double leading;
  std::memcpy(&leading, &bits, 8);
  return std::ldexp(leading, -13);
}

/// Cut, not rounded, to whole units. Not finite stays so.
double truncated(double value, double unit) { return unit == 0 ? value : std::trunc(value / unit) * unit; }

/// FP8 products as tensor cores of compute capability 8.9 and 9.0 add them up: an instruction aligns 32 of them and the
/// running sum with the largest, and cuts each to 13 bits. So it does with the sum.
double fp8_sum(const double* x, const double* y, int64_t count) {
  constexpr int64_t kInstruction = 32;
  double running = 0;
  for (int64_t l = 0; l < count; l += kInstruction) {
    const int64_t end = std::min(count, l + kInstruction);
    double largest = std::abs(running), sum = 0;
    for (int64_t i = l; i < end; ++i) largest = std::max(largest, std::abs(x[i] * y[i]));
    const double unit = unit_of(largest);
    for (int64_t i = l; i < end; ++i) sum += truncated(x[i] * y[i], unit);
    sum += truncated(running, unit);
    running = truncated(sum, unit_of(sum));
  }
  return running;
}

/// op(A) by rows, or op(B) by columns, and their scales.
struct Lines {
  std::vector<double> values, scales, scaled;

  Lines(const void* data, const Layout& layout, bool k_first, cublasLtMatmulMatrixScale_t mode, const void* given,
        int64_t count, int64_t k) {
    for (int64_t i = 0; i < count; ++i)
      for (int64_t l = 0; l < k; ++l) {
        values.push_back(element(data, layout.type, k_first ? l + i * layout.ld : i + l * layout.ld));
        scales.push_back(scale(mode, given, i, count, l, k));
        scaled.push_back(values.back() * scales.back());
      }
  }
};

/// The product of line i of x and line j of y from `first` on, up to `end`.
double sum_of(const Lines& x, int64_t i, const Lines& y, int64_t j, int64_t k, int64_t first, int64_t end, bool in_13_bits) {
  constexpr int64_t kPromotion = 128;  // a running sum is promoted to float32 after so much of k, which is a block, too
  const int64_t at_x = i * k, at_y = j * k;
  double sum = 0;
  if (!in_13_bits) {
    for (int64_t l = first; l < end; ++l) sum += x.scaled[at_x + l] * y.scaled[at_y + l];
    return sum;
  }
  for (int64_t l = first; l < end; l += kPromotion) {
    const double part = fp8_sum(&x.values[at_x + l], &y.values[at_y + l], std::min(kPromotion, end - l));
    sum = static_cast<float>(sum + part * x.scales[at_x + l] * y.scales[at_y + l]);
  }
  return sum;
}

float rounded_to(cudaDataType_t type, double value) {
  const float rounded = static_cast<float>(value);
  return type == CUDA_R_32F ? rounded : as_float(uint32_t{to_bf16(rounded)} << 16);
}

void multiply(const Operation& op, const Sizes& s, double alpha, double beta, cublasLtReductionScheme_t reduction,
              const void* a, const Layout& la, const void* b, const Layout& lb, const void* c, const Layout& lc, void* d,
              const Layout& ld) {
  const Lines x(a, la, op.transpose_a == CUBLAS_OP_T, op.a_mode, op.a_scale, s.m, s.k);
  const Lines y(b, lb, op.transpose_b == CUBLAS_OP_N, op.b_mode, op.b_scale, s.n, s.k);
  const bool integers = ld.type == CUDA_R_32I, in_13_bits = bits_of(la.type) == 8 && !integers && capability < 100;
  const bool in_output_type = reduction == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  const bool reads_c = beta != 0 || (op.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE && device_beta_reads);
  const int64_t half = reduction == CUBLASLT_REDUCTION_SCHEME_NONE ? 0 : blocks(s.k, 256) * 128;  // where a split K is split
  std::vector<double> result(s.m * s.n);
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t j = 0; j < s.n; ++j) {
      double parts[2] = {alpha * sum_of(x, i, y, j, s.k, 0, std::min(half, s.k), in_13_bits),
                         alpha * sum_of(x, i, y, j, s.k, std::min(half, s.k), s.k, in_13_bits)};
      if (in_output_type && !integers)
        for (double& part : parts) part = rounded_to(ld.type, part);
      result[i + j * s.m] = parts[0] + parts[1] + (reads_c ? beta * element(c, lc.type, i + j * lc.ld) : 0);
    }
  for (int64_t i = 0; i < s.m; ++i)
    for (int64_t j = 0; j < s.n; ++j) {
      if (integers) {
        static_cast<int32_t*>(d)[i + j * ld.ld] = static_cast<int32_t>(result[i + j * s.m]);
        continue;
      }
      const float rounded = rounded_to(ld.type, result[i + j * s.m]);
      if (ld.type == CUDA_R_32F)
        static_cast<float*>(d)[i + j * ld.ld] = rounded;
      else
        static_cast<uint16_t*>(d)[i + j * ld.ld] = to_bf16(rounded);
    }
}

}  // namespace

extern "C" {

void cublaslt_model_set_capability(int value) { capability = value; }
const char* cublaslt_model_refusal() { return refusal.c_str(); }
int cublaslt_model_handles() { return handles; }
int cublaslt_model_heuristics() { return heuristics; }
int cublaslt_model_algorithm() { return algorithm; }
void cublaslt_model_set_milliseconds(int algorithm, float milliseconds) { durations[algorithm] = milliseconds; }
float cublaslt_model_milliseconds() { return milliseconds; }
void cublaslt_model_refuse_blocks_below(int64_t depth, bool by_count) {
  least_block_depth = depth, refuses_by_count = by_count;
}
void cublaslt_model_device_beta_reads(bool reads) { device_beta_reads = reads; }

size_t cublasLtGetVersion() {
  const char* version = std::getenv("CUBLASLT_MODEL_VERSION");
  return version ? std::strtoul(version, nullptr, 10) : 130100;
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_SUCCESS ? "success" : refusal.c_str();
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  return guarded([&] { *handle = reinterpret_cast<cublasLtHandle_t>(static_cast<intptr_t>(++handles)); });
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t type) {
  *made = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation{compute, type});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
  delete reinterpret_cast<Operation*>(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t size) {
  auto& op = *reinterpret_cast<Operation*>(desc);
  return guarded([&] {
    switch (attribute) {
      case CUBLASLT_MATMUL_DESC_TRANSA: return take(op.transpose_a, value, size);
      case CUBLASLT_MATMUL_DESC_TRANSB: return take(op.transpose_b, value, size);
      case CUBLASLT_MATMUL_DESC_POINTER_MODE: return take(op.pointer_mode, value, size);
      case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return take(op.a_mode, value, size);
      case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return take(op.b_mode, value, size);
      case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return take(op.a_scale, value, size);
      case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return take(op.b_scale, value, size);
      default: require(false, "an attribute that is not modelled");
    }
  });
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows, uint64_t columns,
                                          int64_t ld) {
  *made = reinterpret_cast<cublasLtMatrixLayout_t>(
      new Layout{type, static_cast<int64_t>(rows), static_cast<int64_t>(columns), ld});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
  delete reinterpret_cast<Layout*>(made);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
  *made = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
  delete reinterpret_cast<Preference*>(made);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t size) {
  return guarded([&] {
    auto& to = *reinterpret_cast<Preference*>(preference);
    switch (attribute) {
      case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(to.workspace, value, size);
      case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return take(to.reductions, value, size);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return take(to.alignments[0], value, size);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return take(to.alignments[1], value, size);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return take(to.alignments[2], value, size);
      case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return take(to.alignments[3], value, size);
      default: require(false, "a preference that is not modelled");
    }
  });
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int* count) {
  return guarded([&] {
    ++heuristics;
    *count = 0;
    require(handle && wanted > 0, "a handle", CUBLAS_STATUS_NOT_INITIALIZED);
    const auto& op = as<Operation>(desc);
    const Sizes s = check(op, as<Layout>(a), as<Layout>(b), as<Layout>(c), as<Layout>(d));
    const auto& preferred = as<Preference>(preference);
    require(preferred.workspace >= kWorkspace, "no algorithm with so small a workspace");
    if (block128_mode(op.a_mode) && s.k < least_block_depth) {
      require(refuses_by_count, "no algorithm for so small a k");
      return;
    }
    for (const cublasLtReductionScheme_t reduction : kAlgorithms) {
      if (*count == wanted) break;
      if (reduction != CUBLASLT_REDUCTION_SCHEME_NONE && !(preferred.reductions & reduction)) continue;
      auto& result = results[*count] = {};
      result.algo.data[0] = fingerprint(op, as<Layout>(a), as<Layout>(b), as<Layout>(d));
      result.algo.data[1] = *count;
      for (int i = 0; i < 4; ++i) result.algo.data[2 + i] = preferred.alignments[i];
      result.algo.data[6] = reduction;
      result.workspaceSize = kWorkspace;
      ++*count;
    }
  });
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo, void* workspace,
                              size_t workspace_bytes, cudaStream_t) {
  return guarded([&] {
    const auto& op = as<Operation>(desc);
    const Layout &la = as<Layout>(a_layout), &lb = as<Layout>(b_layout), &lc = as<Layout>(c_layout),
                 &ld = as<Layout>(d_layout);
    const auto invalid = CUBLAS_STATUS_INVALID_VALUE;
    require(handle != nullptr, "a handle", CUBLAS_STATUS_NOT_INITIALIZED);
    require(alpha && beta && a && b && c && d, "no null pointers", invalid);
    const Sizes s = check(op, la, lb, lc, ld);
    require(algo && algo->data[0] == fingerprint(op, la, lb, ld), "an algorithm of another problem", invalid);
    require(workspace_bytes >= kWorkspace && aligned(workspace, 256), "a workspace of that size, aligned", invalid);
    const void* pointers[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
      require(aligned(pointers[i], 16), "aligned pointers");
      require(aligned(pointers[i], algo->data[2 + i]), "pointers aligned as the algorithm was told", invalid);
    }
    algorithm = static_cast<int>(algo->data[1]);
    milliseconds += durations[algorithm] + (loaded.insert({algo->data[0], algo->data[1]}).second ? 50 : 0);
    for (const auto& [mode, scales, lines] :
         {std::make_tuple(op.a_mode, op.a_scale, s.m), std::make_tuple(op.b_mode, op.b_scale, s.n)}) {
      require(mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F || (scales && aligned(scales, 16)), "aligned scales", invalid);
      require_zero_padding(mode, scales, lines, s.k);
    }
    require(op.pointer_mode == CUBLASLT_POINTER_MODE_HOST || op.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE,
            "one alpha and one beta");
    std::memset(workspace, 0xEE, 256);  // it is the algorithm's
    const auto factor = [&](const void* from) { return element(from, op.scale_type, 0); };
    multiply(op, s, factor(alpha), factor(beta), static_cast<cublasLtReductionScheme_t>(algo->data[6]), a, la, b, lb, c, lc,
             d, ld);
  });
}

}  // extern "C"
