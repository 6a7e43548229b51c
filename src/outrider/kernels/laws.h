// From logits to tokens, of one row: laws, drawing from them, and the acceptance rule of speculative sampling.
//
// The same as `sampling.standardize`, `sampling.draw` and `verify` say with torch and NumPy, in a few sweeps over a row. A row's
// result has the same bits whatever rows are beside it, and on any processor.

#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "rows.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t BLOCK = 64;  // weights that are added up before their sum is looked at
constexpr int64_t FEW = 64;    // weights that are sorted
constexpr float NAN_ = std::numeric_limits<float>::quiet_NaN();
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// ---- reading a row

struct Float {
  const float* at;

  __m256 eight(int64_t k) const { return _mm256_loadu_ps(at + k); }
  float one(int64_t k) const { return at[k]; }
};

struct Bfloat16 {
  const uint16_t* at;

  __m256 eight(int64_t k) const {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + k)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  }
  float one(int64_t k) const {
    const uint32_t bits = static_cast<uint32_t>(at[k]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

// The next LANE numbers, `other` behind the end.
template <class Row>
__m256 lanes_of(const Row& row, int64_t k, int64_t count, float other) {
  if (k + LANE <= count) return row.eight(k);
  float lanes[LANE];
  for (int64_t i = 0; i < LANE; i++) lanes[i] = k + i < count ? row.one(k + i) : other;
  return _mm256_loadu_ps(lanes);
}

// The largest number of a row; NaN if any is.
template <class Row>
float largest_of(const Row& row, int64_t count) {
  __m256 most = _mm256_set1_ps(NOTHING), none = _mm256_setzero_ps();
  for (int64_t k = 0; k < count; k += LANE) {
    const __m256 x = lanes_of(row, k, count, NOTHING);
    most = _mm256_max_ps(most, x);
    none = _mm256_or_ps(none, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  }
  if (_mm256_movemask_ps(none)) return NAN_;
  float lanes[LANE];
  _mm256_storeu_ps(lanes, most);
  return *std::max_element(lanes, lanes + LANE);
}

// Sums of floats in double, in a fixed order.
struct Sum {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();

  void add(__m256 x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
  }
  double total() const {
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(low, high));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }
};

// The weights above a floor, in their order.
template <class Row>
void collect(const Row& row, int64_t count, float floor, std::vector<float>& found) {
  found.clear();
  const __m256 least = _mm256_set1_ps(floor);
  for (int64_t k = 0; k < count; k += LANE) {
    const __m256 x = lanes_of(row, k, count, NOTHING);
    int above = _mm256_movemask_ps(_mm256_cmp_ps(x, least, _CMP_GT_OQ));
    if (!above) continue;
    float lanes[LANE];
    _mm256_storeu_ps(lanes, x);
    for (; above; above &= above - 1) found.push_back(lanes[__builtin_ctz(above)]);
  }
}

// ---- laws

struct Settings {
  float temperature;
  int64_t top_k;
  double top_p;
  float min_p;
};

// The k-th largest logit; -inf if fewer are finite.
template <class Row>
float kth_largest(const Row& row, int64_t count, int64_t k, float best, std::vector<float>& found) {
  for (float below : {7.0f, 14.0f, std::numeric_limits<float>::infinity()}) {
    collect(row, count, best - below, found);
    if (static_cast<int64_t>(found.size()) < k) continue;
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), std::greater<float>());
    return found[k - 1];
  }
  return NOTHING;
}

// The largest t for which the weights >= t add up to `wanted`, those of `found` being all that may be needed. NaN if all of
// them fall short of it.
float edge_of(std::vector<float>& found, double wanted) {
  auto from = found.begin(), to = found.end();
  double before = 0.0;  // what lies above `from` weighs
  while (to - from > FEW) {
    const auto middle = from + (to - from) / 2;
    std::nth_element(from, middle, to, std::greater<float>());
    double upper = 0.0;
    for (auto one = from; one != middle; ++one) upper += *one;
    if (before + upper >= wanted) {
      to = middle;
    } else {
      before += upper;
      from = middle;
    }
  }
  std::sort(from, to, std::greater<float>());
  for (auto one = from; one != to; ++one) {
    before += *one;
    if (before >= wanted) return *one;
  }
  return to == found.end() || found.empty() ? NAN_ : *(to - 1);  // the halves' sums may be rounded otherwise
}

// The least weight of the nucleus: the smallest set {weights >= t} whose share reaches top_p, never empty.
//
// Any weight below (1 - top_p) / count of all lies outside for certain: all such together weigh less than 1 - top_p. A higher
// floor is tried first, which leaves some hundred weights of real text.
float nucleus(const float* weights, int64_t count, double top_p, double total, std::vector<float>& found) {
  const double certain = (1.0 - top_p) / static_cast<double>(count) * total;
  for (double lowest : {256.0 * certain, certain, -1.0}) {
    collect(Float{weights}, count, static_cast<float>(lowest), found);
    const float edge = edge_of(found, top_p * total);
    if (!std::isnan(edge)) return edge;
  }
  return *std::min_element(found.begin(), found.end());  // rounding may leave all just short of it
}

// The law of logits; NaN if there is none.
template <class Row>
void law_of(const Row& row, int64_t count, const Settings& how, float* law, std::vector<float>& found) {
  const float best = largest_of(row, count);
  if (!std::isfinite(best)) {
    std::fill(law, law + count, NAN_);
    return;
  }
  const bool cut = 0 < how.top_k && how.top_k < count;
  const float least = cut ? kth_largest(row, count, how.top_k, best, found) : NOTHING;
  const __m256 top = _mm256_set1_ps(best), kept = _mm256_set1_ps(least), heat = _mm256_set1_ps(how.temperature);
  Sum all;
  for (int64_t k = 0; k < count; k += LANE) {
    const __m256 x = lanes_of(row, k, count, NOTHING);
    // Shifted before it is divided, so that a small temperature can't overflow.
    __m256 weights = exponential(_mm256_div_ps(_mm256_sub_ps(x, top), heat));
    weights = _mm256_and_ps(weights, _mm256_cmp_ps(x, kept, _CMP_GE_OQ));
    all.add(weights);
    if (k + LANE <= count) {
      _mm256_storeu_ps(law + k, weights);
    } else {
      store_some(weights, count - k, law + k);
    }
  }
  double total = all.total();
  float edge = 0.0f;
  if (how.top_p < 1.0) edge = nucleus(law, count, how.top_p, total, found);
  if (how.min_p > edge) edge = how.min_p;  // the most likely token has weight 1
  if (edge > 0.0f) {
    const __m256 lowest = _mm256_set1_ps(edge);
    Sum some;
    for (int64_t k = 0; k < count; k += LANE) {
      const __m256 x = lanes_of(Float{law}, k, count, 0.0f);
      some.add(_mm256_and_ps(x, _mm256_cmp_ps(x, lowest, _CMP_GE_OQ)));
    }
    total = some.total();
  }
  const __m256 lowest = _mm256_set1_ps(edge), sum = _mm256_set1_ps(static_cast<float>(total));
  for (int64_t k = 0; k < count; k += LANE) {
    const __m256 x = lanes_of(Float{law}, k, count, 0.0f);
    const __m256 shares = _mm256_div_ps(_mm256_and_ps(x, _mm256_cmp_ps(x, lowest, _CMP_GE_OQ)), sum);
    if (k + LANE <= count) {
      _mm256_storeu_ps(law + k, shares);
    } else {
      store_some(shares, count - k, law + k);
    }
  }
}

// ---- drawing

// What the draft lacks of the target: (target - draft)+. NaN stays NaN.
struct Residual {
  const float* target;
  const float* draft;

  __m256 eight(int64_t k) const {
    return _mm256_max_ps(_mm256_setzero_ps(), _mm256_sub_ps(_mm256_loadu_ps(target + k), _mm256_loadu_ps(draft + k)));
  }
  float one(int64_t k) const {
    const float rest = target[k] - draft[k];
    return rest < 0.0f ? 0.0f : rest;
  }
};

// A law without one of its tokens.
struct Without {
  const float* target;
  int64_t token;

  __m256 eight(int64_t k) const {
    float lanes[LANE];
    if (k <= token && token < k + LANE) {
      for (int64_t i = 0; i < LANE; i++) lanes[i] = one(k + i);
      return _mm256_loadu_ps(lanes);
    }
    return _mm256_loadu_ps(target + k);
  }
  float one(int64_t k) const { return k == token ? 0.0f : target[k]; }
};

// The first token whose cumulative weight exceeds uniform * total; -1 if the weights are none (NaN, infinite or zero total).
// A token of weight 0 is never drawn.
template <class Row>
int64_t drawn_from(const Row& row, int64_t count, double uniform, std::vector<double>& reached) {
  reached.clear();
  double total = 0.0;
  for (int64_t from = 0; from < count; from += BLOCK) {
    const int64_t to = std::min(from + BLOCK, count);
    Sum sum;
    for (int64_t k = from; k < to; k += LANE) sum.add(lanes_of(row, k, to, 0.0f));
    total += sum.total();
    reached.push_back(total);
  }
  if (!(total > 0.0) || std::isinf(total)) return -1;
  const double point = std::min(uniform * total, std::nextafter(total, 0.0));
  const int64_t block = std::upper_bound(reached.begin(), reached.end(), point) - reached.begin();
  double before = block == 0 ? 0.0 : reached[block - 1];
  const double rest = point - before;
  double inside = 0.0;
  int64_t token = -1;
  for (int64_t k = block * BLOCK; k < std::min((block + 1) * BLOCK, count); k++) {
    const double weight = row.one(k);
    if (!(weight > 0.0)) continue;
    token = k;  // the rest may exceed the block's own sum by rounding: its last token of positive weight, then
    inside += weight;
    if (inside > rest) break;
  }
  return token;
}

// ---- reading

// The first of a row's largest; -1 if there is NaN, or nothing but -inf.
template <class Row>
int64_t best_of(const Row& row, int64_t count) {
  const float most = largest_of(row, count);
  if (!(most > NOTHING)) return -1;
  const __m256 wanted = _mm256_set1_ps(most);
  for (int64_t k = 0; k < count; k += LANE) {
    const int same = _mm256_movemask_ps(_mm256_cmp_ps(lanes_of(row, k, count, NOTHING), wanted, _CMP_EQ_OQ));
    if (same) return k + __builtin_ctz(same);
  }
  return -1;
}

struct Other {
  float weight;
  int64_t token;
};

// The probability of a token at temperature 1, before any filter. others: what else is likely, the likeliest first, with a
// weight of `total` in all; `most` of them, of a probability above `least`.
template <class Row>
double share_of(const Row& row, int64_t count, int64_t token, int64_t most, double least, std::vector<Other>& others,
                double* total) {
  others.clear();
  const float best = largest_of(row, count);
  if (!std::isfinite(best)) return *total = NAN_;
  const __m256 top = _mm256_set1_ps(best), floor = _mm256_set1_ps(static_cast<float>(least));
  Sum sum;
  for (int64_t k = 0; k < count; k += LANE) {
    const __m256 weights = exponential(_mm256_sub_ps(lanes_of(row, k, count, NOTHING), top));
    sum.add(weights);
    if (most == 0) continue;
    int above = _mm256_movemask_ps(_mm256_cmp_ps(weights, floor, _CMP_GT_OQ));  // all weigh 1 or more
    if (!above) continue;
    float lanes[LANE];
    _mm256_storeu_ps(lanes, weights);
    for (; above; above &= above - 1) others.push_back({lanes[__builtin_ctz(above)], k + __builtin_ctz(above)});
  }
  const double all = *total = sum.total();
  const auto kept = [=](const Other& one) { return one.token != token && one.weight > least * all; };
  others.erase(std::stable_partition(others.begin(), others.end(), kept), others.end());
  const auto end = others.begin() + std::min<int64_t>(most, others.size());
  std::partial_sort(others.begin(), end, others.end(), [](const Other& one, const Other& two) {
    return one.weight > two.weight || (one.weight == two.weight && one.token < two.token);
  });
  others.erase(end, others.end());
  return exponential(row.one(token) - best) / all;
}

// ---- the acceptance rule

struct Decided {
  int64_t accepted, next;
};

// One row. law_at(n): the target's law after n drafted tokens, asked for in turn. drafts: [K, V] of the draft, `stride` from one
// to the next; null for a draft that is certain of its tokens.
template <class Laws>
Decided decide(const Laws& law_at, const float* drafts, int64_t stride, int64_t count, const int64_t* tokens, int64_t offered,
               const double* uniforms, double last, std::vector<double>& reached) {
  int64_t n = 0;
  const float* law = law_at(0);
  for (; n < offered; law = law_at(++n)) {
    const double mass = law[tokens[n]];
    const double share = drafts ? drafts[n * stride + tokens[n]] : 1.0;
    // u < mass / share without the division: never true where the target's mass is 0. A draft's law that is 0 or NaN there
    // is not what the token was drawn from.
    if (!(share > 0.0 && uniforms[n] * share < mass)) break;
  }
  int64_t token = -1;
  if (n < offered) {
    token = drafts ? drawn_from(Residual{law, drafts + n * stride}, count, last, reached)
                   : drawn_from(Without{law, tokens[n]}, count, last, reached);
  }
  // A rejection leaves a residual; only rounding can leave nothing, and then the two laws are equal to that precision.
  return {n, token >= 0 ? token : drawn_from(Float{law}, count, last, reached)};
}

}  // namespace
