// From logits to tokens: laws, drawing from them, and the acceptance rule of speculative sampling.
//
// The same as `sampling.standardize`, `sampling.draw` and `verify` say with torch and NumPy, in a few sweeps over a row. A row's
// result has the same bits whatever rows are beside it, and on any processor.

#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "rows.h"

namespace {

using torch::headeronly::ScalarType;

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

// ---- the acceptance rule

struct Decided {
  int64_t accepted, next;
};

// One row. laws [K+1, V] of the target; drafts [K, V], null for a draft that is certain of its tokens.
Decided decide(const float* laws, const float* drafts, int64_t count, const int64_t* tokens, int64_t offered,
               const double* uniforms, double last, std::vector<double>& reached) {
  int64_t n = 0;
  for (; n < offered; n++) {
    const double mass = laws[n * count + tokens[n]];
    const double share = drafts ? drafts[n * count + tokens[n]] : 1.0;
    // u < mass / share without the division: never true where the target's mass is 0. A draft's law that is 0 or NaN there
    // is not what the token was drawn from.
    if (!(share > 0.0 && uniforms[n] * share < mass)) break;
  }
  const float* law = laws + n * count;
  int64_t token = -1;
  if (n < offered) {
    token = drafts ? drawn_from(Residual{law, drafts + n * count}, count, last, reached)
                   : drawn_from(Without{law, tokens[n]}, count, last, reached);
  }
  // A rejection leaves a residual; only rounding can leave nothing, and then the two laws are equal to that precision.
  return {n, token >= 0 ? token : drawn_from(Float{law}, count, last, reached)};
}

// ---- operations

thread_local std::vector<float> kept_weights;
thread_local std::vector<double> kept_sums;

Tensor in_rows(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "these operations are of rows, [N, V]");
  return in_one_piece(x);
}

// each(row, m) for all rows of logits in float32 or bfloat16.
template <class F>
void each_row(const Tensor& x, const F& each) {
  const int64_t count = x.size(1), stride = x.stride(0);
  if (is_float(x)) {
    const float* at = floats(x);
    for_rows(x.size(0), count, [=](int64_t m) { each(Float{at + m * stride}, m); });
  } else {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16, "logits are of float32 or bfloat16");
    const uint16_t* at = static_cast<const uint16_t*>(x.data_ptr());
    for_rows(x.size(0), count, [=](int64_t m) { each(Bfloat16{at + m * stride}, m); });
  }
}

Tensor of_type(const Tensor& like, std::initializer_list<int64_t> shape, ScalarType type) {
  const std::vector<int64_t> sizes(shape);
  return torch::stable::new_empty(like, {sizes.data(), sizes.size()}, type);
}

// logits [N, V], float32 or bfloat16 -> their laws [N, V], float32
Tensor laws(Tensor logits, double temperature, int64_t top_k, double top_p, double min_p) {
  STD_TORCH_CHECK(temperature > 0.0, "a law is of a temperature above 0");
  const Tensor x = in_rows(logits);
  const int64_t count = x.size(1);
  Tensor out = of_type(x, {x.size(0), count}, ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  const Settings how{static_cast<float>(temperature), top_k, top_p, static_cast<float>(min_p)};
  each_row(x, [=](const auto& row, int64_t m) { law_of(row, count, how, to + m * count, kept_weights); });
  return out;
}

// logits [N, V] -> the first of each row's largest, int64 [N]; -1 if there is NaN, or nothing but -inf
Tensor best(Tensor logits) {
  const Tensor x = in_rows(logits);
  const int64_t count = x.size(1);
  Tensor out = of_type(x, {x.size(0)}, ScalarType::Long);
  int64_t* to = static_cast<int64_t*>(out.data_ptr());
  each_row(x, [=](const auto& row, int64_t m) {
    const float most = largest_of(row, count);
    to[m] = -1;
    if (!(most > NOTHING)) return;
    const __m256 wanted = _mm256_set1_ps(most);
    for (int64_t k = 0; k < count; k += LANE) {
      const int same = _mm256_movemask_ps(_mm256_cmp_ps(lanes_of(row, k, count, NOTHING), wanted, _CMP_EQ_OQ));
      if (!same) continue;
      to[m] = k + __builtin_ctz(same);
      return;
    }
  });
  return out;
}

// logits [N, V], int64 [N] -> the probability of that token at temperature 1, before any filter, float64 [N]
Tensor shares(Tensor logits, Tensor tokens) {
  const Tensor x = in_rows(logits);
  const int64_t count = x.size(1);
  STD_TORCH_CHECK(tokens.dim() == 1 && tokens.size(0) == x.size(0) && tokens.scalar_type() == ScalarType::Long,
                  "there is a token a row, int64");
  const Tensor own = whole(tokens);
  const int64_t* at = static_cast<const int64_t*>(own.data_ptr());
  Tensor out = of_type(x, {x.size(0)}, ScalarType::Double);
  double* to = static_cast<double*>(out.data_ptr());
  for (int64_t m = 0; m < x.size(0); m++) STD_TORCH_CHECK(0 <= at[m] && at[m] < count, "there is no such token");
  each_row(x, [=](const auto& row, int64_t m) {
    const float most = largest_of(row, count);
    const __m256 top = _mm256_set1_ps(most);
    Sum sum;
    for (int64_t k = 0; k < count; k += LANE) {
      sum.add(exponential(_mm256_sub_ps(lanes_of(row, k, count, NOTHING), top)));
    }
    to[m] = std::isfinite(most) ? exponential(row.one(at[m]) - most) / sum.total() : NAN_;
  });
  return out;
}

const double* doubles(const Tensor& x, int64_t count) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Double && x.is_contiguous() && x.numel() == count,
                  "there is a uniform number for each draw, float64");
  return static_cast<const double*>(x.data_ptr());
}

// weights [N, V] of float32, uniforms float64 [N] -> a token a row, int64 [N]
Tensor draw(Tensor weights, Tensor uniforms) {
  STD_TORCH_CHECK(is_float(weights), "weights are of float32");
  const Tensor x = in_rows(weights), own = whole(uniforms);
  const int64_t count = x.size(1), stride = x.stride(0);
  const double* points = doubles(own, x.size(0));
  const float* from = floats(x);
  Tensor out = of_type(x, {x.size(0)}, ScalarType::Long);
  int64_t* to = static_cast<int64_t*>(out.data_ptr());
  for_rows(x.size(0), count, [=](int64_t m) {
    to[m] = drawn_from(Float{from + m * stride}, count, points[m], kept_sums);
  });
  return out;
}

// Laws of the target [B, K+1, V] and of the draft [B, K, V] (none: its tokens are certain), float32; tokens int64 [B, K];
// offered int64 [B]; uniforms float64 [B, K] and [B] -> how many are accepted, and the token after them, int64 [B] each
std::tuple<Tensor, Tensor> verify(Tensor target, std::optional<Tensor> draft, Tensor tokens, Tensor offered, Tensor accept,
                                  Tensor last) {
  STD_TORCH_CHECK(target.dim() == 3 && is_float(target), "the target's laws are [B, K+1, V] of float32");
  const int64_t batch = target.size(0), width = target.size(1) - 1, count = target.size(2);
  const Tensor laws = whole(target), own = whole(tokens), lengths = whole(offered);
  const Tensor points = whole(accept), ends = whole(last);
  STD_TORCH_CHECK(own.scalar_type() == ScalarType::Long && own.dim() == 2 && own.size(0) == batch && own.size(1) == width,
                  "drafted tokens are [B, K], int64");
  STD_TORCH_CHECK(lengths.scalar_type() == ScalarType::Long && lengths.numel() == batch, "there is a length a row, int64");
  Tensor drafts = laws;
  if (draft.has_value()) {
    const Tensor& given = draft.value();
    STD_TORCH_CHECK(is_float(given) && given.dim() == 3 && given.size(0) == batch && given.size(1) == width &&
                        given.size(2) == count,
                    "the draft's laws are [B, K, V] of float32");
    drafts = whole(given);
  }
  const double* uniforms = doubles(points, batch * width);
  const double* finals = doubles(ends, batch);
  const int64_t* offers = static_cast<const int64_t*>(own.data_ptr());
  const int64_t* lengths_at = static_cast<const int64_t*>(lengths.data_ptr());
  for (int64_t b = 0; b < batch; b++) {
    STD_TORCH_CHECK(0 <= lengths_at[b] && lengths_at[b] <= width, "a row offers 0 to K tokens");
    for (int64_t n = 0; n < lengths_at[b]; n++) {
      STD_TORCH_CHECK(0 <= offers[b * width + n] && offers[b * width + n] < count, "there is no such token");
    }
  }
  const float* from = floats(laws);
  const float* others = draft.has_value() ? floats(drafts) : nullptr;
  Tensor counts = of_type(laws, {batch}, ScalarType::Long), next = of_type(laws, {batch}, ScalarType::Long);
  int64_t* count_to = static_cast<int64_t*>(counts.data_ptr());
  int64_t* next_to = static_cast<int64_t*>(next.data_ptr());
  for_rows(batch, count * (width + 1), [=](int64_t b) {
    const Decided found = decide(from + b * (width + 1) * count, others ? others + b * width * count : nullptr, count,
                                 offers + b * width, lengths_at[b], uniforms + b * width, finals[b], kept_sums);
    count_to[b] = found.accepted;
    next_to[b] = found.next;
  });
  return {counts, next};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("laws(Tensor logits, float temperature, int top_k, float top_p, float min_p) -> Tensor");
  library.def("best(Tensor logits) -> Tensor");
  library.def("shares(Tensor logits, Tensor tokens) -> Tensor");
  library.def("draw(Tensor weights, Tensor uniforms) -> Tensor");
  library.def(
      "verify(Tensor target, Tensor? draft, Tensor tokens, Tensor offered, Tensor accept, Tensor last) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("laws", TORCH_BOX(&laws));
  library.impl("best", TORCH_BOX(&best));
  library.impl("shares", TORCH_BOX(&shares));
  library.impl("draw", TORCH_BOX(&draw));
  library.impl("verify", TORCH_BOX(&verify));
}
