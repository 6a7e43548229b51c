// Steps of linear attention, several tokens one after the other: what layers that keep a state instead of keys and values do
// between their projections (`models.recurrent.rules`).
//
// Of the states in between nothing is written but what was added to each, which is little: `.._again` makes any of them anew.
// A token's result has the same bits whatever tokens and rows are beside it, however many threads there are, and made anew.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "rows.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t BLOCK = 64;  // columns whose sums are kept at once

// A state's columns c .. c + count - 1 of each of its rows, [keys, count], to be worked on.
void take(const float* state, int64_t keys, int64_t values, int64_t c, int64_t count, float* block) {
  for (int64_t i = 0; i < keys; i++) std::copy_n(state + i * values + c, count, block + i * count);
}

void put(const float* block, int64_t keys, int64_t values, int64_t c, int64_t count, float* state) {
  for (int64_t i = 0; i < keys; i++) std::copy_n(block + i * count, count, state + i * values + c);
}

// The first half of a step: S = decay * S. apart: whether each row of the state has a decay of its own.
template <bool APART>
void fade(float* block, const float* decay, int64_t keys, int64_t count) {
  for (int64_t i = 0; i < keys; i++) {
    const float kept = decay[APART ? i : 0];
    float* row = block + i * count;
#pragma omp simd
    for (int64_t j = 0; j < count; j++) row[j] *= kept;
  }
}

// The second: S += k added; made = S'q, unless there is no q.
void add(float* block, const float* k, const float* added, const float* q, int64_t keys, int64_t count, float* made) {
  float sums[BLOCK] = {};
  for (int64_t i = 0; i < keys; i++) {
    const float key = k[i], query = q == nullptr ? 0.0f : q[i];
    float* row = block + i * count;
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
      const float state = row[j] + key * added[j];
      row[j] = state;
      sums[j] += state * query;
    }
  }
  if (q != nullptr) std::copy_n(sums, count, made);
}

// What is added in a step: beta (v - S'k).
void difference(const float* block, const float* k, const float* v, float beta, int64_t keys, int64_t count, float* added) {
  float seen[BLOCK] = {};
  for (int64_t i = 0; i < keys; i++) {
    const float key = k[i];
    const float* row = block + i * count;
#pragma omp simd
    for (int64_t j = 0; j < count; j++) seen[j] += row[j] * key;
  }
#pragma omp simd
  for (int64_t j = 0; j < count; j++) added[j] = (v[j] - seen[j]) * beta;
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> sizes) {
  if (x.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t i = 0;
  for (int64_t size : sizes) {
    if (x.size(i++) != size) return false;
  }
  return true;
}

struct Shape {
  int64_t rows, tokens, heads, keys, values;
};

// step(block, the token's number among all rows and heads, c, count) for the first `steps` tokens of each head, by blocks of its
// columns: before (states as they were) -> last (as they are).
template <class Step>
void for_heads(const Shape& of, int64_t steps, const float* before, float* last, const Step& step) {
  const int64_t blocks = (of.values + BLOCK - 1) / BLOCK, size = of.keys * of.values;
  for_rows(of.rows * of.heads * blocks, steps * of.keys * BLOCK, [&](int64_t m) {
    const int64_t c = m % blocks * BLOCK, head = m / blocks, r = head / of.heads, h = head % of.heads;
    const int64_t count = std::min(BLOCK, of.values - c);
    std::vector<float> block(of.keys * count);
    take(before + head * size, of.keys, of.values, c, count, block.data());
    for (int64_t n = 0; n < steps; n++) step(block.data(), (r * of.tokens + n) * of.heads + h, c, count);
    put(block.data(), of.keys, of.values, c, count, last + head * size);
  });
}

struct Decay {
  const float* at;
  int64_t each;  // 1, or as many as there are keys

  void fade(float* block, int64_t token, int64_t keys, int64_t count) const {
    each == 1 ? ::fade<false>(block, at + token, keys, count) : ::fade<true>(block, at + token * each, keys, count);
  }
};

// The (gated) delta rule: S = decay * S; S += k (beta * (v - S'k)); out = S'q. q, k [R, N, heads, keys], v [R, N, heads, values],
// decay [R, N, heads, 1 or keys], beta [R, N, heads], state [R, heads, keys, values]
// -> out and what was added to the state [R, N, heads, values], the last state [R, heads, keys, values], all in float32
std::tuple<Tensor, Tensor, Tensor> delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor state) {
  STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4, "queries and values have 4 dimensions");
  const int64_t rows = q.size(0), tokens = q.size(1), heads = q.size(2), keys = q.size(3), values = v.size(3);
  STD_TORCH_CHECK(has_shape(k, {rows, tokens, heads, keys}) && has_shape(v, {rows, tokens, heads, values}) &&
                      has_shape(beta, {rows, tokens, heads}) && has_shape(state, {rows, heads, keys, values}),
                  "keys, values, weights and states are of the same rows, tokens and heads");
  const bool apart = decay.dim() == 4 && decay.size(3) != 1;
  STD_TORCH_CHECK(has_shape(decay, {rows, tokens, heads, apart ? keys : 1}), "a head, or each of its keys, decays");
  for (const Tensor* one : {&q, &k, &v, &decay, &beta, &state}) STD_TORCH_CHECK(is_float(*one), "the delta rule is of float32");
  q = whole(q), k = whole(k), v = whole(v), decay = whole(decay), beta = whole(beta), state = whole(state);
  Tensor out = torch::stable::empty_like(v), added = torch::stable::empty_like(v), after = torch::stable::empty_like(state);
  const float *qs = floats(q), *ks = floats(k), *vs = floats(v), *betas = floats(beta), *before = floats(state);
  const Decay decays{floats(decay), apart ? keys : 1};
  float *to = static_cast<float*>(out.data_ptr()), *adds = static_cast<float*>(added.data_ptr());
  float* last = static_cast<float*>(after.data_ptr());
  for_heads({rows, tokens, heads, keys, values}, tokens, before, last, [=](float* block, int64_t at, int64_t c, int64_t count) {
    const int64_t from = at * values + c;
    decays.fade(block, at, keys, count);
    difference(block, ks + at * keys, vs + from, betas[at], keys, count, adds + from);
    add(block, ks + at * keys, adds + from, qs + at * keys, keys, count, to + from);
  });
  return {out, added, after};
}

// The state after the first `steps` tokens, from what `delta` was given and what it has added. -> [R, heads, keys, values]
Tensor delta_again(Tensor k, Tensor added, Tensor decay, Tensor state, int64_t steps) {
  STD_TORCH_CHECK(k.dim() == 4 && added.dim() == 4 && decay.dim() == 4, "keys and what was added have 4 dimensions");
  const int64_t rows = k.size(0), tokens = k.size(1), heads = k.size(2), keys = k.size(3), values = added.size(3);
  const int64_t each = decay.size(3);
  STD_TORCH_CHECK(has_shape(added, {rows, tokens, heads, values}) && has_shape(state, {rows, heads, keys, values}) &&
                      has_shape(decay, {rows, tokens, heads, each}) && (each == 1 || each == keys),
                  "keys, what was added and states are of the same rows, tokens and heads");
  STD_TORCH_CHECK(0 <= steps && steps <= tokens, "there are no more steps than tokens");
  for (const Tensor* one : {&k, &added, &decay, &state}) STD_TORCH_CHECK(is_float(*one), "the delta rule is of float32");
  k = whole(k), added = whole(added), decay = whole(decay), state = whole(state);
  Tensor after = torch::stable::empty_like(state);
  const float *ks = floats(k), *adds = floats(added), *before = floats(state);
  const Decay decays{floats(decay), each};
  float* last = static_cast<float*>(after.data_ptr());
  for_heads({rows, tokens, heads, keys, values}, steps, before, last, [=](float* block, int64_t at, int64_t c, int64_t count) {
    decays.fade(block, at, keys, count);
    add(block, ks + at * keys, adds + at * values + c, nullptr, keys, count, nullptr);
  });
  return after;
}

// One step of one head of Mamba 2's: S = decay * S + x b'; out = S c, unless there is no c.
// Sums go by `SUMS` lanes, which are added up in their order.
void outer_step(float* state, const float* x, float decay, const float* b, const float* c, int64_t size, int64_t width,
                float* out) {
  for (int64_t p = 0; p < size; p++) {
    float *row = state + p * width, lanes[SUMS] = {};
    int64_t j = 0;
    for (; j + SUMS <= width; j += SUMS) {
#pragma omp simd
      for (int64_t l = 0; l < SUMS; l++) {
        const float now = row[j + l] * decay + x[p] * b[j + l];
        row[j + l] = now;
        if (c != nullptr) lanes[l] += now * c[j + l];
      }
    }
    for (int64_t l = 0; j < width; j++, l++) {
      row[j] = row[j] * decay + x[p] * b[j];
      if (c != nullptr) lanes[l] += row[j] * c[j];
    }
    if (c == nullptr) continue;
    float sum = 0.0f;
    for (float lane : lanes) sum += lane;
    out[p] = sum;
  }
}

// The states after the first `steps` tokens, and what comes of each, if there is a c.
Tensor outer_steps(Tensor x, Tensor decay, Tensor b, const Tensor* c, Tensor state, int64_t steps, Tensor* out) {
  STD_TORCH_CHECK(x.dim() == 4 && b.dim() == 4, "inputs have 4 dimensions");
  const int64_t rows = x.size(0), tokens = x.size(1), heads = x.size(2), size = x.size(3);
  const int64_t groups = b.size(2), width = b.size(3);
  STD_TORCH_CHECK(groups > 0 && heads % groups == 0, "groups have as many heads each");
  STD_TORCH_CHECK(has_shape(decay, {rows, tokens, heads}) && has_shape(b, {rows, tokens, groups, width}) &&
                      has_shape(state, {rows, heads, size, width}),
                  "inputs and states are of the same rows, tokens and heads");
  STD_TORCH_CHECK(0 <= steps && steps <= tokens, "there are no more steps than tokens");
  for (const Tensor* one : {&x, &decay, &b, &state}) STD_TORCH_CHECK(is_float(*one), "Mamba's steps are of float32");
  x = whole(x), decay = whole(decay), b = whole(b), state = whole(state);
  Tensor after = torch::stable::empty_like(state);
  const float *xs = floats(x), *decays = floats(decay), *bs = floats(b), *cs = c == nullptr ? nullptr : floats(*c);
  const float* before = floats(state);
  float* last = static_cast<float*>(after.data_ptr());
  float* to = out == nullptr ? nullptr : static_cast<float*>(out->data_ptr());
  for_rows(rows * heads, steps * size * width, [=](int64_t head) {
    const int64_t r = head / heads, h = head % heads, group = h / (heads / groups);
    float* now = last + head * size * width;
    std::copy_n(before + head * size * width, size * width, now);
    for (int64_t n = 0; n < steps; n++) {
      const int64_t at = (r * tokens + n) * heads + h, own = ((r * tokens + n) * groups + group) * width;
      outer_step(now, xs + at * size, decays[at], bs + own, cs == nullptr ? nullptr : cs + own, size, width,
                 to == nullptr ? nullptr : to + at * size);
    }
  });
  return after;
}

// Mamba 2's steps. x [R, N, heads, size], decay [R, N, heads], b and c [R, N, groups, width], state [R, heads, size, width]
// -> out [R, N, heads, size], the last state [R, heads, size, width], all in float32
std::tuple<Tensor, Tensor> outer(Tensor x, Tensor decay, Tensor b, Tensor c, Tensor state) {
  STD_TORCH_CHECK(x.dim() == 4 && b.dim() == 4, "inputs have 4 dimensions");
  STD_TORCH_CHECK(has_shape(c, {x.size(0), x.size(1), b.size(2), b.size(3)}) && is_float(c), "what is read is like what is added");
  c = whole(c), x = whole(x);
  Tensor out = torch::stable::empty_like(x);
  const Tensor after = outer_steps(x, decay, b, &c, state, x.size(1), &out);
  return {out, after};
}

// The state after the first `steps` tokens, from what `outer` was given. -> [R, heads, size, width]
Tensor outer_again(Tensor x, Tensor decay, Tensor b, Tensor state, int64_t steps) {
  return outer_steps(x, decay, b, nullptr, state, steps, nullptr);
}

// The nearest numbers of bfloat16, as torch rounds.
inline __m256 in_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// One step of one channel of Mamba 1's: s = e^(dt a) s + dt x b; out = s'c, unless there is no c. a is not above 0. coarse: what
// comes of a state is of its numbers in bfloat16.
void scan_step(float* state, float x, float dt, const float* a, const float* b, const float* c, int64_t width, bool coarse,
               float* out) {
  const __m256 size = _mm256_set1_ps(dt), added = _mm256_set1_ps(dt * x);
  __m256 sums = _mm256_setzero_ps();
  for (int64_t j = 0; j < width; j += LANE) {
    const int64_t count = std::min(LANE, width - j);
    const auto next = [&](const float* row) { return count == LANE ? _mm256_loadu_ps(row + j) : some_of(row + j, count); };
    const __m256 kept = exponential(_mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_mul_ps(size, next(a))));  // NaN stays
    const __m256 now = _mm256_fmadd_ps(kept, next(state), _mm256_mul_ps(added, next(b)));
    count == LANE ? _mm256_storeu_ps(state + j, now) : store_some(now, count, state + j);
    if (c != nullptr) sums = _mm256_fmadd_ps(coarse ? in_bfloat16(now) : now, next(c), sums);
  }
  if (c == nullptr) return;
  float lanes[LANE], sum = 0.0f;
  _mm256_storeu_ps(lanes, sums);
  for (float lane : lanes) sum += lane;
  *out = sum;
}

// The states after the first `steps` tokens, and what comes of each, if there is a c.
Tensor scan_steps(Tensor x, Tensor dt, Tensor a, Tensor b, const Tensor* c, Tensor state, int64_t steps, bool coarse,
                  Tensor* out) {
  STD_TORCH_CHECK(x.dim() == 3 && b.dim() == 3, "inputs have 3 dimensions");
  const int64_t rows = x.size(0), tokens = x.size(1), channels = x.size(2), width = b.size(2);
  STD_TORCH_CHECK(has_shape(dt, {rows, tokens, channels}) && has_shape(a, {channels, width}) &&
                      has_shape(b, {rows, tokens, width}) && has_shape(state, {rows, channels, width}),
                  "inputs and states are of the same rows, tokens and channels");
  STD_TORCH_CHECK(width > 0, "a channel has states");
  STD_TORCH_CHECK(0 <= steps && steps <= tokens, "there are no more steps than tokens");
  for (const Tensor* one : {&x, &dt, &a, &b, &state}) STD_TORCH_CHECK(is_float(*one), "Mamba's steps are of float32");
  x = whole(x), dt = whole(dt), a = whole(a), b = whole(b), state = whole(state);
  Tensor after = torch::stable::empty_like(state);
  const float *xs = floats(x), *dts = floats(dt), *as = floats(a), *bs = floats(b), *cs = c == nullptr ? nullptr : floats(*c);
  const float* before = floats(state);
  float* last = static_cast<float*>(after.data_ptr());
  float* to = out == nullptr ? nullptr : static_cast<float*>(out->data_ptr());
  for_rows(rows * channels, steps * width, [=](int64_t m) {
    const int64_t r = m / channels, channel = m % channels;
    float* now = last + m * width;
    std::copy_n(before + m * width, width, now);
    for (int64_t n = 0; n < steps; n++) {
      const int64_t token = r * tokens + n, at = token * channels + channel;
      scan_step(now, xs[at], dts[at], as + channel * width, bs + token * width, cs == nullptr ? nullptr : cs + token * width,
                width, coarse, to == nullptr ? nullptr : to + at);
    }
  });
  return after;
}

// Mamba 1's steps. x and dt [R, N, channels], a [channels, width], b and c [R, N, width], state [R, channels, width]; coarse: as
// in `scan_step` -> out [R, N, channels], the last state [R, channels, width], all in float32
std::tuple<Tensor, Tensor> scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, bool coarse) {
  STD_TORCH_CHECK(x.dim() == 3 && b.dim() == 3, "inputs have 3 dimensions");
  STD_TORCH_CHECK(has_shape(c, {b.size(0), b.size(1), b.size(2)}) && is_float(c), "what is read is like what is added");
  c = whole(c), x = whole(x);
  Tensor out = torch::stable::empty_like(x);
  const Tensor after = scan_steps(x, dt, a, b, &c, state, x.size(1), coarse, &out);
  return {out, after};
}

// The state after the first `steps` tokens, from what `scan` was given. -> [R, channels, width]
Tensor scan_again(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor state, int64_t steps) {
  return scan_steps(x, dt, a, b, nullptr, state, steps, false, nullptr);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor state) -> (Tensor, Tensor, Tensor)");
  library.def("delta_again(Tensor k, Tensor added, Tensor decay, Tensor state, int steps) -> Tensor");
  library.def("outer(Tensor x, Tensor decay, Tensor b, Tensor c, Tensor state) -> (Tensor, Tensor)");
  library.def("outer_again(Tensor x, Tensor decay, Tensor b, Tensor state, int steps) -> Tensor");
  library.def("scan(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor state, bool coarse) -> (Tensor, Tensor)");
  library.def("scan_again(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor state, int steps) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("delta", TORCH_BOX(&delta));
  library.impl("delta_again", TORCH_BOX(&delta_again));
  library.impl("outer", TORCH_BOX(&outer));
  library.impl("outer_again", TORCH_BOX(&outer_again));
  library.impl("scan", TORCH_BOX(&scan));
  library.impl("scan_again", TORCH_BOX(&scan_again));
}
