// The exponential race: a token drawn from a law by numbers of its position alone, one a token of the vocabulary.
//
// The same as `sampling.race` says with torch, to the number: Philox4x32 with ten rounds (Salmon et al. 2011), its key the
// stream's and its counter (block, position, half, 0).

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "rows.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t WORDS = 4;               // of 32 bits that a block of Philox gives
constexpr int64_t GROUP = WORDS * LANE;    // tokens whose numbers are made at once: word w of lane i is token 8 w + i
constexpr uint32_t TIMES_0 = 0xD2511F53, TIMES_1 = 0xCD9E8D57, MORE_0 = 0x9E3779B9, MORE_1 = 0xBB67AE85;
constexpr int ROUNDS = 10;

struct Key {
  uint32_t low, high;
};

inline Key key_of(int64_t bits) {
  return {static_cast<uint32_t>(static_cast<uint64_t>(bits)), static_cast<uint32_t>(static_cast<uint64_t>(bits) >> 32)};
}

// Word `word` of a block.
inline uint32_t philox(Key key, uint32_t block, uint32_t position, uint32_t half, int64_t word) {
  uint32_t x[WORDS] = {block, position, half, 0};
  for (int round = 0; round < ROUNDS; round++) {
    const uint64_t first = static_cast<uint64_t>(TIMES_0) * x[0], second = static_cast<uint64_t>(TIMES_1) * x[2];
    const uint32_t next[WORDS] = {static_cast<uint32_t>(second >> 32) ^ x[1] ^ key.low, static_cast<uint32_t>(second),
                                  static_cast<uint32_t>(first >> 32) ^ x[3] ^ key.high, static_cast<uint32_t>(first)};
    std::copy(next, next + WORDS, x);
    key.low += MORE_0;
    key.high += MORE_1;
  }
  return x[word];
}

struct Product {
  __m256i low, high;
};

// Of eight numbers and one, the lower and the upper 32 bits.
inline Product multiplied(__m256i x, __m256i by) {
  const __m256i even = _mm256_mul_epu32(x, by), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), by);
  return {_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA), _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA)};
}

// Eight blocks from `block` on.
inline void philox_of_eight(Key key, uint32_t block, uint32_t position, uint32_t half, __m256i words[WORDS]) {
  const __m256i times_0 = _mm256_set1_epi32(static_cast<int>(TIMES_0)), times_1 = _mm256_set1_epi32(static_cast<int>(TIMES_1));
  __m256i x0 = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(block)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  __m256i x1 = _mm256_set1_epi32(static_cast<int>(position));
  __m256i x2 = _mm256_set1_epi32(static_cast<int>(half)), x3 = _mm256_setzero_si256();
  for (int round = 0; round < ROUNDS; round++) {
    const Product first = multiplied(x0, times_0), second = multiplied(x2, times_1);
    x0 = _mm256_xor_si256(_mm256_xor_si256(second.high, x1), _mm256_set1_epi32(static_cast<int>(key.low)));
    x1 = second.low;
    x2 = _mm256_xor_si256(_mm256_xor_si256(first.high, x3), _mm256_set1_epi32(static_cast<int>(key.high)));
    x3 = first.low;
    key.low += MORE_0;
    key.high += MORE_1;
  }
  words[0] = x0;
  words[1] = x1;
  words[2] = x2;
  words[3] = x3;
}

// Of one token: -log(1 - v), v uniform in (0, 1) with 64 bits.
inline double exponential_of(Key key, uint32_t position, int64_t token) {
  const uint32_t block = static_cast<uint32_t>(token / GROUP * LANE + token % LANE);
  const int64_t word = token % GROUP / LANE;
  const double upper = philox(key, block, position, 0, word), lower = philox(key, block, position, 1, word);
  const double v = (upper * 4294967296.0 + lower + 0.5) * 0x1p-64;
  return -std::log1p(-std::min(v, 1.0 - 0x1p-53));
}

// The token whose exponential number divided by its weight is least; -1 if the weights are none (NaN, infinite or zero total).
// A token of weight 0 is never drawn.
//
// Only few need a logarithm: -log(1 - v) >= v >= its upper 32 bits, so a token whose bits already exceed the best so far
// times its weight can't win.
inline int64_t race_won(const float* weights, int64_t count, Key key, uint32_t position) {
  const __m256 unit = _mm256_set1_ps(0x1p-31f);
  int64_t winner = -1;
  double best = std::numeric_limits<double>::infinity();
  __m256 bound = _mm256_set1_ps(std::numeric_limits<float>::infinity()), sums = _mm256_setzero_ps();
  for (int64_t from = 0; from < count; from += GROUP) {
    __m256 own[WORDS];
    __m256 any = _mm256_setzero_ps();
    for (int64_t w = 0; w < WORDS; w++) {
      const int64_t k = from + w * LANE;
      own[w] = k + LANE <= count ? _mm256_loadu_ps(weights + k) : some_of(weights + k, std::max<int64_t>(count - k, 0));
      any = _mm256_or_ps(any, own[w]);
      sums = _mm256_add_ps(sums, own[w]);
    }
    if (!_mm256_movemask_ps(_mm256_cmp_ps(any, _mm256_setzero_ps(), _CMP_NEQ_UQ))) continue;
    __m256i words[WORDS];
    philox_of_eight(key, static_cast<uint32_t>(from / GROUP * LANE), position, 0, words);
    for (int64_t w = 0; w < WORDS; w++) {
      // A bit is dropped, so that the number is positive; what is left is rounded down far more than its conversion rounds up.
      const __m256i halved = _mm256_and_si256(_mm256_srli_epi32(words[w], 1), _mm256_set1_epi32(0x7FFFFF80));
      const __m256 least = _mm256_mul_ps(_mm256_cvtepi32_ps(halved), unit);
      const __m256 reach = _mm256_mul_ps(bound, own[w]);  // NaN for a weight of 0 before there is a best one: compares as no
      int open = _mm256_movemask_ps(_mm256_cmp_ps(least, reach, _CMP_LE_OQ));
      for (; open; open &= open - 1) {
        const int64_t token = from + w * LANE + __builtin_ctz(open);
        if (token >= count) break;  // a lane that fills up: of weight 0, which lies within reach of the number 0
        const double weight = weights[token];
        if (!(weight > 0.0)) continue;
        const double time = exponential_of(key, position, token) / weight;
        if (!(time < best)) continue;
        best = time;
        winner = token;
        // A little above it: `reach` is a product that is rounded.
        bound = _mm256_set1_ps(static_cast<float>(best * (1.0 + 0x1p-20)));
      }
    }
  }
  float lanes[LANE];
  _mm256_storeu_ps(lanes, sums);
  double total = 0.0;
  for (const float sum : lanes) total += sum;
  return total > 0.0 && std::isfinite(total) ? winner : -1;
}

}  // namespace
