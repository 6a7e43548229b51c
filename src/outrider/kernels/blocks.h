// Products of a block of 16 outputs with the rows of activations that use its lines while they are at hand (`Rows`).

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "activations.h"
#include "linear.h"

namespace OUTRIDER_NAMESPACE {
namespace {

constexpr int64_t NEAR = 2048;  // bytes that are fetched in advance

// Where a block's results go: [rows, outputs], `lanes` of them in this block. added: what they are added to, in the same places.
struct Out {
  float* at;
  const float *bias, *added;
  int64_t stride, lanes;

  Out block(int64_t b) const {  // the b-th after this one
    const int64_t n = b * OUTPUTS;
    return {at + n, bias == nullptr ? nullptr : bias + n, added == nullptr ? nullptr : added + n, stride, lanes - n};
  }
};

// How many rows use a line while it is at hand: at most, and with code of their own for each number. pairs: whether more rows
// than that are computed with two blocks at once, so that an activation is used twice while it is at hand.
template <int MOST, int KNOWN, bool PAIRS>
struct Rows {
  static constexpr int most = MOST, known = KNOWN;
  static constexpr bool pairs = PAIRS;
};

// What is read after this line.
inline void fetch(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line + NEAR), _MM_HINT_T0); }

constexpr int64_t AHEAD = 8192;  // at least, where several blocks are computed at once, by turns of rows

// What is read later yet, of which `step` bytes are fetched at each line.
struct Ahead {
  const uint8_t* at;
  int64_t step;
};

#if defined(__AVX512VNNI__)

// Several rows use a line for so long that the processor does not see by itself what comes. It is fetched at once into a first
// cache of 48 kB (as measured on AMD's fifth generation), else into the second one, which waits for more lines at a time (its fourth).
constexpr bool AT_ONCE = OUTRIDER_FIRST_CACHE >= 48 << 10;
constexpr int64_t FAR = AT_ONCE ? 8192 : 16384;

// What is read after this line, or where `LATER` what is read much later, of one block or of several.
template <bool LATER, int B>
inline void fetch(const uint8_t* line, Ahead& ahead) {
  if (!LATER || !AT_ONCE) fetch(line);
  if (LATER) {
    const uint8_t* far = B > 1 ? ahead.at : line + FAR;
    if (B > 1) ahead.at += ahead.step;
    _mm_prefetch(reinterpret_cast<const char*>(far), AT_ONCE ? _MM_HINT_T0 : _MM_HINT_T1);
  }
}

constexpr Rows<8, 8, true> ROWS_INT8, ROWS_GROUPED;

template <int M>
void store(const __m512 (&sums)[M], const Out& out) {
  const __mmask16 mask = out.lanes >= OUTPUTS ? 0xffff : static_cast<__mmask16>((1u << out.lanes) - 1);
  for (int m = 0; m < M; m++) {
    __m512 result = sums[m];
    if (out.bias != nullptr) result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(mask, out.bias));
    if (out.added != nullptr) result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(mask, out.added + m * out.stride));
    _mm512_mask_storeu_ps(out.at + m * out.stride, mask, result);
  }
}

// Weights are MOVED: what that adds is taken away in advance. B blocks, `bytes` apart, use an activation while it is at hand.
template <int M, int B>
void block_int8(const uint8_t* weight, int64_t bytes, const float* weight_scales, const Quantized& x, int64_t first, Ahead ahead,
                const Out& out) {
  const int8_t* values = x.row(first);
  __m512 products[B][M];
#pragma GCC unroll 2
  for (int b = 0; b < B; b++) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) products[b][m] = _mm512_setzero_ps();
  }
  for (int64_t s = 0; s < x.blocks; s++) {
    const int64_t at = first * x.blocks + s;
    __m512i sums[B][M];
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sums[b][m] = _mm512_set1_epi32(-MOVED * x.sums[at + m * x.blocks]);
    }
    for (int64_t k = s * x.block; k < std::min((s + 1) * x.block, x.columns); k += 4, weight += LINE) {
      __m512i lines[B];
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) {
        lines[b] = _mm512_loadu_si512(weight + b * bytes);
        fetch<(M * B > 4), B>(weight + b * bytes, ahead);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const __m512i four = _mm512_set1_epi32(four_at(values + m * x.columns + k));
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) sums[b][m] = _mm512_dpbusd_epi32(sums[b][m], lines[b], four);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      const __m512 scale = _mm512_set1_ps(x.scales[at + m * x.blocks]);
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) products[b][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[b][m]), scale, products[b][m]);
    }
  }
#pragma GCC unroll 2
  for (int b = 0; b < B; b++) {
    const __m512 scale = _mm512_loadu_ps(weight_scales + b * OUTPUTS);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) products[b][m] = _mm512_mul_ps(products[b][m], scale);
    store<M>(products[b], out.block(b));
  }
}

// Whole numbers of two groups for each output, of the first in the lower half of its lane.
template <bool SIGNED>
inline __m512i numbers_of(const uint8_t* pair) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair));
  return SIGNED ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes);
}

inline __m512i one_of(__m512i two, int64_t which) {
  return which == 0 ? _mm512_srai_epi32(_mm512_slli_epi32(two, 16), 16) : _mm512_srai_epi32(two, 16);
}

// 8 columns in 4 bits, 16 in 6.
inline void read_weights(const uint8_t* line, __m512i (&fours)[2]) {
  const __m512i low = _mm512_set1_epi8(15), both = _mm512_loadu_si512(line);
  fours[0] = _mm512_and_si512(both, low);
  fours[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
}

inline void read_weights(const uint8_t* lines, __m512i (&fours)[4]) {
  const __m512i low = _mm512_set1_epi8(63);
  for (int i = 0; i < 3; i++) fours[i] = _mm512_loadu_si512(lines + i * LINE);
  fours[3] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(fours[0], 6), _mm512_set1_epi8(3)),
                             _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(fours[1], 4), _mm512_set1_epi8(12)),
                                             _mm512_and_si512(_mm512_srli_epi16(fours[2], 2), _mm512_set1_epi8(48))));
  for (int i = 0; i < 3; i++) fours[i] = _mm512_and_si512(fours[i], low);
}

// super: columns that share a scale. B blocks, `bytes` apart, use an activation while it is at hand.
template <int BITS, int M, int B>
void block_grouped(const uint8_t* weight, int64_t bytes, int64_t super, const Quantized& x, int64_t first, int64_t, Ahead ahead,
                   const Out& out) {
  constexpr int64_t group = BITS == 4 ? 32 : 16;
  constexpr int LINES = BITS == 4 ? 1 : 3, FOURS = BITS == 4 ? 2 : 4;  // that are read at once, and the columns in them by fours
  const int64_t all = x.columns / group, groups = super / group, pairs = (groups + 1) / 2;
  const int8_t* values = x.row(first);
  const int16_t* group_sums = x.group_sums.data() + first * all;
  const float* scales = x.scales.data() + first * x.blocks;
  __m512 products[B][M];
#pragma GCC unroll 2
  for (int b = 0; b < B; b++) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) products[b][m] = _mm512_setzero_ps();
  }
  for (int64_t s = 0; s < x.columns; s += super, group_sums += groups, scales++) {
    const uint8_t *numbers = weight, *steps = BITS == 4 ? numbers + pairs * PAIR : numbers, *last = steps + pairs * PAIR;
    for (; weight < last + LINE; weight += LINE) {
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) fetch<(M * B > 2), B>(weight + b * bytes, ahead);
    }
    __m512i totals[B][M];
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) {
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) totals[b][m] = _mm512_setzero_si512();
    }
    for (int64_t g = 0; g < groups; g++) {
      __m512i sums[B][M];
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sums[b][m] = _mm512_setzero_si512();
      }
#pragma GCC unroll 4
      for (int64_t k = 0; k < group; k += 4 * FOURS, weight += LINES * LINE, values += 4 * FOURS) {
        __m512i fours[B][FOURS];
#pragma GCC unroll 2
        for (int b = 0; b < B; b++) {
          read_weights(weight + b * bytes, fours[b]);
#pragma GCC unroll 3
          for (int line = 0; line < LINES; line++) fetch<(M * B > 2), B>(weight + b * bytes + line * LINE, ahead);
        }
#pragma GCC unroll 4
        for (int i = 0; i < FOURS; i++) {
#pragma GCC unroll 8
          for (int m = 0; m < M; m++) {
            const __m512i four = _mm512_set1_epi32(four_at(values + m * x.columns + 4 * i));
#pragma GCC unroll 2
            for (int b = 0; b < B; b++) sums[b][m] = _mm512_dpbusd_epi32(sums[b][m], fours[b][i], four);
          }
        }
      }
#pragma GCC unroll 2
      for (int b = 0; b < B; b++) {
        const __m512i number = one_of(numbers_of<BITS != 4>(numbers + b * bytes + g / 2 * PAIR), g % 2);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) totals[b][m] = _mm512_add_epi32(totals[b][m], _mm512_mullo_epi32(sums[b][m], number));
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < B; b++) {
      const int64_t at = b * bytes;
      __m512i least[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) least[m] = _mm512_setzero_si512();
      for (int64_t p = 0; p < pairs; p++) {
        const __m512i step = numbers_of<BITS != 4>(steps + at + p * PAIR);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          const __m512i sums = _mm512_set1_epi32(two_at(group_sums + m * all + 2 * p));
          least[m] = _mm512_add_epi32(least[m], _mm512_madd_epi16(step, sums));
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const __m512 of_row = _mm512_set1_ps(scales[m * x.blocks]);
        if constexpr (BITS == 4) {
          const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(last + at)));
          const __m512 step = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(last + at + 32)));
          products[b][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[b][m]), _mm512_mul_ps(scale, of_row), products[b][m]);
          products[b][m] = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(least[m]), _mm512_mul_ps(step, of_row), products[b][m]);
        } else {
          const __m512i total = _mm512_sub_epi32(totals[b][m], _mm512_slli_epi32(least[m], 5));
          products[b][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(_mm512_loadu_ps(last + at), of_row), products[b][m]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int b = 0; b < B; b++) store<M>(products[b], out.block(b));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

// Products of two columns are added in 16 bits. A pair fits if weights "in 8 bits" go to 64: 2 * 128 * 127 = 32,512. In 6 bits
// two pairs do, 4 * 63 * 127 = 32,004, and in 4 bits eight, 16 * 15 * 127 = 30,480.
constexpr Rows<5, 5, false> ROWS_INT8;
constexpr Rows<32, 4, false> ROWS_GROUPED;

void store(const float (&sums)[8], int half, const Out& out, int64_t m) {
  for (int64_t i = 0; i < 8 && half * 8 + i < out.lanes; i++) {
    const int64_t n = half * 8 + i, at = m * out.stride + n;
    float result = out.bias == nullptr ? sums[i] : sums[i] + out.bias[n];
    if (out.added != nullptr) result += out.added[at];
    out.at[at] = result;
  }
}

template <int M, int>
void block_int8(const uint8_t* weight, int64_t, const float* weight_scales, const Quantized& x, int64_t first, Ahead, const Out& out) {
  const int8_t* values = x.row(first);
  const __m256i ones = _mm256_set1_epi16(1);
  alignas(32) float products[M][OUTPUTS] = {};
  for (int64_t s = 0; s < x.blocks; s++) {
    const int64_t at = first * x.blocks + s;
    __m256i sums[M][2];
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm256_set1_epi32(-MOVED * x.sums[at + m * x.blocks]);
    for (int64_t k = s * x.block; k < std::min((s + 1) * x.block, x.columns); k += 4, weight += LINE) {
      const __m256i line[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight)),
                               _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + 32))};
      fetch(weight);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) {
        const __m256i four = _mm256_set1_epi32(four_at(values + m * x.columns + k));
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
          const __m256i pairs = _mm256_maddubs_epi16(line[half], four);
          sums[m][half] = _mm256_add_epi32(sums[m][half], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    for (int m = 0; m < M; m++) {
      const __m256 of_row = _mm256_set1_ps(x.scales[at + m * x.blocks]);
      for (int half = 0; half < 2; half++) {
        float* product = products[m] + half * 8;
        _mm256_store_ps(product, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[m][half]), of_row, _mm256_load_ps(product)));
      }
    }
  }
  for (int m = 0; m < M; m++) {
    for (int half = 0; half < 2; half++) {
      float found[8];
      _mm256_storeu_ps(found, _mm256_mul_ps(_mm256_load_ps(products[m] + half * 8), _mm256_loadu_ps(weight_scales + half * 8)));
      store(found, half, out, m);
    }
  }
}

// Eight outputs' whole numbers of two groups, of the first in the lower half of a lane.
template <bool SIGNED>
inline __m256i numbers_of(const uint8_t* pair) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(pair));
  return SIGNED ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
}

// One of them in both halves.
inline __m256i one_of(__m256i two, int64_t which) {
  const __m256i lanes = _mm256_set_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100, 0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
  return _mm256_shuffle_epi8(two, _mm256_add_epi8(lanes, _mm256_set1_epi8(which == 0 ? 0 : 2)));
}

// 16 columns of 8 outputs.
template <int BITS>
inline __attribute__((always_inline)) void read_weights(const uint8_t* lines, __m256i (&fours)[4]) {
  if constexpr (BITS == 4) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; i++) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines + i * LINE));
      fours[2 * i] = _mm256_and_si256(both, low);
      fours[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
  } else {
    const __m256i low = _mm256_set1_epi8(63);
    for (int i = 0; i < 3; i++) fours[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines + i * LINE));
    fours[3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(fours[0], 6), _mm256_set1_epi8(3)),
                               _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(fours[1], 4), _mm256_set1_epi8(12)),
                                               _mm256_and_si256(_mm256_srli_epi16(fours[2], 2), _mm256_set1_epi8(48))));
    for (int i = 0; i < 3; i++) fours[i] = _mm256_and_si256(fours[i], low);
  }
}

// 16 columns of 16 outputs with 16 activations of a row, times a number of each output: added to the totals. The lines are in
// registers while rows take turns, and what rows add up to is in memory.
template <int BITS>
inline __attribute__((always_inline)) void add_columns(const __m256i (&fours)[2][4], const __m256i (&numbers)[2], const int8_t* from,
                                                       __m256i (&totals)[2]) {
  constexpr int TOGETHER = BITS == 4 ? 4 : 2;  // that fit into 16 bits
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += TOGETHER) {
    __m256i sums[2];
#pragma GCC unroll 4
    for (int j = i; j < i + TOGETHER; j++) {
      const __m256i four = _mm256_set1_epi32(four_at(from + 4 * j));
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const __m256i product = _mm256_maddubs_epi16(fours[half][j], four);
        sums[half] = j == i ? product : _mm256_add_epi16(sums[half], product);
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) totals[half] = _mm256_add_epi32(totals[half], _mm256_madd_epi16(sums[half], numbers[half]));
  }
}

// super: columns that share a scale.
template <int BITS, int M, int>
void block_grouped(const uint8_t* weight, int64_t, int64_t super, const Quantized& x, int64_t first, int64_t rows, Ahead,
                   const Out& out) {
  constexpr int MOST = M > 0 ? M : ROWS_GROUPED.most;
  const int64_t count = M > 0 ? M : rows;  // known when it is compiled, if it can be
  constexpr int64_t group = BITS == 4 ? 32 : 16, part = BITS == 4 ? 2 : 3;  // part: lines of 16 columns
  const int64_t all = x.columns / group, groups = super / group, pairs = (groups + 1) / 2;
  const int8_t* values = x.row(first);
  const int16_t* group_sums = x.group_sums.data() + first * all;
  const float* scales = x.scales.data() + first * x.blocks;
  alignas(32) float products[MOST][OUTPUTS];
  std::memset(products, 0, count * sizeof(products[0]));
  for (int64_t s = 0; s < x.columns; s += super, group_sums += groups, scales++) {
    const uint8_t *numbers = weight, *steps = BITS == 4 ? numbers + pairs * PAIR : numbers, *last = steps + pairs * PAIR;
    for (; weight < last + LINE; weight += LINE) fetch(weight);
    __m256i totals[MOST][2];
    for (int64_t m = 0; m < count; m++) totals[m][0] = totals[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int64_t k = 0; k < super; k += 16, weight += part * LINE, values += 16) {
      const uint8_t* pair = numbers + k / group / 2 * PAIR;
      const int64_t which = k / group % 2;
      const __m256i of_group[2] = {one_of(numbers_of<BITS != 4>(pair), which), one_of(numbers_of<BITS != 4>(pair + 16), which)};
      for (int line = 0; line < part; line++) fetch(weight + line * LINE);
      __m256i fours[2][4];
      read_weights<BITS>(weight, fours[0]);
      read_weights<BITS>(weight + 32, fours[1]);
      if constexpr (M > 0) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) add_columns<BITS>(fours, of_group, values + m * x.columns, totals[m]);
      } else {
#pragma GCC unroll 1
        for (int64_t m = 0; m < count; m++) add_columns<BITS>(fours, of_group, values + m * x.columns, totals[m]);
      }
    }
    for (int half = 0; half < 2; half++) {
#pragma GCC unroll 1
      for (int64_t m = 0; m < count; m++) {
        const __m256 of_row = _mm256_set1_ps(scales[m * x.blocks]);
        __m256i least = _mm256_setzero_si256();
        for (int64_t p = 0; p < pairs; p++) {
          const __m256i sums = _mm256_set1_epi32(two_at(group_sums + m * all + 2 * p));
          least = _mm256_add_epi32(least, _mm256_madd_epi16(numbers_of<BITS != 4>(steps + p * PAIR + half * 16), sums));
        }
        float* product = products[m] + half * 8;
        if constexpr (BITS == 4) {
          const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(last + half * 16)));
          const __m256 step = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(last + 32 + half * 16)));
          const __m256 more =
              _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[m][half]), _mm256_mul_ps(scale, of_row), _mm256_load_ps(product));
          _mm256_store_ps(product, _mm256_fnmadd_ps(_mm256_cvtepi32_ps(least), _mm256_mul_ps(step, of_row), more));
        } else {
          const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float*>(last) + half * 8);
          const __m256i total = _mm256_sub_epi32(totals[m][half], _mm256_slli_epi32(least, 5));
          _mm256_store_ps(product, _mm256_fmadd_ps(_mm256_cvtepi32_ps(total), _mm256_mul_ps(scale, of_row), _mm256_load_ps(product)));
        }
      }
    }
  }
  for (int64_t m = 0; m < count; m++) {
    for (int half = 0; half < 2; half++) {
      float found[8];
      std::memcpy(found, products[m] + half * 8, sizeof(found));
      store(found, half, out, m);
    }
  }
}

#else
#error "needs AVX-512 VNNI, or AVX2 with FMA and F16C"
#endif

}  // namespace
}  // namespace OUTRIDER_NAMESPACE
