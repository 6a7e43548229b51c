// Attention of a chunk of columns with AVX2: M rows use keys and values while they are in registers.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention_pass.h"

namespace OUTRIDER_NAMESPACE {
namespace {

constexpr int64_t MOST_ROWS = 3;  // at once
constexpr int64_t KEYS = 4;       // at once

// Products of M rows with the chunk's keys, scaled; what a row does not see is NOTHING, and so is what fills up the last lane.
template <int M, class Cell>
void score(const Pass& pass, const float* const (&queries)[M], const Cell* keys, const bool* const (&seen)[M], int64_t count,
           float (&scores)[M][CHUNK]) {
  for (int64_t c = 0; c < count; c += KEYS) {
    const Cell* key[KEYS];
    for (int64_t i = 0; i < KEYS; i++) key[i] = keys + std::min(c + i, count - 1) * pass.keys.column;
    __m256 sums[M][KEYS];
    for (int m = 0; m < M; m++) {
      for (int64_t i = 0; i < KEYS; i++) sums[m][i] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < pass.size; d += LANE) {
      __m256 part[KEYS];
      for (int64_t i = 0; i < KEYS; i++) part[i] = eight_of(key[i] + d);
#pragma GCC unroll 3
      for (int m = 0; m < M; m++) {
        const __m256 query = _mm256_loadu_ps(queries[m] + d);
#pragma GCC unroll 4
        for (int64_t i = 0; i < KEYS; i++) sums[m][i] = _mm256_fmadd_ps(query, part[i], sums[m][i]);
      }
    }
    for (int m = 0; m < M; m++) {
      const __m256 both = _mm256_hadd_ps(_mm256_hadd_ps(sums[m][0], sums[m][1]), _mm256_hadd_ps(sums[m][2], sums[m][3]));
      const __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
      _mm_storeu_ps(scores[m] + c, _mm_mul_ps(four, _mm_set1_ps(pass.scale)));
    }
  }
  const int64_t filled = (count + LANE - 1) / LANE * LANE;
  for (int m = 0; m < M; m++) {
    if (seen[m] != nullptr) {
      for (int64_t c = 0; c < count; c++) scores[m][c] = seen[m][c] ? scores[m][c] : NOTHING;
    }
    for (int64_t c = count; c < filled; c++) scores[m][c] = NOTHING;
  }
}

// Scores become weights; -> whether there are any: not if every score is -inf, as where nothing is seen.
inline bool weigh(float* scores, int64_t count, float* largest, float* weight) {
  __m256 most = _mm256_set1_ps(NOTHING), no_number = _mm256_setzero_ps();
  for (int64_t c = 0; c < count; c += LANE) {
    const __m256 here = _mm256_loadu_ps(scores + c);
    most = _mm256_max_ps(here, most);
    no_number = _mm256_or_ps(no_number, _mm256_cmp_ps(here, here, _CMP_UNORD_Q));
  }
  float lanes[LANE];
  _mm256_storeu_ps(lanes, most);
  *largest = *std::max_element(lanes, lanes + LANE);
  if (_mm256_movemask_ps(no_number) != 0) *largest = std::numeric_limits<float>::quiet_NaN();
  *weight = 0.0f;
  if (*largest == NOTHING) return false;
  __m256 sum = _mm256_setzero_ps();
  for (int64_t c = 0; c < count; c += LANE) {
    const __m256 weights = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + c), _mm256_set1_ps(*largest)));
    _mm256_storeu_ps(scores + c, weights);
    sum = _mm256_add_ps(sum, weights);
  }
  _mm256_storeu_ps(lanes, sum);
  *weight = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
  return true;
}

// Weighted values of `W` lanes from d on.
template <int M, int W, class Cell>
void add_values(const float (&weights)[M][CHUNK], const Cell* values, int64_t stride, int64_t count, int64_t size, float* out) {
  __m256 sums[M][W];
  for (int m = 0; m < M; m++) {
    for (int w = 0; w < W; w++) sums[m][w] = _mm256_setzero_ps();
  }
  for (int64_t c = 0; c < count; c++, values += stride) {
    __m256 part[W];
    for (int w = 0; w < W; w++) part[w] = eight_of(values + w * LANE);
#pragma GCC unroll 3
    for (int m = 0; m < M; m++) {
      const __m256 weight = _mm256_set1_ps(weights[m][c]);
#pragma GCC unroll 4
      for (int w = 0; w < W; w++) sums[m][w] = _mm256_fmadd_ps(weight, part[w], sums[m][w]);
    }
  }
  for (int m = 0; m < M; m++) {
    for (int w = 0; w < W; w++) _mm256_storeu_ps(out + m * size + w * LANE, sums[m][w]);
  }
}

template <int M, class Cell>
void add_all_values(const float (&weights)[M][CHUNK], const Cell* values, int64_t stride, int64_t count, int64_t size, float* out) {
  int64_t d = 0;
  for (; d + 4 * LANE <= size; d += 4 * LANE) add_values<M, 4>(weights, values + d, stride, count, size, out + d);
  for (; d < size; d += LANE) add_values<M, 1>(weights, values + d, stride, count, size, out + d);
}

}  // namespace
}  // namespace OUTRIDER_NAMESPACE
