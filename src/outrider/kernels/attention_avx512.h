// Attention of a chunk of columns with AVX-512, to the bits of `attention_avx2.h`: a register holds eight numbers of two keys, and
// lanes are added in the same order.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention_pass.h"

namespace OUTRIDER_NAMESPACE {
namespace {

constexpr int64_t MOST_ROWS = 6;  // at once
constexpr int64_t KEYS = 8;       // at once
constexpr int64_t WIDE = 2 * LANE;

inline __m512 two_of(const float* low, const float* high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(high), 1);
}

inline __m512 two_of(const Half* low, const Half* high) {
  const __m128i lower = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  const __m128i upper = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
  return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(lower), upper, 1));
}

// Of those of the mask; the others are 0.
inline __m512 wide_of(__mmask16 mask, const float* x) { return _mm512_maskz_loadu_ps(mask, x); }
inline __m512 wide_of(__mmask16 mask, const Half* x) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x)); }
inline __m512 wide_of(const float* x) { return _mm512_loadu_ps(x); }
inline __m512 wide_of(const Half* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }

// Neighbours added, within each 128 bits, as `_mm256_hadd_ps` does.
inline __m512 add_neighbours(__m512 a, __m512 b) {
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)), _mm512_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
}

// Products of M rows with the chunk's keys, scaled; what a row does not see is NOTHING, and so is what fills up the last lane.
template <int M, class Cell>
void score(const Pass& pass, const float* const (&queries)[M], const Cell* keys, const bool* const (&seen)[M], int64_t count,
           float (&scores)[M][CHUNK]) {
  constexpr int PAIRS = KEYS / 2;
  const int64_t stride = pass.keys.column;
  for (int64_t c = 0; c < count; c += KEYS) {
    const Cell* key[KEYS];
    for (int64_t i = 0; i < KEYS; i++) key[i] = keys + std::min(c + i, count - 1) * stride;
    __m512 sums[M][PAIRS];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
      for (int i = 0; i < PAIRS; i++) sums[m][i] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < pass.size; d += LANE) {
      __m512 part[PAIRS];
#pragma GCC unroll 4
      for (int i = 0; i < PAIRS; i++) part[i] = two_of(key[i] + d, key[i + PAIRS] + d);
#pragma GCC unroll 6
      for (int m = 0; m < M; m++) {
        const __m512 query = _mm512_broadcast_f32x8(_mm256_loadu_ps(queries[m] + d));
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS; i++) sums[m][i] = _mm512_fmadd_ps(query, part[i], sums[m][i]);
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const __m512 both = add_neighbours(add_neighbours(sums[m][0], sums[m][1]), add_neighbours(sums[m][2], sums[m][3]));
      const __m512 halves = _mm512_add_ps(_mm512_shuffle_f32x4(both, both, _MM_SHUFFLE(2, 0, 2, 0)),
                                          _mm512_shuffle_f32x4(both, both, _MM_SHUFFLE(3, 1, 3, 1)));
      _mm256_storeu_ps(scores[m] + c, _mm256_mul_ps(_mm512_castps512_ps256(halves), _mm256_set1_ps(pass.scale)));
    }
  }
  const int64_t whole = count / WIDE * WIDE;
  for (int m = 0; m < M; m++) {
    if (seen[m] != nullptr) {
      for (int64_t c = 0; c < whole; c += WIDE) {
        const __m128i sees = _mm_loadu_si128(reinterpret_cast<const __m128i*>(seen[m] + c));
        const __mmask16 blind = _mm_cmpeq_epi8_mask(sees, _mm_setzero_si128());
        _mm512_mask_storeu_ps(scores[m] + c, blind, _mm512_set1_ps(NOTHING));
      }
      for (int64_t c = whole; c < count; c++) scores[m][c] = seen[m][c] ? scores[m][c] : NOTHING;
    }
    if (whole < count) std::fill(scores[m] + count, scores[m] + whole + WIDE, NOTHING);
  }
}

// Scores become weights; -> whether there are any: not if every score is -inf, as where nothing is seen.
inline bool weigh(float* scores, int64_t count, float* largest, float* weight) {
  __m512 most = _mm512_set1_ps(NOTHING);
  __mmask16 no_number = 0;
  for (int64_t c = 0; c < count; c += WIDE) {
    const __m512 here = _mm512_loadu_ps(scores + c);
    most = _mm512_max_ps(here, most);
    no_number |= _mm512_cmp_ps_mask(here, here, _CMP_UNORD_Q);
  }
  *largest = no_number != 0 ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(most);
  *weight = 0.0f;
  if (*largest == NOTHING) return false;
  __m256 sum = _mm256_setzero_ps();
  for (int64_t c = 0; c < count; c += WIDE) {
    const __m512 weights = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + c), _mm512_set1_ps(*largest)));
    _mm512_storeu_ps(scores + c, weights);
    sum = _mm256_add_ps(sum, _mm512_castps512_ps256(weights));
    sum = _mm256_add_ps(sum, _mm512_extractf32x8_ps(weights, 1));
  }
  float lanes[LANE];
  _mm256_storeu_ps(lanes, sum);
  *weight = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  return true;
}

// Weighted values of up to `W` registers, the last of which is cut by a mask.
template <int M, int W, class Cell>
void add_values(const float (&weights)[M][CHUNK], const Cell* values, int64_t stride, int64_t count, int64_t size, __mmask16 last,
                float* out) {
  __m512 sums[M][W];
#pragma GCC unroll 6
  for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) sums[m][w] = _mm512_setzero_ps();
  }
  for (int64_t c = 0; c < count; c++, values += stride) {
    __m512 part[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) {
      part[w] = w < W - 1 ? wide_of(values + w * WIDE) : wide_of(last, values + w * WIDE);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      const __m512 weight = _mm512_set1_ps(weights[m][c]);
#pragma GCC unroll 4
      for (int w = 0; w < W; w++) sums[m][w] = _mm512_fmadd_ps(weight, part[w], sums[m][w]);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) {
      _mm512_mask_storeu_ps(out + m * size + w * WIDE, w < W - 1 ? 0xffff : last, sums[m][w]);
    }
  }
}

template <int M, class Cell>
void add_all_values(const float (&weights)[M][CHUNK], const Cell* values, int64_t stride, int64_t count, int64_t size, float* out) {
  constexpr __mmask16 all = 0xffff;
  int64_t d = 0;
  for (; d + 4 * WIDE <= size; d += 4 * WIDE) add_values<M, 4>(weights, values + d, stride, count, size, all, out + d);
  for (; d < size; d += WIDE) {
    const __mmask16 here = d + WIDE <= size ? all : static_cast<__mmask16>((1u << (size - d)) - 1);
    add_values<M, 1>(weights, values + d, stride, count, size, here, out + d);
  }
}

}  // namespace
}  // namespace OUTRIDER_NAMESPACE
