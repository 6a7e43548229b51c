// Steps of linear attention, several tokens one after the other, with the state after each: what layers that keep a state
// instead of keys and values do between their projections (`models.recurrent.rules`).
//
// A token's result has the same bits whatever tokens and rows are beside it, and however many threads there are.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "rows.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t BLOCK = 64;  // columns whose sums are kept at once

// One step of one head for columns c .. c + count - 1: from (what the state was) -> to (what it is) and out.
//   S = decay * S; S += k (beta * (v - S'k)); out = S'q
// apart: whether each row of the state has a decay of its own.
template <bool APART>
void delta_step(const float* from, float* to, const float* q, const float* k, const float* v, const float* decay, float beta,
                int64_t keys, int64_t values, int64_t c, int64_t count, float* out) {
  float seen[BLOCK] = {}, made[BLOCK] = {};
  for (int64_t i = 0; i < keys; i++) {
    const float kept = decay[APART ? i : 0], key = k[i];
    const float* old = from + i * values + c;
    float* row = to + i * values + c;
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
      const float state = old[j] * kept;
      row[j] = state;
      seen[j] += state * key;
    }
  }
#pragma omp simd
  for (int64_t j = 0; j < count; j++) seen[j] = (v[c + j] - seen[j]) * beta;
  for (int64_t i = 0; i < keys; i++) {
    const float key = k[i], query = q[i];
    float* row = to + i * values + c;
#pragma omp simd
    for (int64_t j = 0; j < count; j++) {
      const float state = row[j] + key * seen[j];
      row[j] = state;
      made[j] += state * query;
    }
  }
  for (int64_t j = 0; j < count; j++) out[c + j] = made[j];
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> sizes) {
  if (x.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t i = 0;
  for (int64_t size : sizes) {
    if (x.size(i++) != size) return false;
  }
  return true;
}

// The (gated) delta rule. q, k [R, N, heads, keys], v [R, N, heads, values], decay [R, N, heads, 1 or keys], beta [R, N, heads],
// state [R, heads, keys, values] -> out [R, N, heads, values], states [N, R, heads, keys, values], all in float32
std::tuple<Tensor, Tensor> delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor state) {
  STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4, "queries and values have 4 dimensions");
  const int64_t rows = q.size(0), tokens = q.size(1), heads = q.size(2), keys = q.size(3), values = v.size(3);
  STD_TORCH_CHECK(has_shape(k, {rows, tokens, heads, keys}) && has_shape(v, {rows, tokens, heads, values}) &&
                      has_shape(beta, {rows, tokens, heads}) && has_shape(state, {rows, heads, keys, values}),
                  "keys, values, weights and states are of the same rows, tokens and heads");
  const bool apart = decay.dim() == 4 && decay.size(3) != 1;
  STD_TORCH_CHECK(has_shape(decay, {rows, tokens, heads, apart ? keys : 1}), "a head, or each of its keys, decays");
  for (const Tensor* one : {&q, &k, &v, &decay, &beta, &state}) STD_TORCH_CHECK(is_float(*one), "the delta rule is of float32");
  q = whole(q), k = whole(k), v = whole(v), decay = whole(decay), beta = whole(beta), state = whole(state);
  const int64_t out_shape[] = {rows, tokens, heads, values}, states_shape[] = {tokens, rows, heads, keys, values};
  Tensor out = torch::stable::new_empty(q, {out_shape, 4}), states = torch::stable::new_empty(q, {states_shape, 5});
  const float *qs = floats(q), *ks = floats(k), *vs = floats(v), *decays = floats(decay), *betas = floats(beta);
  const float* before = floats(state);
  float *to = static_cast<float*>(out.data_ptr()), *after = static_cast<float*>(states.data_ptr());
  const int64_t blocks = (values + BLOCK - 1) / BLOCK, size = keys * values, each = apart ? keys : 1;
  for_rows(rows * heads * blocks, tokens * keys * BLOCK, [=](int64_t m) {
    const int64_t c = m % blocks * BLOCK, head = m / blocks, r = head / heads, h = head % heads;
    const int64_t count = std::min(BLOCK, values - c);
    const float* from = before + head * size;
    for (int64_t n = 0; n < tokens; n++) {
      const int64_t at = (r * tokens + n) * heads + h;
      float* next = after + (n * rows * heads + head) * size;
      const float *query = qs + at * keys, *key = ks + at * keys, *value = vs + at * values;
      if (apart) {
        delta_step<true>(from, next, query, key, value, decays + at * each, betas[at], keys, values, c, count, to + at * values);
      } else {
        delta_step<false>(from, next, query, key, value, decays + at, betas[at], keys, values, c, count, to + at * values);
      }
      from = next;
    }
  });
  return {out, states};
}

// One step of one head: from (what the state was) -> to (what it is) and out.
//   S = decay * S + x b'; out = S c
// Sums go by `SUMS` lanes, which are added up in their order.
void outer_step(const float* from, float* to, const float* x, float decay, const float* b, const float* c, int64_t size,
                int64_t width, float* out) {
  for (int64_t p = 0; p < size; p++) {
    const float* old = from + p * width;
    float *row = to + p * width, lanes[SUMS] = {};
    int64_t j = 0;
    for (; j + SUMS <= width; j += SUMS) {
#pragma omp simd
      for (int64_t l = 0; l < SUMS; l++) {
        const float state = old[j + l] * decay + x[p] * b[j + l];
        row[j + l] = state;
        lanes[l] += state * c[j + l];
      }
    }
    for (int64_t l = 0; j < width; j++, l++) {
      row[j] = old[j] * decay + x[p] * b[j];
      lanes[l] += row[j] * c[j];
    }
    float sum = 0.0f;
    for (float lane : lanes) sum += lane;
    out[p] = sum;
  }
}

// Mamba 2's step. x [R, N, heads, size], decay [R, N, heads], b and c [R, N, groups, width], state [R, heads, size, width]
// -> out [R, N, heads, size], states [N, R, heads, size, width], all in float32
std::tuple<Tensor, Tensor> outer(Tensor x, Tensor decay, Tensor b, Tensor c, Tensor state) {
  STD_TORCH_CHECK(x.dim() == 4 && b.dim() == 4, "inputs have 4 dimensions");
  const int64_t rows = x.size(0), tokens = x.size(1), heads = x.size(2), size = x.size(3);
  const int64_t groups = b.size(2), width = b.size(3);
  STD_TORCH_CHECK(groups > 0 && heads % groups == 0, "groups have as many heads each");
  STD_TORCH_CHECK(has_shape(decay, {rows, tokens, heads}) && has_shape(b, {rows, tokens, groups, width}) &&
                      has_shape(c, {rows, tokens, groups, width}) && has_shape(state, {rows, heads, size, width}),
                  "inputs and states are of the same rows, tokens and heads");
  for (const Tensor* one : {&x, &decay, &b, &c, &state}) STD_TORCH_CHECK(is_float(*one), "Mamba's steps are of float32");
  x = whole(x), decay = whole(decay), b = whole(b), c = whole(c), state = whole(state);
  const int64_t out_shape[] = {rows, tokens, heads, size}, states_shape[] = {tokens, rows, heads, size, width};
  Tensor out = torch::stable::new_empty(x, {out_shape, 4}), states = torch::stable::new_empty(x, {states_shape, 5});
  const float *xs = floats(x), *decays = floats(decay), *bs = floats(b), *cs = floats(c), *before = floats(state);
  float *to = static_cast<float*>(out.data_ptr()), *after = static_cast<float*>(states.data_ptr());
  for_rows(rows * heads, tokens * size * width, [=](int64_t head) {
    const int64_t r = head / heads, h = head % heads, group = h / (heads / groups);
    const float* from = before + head * size * width;
    for (int64_t n = 0; n < tokens; n++) {
      const int64_t at = (r * tokens + n) * heads + h, own = ((r * tokens + n) * groups + group) * width;
      float* next = after + (n * rows * heads + head) * size * width;
      outer_step(from, next, xs + at * size, decays[at], bs + own, cs + own, size, width, to + at * size);
      from = next;
    }
  });
  return {out, states};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("delta(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor state) -> (Tensor, Tensor)");
  library.def("outer(Tensor x, Tensor decay, Tensor b, Tensor c, Tensor state) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("delta", TORCH_BOX(&delta));
  library.impl("outer", TORCH_BOX(&outer));
}
