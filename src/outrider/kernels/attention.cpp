// Attention in float32 for passes of any width, to keys and values in float32 or float16.
//
// A query's result has the same bits whatever queries are beside it, however many columns lie beyond what it sees, and however
// many threads there are: a product of a query and a key is summed in one order, chunks of columns begin at fixed columns,
// their weighted values are summed column after column, and chunks are put together one after the other. A masked column adds
// zero, whatever its value, and a chunk of masked columns is left out. Scores that are all -inf make no number, as softmax does.
//
// Heads that share keys are rows below each other, several of which use keys and values while they are in registers. Keys and
// values are read as they lie in the cache.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "attention_pass.h"
#if defined(__AVX512F__)
#include "attention_avx512.h"
#else
#include "attention_avx2.h"
#endif

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t PARALLEL = 1 << 16;  // products from which several threads share them
constexpr int64_t MANY_TURNS = 1 << 14;  // numbers of queries, keys and values from which they share rotating and keeping them

bool all_finite(const float* x, int64_t count) {
  constexpr int64_t SIDE_BY_SIDE = 4;
  __m256 zeros[SIDE_BY_SIDE];
  for (__m256& each : zeros) each = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + SIDE_BY_SIDE * LANE <= count; k += SIDE_BY_SIDE * LANE) {
    for (int64_t i = 0; i < SIDE_BY_SIDE; i++) {
      zeros[i] = _mm256_fmadd_ps(_mm256_loadu_ps(x + k + i * LANE), _mm256_setzero_ps(), zeros[i]);
    }
  }
  for (; k < count; k += LANE) zeros[0] = _mm256_fmadd_ps(_mm256_loadu_ps(x + k), _mm256_setzero_ps(), zeros[0]);
  const __m256 all = _mm256_add_ps(_mm256_add_ps(zeros[0], zeros[1]), _mm256_add_ps(zeros[2], zeros[3]));
  return _mm256_movemask_ps(_mm256_cmp_ps(all, all, _CMP_UNORD_Q)) == 0;
}

// The same weighted values without the columns that are not seen: what is no number there, is none beside a weight of zero.
template <class Cell>
void add_seen_values(const float* weights, const bool* seen, const Cell* values, int64_t stride, int64_t count, int64_t size,
                     float* out) {
  std::fill(out, out + size, 0.0f);
  for (int64_t c = 0; c < count; c++) {
    if (!seen[c]) continue;
    for (int64_t d = 0; d < size; d++) out[d] = std::fma(weights[c], number(values[c * stride + d]), out[d]);
  }
}

template <int M, class Cell>
void attend_rows(const Pass& pass, int64_t g, int64_t first, int64_t begin, int64_t count, const Found& found) {
  const float* queries[M];
  const bool* seen[M];
  for (int m = 0; m < M; m++) {
    const int64_t n = (first + m) % pass.tokens;
    queries[m] = pass.queries.of(g * pass.times + (first + m) / pass.tokens, n);
    seen[m] = pass.seen == nullptr ? nullptr : pass.seen + n * pass.seen_token + begin;
  }
  float scores[M][CHUNK];
  bool some = false;
  if (pass.seen != nullptr) {
    for (int m = 0; m < M; m++) some = some || std::find(seen[m], seen[m] + count, true) != seen[m] + count;
  }
  if (pass.seen != nullptr && !some) {
    for (int m = 0; m < M; m++) {
      found.largest[first + m] = NOTHING;
      found.weight[first + m] = 0.0f;
    }
    return;
  }
  score<M>(pass, queries, pass.keys.of<Cell>(pass.row, g, begin), seen, count, scores);
  for (int m = 0; m < M; m++) {
    if (!weigh(scores[m], count, found.largest + first + m, found.weight + first + m)) {
      std::fill(scores[m], scores[m] + count, 0.0f);
      // It sees something, but nothing of what it sees has a weight.
      if (seen[m] == nullptr || std::find(seen[m], seen[m] + count, true) != seen[m] + count) found.weight[first + m] = NAN;
    }
  }
  const Cell* values = pass.values.of<Cell>(pass.row, g, begin);
  add_all_values<M>(scores, values, pass.values.column, count, pass.size, found.values + first * pass.size);
  float* out = found.values + first * pass.size;
  if (pass.seen == nullptr || all_finite(out, M * pass.size)) return;
  for (int m = 0; m < M; m++) {
    add_seen_values(scores[m], seen[m], values, pass.values.column, count, pass.size, out + m * pass.size);
  }
}

// The same for a number of rows that is known when it runs, M at the most.
template <int M, class Cell>
void attend_some(int64_t rows, const Pass& pass, int64_t g, int64_t first, int64_t begin, int64_t count, const Found& found) {
  if constexpr (M > 0) {
    if (rows == M) {
      attend_rows<M, Cell>(pass, g, first, begin, count, found);
    } else {
      attend_some<M - 1, Cell>(rows, pass, g, first, begin, count, found);
    }
  }
}

// What the rows see, bool [B or 1, 1, N, L] or none, the last dimension in one piece.
struct Seen {
  const bool* at = nullptr;
  int64_t row = 0, token = 0;

  Seen(const std::optional<Tensor>& mask, int64_t batch, int64_t tokens, int64_t columns) {
    if (!mask.has_value()) return;
    STD_TORCH_CHECK(mask->dim() == 4 && mask->scalar_type() == torch::headeronly::ScalarType::Bool && mask->size(1) == 1 &&
                        (mask->size(0) == batch || mask->size(0) == 1) && mask->size(2) == tokens && mask->size(3) == columns &&
                        (mask->stride(3) == 1 || columns == 1),
                    "what is seen must be bool [B, 1, N, L], L in one piece");
    at = static_cast<const bool*>(mask->data_ptr());
    row = mask->size(0) == 1 ? 0 : mask->stride(0);
    token = mask->stride(2);
  }
};

// Which sequence a task is of, and its number among that one's: `begins` has the first task of each, and how many there are.
struct Place {
  int64_t pass, task;

  Place(const std::vector<int64_t>& begins, int64_t all)
      : pass(std::upper_bound(begins.begin(), begins.end(), all) - begins.begin() - 1), task(all - begins[pass]) {}
};

// Puts the chunks of a query together: where chunk c was found, for a row of a group.
template <class FoundOf>
void put_together(const Pass& pass, int64_t g, int64_t row, const FoundOf& found_of) {
  const int64_t size = pass.size, chunks = pass.chunks();
  float largest = NOTHING, total = 0.0f;
  for (int64_t c = 0; c < chunks; c++) {
    const float here = found_of(c).largest[row];
    if (here > largest || std::isnan(here)) largest = here;  // once NaN, it stays
  }
  float* result = pass.to + (row % pass.tokens * pass.groups * pass.times + g * pass.times + row / pass.tokens) * size;
  bool lost = false;
  for (int64_t c = 0; c < chunks; c++) lost = lost || std::isnan(found_of(c).weight[row]);
  std::fill(result, result + size, largest == NOTHING && lost ? NAN : 0.0f);
  for (int64_t c = 0; c < chunks; c++) {
    const Found found = found_of(c);
    if (found.largest[row] == NOTHING) continue;
    const float factor = exponential(found.largest[row] - largest);
    const float* values = found.values + row * size;
    total += found.weight[row] * factor;
    for (int64_t d = 0; d < size; d++) result[d] += values[d] * factor;
  }
  if (total == 0.0f) return;  // it sees nothing
  const float inverse = 1.0f / total;
  for (int64_t d = 0; d < size; d++) result[d] *= inverse;
}

// All sequences' together, so that threads share them whatever their lengths.
void attend_all(const std::vector<Pass>& passes) {
  std::vector<int64_t> tasks{0}, rows{0}, rooms{0};  // where each sequence's begin
  int64_t work = 0, results = 0;
  for (const Pass& pass : passes) {
    tasks.push_back(tasks.back() + pass.tasks());
    rows.push_back(rows.back() + pass.groups * pass.rows());
    rooms.push_back(rooms.back() + pass.tasks() * pass.rows() * (pass.size + 2));
    work += pass.groups * pass.rows() * pass.columns * pass.size;
    results += pass.groups * pass.rows() * pass.size * pass.chunks();
  }
  static thread_local Room kept;
  float* room = kept.of(rooms.back());
  auto found_of = [&](int64_t p, int64_t task) {
    const int64_t count = passes[p].rows();
    float* at = room + rooms[p] + task * count * (passes[p].size + 2);
    return Found{at, at + count, at + 2 * count};
  };
  auto some_chunks = [&](int64_t from, int64_t until) {
    for (int64_t all = from; all < until; all++) {
      const Place at(tasks, all);
      const Pass& pass = passes[at.pass];
      const int64_t begin = at.task % pass.chunks() * CHUNK, g = at.task / pass.chunks();
      const int64_t count = std::min(CHUNK, pass.columns - begin);
      const Found found = found_of(at.pass, at.task);
      for (int64_t first = 0; first < pass.rows(); first += MOST_ROWS) {
        const int64_t some = std::min(pass.rows() - first, MOST_ROWS);
        if (pass.keys.half) {
          attend_some<MOST_ROWS, Half>(some, pass, g, first, begin, count, found);
        } else {
          attend_some<MOST_ROWS, float>(some, pass, g, first, begin, count, found);
        }
      }
    }
  };
  auto some_rows = [&](int64_t from, int64_t until) {
    for (int64_t all = from; all < until; all++) {
      const Place at(rows, all);
      const Pass& pass = passes[at.pass];
      const int64_t g = at.task / pass.rows();
      put_together(pass, g, at.task % pass.rows(), [&](int64_t c) { return found_of(at.pass, g * pass.chunks() + c); });
    }
  };
  if (tasks.back() > 1 && work >= PARALLEL) {
    torch::stable::parallel_for(0, tasks.back(), 1, some_chunks);
    if (results >= PARALLEL) {
      torch::stable::parallel_for(0, rows.back(), 16, some_rows);
      return;
    }
  } else {
    some_chunks(0, tasks.back());
  }
  some_rows(0, rows.back());
}

// query [B, heads, N, size], key and value [B, groups, L, size] in float32 or both in float16, seen bool [B or 1, 1, N, L] or none
// -> [B, N, heads, size]
Tensor attend(Tensor query, Tensor key, Tensor value, std::optional<Tensor> seen, double scale) {
  for (Tensor* each : {&query, &key, &value}) {
    STD_TORCH_CHECK(each->dim() == 4 && (is_float(*each) || (is_half(*each) && each != &query)), "attention is of float32");
    STD_TORCH_CHECK(each->size(3) == query.size(3) && each->size(0) == query.size(0), "queries, keys and values have other sizes");
    *each = in_one_piece(*each);
  }
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), size = query.size(3);
  const int64_t groups = key.size(1), columns = key.size(2);
  STD_TORCH_CHECK(groups > 0 && heads % groups == 0 && value.size(1) == groups && value.size(2) == columns && size % LANE == 0,
                  "heads can't share these keys");
  STD_TORCH_CHECK(is_half(key) == is_half(value), "keys and values are of two types");
  const std::optional<Tensor> mask = mask_in_one_piece(seen);
  const Seen sees(mask, batch, tokens, columns);
  const int64_t shape[] = {batch, tokens, heads, size};
  Tensor out = torch::stable::new_empty(query, {shape, 4});
  std::vector<Pass> passes;
  for (int64_t b = 0; b < batch; b++) {
    passes.push_back({Part(query, b), Kept(key), Kept(value), b, sees.at == nullptr ? nullptr : sees.at + b * sees.row, sees.token, groups,
                      heads / groups, tokens, columns, size, static_cast<float>(scale),
                      static_cast<float*>(out.data_ptr()) + b * tokens * heads * size});
  }
  attend_all(passes);
  return out;
}

// The same of new tokens, whose keys and values are kept first: see `kept_attention` and `new_tokens`.
// packed [B, N, (heads + 2 * groups) * size] -> [B, N, heads * size]
Tensor attend_new_tokens(Tensor packed, int64_t heads, std::optional<Tensor> query_norm, std::optional<Tensor> key_norm, double eps,
                         double more, Tensor cos, Tensor sin, Tensor keys, Tensor values, Tensor at, std::optional<Tensor> seen,
                         int64_t columns, double scale) {
  const KeptAttention kept = kept_attention(heads, query_norm, key_norm, eps, more, keys, values, scale);
  const std::optional<Tensor> mask = mask_in_one_piece(seen);
  NewTokens tokens = new_tokens(numbers_of(at), columns);
  turn_by(tokens, cos, sin);
  if (mask.has_value()) see(tokens, *mask);
  check_fit(kept, tokens);
  STD_TORCH_CHECK(is_float(packed) && packed.dim() == 3 && packed.size(0) == tokens.at.batch && packed.size(1) == tokens.at.tokens &&
                      packed.size(2) == kept.given(),
                  "attention is of float32, [B, N, queries, keys and values]");
  const Tensor x = whole(packed);
  const int64_t flat[] = {tokens.at.batch, tokens.at.tokens, heads * kept.size};
  Tensor out = torch::stable::new_empty(packed, {flat, 3});
  attend_new(kept, tokens, floats(x), static_cast<float*>(out.data_ptr()));
  return out;
}

}  // namespace

KeptAttention OUTRIDER_NAMESPACE::kept_attention(int64_t heads, const std::optional<Tensor>& query_norm,
                                                 const std::optional<Tensor>& key_norm, double eps, double more, const Tensor& keys,
                                                 const Tensor& values, double scale) {
  STD_TORCH_CHECK(keys.dim() == 4 && values.dim() == 4, "attention is of other dimensions");
  STD_TORCH_CHECK((is_float(keys) && is_float(values)) || (is_half(keys) && is_half(values)), "keys and values are of other types");
  const int64_t batch = keys.size(0), groups = keys.size(1), capacity = keys.size(2), size = keys.size(3);
  STD_TORCH_CHECK(groups > 0 && heads > 0 && heads % groups == 0 && size % LANE == 0, "heads can't share these keys");
  STD_TORCH_CHECK(values.size(0) == batch && values.size(1) == groups && values.size(2) == capacity && values.size(3) == size &&
                      keys.stride(3) == 1 && values.stride(3) == 1,
                  "keys and values are kept in other sizes");
  KeptAttention kept{Kept(keys), Kept(values), std::nullopt, std::nullopt, batch, groups, heads, size, capacity,
                     static_cast<float>(scale)};
  if (query_norm.has_value()) kept.of_queries = norm_of(*query_norm, size, eps, more);
  if (key_norm.has_value()) kept.of_keys = norm_of(*key_norm, size, eps, more);
  return kept;
}

NewTokens OUTRIDER_NAMESPACE::new_tokens(const Numbers& at, int64_t columns) {
  std::vector<Span> spans;
  for (int64_t b = 0; b < at.batch; b++) spans.push_back({b, b, 0, at.tokens, columns});
  NewTokens found = new_tokens_of(at, columns, spans);
  found.by_rows = true;
  return found;
}

NewTokens OUTRIDER_NAMESPACE::new_tokens_of(const Numbers& at, int64_t columns, const std::vector<Span>& spans) {
  int64_t last = -1;
  for (int64_t b = 0; b < at.batch; b++) {
    for (int64_t n = 0; n < at.tokens; n++) {
      STD_TORCH_CHECK(0 <= at.of(b, n), "a column lies outside of what is kept");
      last = std::max(last, at.of(b, n));
    }
  }
  return {at, last, columns, spans, false};
}

void OUTRIDER_NAMESPACE::turn_by(NewTokens& tokens, const Tensor& cos, const Tensor& sin) {
  STD_TORCH_CHECK(cos.dim() == 4, "attention is of other dimensions");
  tokens.turned = cos.size(3);
  STD_TORCH_CHECK(tokens.turned % 2 == 0, "an odd number is rotated");
  tokens.cosines = angles_of(cos, tokens.at.batch, tokens.at.tokens, tokens.turned);
  tokens.sines = angles_of(sin, tokens.at.batch, tokens.at.tokens, tokens.turned);
}

void OUTRIDER_NAMESPACE::see(NewTokens& tokens, const Tensor& seen) {
  const Seen sees(seen, tokens.at.batch, tokens.at.tokens, tokens.columns);
  tokens.seen = sees.at;
  tokens.seen_row = sees.row;
  tokens.seen_token = sees.token;
}

void OUTRIDER_NAMESPACE::check_fit(const KeptAttention& kept, const NewTokens& tokens) {
  STD_TORCH_CHECK(0 <= tokens.columns && tokens.columns <= kept.capacity, "keys and values are kept in other sizes");
  STD_TORCH_CHECK(!tokens.by_rows || tokens.at.batch == kept.batch, "keys and values are kept in other sizes");
  for (const Span& span : tokens.spans) {
    STD_TORCH_CHECK(0 <= span.kept && span.kept < kept.batch && 0 <= span.columns && span.columns <= tokens.columns,
                    "keys and values are kept in other sizes");
  }
  STD_TORCH_CHECK(tokens.last < kept.capacity, "a column lies outside of what is kept");
  STD_TORCH_CHECK(tokens.turned <= kept.size, "more is rotated than there is");
}

void OUTRIDER_NAMESPACE::attend_new(const KeptAttention& kept, const NewTokens& tokens, const float* packed, float* out) {
  static thread_local Room for_queries;
  const int64_t size = kept.size, length = tokens.at.tokens, wide = kept.heads * size, all = tokens.at.batch * length;
  float* queries = for_queries.of(all * wide);
  std::vector<Pass> passes;
  std::vector<int64_t> begins{0};  // of the spans' tokens
  for (const Span& span : tokens.spans) {
    const int64_t before = begins.back();
    const bool* seen = tokens.seen == nullptr ? nullptr : tokens.seen + span.batch * tokens.seen_row + span.first * tokens.seen_token;
    passes.push_back({Part(queries + before * wide, span.count, size), kept.keys, kept.values, span.kept, seen, tokens.seen_token,
                      kept.groups, kept.heads / kept.groups, span.count, span.columns, size, kept.scale, out + before * wide});
    begins.push_back(before + span.count);
  }
  const auto some_tokens = [&](int64_t from, int64_t until) {
    static thread_local Room for_one, for_keys;
    const Turn query{kept.of_queries, size, tokens.turned}, key{kept.of_keys, size, tokens.turned};
    float *room = for_one.of(size), *turned = for_keys.of(size);
    for (int64_t m = from; m < until; m++) {
      const Place at(begins, m);
      const Span& span = tokens.spans[at.pass];
      const int64_t b = span.batch, i = at.task, n = span.first + i, to = tokens.at.of(b, n);
      const float *row = packed + m * kept.given(), *c = tokens.cosines.of(b, n), *s = tokens.sines.of(b, n);
      float* own = queries + begins[at.pass] * wide;
      for (int64_t h = 0; h < kept.heads; h++, row += size) query(row, c, s, room, own + (h * span.count + i) * size);
      for (int64_t g = 0; g < kept.groups; g++, row += size) {
        key(row, c, s, room, turned);
        kept.keys.put(turned, size, span.kept, g, to);
      }
      for (int64_t g = 0; g < kept.groups; g++, row += size) kept.values.put(row, size, span.kept, g, to);
    }
  };
  if (all > 1 && all * kept.given() >= MANY_TURNS) {
    torch::stable::parallel_for(0, all, 1, some_tokens);
  } else {
    some_tokens(0, all);
  }
  attend_all(passes);
}

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("attend(Tensor query, Tensor key, Tensor value, Tensor? seen, float scale) -> Tensor");
  library.def("attend_new(Tensor packed, int heads, Tensor? query_norm, Tensor? key_norm, float eps, float more, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor at, Tensor? seen, int columns, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("attend", TORCH_BOX(&attend));
  library.impl("attend_new", TORCH_BOX(&attend_new_tokens));
}
