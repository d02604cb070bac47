// NVFP4 quantisation along rows, along columns, or both in one pass over the input (numerics.md 2 to 4, 13 and 14).
//
// Rows: a packet of kLanes blocks at a time. The maxima of 8 vectors fold pairwise until lane b holds block b's amax, scale
// bytes and their inverses are computed for all blocks at once, and the codes of two neighbours meet in one byte. Scales of
// a span of packets come before their codes, so that one packet's long chain of dependent steps hides behind the others'.
// Columns: 16 rows of a vector of columns at a time, so that a block's amax and its rotation are vertical; the 16 codes of a
// column gather in 8 bytes, and 128 rows of them make one 64-byte line of the K-major result.
// Bytes moved per element: the input once (twice with the amax), 9/16 written a direction.
#pragma once

#include "../../numerics/hadamard.h"
#include "../../numerics/nvfp4.h"
#include "../../problems.h"
#include "../tiles.h"
#include "codes.h"
#include "eden.h"
#include "random.h"

namespace jaxlowprec {
namespace JLP_ISA {

/// What one matrix of the batch is quantised with.
struct DirectionContext {
  Nvfp4TensorScale tensor;
  RoomScale room;  // where scales are chosen or corrected
  Random random;   // its own
  alignas(64) uint32_t signs[kBlock];

  DirectionContext(const QuantizeDirection& direction, int64_t batch, uint32_t sign_mask)
      : tensor(nvfp4_tensor_scale(direction.tensor[batch])),
        room(direction.tensor[batch]),
        random(direction.random.of(batch)) {
    for (int r = 0; r < kBlock; ++r) signs[r] = ((sign_mask >> r) & 1u) << 31;
  }
};

// --- scales

/// Scale bytes and inverse scales of kLanes blocks. False when a block is out of the ordinary: its scaled elements may
/// saturate (the scale underflowed, or the given amax was too small), or it is poisoned: it holds NaN or infinity though the
/// given amax was finite. A poisoned block's scale and inverse scale are NaN and its codes 0.
JLP_RULE bool block_scales(U32 amax, const Nvfp4TensorScale& tensor, U32& scale, F32& encode) {
  F32 decoded;
  scale = nvfp4_block_scale(L::from_bits(amax), tensor.multiplier, decoded);
  encode = nvfp4_block_encode_by_value(decoded, tensor.decode);
  const bool ordinary = all_below(L::from_bits(amax) * encode, 7.0f);
  if (__builtin_expect(!ordinary, 0)) {
    scale = amax >= kInfinityBits ? fill<F32>(kFloat8NaN) : scale;
    encode = amax >= kInfinityBits ? L::from_bits(fill<F32>(kNaNBits)) : encode;
  }
  return ordinary;
}

// --- rows

/// Packets of a row (or of the rows of a slab) that lie together in memory: their scales, then their codes.
struct Span {
  alignas(64) float encode[kSpan][kLanes];
  alignas(64) uint8_t scale[kSpan][kLanes];
  bool ordinary;

  template <class E>
  __attribute__((noinline)) void compute(const typename E::Storage* x, int packets, const Nvfp4TensorScale& tensor) {
    compute_by([&](int g) { return E::block_amax(x + g * kPacket); }, packets, tensor);
  }

  /// From the blocks' amaxes.
  __attribute__((noinline)) void compute(const uint32_t* amaxes, int packets, const Nvfp4TensorScale& tensor) {
    compute_by([&](int g) { return load<U32>(amaxes + g * kLanes); }, packets, tensor);
  }

 private:
  template <class Amax>
  __attribute__((always_inline)) void compute_by(Amax amax, int packets, const Nvfp4TensorScale& tensor) {
    ordinary = true;
    for (int g = 0; g < packets; ++g) {
      U32 scales;
      F32 factors;
      ordinary &= block_scales(amax(g), tensor, scales, factors);
      store(encode[g], factors);
      store_low_bytes(scale[g], scales);
    }
  }
};

/// The codes of packets that lie together, each by factors of its own or all by the same (kShared). Meanwhile as many of
/// `ahead` are fetched.
template <class E, bool kStochastic, bool kShared>
__attribute__((noinline)) void encode_packets(const typename E::Storage* x, int packets, const float* __restrict encode,
                                              bool ordinary, const RandomSpan& random, const PacketsAhead<E>& ahead,
                                              uint8_t* __restrict data) {
  for (int g = 0; g < packets; ++g, data += kPacketBytes) {
    ahead.fetch(g);
    quantize_row_packet<E, kStochastic>(x + g * kPacket, encode + (kShared ? 0 : g * kLanes), ordinary, random.bytes[g],
                                        data);
  }
}

/// A run of elements of a row, each 1x16 block by the best of several scales or, with `eden`, by a corrected one.
template <class E>
__attribute__((noinline)) void quantize_row_run_by_best(const typename E::Storage* x, int64_t elements, ScaleRule rule,
                                                        bool eden, const DirectionContext& context, uint32_t row,
                                                        const uint32_t* blocks, uint8_t* data, uint8_t* scale) {
  const auto encode = with_span(rule, eden, [](auto span) { return encode_best_packets<E, typename decltype(span)::Type>; });
  ScaleBits random;
  const uint32_t* bits = eden ? random.bits : nullptr;
  while (elements >= kPacket) {
    const int packets = static_cast<int>(std::min<int64_t>(kSpan, elements / kPacket));
    if (eden) random.compute(context.random, &row, 1, blocks, packets), blocks += packets * kLanes;
    encode(x, packets, context.room, bits, {x + kSpan * kPacket, kPacket}, data, scale);
    x += packets * kPacket, elements -= packets * kPacket, data += packets * kPacketBytes, scale += packets * kLanes;
  }
  if (elements == 0) return;
  alignas(64) typename E::Storage padded[kPacket] = {};
  alignas(64) uint8_t codes[kPacketBytes], scales[kLanes];
  alignas(64) uint32_t padded_blocks[kLanes] = {};
  const int count = static_cast<int>(divide_up(elements, kBlock));
  memcpy(padded, x, elements * sizeof *x);
  if (eden) memcpy(padded_blocks, blocks, count * sizeof *blocks), random.compute(context.random, &row, 1, padded_blocks, 1);
  encode(padded, 1, context.room, bits, {padded, 0}, codes, scales);
  memcpy(data, codes, count * 8);
  memcpy(scale, scales, count);
}

/// A run of elements of one row, quantised with 1x16 blocks, whose amaxes are given, of whole packets, or else found.
template <class E>
__attribute__((noinline)) void quantize_row_run(const typename E::Storage* x, int64_t elements, bool stochastic,
                                                const DirectionContext& context, uint32_t row, const uint32_t* blocks,
                                                uint8_t* data, uint8_t* scale, const uint32_t* amaxes = nullptr) {
  Span span;
  RandomSpan random;
  const auto scales_of = [&](const typename E::Storage* from, int packets) {
    if (!amaxes) return span.compute<E>(from, packets, context.tensor);
    span.compute(amaxes, packets, context.tensor);
    amaxes += packets * kLanes;
  };
  const auto encode = stochastic ? encode_packets<E, true, false> : encode_packets<E, false, false>;
  while (elements >= kPacket) {
    const int packets = static_cast<int>(std::min<int64_t>(kSpan, elements / kPacket));
    scales_of(x, packets);
    if (stochastic) random.compute(context.random, &row, 1, blocks, packets), blocks += packets * kLanes;
    encode(x, packets, span.encode[0], span.ordinary, random, {x + kSpan * kPacket, kPacket}, data);
    memcpy(scale, span.scale, packets * kLanes);
    x += packets * kPacket, elements -= packets * kPacket, data += packets * kPacketBytes, scale += packets * kLanes;
  }
  if (elements == 0) return;
  alignas(64) typename E::Storage padded[kPacket] = {};
  alignas(64) uint8_t codes[kPacketBytes];
  alignas(64) uint32_t padded_blocks[kLanes] = {};
  const int count = static_cast<int>(divide_up(elements, kBlock));
  memcpy(padded, x, elements * sizeof *x);
  if (stochastic) memcpy(padded_blocks, blocks, count * sizeof *blocks);
  scales_of(padded, 1);
  if (stochastic) random.compute(context.random, &row, 1, padded_blocks, 1);
  encode(padded, 1, span.encode[0], span.ordinary, random, {padded, 0}, codes);
  memcpy(data, codes, count * 8);
  memcpy(scale, span.scale, count);
}

// --- columns

/// A slab's columns rotated and rounded to the element type.
template <class E>
__attribute__((noinline)) void rotate_columns(const CachedSlab<E>& slab, const uint32_t* signs,
                                              typename E::Storage (*rotated)[kPacket]) {
  for (int j = 0; j < kPacket; j += 2 * kLanes) {
    F32 even[kBlock], odd[kBlock];
    JLP_UNROLL(16)
    for (int r = 0; r < kBlock; ++r) even[r] = L::from_bits(L::bits(E::load_pair(&slab.x[r][j]).even) ^ signs[r]);
    hadamard_butterfly<kBlock>(even);
    JLP_UNROLL(16)
    for (int r = 0; r < kBlock; ++r) odd[r] = L::from_bits(L::bits(E::load_pair(&slab.x[r][j]).odd) ^ signs[r]);
    hadamard_butterfly<kBlock>(odd);
    JLP_UNROLL(16)
    for (int r = 0; r < kBlock; ++r) E::store_numbers(&rotated[r][j], {even[r] * 0.25f, odd[r] * 0.25f});
  }
}

/// Scale bytes of the blocks of a slab's columns, and what their elements are multiplied by. False as block_scales.
template <class E>
__attribute__((noinline)) bool column_scales(const typename E::Storage* x, const Nvfp4TensorScale& tensor, float* encode,
                                             uint8_t* scale) {
  alignas(64) uint32_t amax[kPacket];
  for (int i = 0; i < kPacket; i += 2 * kLanes) E::column_amax(x + i, kBlock, kPacket, amax + i);
  bool ordinary = true;
  for (int i = 0; i < kPacket; i += kLanes) {
    U32 scales;
    F32 factors;
    ordinary &= block_scales(load<U32>(amax + i), tensor, scales, factors);
    store(encode + i, factors), store_low_bytes(scale + i, scales);
  }
  return ordinary;
}

/// A K-major tile under construction: of each slab 8 bytes of codes a column, those of the even columns first, and a scale a
/// column.
struct ColumnTile {
  alignas(64) uint64_t codes[kSlabs][2][kPacket / 2];
  alignas(64) uint8_t scale[kSlabs][kPacket];
};

/// The 16 codes of each of kLanes columns: rows 0 to 7 in codes[0], 8 to 15 in codes[1].
template <class E, bool kStochastic, bool kSaturate, bool kOdd>
JLP_RULE void encode_columns(const typename E::Storage* x, F32 factor, const U32 (&random)[4], U32 (&codes)[2]) {
  constexpr uint32_t kOffsets = kCodeOffset<kStochastic> * 0x11111111u;  // of 8 codes, a nibble apart, modulo 2^32
  JLP_UNROLL(2)
  for (int half = 0; half < 2; ++half) {
    U32 sum = fill<F32>(0u - kOffsets), signs = U32{};
    const auto add = [&](auto place) {
      constexpr int i = decltype(place)::value;
      const int r = 8 * half + i;
      const Pair pair = E::load_pair(x + r * kPacket);
      const F32 y = L::scaled(kOdd ? pair.odd : pair.even, factor);
      sum += code_bits<kStochastic, kSaturate, 8 * (i % 4)>(y, random[r / 4]) << (4 * i);
      signs |= (L::bits(y) & kSignBit) >> (28 - 4 * i);
    };
    for_each_place(add, std::make_integer_sequence<int, 8>());
    codes[half] = sum | signs;
    if (kSaturate) codes[half] = factor != factor ? U32{} : codes[half];  // poisoned
  }
}

/// Random words of the even and the odd columns of `pairs` pairs. Not inlined: every kind of slab shares it.
__attribute__((noinline)) static void random_pairs(const Random& random, const uint32_t* columns, uint32_t block, int pairs,
                                                   U32 (*words)[2][4]) {
  const RandomKey key(random);
  for (int j = 0; j < pairs; ++j) {
    const U32 a = load<U32>(columns + 2 * kLanes * j), b = load<U32>(columns + 2 * kLanes * j + kLanes);
    random_columns(key, shuffle<EvenLanes>(a, b), block, words[j][0]);
    random_columns(key, shuffle<OddLanes>(a, b), block, words[j][1]);
  }
}

/// The codes of a slab's columns. `encode` is what each column is multiplied by; of `random` byte r is row r's. Meanwhile 16
/// rows of `ahead` are fetched.
template <class E, bool kStochastic, bool kSaturate>
__attribute__((noinline)) void encode_slab_columns(const typename E::Storage* x, const float* encode,
                                                   const U32 (*random)[2][4], int pairs, const PacketsAhead<E>& ahead,
                                                   uint64_t (&codes)[2][kPacket / 2]) {
  for (int j = 0; j < pairs; ++j, x += 2 * kLanes, encode += 2 * kLanes) {
    for (int r = 2 * j; r < 2 * j + kBlock / kPairs; ++r) ahead.fetch(r);
    const F32 low = load<F32>(encode), high = load<F32>(encode + kLanes);
    const auto& words = random[kStochastic ? j : 0];
    U32 even[2], odd[2];
    encode_columns<E, kStochastic, kSaturate, false>(x, shuffle<EvenLanes>(low, high), words[0], even);
    encode_columns<E, kStochastic, kSaturate, true>(x, shuffle<OddLanes>(low, high), words[1], odd);
    store_interleaved(&codes[0][kLanes * j], even[0], even[1]);
    store_interleaved(&codes[1][kLanes * j], odd[0], odd[1]);
  }
}

/// The K-major half of one slab, by the factors in `encode`.
template <class E, bool kStochastic>
void quantize_slab_columns(const typename E::Storage* x, int columns, const DirectionContext& context, const float* encode,
                           bool ordinary, const uint32_t* rows, uint32_t block, const PacketsAhead<E>& ahead,
                           uint64_t (&codes)[2][kPacket / 2]) {
  const int pairs = static_cast<int>(divide_up(columns, 2 * kLanes));
  U32 random[kStochastic ? kPairs : 1][2][4];
  if constexpr (kStochastic) random_pairs(context.random, rows, block, pairs, random);
  if (__builtin_expect(ordinary, 1))
    encode_slab_columns<E, kStochastic, false>(x, encode, random, pairs, ahead, codes);
  else
    encode_slab_columns<E, kStochastic, true>(x, encode, random, pairs, ahead, codes);
}

/// Codes of `slabs` slabs to their lines, `stride` bytes apart.
__attribute__((noinline)) static void store_column_codes(const ColumnTile& tile, int slabs, int columns, uint8_t* data,
                                                         int64_t stride) {
  for (int odd = 0; odd < 2; ++odd)
    for (int i = 0; 2 * i + odd < columns; i += kWords) {
      alignas(64) uint8_t lines[kWords][8 * kSlabs];
      for (int s = 0; s < kSlabs; s += kWords) {
        U32 v[kWords];
        JLP_UNROLL(8)
        for (int k = 0; k < kWords; ++k) v[k] = load<U32>(&tile.codes[s + k][odd][i]);
        transpose_words(v);
        JLP_UNROLL(8)
        for (int k = 0; k < kWords; ++k) store(&lines[k][8 * s], v[k]);
      }
      for (int k = 0; k < kWords; ++k) {
        const int column = 2 * (i + k) + odd;
        if (column < columns) store_line(data + column * stride, lines[k], 8 * slabs);
      }
    }
}

/// Scales of `slabs` slabs to their lines, `stride` bytes apart.
__attribute__((noinline)) static void store_column_scales(const ColumnTile& tile, int slabs, int columns, uint8_t* scale,
                                                          int64_t stride) {
  for (int column = 0; column < columns; column += 16) {
    Bytes16 v[kSlabs];
    JLP_UNROLL(8)
    for (int s = 0; s < kSlabs; ++s) v[s] = load<Bytes16>(&tile.scale[s][column]);
    transpose(v);
    uint8_t bytes[16][kSlabs];
    memcpy(bytes, v, sizeof bytes);
    for (int i = 0; i < std::min(16, columns - column); ++i) {
      uint8_t* to = scale + (column + i) * stride;
      if (slabs == kSlabs)
        memcpy(to, bytes[i], kSlabs);
      else
        memcpy(to, bytes[i], slabs);
    }
  }
}

// --- slabs and tiles

/// Scales of a slab's 16x16 tiles from the maxima of its rows' blocks.
template <class E>
JLP_RULE bool tile_scales(const CachedSlab<E>& slab, const Format& format, const DirectionContext& context, float* encode,
                          uint8_t* scale) {
  U32 amax = U32{};
  for (int r = 0; r < kBlock; ++r) amax = max_magnitude(amax, E::block_amax(slab.x[r]));
  U32 scales;
  F32 factors;
  bool ordinary;
  if (format.chooses_scales()) {
    const auto best =
        with_scale_error(format.scale_rule, [](auto error) { return best_tile_scales<E, decltype(error)::value>; });
    best(slab.x, amax, context.room, scales, factors);
    ordinary = all_below(L::from_bits(amax) * factors, 7.0f);
  } else {
    ordinary = block_scales(amax, context.tensor, scales, factors);
  }
  store(encode, factors);
  store_low_bytes(scale, scales);
  return ordinary;
}

/// Bytes from one line of a direction to the next.
struct LineStrides {
  int64_t data, scale;

  LineStrides(const QuantizeDirection& direction, int64_t blocks)
      : data(direction.data_stride ? direction.data_stride : blocks * 8),
        scale(direction.scale_stride ? direction.scale_stride : blocks) {}
};

/// One operation on one matrix of the batch, from one type of elements.
template <class E>
struct QuantizeNvfp4 {
  using Storage = typename E::Storage;
  bool stochastic, eden;

  static int64_t row_blocks(const QuantizeProblem& p) { return divide_up(p.columns, kBlock); }
  static int64_t column_blocks(const QuantizeProblem& p) { return divide_up(p.rows, kBlock); }

  /// The rowwise half of one slab.
  void slab_rows(const QuantizeProblem& p, int64_t batch, const CachedSlab<E>& slab, const DirectionContext& context,
                 const float* tile_encode, bool tiles_ordinary, int64_t row, int64_t column,
                 const PacketsAhead<E>& ahead) const {
    const int64_t blocks = row_blocks(p), block = column / kBlock;
    const int count = static_cast<int>(divide_up(slab.columns, kBlock));
    const bool best = by_best(p);
    Span span;
    if (!p.format.tiles && !best) span.compute<E>(slab.x[0], kBlock, context.tensor);
    alignas(64) uint32_t ids[kLanes] = {};
    if (stochastic || eden) memcpy(ids, context.random.sixteens + block, count * sizeof *ids);
    ScaleBits scale_bits;
    if (eden) scale_bits.compute(context.random, context.random.rows + row, slab.rows, ids, 1);
    RandomSpan random;
    if (stochastic) random.compute(context.random, context.random.rows + row, slab.rows, ids, 1);
    const int64_t first = (batch * p.rows + row) * blocks + block;
    alignas(64) uint8_t codes[kBlock][kPacketBytes];
    if (best)
      with_span(p.format.scale_rule, eden, [](auto span) { return encode_best_packets<E, typename decltype(span)::Type>; })(
          slab.x[0], slab.rows, context.room, eden ? scale_bits.bits : nullptr, ahead, codes[0], span.scale[0]);
    else if (p.format.tiles)
      (stochastic ? encode_packets<E, true, true> : encode_packets<E, false, true>)(slab.x[0], slab.rows, tile_encode,
                                                                                    tiles_ordinary, random, ahead, codes[0]);
    else
      (stochastic ? encode_packets<E, true, false> : encode_packets<E, false, false>)(slab.x[0], slab.rows, span.encode[0],
                                                                                      span.ordinary, random, ahead,
                                                                                      codes[0]);
    for (int r = 0; r < slab.rows; ++r) {
      const int64_t at = first + r * blocks;
      store_line(p.rowwise.data + at * 8, codes[r], count * 8);
      if (!p.format.tiles) memcpy(p.rowwise.scale + at, span.scale[r], count);
    }
  }

  /// The finished K-major tile of slabs [0, slabs) to its place.
  static void store_columns(const QuantizeProblem& p, int64_t batch, const ColumnTile& tile, int64_t row, int slabs,
                            int64_t column, int columns) {
    const int64_t block = row / kBlock, line = batch * p.columns + column;
    const LineStrides strides(p.columnwise, column_blocks(p));
    store_column_codes(tile, slabs, columns, p.columnwise.data + line * strides.data + block * 8, strides.data);
    if (p.format.tiles) return;
    store_column_scales(tile, slabs, columns, p.columnwise.scale + line * strides.scale + block, strides.scale);
  }

  /// The columnwise half of one slab, the s-th of a tile. `tile_encode` is what its 16x16 tiles are multiplied by. `bits`
  /// are those of scales.
  void slab_columns(const QuantizeProblem& p, const CachedSlab<E>& slab, const DirectionContext& context,
                    const float* tile_encode, bool ordinary, const uint32_t* rows, uint32_t block, const uint32_t* bits,
                    const PacketsAhead<E>& ahead, int s, ColumnTile& tile) const {
    alignas(64) Storage rotated[kBlock][kPacket];
    alignas(64) float encode[kPacket];
    const Storage* x = slab.x[0];
    if (p.rotate_columns && !p.format.tiles) {
      rotate_columns(slab, context.signs, rotated);
      x = rotated[0];
    }
    if (by_best(p)) {
      const int pairs = static_cast<int>(divide_up(slab.columns, 2 * kLanes));
      const auto best = with_span(p.format.scale_rule, eden,
                                  [](auto span) { return encode_best_slab_columns<E, typename decltype(span)::Type>; });
      return best(x, context.room, bits, pairs, ahead, tile.codes[s], tile.scale[s]);
    }
    if (p.format.tiles)
      for (int i = 0; i < kPacket; ++i) encode[i] = tile_encode[i / kBlock];
    else
      ordinary = column_scales<E>(x, context.tensor, encode, tile.scale[s]);
    (stochastic ? quantize_slab_columns<E, true> : quantize_slab_columns<E, false>)(x, slab.columns, context, encode,
                                                                                    ordinary, rows, block, ahead,
                                                                                    tile.codes[s]);
  }

  /// A tile of up to 128 rows by a packet of columns, in the wanted directions. `more`: the one to its right comes next.
  void tile(const QuantizeProblem& p, int64_t batch, int64_t first_row, int64_t column, bool more) const {
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    const bool rowwise = p.rowwise.data, columnwise = p.columnwise.data;
    const DirectionContext row_context(rowwise ? p.rowwise : p.columnwise, batch, 0);
    const DirectionContext column_context(columnwise ? p.columnwise : p.rowwise, batch, p.sign_mask);
    const int64_t last_row = std::min(first_row + kColumnTileRows, p.rows);
    ColumnTile columns;
    alignas(64) float encode[kLanes];
    alignas(64) uint8_t scale[kLanes];
    alignas(64) uint32_t ids[kPacket] = {};
    ColumnBits column_bits;
    bool ordinary = true;
    int slabs = 0, width = 0;
    for (int64_t row = first_row; row < last_row; row += kBlock, ++slabs) {
      const CachedSlab<E> slab(x, p.rows, p.columns, row, column);
      const bool to_the_right = row + kBlock >= last_row && more;
      const Storage* next =
          x + (to_the_right ? first_row * p.columns + column + kPacket : (row + kBlock) * p.columns + column);
      const PacketsAhead<E> ahead{next, p.columns}, nothing{slab.x[0], 0};
      width = slab.columns;
      if (p.format.tiles) {
        ordinary = tile_scales(slab, p.format, row_context, encode, scale);
        store_tile_scales(p, batch, row / kBlock, column / kBlock, scale, static_cast<int>(divide_up(width, kBlock)));
      }
      if (rowwise) slab_rows(p, batch, slab, row_context, encode, ordinary, row, column, columnwise ? nothing : ahead);
      if (!columnwise) continue;
      const Random& random = column_context.random;
      if (random.key && slabs == 0) memcpy(ids, random.rows + column, width * sizeof *ids);
      const uint32_t id = random.key ? random.sixteens[row / kBlock] : 0;
      const uint32_t* bits = eden ? column_bits.of(random, ids, id) : nullptr;
      slab_columns(p, slab, column_context, encode, ordinary, ids, id, bits, ahead, slabs, columns);
    }
    if (columnwise) store_columns(p, batch, columns, first_row, slabs, column, width);
  }

  /// The scales of a row of 16x16 tiles: the columnwise ones are the transposed.
  static void store_tile_scales(const QuantizeProblem& p, int64_t batch, int64_t tile_row, int64_t tile_column,
                                const uint8_t* scale, int count) {
    const int64_t across = row_blocks(p), down = column_blocks(p);
    if (p.rowwise.data) memcpy(p.rowwise.scale + (batch * down + tile_row) * across + tile_column, scale, count);
    if (!p.columnwise.data) return;
    for (int i = 0; i < count; ++i) p.columnwise.scale[(batch * across + tile_column + i) * down + tile_row] = scale[i];
  }

  // Chunks: strips of tiles where columns or 16x16 blocks are wanted, runs of rows otherwise.

  static constexpr int64_t kStripColumns = 4 * kPacket;
  bool by_best(const QuantizeProblem& p) const { return (p.format.chooses_scales() || eden) && !p.format.tiles; }
  static bool by_tiles(const QuantizeProblem& p) { return p.format.tiles || p.columnwise.data; }

  int64_t chunks_per_matrix(const QuantizeProblem& p) const {
    if (by_tiles(p)) return divide_up(p.rows, kColumnTileRows) * divide_up(p.columns, kStripColumns);
    return RowRuns(p, stochastic || eden).count();
  }

  void chunk(const QuantizeProblem& p, int64_t batch, int64_t chunk) const {
    QuantizeProblem wanted = p;
    const int64_t rows_out = p.format.tiles ? column_blocks(p) : p.rows,
                  columns_out = p.format.tiles ? row_blocks(p) : p.columns;
    poison_if_not_finite(wanted.rowwise, batch, chunk, p.rows, rows_out, row_blocks(p));
    poison_if_not_finite(wanted.columnwise, batch, chunk, p.columns, columns_out, column_blocks(p));
    if (!wanted.rowwise.data && !wanted.columnwise.data) return;
    if (!by_tiles(p)) return run(wanted, batch, chunk);
    const int64_t across = divide_up(p.columns, kStripColumns), first = chunk % across * kStripColumns;
    const int64_t last = std::min(first + kStripColumns, p.columns);
    for (int64_t column = first; column < last; column += kPacket)
      tile(wanted, batch, chunk / across * kColumnTileRows, column, column + kPacket < last);
  }

 private:
  /// A tensor whose amax is not finite decodes to NaN everywhere: its first chunk writes that, and the direction is done.
  static void poison_if_not_finite(QuantizeDirection& direction, int64_t batch, int64_t chunk, int64_t data_rows,
                                   int64_t scale_rows, int64_t blocks) {
    if (!direction.data || nvfp4_tensor_scale(direction.tensor[batch]).usable) return;
    const LineStrides strides(direction, blocks);
    for (int64_t row = batch * data_rows; chunk == 0 && row < (batch + 1) * data_rows; ++row)
      memset(direction.data + row * strides.data, 0, blocks * 8);
    for (int64_t row = batch * scale_rows; chunk == 0 && row < (batch + 1) * scale_rows; ++row)
      memset(direction.scale + row * strides.scale, kFloat8NaN, blocks);
    direction.data = nullptr;
  }

  void run(const QuantizeProblem& p, int64_t batch, int64_t chunk) const {
    const int64_t blocks = row_blocks(p);
    const DirectionContext context(p.rowwise, batch, 0);
    const Storage* x = static_cast<const Storage*>(p.x) + batch * p.rows * p.columns;
    uint8_t* data = p.rowwise.data + batch * p.rows * blocks * 8;
    uint8_t* scale = p.rowwise.scale + batch * p.rows * blocks;
    RowRuns(p, stochastic || eden).visit(chunk, [&](int64_t row, int64_t column, int64_t columns) {
      const uint32_t id = context.random.key ? context.random.rows[row] : 0;
      if (by_best(p))
        return quantize_row_run_by_best<E>(x + row * p.columns + column, columns, p.format.scale_rule, eden, context, id,
                                           context.random.sixteens, data + row * blocks * 8 + column / 2,
                                           scale + row * blocks + column / kBlock);
      quantize_row_run<E>(x + row * p.columns + column, columns, stochastic, context, id, context.random.sixteens,
                          data + row * blocks * 8 + column / 2, scale + row * blocks + column / kBlock);
    });
  }
};

}  // namespace JLP_ISA
}  // namespace jaxlowprec
