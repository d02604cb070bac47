// What the kernels are asked to do: formats as jaxlowprec/arrays/formats.py describes them, and one struct per operation.
// The CPU's and the GPU's kernels take the same structs, with pointers into their own memory.
#pragma once

#include <cstdint>

#include "numerics/activations.h"
#include "numerics/code_types.h"

namespace jaxlowprec {

enum class ElementType : int32_t { kBF16, kF16, kF32 };
constexpr int element_bytes(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

// --- formats, as jaxlowprec/arrays/formats.py describes them

/// The scales that codes are multiplied by.
enum class Scaling : int32_t {
  kTwoLevel,  // NVFP4: an E4M3 scale per block, and the amax of the matrix
  kE8M0,      // MX: a power of two per block
  kFloat32,   // FP8 blockwise: a float32 per block
  kTensor,    // a float32 per matrix
  kFloat16,   // Int4: a bfloat16 or float16 per block, and zero points if it is asymmetric
  kRows,      // a float32, bfloat16 or float16 per line along the quantised axis
};

/// How an amax becomes an E8M0 scale (numerics.md 6), a block of NVFP4 gets its scale (2 and 13), and a line of 8-bit
/// integers its own (18).
enum class ScaleRule : int32_t {
  kUp,
  kFloor,
  kEven,
  kSix,
  kFourOverSix,
  kFourOverSixMse,
  kSearch,
  kDeploy,
  kCompressedTensors
};

struct Format {
  CodeType code;
  Scaling scaling;
  int32_t block;         // elements along the quantised axis that share a scale; 1 for kTensor and kRows
  bool tiles;            // block x block instead of 1 x block
  ScaleRule scale_rule;  // of kE8M0, kTwoLevel and 8-bit integers
  bool power_of_two;     // of kFloat32 and kTensor
  float amax_epsilon;    // of kFloat32 and kTensor
  ElementType scale_type = ElementType::kBF16;  // of kFloat16 and kRows
  bool column_major = false;                    // on GPUs, in 1 x block: scales lie as [blocks, rows]
  float least_scale = 0;                        // of kRows

  /// Whether a block takes the best of several scales.
  bool chooses_scales() const {
    return scale_rule == ScaleRule::kFourOverSix || scale_rule == ScaleRule::kFourOverSixMse ||
           scale_rule == ScaleRule::kSearch;
  }
  bool packed() const { return code == CodeType::kE2M1 || code == CodeType::kInt4; }  // two codes per byte
  int64_t blocks(int64_t elements) const { return (elements + block - 1) / block; }
  /// Bytes of codes of `columns` elements: packed ones fill whole blocks.
  int64_t row_bytes(int64_t columns) const { return packed() ? (blocks(columns) * block + 1) / 2 : columns; }
  int64_t scale_rows(int64_t rows) const { return scaling == Scaling::kTensor ? 1 : tiles ? blocks(rows) : rows; }
  int64_t scale_columns(int64_t columns) const {
    return scaling == Scaling::kTensor || scaling == Scaling::kRows ? 1 : blocks(columns);
  }
  int64_t scale_bytes() const {
    if (scaling == Scaling::kFloat16 || scaling == Scaling::kRows) return element_bytes(scale_type);
    return scaling == Scaling::kFloat32 || scaling == Scaling::kTensor ? 4 : 1;
  }
  /// Scales of a rows x columns matrix, each of scale_bytes().
  int64_t scales(int64_t rows, int64_t columns) const { return scale_rows(rows) * scale_columns(columns); }
};

/// Where stochastic rounding takes its bits from (numerics.md 4 and 14): global indices of the unsharded array.
struct Random {
  const uint32_t* key = nullptr;       // [batch, 2]; null: round to nearest
  const uint32_t* rows = nullptr;      // [rows of the quantised orientation]
  const uint32_t* sixteens = nullptr;  // [sixteens of the quantised axis]: runs of 16 elements
  uint32_t stream = 0;
  int64_t rows_step = 0, sixteens_step = 0;  // from one matrix's indices to the next's; 0: all have the same

  /// One matrix's.
  Random of(int64_t batch) const {
    return key ? Random{key + 2 * batch, rows + batch * rows_step, sixteens + batch * sixteens_step, stream} : Random{};
  }
};

/// One of the two ways to quantise a matrix: along its rows, or along its columns with the result stored K-major.
struct QuantizeDirection {
  const float* tensor = nullptr;  // [batch]: kTwoLevel and kTensor: the amax after rotation, or the encode scale; kRows:
                                  // [batch, lines], amaxes, or null, rowwise: they are found; else null
  uint8_t* data = nullptr;        // null: not wanted
  uint8_t* scale = nullptr;
  Random random;
  int64_t data_stride = 0, scale_stride = 0;  // columnwise, on the CPU: bytes from one line to the next; 0: lines adjoin
};

struct QuantizeProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  Format format;
  bool encode_scale_given;  // kTensor: `tensor` is what to multiply by
  QuantizeDirection rowwise, columnwise;
  bool rotate_columns;  // kTwoLevel: random Hadamard transform along the columns, for the columnwise direction
  uint32_t sign_mask;
  bool eden = false;  // kTwoLevel in 1x16: random bits are for scales, which are corrected for their codes' errors

  /// Whether there are random bits, and whether they are for codes.
  bool random() const { return rowwise.random.key || columnwise.random.key; }
  bool stochastic() const { return random() && !eden; }
};

/// Rows that are tensors of their own: NVFP4 in blocks of 1x16, to nearest, each row by the amax that is found of it.
struct RowScaledQuantizeProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  Format format;
  float* amax;  // [batch, rows]
  uint8_t* data;
  uint8_t* scale;
};

/// The amaxes of all lines: magnitude bits.
struct LineAmaxesProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  uint32_t* of_rows;     // [batch, rows]; null: not wanted
  uint32_t* of_columns;  // [batch, columns], zero on entry; null: not wanted
};

struct AmaxProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  uint32_t* plain;    // [batch] magnitude bits, zero on entry; null: not wanted
  uint32_t* rotated;  // the same after the random Hadamard transform along the columns
  uint32_t sign_mask;
};

enum class Activation : int32_t { kNone, kGeluTanh, kGeluTanhGradient };

/// Codes [batch, rows, format.row_bytes(columns)], contraction last, and [batch, format.scales(rows, columns)] scales.
struct MatmulOperand {
  Format format;
  const uint8_t* data;
  const uint8_t* scale;
  const float* amax;                                      // [batch]; kTwoLevel only, else null
  int64_t columns;                                        // K, up to padding to whole blocks of packed codes
  int64_t given_data_stride = 0, given_scale_stride = 0;  // on the CPU: bytes from one row to the next; 0: rows adjoin

  int64_t data_stride() const { return given_data_stride ? given_data_stride : format.row_bytes(columns); }
  int64_t scale_stride() const {
    return given_scale_stride ? given_scale_stride : format.scale_columns(columns) * format.scale_bytes();
  }
};

/// The epilogue of a GEMM and its result: sums + bias, activation, + accumulate, one cast (numerics.md 9).
struct MatmulResult {
  int64_t batch, rows, columns;  // M, N
  const float* bias;             // [batch, columns]; null: none
  const void* accumulate;        // [batch, rows, columns] of `accumulate_type`; null: none
  ElementType accumulate_type;
  Activation activation;
  void* pre_activation;          // kGeluTanh: what it was applied to, of the result's type; null: not wanted
  const void* activation_input;  // kGeluTanhGradient: where the derivative is taken [batch, rows, columns]
  ElementType activation_input_type;
  void* result;  // [batch, rows, columns]
  ElementType type;
  int64_t threads;  // how many may share the work: only the sizes of the chunks depend on it
};

struct MatmulProblem : MatmulResult {
  MatmulOperand a, b;
  bool float32_sums = false;  // on GPUs: sums in float32 (numerics.md 9) are wanted more than speed

  /// K. Packed codes may be padded further than the other operand's: with zeros, which add nothing.
  int64_t depth() const { return a.columns < b.columns ? a.columns : b.columns; }
  /// Both operands 4-bit: dot products of a block are exact integers.
  bool packed() const { return a.format.packed() && b.format.packed(); }
};

constexpr int64_t kMostInt8Depth = 131'072;                        // products of 8-bit integers whose sum 32 bits hold
constexpr int32_t kLeastNibbleGroup = 32, kMostNibbleGroup = 256;  // of a 4-bit weight that 8-bit integers are multiplied by

/// Whether there is a GEMM for a pair of operands (numerics.md 5 and 9).
inline bool matmul_supports(const MatmulProblem& p) {
  const Format &a = p.a.format, &b = p.b.format;
  if (a.code == CodeType::kInt4) return false;
  if (a.code == CodeType::kInt8 && (b.code == CodeType::kInt4 || (b.packed() && b.scaling == Scaling::kE8M0)))
    return b.block >= kLeastNibbleGroup && kMostNibbleGroup % b.block == 0 && b.blocks(p.a.columns) == b.blocks(p.b.columns);
  if (a.scaling == Scaling::kFloat32 && b.scaling == Scaling::kE8M0 && b.packed())
    return !a.tiles && b.blocks(p.a.columns) == b.blocks(p.b.columns);
  if (a.scaling != b.scaling) return false;
  if ((a.code == CodeType::kInt8) != (b.code == CodeType::kInt8)) return false;
  if (a.code == CodeType::kInt8 && p.depth() > kMostInt8Depth) return false;
  if (a.code == b.code && !meets_itself(a.code)) return false;
  if (a.scaling == Scaling::kFloat32 && a.tiles && b.tiles) return false;
  const bool mixed = a.packed() != b.packed();
  return mixed ? a.blocks(p.a.columns) == b.blocks(p.b.columns) : p.a.columns == p.b.columns;
}

/// Activations in high precision by a quantised weight.
struct WeightOnlyProblem : MatmulResult {
  const void* x;  // [batch, rows, depth]
  ElementType x_type;
  int64_t depth;              // K
  MatmulOperand weight;       // `columns` is K
  const uint8_t* zero_point;  // as the scales, 0 to 15; null: none
};

struct DequantizeProblem {
  Format format;
  const uint8_t* data;   // [batch, rows, format.row_bytes(columns)]
  const uint8_t* scale;  // [batch, format.scales(rows, columns)]
  const float* amax;     // [batch]; kTwoLevel only, else null
  int64_t batch, rows, columns;
  bool rotate;  // undo a random Hadamard transform of size 16 along the rows
  uint32_t sign_mask;
  void* result;
  ElementType type;
};

/// 4-bit integers with a 16-bit scale per group, as jaxlowprec.Int4 by its "deploy" rule.
struct Int4Format {
  int64_t group;      // elements along the quantised axis that share a scale
  bool symmetric;     // else a zero point a group
  ElementType scale;  // kBF16 or kF16: the deployment dtype

  int64_t groups(int64_t length) const { return (length + group - 1) / group; }
  /// Bytes of codes of a line: groups are filled up with zeros.
  int64_t line_bytes(int64_t length) const { return (groups(length) * group + 1) / 2; }
};

/// A matrix with the axis that groups run along: its rows or, columnwise, its columns. A line is a run of that axis; codes,
/// scales and zero points are stored line by line, which is K-major where columnwise.
struct Int4Matrices {
  int64_t batch, rows, columns;
  bool columnwise;
  Int4Format format;

  int64_t lines() const { return columnwise ? columns : rows; }
  int64_t length() const { return columnwise ? rows : columns; }
  int64_t groups() const { return format.groups(length()); }  // of a line
  int64_t line_bytes() const { return format.line_bytes(length()); }
  int64_t size() const { return rows * columns; }
};

struct Int4FakeQuantizeProblem : Int4Matrices {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  void* result;  // of the same type, which is kF32 or the deployment dtype
};

struct Int4QuantizeProblem : Int4Matrices {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  uint8_t* data;    // [batch, lines, line bytes]
  uint16_t* scale;  // [batch, lines, groups]
  uint8_t* zero;    // the same; null where symmetric
};

struct Int4DequantizeProblem : Int4Matrices {
  const uint8_t* data;    // [batch, lines, line bytes]
  const uint16_t* scale;  // [batch, lines, groups]
  const uint8_t* zero;    // the same; null where symmetric
  void* result;           // [batch, rows, columns]
  ElementType type;
};

struct HadamardProblem {
  const void* x;  // [rows, columns], transformed along its rows in pieces of `size`; or, if `vertical`, along its columns
  ElementType type;
  int64_t batch, rows, columns;
  int32_t size;
  bool vertical, inverse;
  const uint32_t* sign_bits;  // [size], 0 or the sign bit; not read where signs are drawn
  void* result;
  const uint32_t* drawn_signs = nullptr;  // [batch, 4]: sign i is negative where bit i % 32 of word i / 32 is set; or null

  /// The sign bit of each element of a transform of matrix `batch`, from the host's memory.
  void signs_of(int64_t batch, uint32_t* bits) const {
    for (int32_t i = 0; i < size; ++i)
      bits[i] = drawn_signs ? (drawn_signs[4 * batch + i / 32] >> (i % 32)) << 31 : sign_bits[i];
  }
};

constexpr int32_t kDrawnSigns = 128;  // of a matrix: longer transforms have fixed ones

// --- activations and norms, which make the operands of GEMMs (numerics.md 12)

/// The tensor amaxes that a kernel takes of a result while it writes it: those of an AmaxProblem on the result.
struct ResultAmaxes {
  uint32_t* plain = nullptr;    // [batch] magnitude bits, zero on entry; null: not wanted
  uint32_t* rotated = nullptr;  // the same after the random Hadamard transform along the columns
  uint32_t sign_mask = 0;

  bool wanted() const { return plain || rotated; }
};

/// Sums over rows (numerics.md 12.3): of parts of kSummedRows rows, which AddPartsProblem adds up.
constexpr int64_t kSummedRows = 64;

inline int64_t summed_parts(int64_t rows) { return (rows + kSummedRows - 1) / kSummedRows; }

struct SumOverRowsProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  float* sums = nullptr;  // [batch, parts(), columns]

  int64_t sums_each() const { return columns; }
  int64_t parts() const { return summed_parts(rows); }
};

/// Parts' sums, added up: of every kAddedApart-th part from each of the first ones, in ascending order; then these sums, in
/// order.
constexpr int kAddedApart = 8;

struct AddPartsProblem {
  const float* found;  // [batch, parts, step], of which the first `columns`
  int64_t step, batch, parts, columns;
  float* result;  // [batch, columns]
};

struct ActivationProblem {
  const void* x;   // [batch, size]
  const void* up;  // [batch, size], that the activation is multiplied by; null: none
  ElementType type;
  int64_t batch, size;  // elements of a matrix; without amaxes all matrices may be taken as one
  ActivationKind kind;
  void* result;         // [batch, size]
  int64_t columns = 0;  // of a matrix; needed for amaxes only
  ResultAmaxes amaxes = {};
};

struct ActivationGradientProblem {
  const void *dy, *x, *up;  // [batch, size]; up null: none
  ElementType type;
  int64_t batch, size;  // as in ActivationProblem
  ActivationKind kind;
  void *dx, *dup;       // [batch, size]; dup null without up
  int64_t columns = 0;  // as in ActivationProblem, and for sums
  ResultAmaxes of_dx = {}, of_dup = {};
  float* sums = nullptr;  // [batch, parts(), sums_each()]: of dx, then of dup, over a part's rows; null: none

  int64_t rows() const { return size / columns; }
  int64_t sums_each() const { return (up ? 2 : 1) * columns; }
  int64_t parts() const { return summed_parts(rows()); }
};

/// An activation that is quantised and not stored.
struct ActivationQuantizeProblem : ActivationProblem {
  QuantizeProblem quantize;  // of the activation, which is no array; of a format without a tensor scale
};

/// Gradients that are quantised, to nearest, and not stored.
struct ActivationGradientQuantizeProblem : ActivationGradientProblem {
  QuantizeProblem quantize[2];  // of the gradients of x and of up, alike
};

enum class NormKind : int32_t { kRms, kLayer };

struct NormProblem {
  NormKind kind;
  ElementType type;  // of x, the residual and the results
  int64_t batch, rows, columns;
  float epsilon;
  const void *x, *residual;    // [batch, rows, columns]; residual null: none
  const float *weight, *beta;  // [batch, columns]: gamma or 1 + gamma; beta null: none
  void *result, *total;        // [batch, rows, columns]; total: x + residual, null without
  float *mean, *inverse;       // [batch, rows]; mean of kLayer only, else null
  ResultAmaxes amaxes = {};    // of `result`
};

/// A norm that is quantised and not stored.
struct NormQuantizeProblem : NormProblem {
  QuantizeProblem quantize;  // of the norm, which is no array; of a format without a tensor scale
};

constexpr int64_t kGradientParts = 512;  // at most, of a matrix

struct NormGradientProblem {
  NormKind kind;
  ElementType type;  // of dy, x, the sum's gradient and the result
  int64_t batch, rows, columns;
  const void *dy, *of_total, *x;  // [batch, rows, columns]; of_total: the gradient of x + residual, null without
  const float* weight;            // [batch, columns]
  const float *mean, *inverse;    // [batch, rows]
  void* dx;                       // [batch, rows, columns]
  bool has_beta = false;          // whether dy is summed, too
  float* sums = nullptr;  // [batch, parts, sums_each()]: of dy * n, then of dy, over a part's rows; null, on the CPU: none

  int64_t sums_each() const { return (1 + has_beta) * columns; }
  /// Rows of a part on the CPU (the GPU's: cuda/producers/norm_parts.h): enough that the sums are few bytes beside them, and
  /// that adding them up is little work.
  int64_t rows_each() const {
    constexpr int64_t kElements = 16 * 1024, kRows = 32;
    const int64_t parts = (rows + kGradientParts - 1) / kGradientParts, elements = kElements / columns;
    const int64_t most = parts > elements ? parts : elements;
    return most > kRows ? most : kRows;
  }
  int64_t parts() const { return (rows + rows_each() - 1) / rows_each(); }
};

// --- AdamW and Lion in one pass (numerics.md 19)

/// A moment: float32 numbers, or codes and the exponents of their blocks. The new one may take the place of the old one.
struct MomentState {
  const float* numbers = nullptr;      // [batch, rows, columns]; null: it is coded
  const uint8_t* codes = nullptr;      // [batch, rows, columns]
  const uint8_t* exponents = nullptr;  // [batch, rows, blocks()]
  float* new_numbers = nullptr;
  uint8_t* new_codes = nullptr;
  uint8_t* new_exponents = nullptr;
  bool stochastic = false;  // the codes are
};

/// How a weight is kept.
enum class WeightKind : int32_t {
  kFloat32,
  kNearest,  // bfloat16, ties to even
  kDrawn,    // bfloat16, rounded by draws
  kRest8,    // bfloat16 and a remainder of int8
  kRest16,   // of int16
};

enum class UpdateRule { kAdamW, kLion };

struct OptimizerUpdateProblem {
  UpdateRule rule;
  int64_t batch, rows, columns;
  const void* g;  // [batch, rows, columns], kBF16 or kF32
  ElementType g_type;
  WeightKind weight;
  const void* p;                  // [batch, rows, columns]
  const void* rest;               // the same; null: there is none
  void* new_p;                    // may be p; null: the update is wanted
  float* update;                  // or null
  void* new_rest;                 // may be rest
  MomentState mu, nu;             // with a sign, and without; Lion has no nu
  const float* scalars;           // [batch, 9 or 6]: those of the rule
  const uint32_t* words;          // [batch, 2, 2]: of the draws for both moments, and for the weight; null: nothing is drawn
  const uint32_t* row_numbers;    // [rows]: places in the whole array, of rows
  const uint32_t* block_numbers;  // [blocks()]: and of 32 elements of a row

  int64_t blocks() const { return (columns + 31) / 32; }
  bool drawn() const { return words != nullptr; }
};

// --- what quantisation did to an array (jaxlowprec/ops/statistics); parts are counted one by one, in any order, then added
// up in theirs

constexpr int64_t kMomentsElements = 32 * 1024, kOutlierRows = 256, kOutlierParts = 64, kSumsLines = 128;

struct MomentsProblem {
  const void* x;
  ElementType type;
  int64_t batch, size;  // elements of a matrix
  float* result;        // [batch, parts(), 2]: largest finite magnitude, root mean square

  int64_t parts() const { return (size + kMomentsElements - 1) / kMomentsElements; }
  int64_t size_of(int64_t part) const {
    const int64_t rest = size - part * kMomentsElements;
    return rest < kMomentsElements ? rest : kMomentsElements;
  }
};

struct OutliersProblem {
  const void* x;
  ElementType type;
  int64_t batch, rows, columns;
  const float* threshold;  // [batch]
  int32_t* result;         // [batch, parts(), columns]

  int64_t rows_each() const {
    const int64_t even = (rows + kOutlierParts - 1) / kOutlierParts;
    return even > kOutlierRows ? even : kOutlierRows;
  }
  int64_t parts() const { return (rows + rows_each() - 1) / rows_each(); }
};

/// What is counted of each part: the sums that jaxlowprec/ops/statistics/reference.py names, blocks (of kTensor: lines) by
/// their scale's bin, elements by their code's bin.
constexpr int kSumsScalesFrom = 16, kSumsScales = 256, kSumsCodesFrom = kSumsScalesFrom + kSumsScales, kSumsCodes = 32;
constexpr int kSums = kSumsCodesFrom + kSumsCodes;
constexpr int kRangeEvery = 16, kRangeRun = 128;

struct SumsProblem {
  const void* x;  // [batch, rows, columns]
  ElementType type;
  int64_t batch, rows, columns;
  bool columnwise;       // the codes are those of x's columns, K-major
  Format format;         // not Int4
  const uint8_t* data;   // [batch, lines(), format.row_bytes(length())]
  const uint8_t* scale;  // [batch, format.scales(lines(), length())]
  const float* amax;     // [batch]; kTwoLevel only, else null
  const float* unit;     // [batch]
  float* result;         // [batch, parts(), kSums]

  int64_t lines() const { return columnwise ? columns : rows; }
  int64_t length() const { return columnwise ? rows : columns; }
  int64_t parts() const { return (lines() + kSumsLines - 1) / kSumsLines; }
};

}  // namespace jaxlowprec
