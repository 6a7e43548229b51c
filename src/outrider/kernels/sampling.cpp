// Operations of torch on rows of logits and laws: what `laws.h` says of one row.

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "laws.h"
#include "race.h"

namespace {

using torch::headeronly::ScalarType;

thread_local std::vector<float> kept_weights;
thread_local std::vector<double> kept_sums;
thread_local std::vector<Other> kept_others;

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
  each_row(x, [=](const auto& row, int64_t m) { to[m] = best_of(row, count); });
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
    double total;
    to[m] = share_of(row, count, at[m], 0, 0.0, kept_others, &total);
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

const int64_t* one_a_row(const Tensor& x, int64_t rows) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Long && x.dim() == 1 && x.is_contiguous() && x.numel() == rows,
                  "there is a key and a position a row, int64");
  return static_cast<const int64_t*>(x.data_ptr());
}

// weights [N, V] of float32, keys and positions int64 [N] -> who wins the race of that position, a token a row, int64 [N]
Tensor race(Tensor weights, Tensor keys, Tensor positions) {
  STD_TORCH_CHECK(is_float(weights), "weights are of float32");
  const Tensor x = in_rows(weights), own = whole(keys), places = whole(positions);
  const int64_t count = x.size(1), stride = x.stride(0);
  const int64_t* key = one_a_row(own, x.size(0));
  const int64_t* at = one_a_row(places, x.size(0));
  const float* from = floats(x);
  Tensor out = of_type(x, {x.size(0)}, ScalarType::Long);
  int64_t* to = static_cast<int64_t*>(out.data_ptr());
  for_rows(x.size(0), count, [=](int64_t m) {
    to[m] = race_won(from + m * stride, count, key_of(key[m]), static_cast<uint32_t>(at[m]));
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
    const float* own = from + b * (width + 1) * count;
    const Decided found = decide([=](int64_t n) { return own + n * count; }, others ? others + b * width * count : nullptr, count,
                                 count, offers + b * width, lengths_at[b], uniforms + b * width, finals[b], kept_sums);
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
  library.def("race(Tensor weights, Tensor keys, Tensor positions) -> Tensor");
  library.def(
      "verify(Tensor target, Tensor? draft, Tensor tokens, Tensor offered, Tensor accept, Tensor last) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("laws", TORCH_BOX(&laws));
  library.impl("best", TORCH_BOX(&best));
  library.impl("shares", TORCH_BOX(&shares));
  library.impl("draw", TORCH_BOX(&draw));
  library.impl("race", TORCH_BOX(&race));
  library.impl("verify", TORCH_BOX(&verify));
}
