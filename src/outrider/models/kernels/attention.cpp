// Attention in float32 for passes of any width.
//
// A query's result has the same bits whatever queries are beside it, however many columns lie beyond what it sees, and however
// many threads there are: a product of a query and a key is summed in one order, chunks of columns begin at fixed columns,
// their weighted values are summed column after column, and chunks are put together one after the other. A masked column adds
// zero, and a chunk of masked columns is left out.
//
// Heads that share keys are rows below each other, three of which use keys and values while they are in registers. Keys and
// values are read as they lie in the cache.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;

namespace {

constexpr int64_t LANE = 8;            // numbers that are computed at once
constexpr int64_t CHUNK = 256;         // columns
constexpr int64_t MOST_ROWS = 3;       // at once
constexpr int64_t KEYS = 4;            // at once
constexpr int64_t PARALLEL = 1 << 16;  // products from which several threads share them
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// e^x for x <= 0, to about one unit of the last place; 0 for less than -87. Of NaN: NaN.
__m256 exponential(__m256 x) {
  const __m256 small = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0.693359375f), x);
  r = _mm256_fmadd_ps(n, _mm256_set1_ps(2.12194440e-4f), r);
  __m256 sum = _mm256_set1_ps(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f}) {
    sum = _mm256_fmadd_ps(sum, r, _mm256_set1_ps(next));
  }
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(small, _mm256_mul_ps(sum, _mm256_castsi256_ps(power)));
}

float exponential(float x) { return _mm256_cvtss_f32(exponential(_mm256_set1_ps(x))); }

// The same with its last dimension in one piece.
Tensor in_one_piece(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) == 1 ? x : torch::stable::contiguous(x);
}

// [batch, heads, tokens, size], the last dimension in one piece.
struct Part {
  const float* at;
  int64_t batch, head, token;

  explicit Part(const Tensor& x)
      : at(static_cast<const float*>(x.data_ptr())), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
  const float* of(int64_t b, int64_t h, int64_t n) const { return at + b * batch + h * head + n * token; }
};

// What all chunks need. seen: of a row and a column, or none for all.
struct Pass {
  Part queries, keys, values;
  const bool* seen;
  int64_t seen_batch, seen_token;
  int64_t groups, times, tokens, columns, size;
  float scale;

  int64_t rows() const { return times * tokens; }
};

// A chunk's largest score of each row, the sum of weights, and the weighted values, for a row after the other.
struct Found {
  float *largest, *weight, *values;
};

// Products of M rows with the chunk's keys, scaled; what a row does not see is NOTHING, and so is what fills up the last lane.
template <int M>
void score(const Pass& pass, const float* const (&queries)[M], const float* keys, const bool* const (&seen)[M], int64_t count,
           float (&scores)[M][CHUNK]) {
  for (int64_t c = 0; c < count; c += KEYS) {
    const float* key[KEYS];
    for (int64_t i = 0; i < KEYS; i++) key[i] = keys + std::min(c + i, count - 1) * pass.keys.token;
    __m256 sums[M][KEYS];
    for (int m = 0; m < M; m++) {
      for (int64_t i = 0; i < KEYS; i++) sums[m][i] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < pass.size; d += LANE) {
      __m256 part[KEYS];
      for (int64_t i = 0; i < KEYS; i++) part[i] = _mm256_loadu_ps(key[i] + d);
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

// Scores become weights; -> whether the row sees anything.
bool weigh(float* scores, int64_t count, float* largest, float* weight) {
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
template <int M, int W>
void add_values(const float (&weights)[M][CHUNK], const float* values, int64_t stride, int64_t count, int64_t size, float* out) {
  __m256 sums[M][W];
  for (int m = 0; m < M; m++) {
    for (int w = 0; w < W; w++) sums[m][w] = _mm256_setzero_ps();
  }
  for (int64_t c = 0; c < count; c++, values += stride) {
    __m256 part[W];
    for (int w = 0; w < W; w++) part[w] = _mm256_loadu_ps(values + w * LANE);
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

template <int M>
void attend_rows(const Pass& pass, int64_t b, int64_t g, int64_t first, int64_t begin, int64_t count, const Found& found) {
  const float* queries[M];
  const bool* seen[M];
  for (int m = 0; m < M; m++) {
    const int64_t n = (first + m) % pass.tokens;
    queries[m] = pass.queries.of(b, g * pass.times + (first + m) / pass.tokens, n);
    seen[m] = pass.seen == nullptr ? nullptr : pass.seen + b * pass.seen_batch + n * pass.seen_token + begin;
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
  score<M>(pass, queries, pass.keys.of(b, g, begin), seen, count, scores);
  for (int m = 0; m < M; m++) {
    if (!weigh(scores[m], count, found.largest + first + m, found.weight + first + m)) {
      std::fill(scores[m], scores[m] + count, 0.0f);
    }
  }
  const float* values = pass.values.of(b, g, begin);
  float* out = found.values + first * pass.size;
  int64_t d = 0;
  for (; d + 4 * LANE <= pass.size; d += 4 * LANE) {
    add_values<M, 4>(scores, values + d, pass.values.token, count, pass.size, out + d);
  }
  for (; d < pass.size; d += LANE) add_values<M, 1>(scores, values + d, pass.values.token, count, pass.size, out + d);
}

// query [B, heads, N, size], key and value [B, groups, L, size], seen bool [B or 1, 1, N, L] or none -> [B, N, heads, size]
Tensor attend(Tensor query, Tensor key, Tensor value, std::optional<Tensor> seen, double scale) {
  for (Tensor* each : {&query, &key, &value}) {
    STD_TORCH_CHECK(each->dim() == 4 && each->scalar_type() == torch::headeronly::ScalarType::Float, "attention is of float32");
    STD_TORCH_CHECK(each->size(3) == query.size(3) && each->size(0) == query.size(0), "queries, keys and values have other sizes");
    *each = in_one_piece(*each);
  }
  const int64_t batch = query.size(0), heads = query.size(1), tokens = query.size(2), size = query.size(3);
  const int64_t groups = key.size(1), columns = key.size(2);
  STD_TORCH_CHECK(groups > 0 && heads % groups == 0 && value.size(1) == groups && value.size(2) == columns && size % LANE == 0,
                  "heads can't share these keys");
  Pass pass{Part(query), Part(key), Part(value), nullptr, 0, 0, groups, heads / groups, tokens, columns, size,
            static_cast<float>(scale)};
  Tensor mask = query;
  if (seen.has_value()) {
    STD_TORCH_CHECK(seen->dim() == 4, "what is seen must be bool [B, 1, N, L]");
    mask = in_one_piece(*seen);
    STD_TORCH_CHECK( mask.scalar_type() == torch::headeronly::ScalarType::Bool && mask.size(1) == 1 &&
                        (mask.size(0) == batch || mask.size(0) == 1) && mask.size(2) == tokens && mask.size(3) == columns,
                    "what is seen must be bool [B, 1, N, L]");
    pass.seen = static_cast<const bool*>(mask.data_ptr());
    pass.seen_batch = mask.size(0) == 1 ? 0 : mask.stride(0);
    pass.seen_token = mask.stride(2);
  }
  const int64_t shape[] = {batch, tokens, heads, size};
  Tensor out = torch::stable::new_empty(query, {shape, 4});
  float* to = static_cast<float*>(out.data_ptr());
  const int64_t rows = pass.rows(), chunks = (columns + CHUNK - 1) / CHUNK, tasks = batch * groups * chunks;
  const std::unique_ptr<float[]> room(new float[tasks * rows * (size + 2)]);
  auto found_of = [&](int64_t task) {
    float* at = room.get() + task * rows * (size + 2);
    return Found{at, at + rows, at + 2 * rows};
  };
  auto some_chunks = [&](int64_t from, int64_t until) {
    for (int64_t task = from; task < until; task++) {
      const int64_t begin = task % chunks * CHUNK, g = task / chunks % groups, b = task / chunks / groups;
      const int64_t count = std::min(CHUNK, columns - begin);
      const Found found = found_of(task);
      for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        switch (std::min(rows - first, MOST_ROWS)) {
          case 1: attend_rows<1>(pass, b, g, first, begin, count, found); break;
          case 2: attend_rows<2>(pass, b, g, first, begin, count, found); break;
          case 3: attend_rows<3>(pass, b, g, first, begin, count, found); break;
        }
      }
    }
  };
  auto put_together = [&](int64_t from, int64_t until) {
    for (int64_t at = from; at < until; at++) {
      const int64_t row = at % rows, g = at / rows % groups, b = at / rows / groups;
      const int64_t first = (b * groups + g) * chunks;
      float largest = NOTHING, total = 0.0f;
      for (int64_t c = 0; c < chunks; c++) {
        const float here = found_of(first + c).largest[row];
        if (here > largest || std::isnan(here)) largest = here;  // once NaN, it stays
      }
      float* result = to + ((b * tokens + row % tokens) * heads + g * pass.times + row / tokens) * size;
      std::fill(result, result + size, 0.0f);
      for (int64_t c = 0; c < chunks; c++) {
        const Found found = found_of(first + c);
        if (found.largest[row] == NOTHING) continue;
        const float factor = exponential(found.largest[row] - largest);
        const float* values = found.values + row * size;
        total += found.weight[row] * factor;
        for (int64_t d = 0; d < size; d++) result[d] += values[d] * factor;
      }
      if (total == 0.0f) continue;  // it sees nothing
      const float inverse = 1.0f / total;
      for (int64_t d = 0; d < size; d++) result[d] *= inverse;
    }
  };
  if (tasks > 1 && batch * heads * tokens * columns * size >= PARALLEL) {
    torch::stable::parallel_for(0, tasks, 1, some_chunks);
    if (batch * heads * tokens * size * chunks >= PARALLEL) {
      torch::stable::parallel_for(0, batch * groups * rows, 16, put_together);
      return out;
    }
  } else {
    some_chunks(0, tasks);
  }
  put_together(0, batch * groups * rows);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("attend(Tensor query, Tensor key, Tensor value, Tensor? seen, float scale) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) { library.impl("attend", TORCH_BOX(&attend)); }
