// Linear layers with weights in 8 or 4 bits and activations in 8, for x86 processors with AVX-512 VNNI or AVX2.
//
// A row's result has the same bits whatever rows are beside it and however many threads there are: activations are rounded by
// a scale of their row, products are summed as integers (8 bits: of a whole row; 4 bits: of a group of 32 columns), and what
// is added in floating point is added in the order of the columns, one output in one lane.
//
// Weights lie as they are read, in blocks of 16 outputs: a line of 64 bytes has 4 columns (8 bits) or 8 (4 bits, the first 4
// in the lower halves) of 16 outputs each, so that an instruction multiplies 4 columns of 16 outputs with 4 activations of
// a row. Up to 8 rows use a line while it is at hand (5 in 8 bits by AVX2): at the memory's pace they cost as much as one.
//
// `fused_int8` and `fused_int4` do what stands before and behind a layer, too: a norm or a gate, and adding what goes past it.
// They give the bits of these operations, called one by one.
//
// `packing.cpp` makes that layout, and `chain.cpp` calls these products without torch in between. All are operations of torch,
// callable by its interpreter (TorchScript), and compiled against the part of torch's headers whose binary interface is stable.

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "linear.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t NEAR = 2048;       // bytes that are fetched in advance, into the first cache
constexpr int64_t FAR = 16384;       // and into the second, which waits for more lines at a time than the first
constexpr int64_t TURNS = 8;         // in which a thread computes its part of the blocks, about
constexpr int64_t MOST_PARTS = 64;
constexpr int64_t SHARE = 1 << 12;   // activations that a thread gates at least
constexpr float LARGEST = 127.0f;    // of a rounded activation
constexpr float ZERO = 128.0f;       // added before rounding, as torch's kernels do: the same ties

// Activations [rows, columns] in 8 bits: x = value * scale. A row whose numbers are not all finite has a scale that is not.
struct Rounded {
  int64_t rows, columns;  // columns: filled up with zeros
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;       // of a row's values
  std::vector<float> group_sums;   // of each group of columns, in 4 bits

  const int8_t* row(int64_t m) const { return values.data() + m * columns; }
};

void round_row(const float* x, int64_t columns, int64_t padded, int8_t* values, float* scale, int32_t* sum) {
  float largest = 0.0f, finite = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : finite)
  for (int64_t k = 0; k < columns; k++) {
    largest = std::max(largest, std::fabs(x[k]));
    finite += x[k] * 0.0f;
  }
  *scale = std::max(largest, 1e-30f) / LARGEST + finite;
  if (!std::isfinite(*scale)) {  // whatever the integers are, the results are no numbers
    std::memset(values, 0, padded);
    *sum = 0;
    return;
  }
  const float divisor = *scale;
  int32_t total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t k = 0; k < columns; k++) {
    const float moved = x[k] / divisor + ZERO;
    const int32_t value = static_cast<int32_t>(std::nearbyint(moved)) - static_cast<int32_t>(ZERO);
    values[k] = static_cast<int8_t>(value);
    total += static_cast<int8_t>(value);
  }
  std::memset(values + columns, 0, padded - columns);
  *sum = total;
}

// Kept by each thread, so that a call allocates nothing.
const Rounded& round_rows(const float* x, int64_t rows, int64_t columns, int64_t padded, bool by_group) {
  static thread_local Rounded kept;
  Rounded& out = kept;
  out.rows = rows;
  out.columns = padded;
  out.values.resize(rows * padded);
  out.scales.resize(rows);
  out.sums.resize(rows);
  const int64_t groups = by_group ? padded / GROUP : 0;
  out.group_sums.resize(rows * groups);
  for_rows(rows, columns, [&out, x, columns, padded, groups](int64_t m) {
    int8_t* values = out.values.data() + m * padded;
    round_row(x + m * columns, columns, padded, values, &out.scales[m], &out.sums[m]);
    for (int64_t g = 0; g < groups; g++) {
      int32_t sum = 0;
      for (int64_t k = 0; k < GROUP; k++) sum += values[g * GROUP + k];
      out.group_sums[m * groups + g] = static_cast<float>(sum);
    }
  });
  return out;
}

int32_t four_at(const int8_t* values) {
  int32_t found;
  std::memcpy(&found, values, sizeof(found));
  return found;
}

// Where a block's results go: [rows, outputs], `lanes` of them in this block. added: what they are added to, in the same places.
struct Out {
  float* at;
  const float *bias, *added;
  int64_t stride, lanes;
};

// What is read after this line.
inline void fetch(const uint8_t* line) { _mm_prefetch(reinterpret_cast<const char*>(line + NEAR), _MM_HINT_T0); }

#if defined(__AVX512VNNI__)

// And what is read much later, where several rows use a line: with few, the processor sees by itself what comes.
template <bool SEVERAL>
inline void fetch(const uint8_t* line) {
  fetch(line);
  if (SEVERAL) _mm_prefetch(reinterpret_cast<const char*>(line + FAR), _MM_HINT_T1);
}

constexpr int MOST_ROWS_INT8 = 8, MOST_ROWS_INT4 = 8;

template <int M>
void store(const __m512 (&sums)[M], const float* scales, const Out& out) {
  const __mmask16 mask = out.lanes >= OUTPUTS ? 0xffff : static_cast<__mmask16>((1u << out.lanes) - 1);
  for (int m = 0; m < M; m++) {
    __m512 result = _mm512_mul_ps(sums[m], _mm512_set1_ps(scales[m]));
    if (out.bias != nullptr) result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(mask, out.bias));
    if (out.added != nullptr) result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(mask, out.added + m * out.stride));
    _mm512_mask_storeu_ps(out.at + m * out.stride, mask, result);
  }
}

// Weights are MOVED: what that adds is taken away in advance.
template <int M>
void block_int8(const uint8_t* weight, const float* weight_scales, const Rounded& x, int64_t first, const Out& out) {
  const int8_t* values = x.row(first);
  __m512i sums[M];
  for (int m = 0; m < M; m++) sums[m] = _mm512_set1_epi32(-MOVED * x.sums[first + m]);
  for (int64_t k = 0; k < x.columns; k += 4, weight += LINE) {
    const __m512i line = _mm512_loadu_si512(weight);
    fetch<(M > 4)>(weight);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      sums[m] = _mm512_dpbusd_epi32(sums[m], line, _mm512_set1_epi32(four_at(values + m * x.columns + k)));
    }
  }
  const __m512 scale = _mm512_loadu_ps(weight_scales);
  __m512 products[M];
  for (int m = 0; m < M; m++) products[m] = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[m]), scale);
  store<M>(products, x.scales.data() + first, out);
}

template <int M>
void block_int4(const uint8_t* weight, const Rounded& x, int64_t first, const Out& out) {
  const int64_t groups = x.columns / GROUP;
  const int8_t* values = x.row(first);
  const float* group_sums = x.group_sums.data() + first * groups;
  const __m512i low = _mm512_set1_epi8(15);
  __m512 products[M];
  for (int m = 0; m < M; m++) products[m] = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; g++, weight += LINE) {
    __m512i sums[M];
    for (int m = 0; m < M; m++) sums[m] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int line = 0; line < GROUP_LINES - 1; line++, weight += LINE) {
      const __m512i both = _mm512_loadu_si512(weight);
      fetch<(M > 2)>(weight);
      const __m512i lower = _mm512_and_si512(both, low), upper = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      const int8_t* at = values + g * GROUP + line * 8;
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        sums[m] = _mm512_dpbusd_epi32(sums[m], lower, _mm512_set1_epi32(four_at(at + m * x.columns)));
        sums[m] = _mm512_dpbusd_epi32(sums[m], upper, _mm512_set1_epi32(four_at(at + m * x.columns + 4)));
      }
    }
    const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight)));
    const __m512 least = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + 32)));
    fetch<(M > 2)>(weight);
    for (int m = 0; m < M; m++) {
      products[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[m]), scale, products[m]);
      products[m] = _mm512_fmadd_ps(_mm512_set1_ps(group_sums[m * groups + g]), least, products[m]);
    }
  }
  store<M>(products, x.scales.data() + first, out);
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

// Products of two columns are added in 16 bits. A pair fits if weights "in 8 bits" go to 64: 2 * 128 * 127 = 32,512. In 4 bits a
// group of columns does: 8 * 2 * 15 * 127 = 30,480.
constexpr int MOST_ROWS_INT8 = 5, MOST_ROWS_INT4 = 8;

void store(const float (&sums)[8], int half, const Out& out, int64_t m) {
  for (int64_t i = 0; i < 8 && half * 8 + i < out.lanes; i++) {
    const int64_t n = half * 8 + i, at = m * out.stride + n;
    float result = out.bias == nullptr ? sums[i] : sums[i] + out.bias[n];
    if (out.added != nullptr) result += out.added[at];
    out.at[at] = result;
  }
}

template <int M>
void block_int8(const uint8_t* weight, const float* weight_scales, const Rounded& x, int64_t first, const Out& out) {
  const int8_t* values = x.row(first);
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[M][2];
  for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = _mm256_set1_epi32(-MOVED * x.sums[first + m]);
  for (int64_t k = 0; k < x.columns; k += 4, weight += LINE) {
    const __m256i line[2] = {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight)),
                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weight + 32))};
    fetch(weight);
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const __m256i four = _mm256_set1_epi32(four_at(values + m * x.columns + k));
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const __m256i pairs = _mm256_maddubs_epi16(line[half], four);
        sums[m][half] = _mm256_add_epi32(sums[m][half], _mm256_madd_epi16(pairs, ones));
      }
    }
  }
  for (int m = 0; m < M; m++) {
    for (int half = 0; half < 2; half++) {
      const __m256 product = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[m][half]), _mm256_loadu_ps(weight_scales + half * 8));
      float found[8];
      _mm256_storeu_ps(found, _mm256_mul_ps(product, _mm256_set1_ps(x.scales[first + m])));
      store(found, half, out, m);
    }
  }
}

// The products of 4 columns of 16 outputs with M rows.
template <int M, bool FIRST>
inline __attribute__((always_inline)) void add_columns(__m256i left, __m256i right, const int8_t* from, int64_t columns,
                                                       __m256i (&sums)[M][2]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    const __m256i four = _mm256_set1_epi32(four_at(from + m * columns));
    const __m256i products[2] = {_mm256_maddubs_epi16(left, four), _mm256_maddubs_epi16(right, four)};
    sums[m][0] = FIRST ? products[0] : _mm256_add_epi16(sums[m][0], products[0]);
    sums[m][1] = FIRST ? products[1] : _mm256_add_epi16(sums[m][1], products[1]);
  }
}

// Of a line: it is read twice, since the sums of many rows leave no register for it.
template <int M, bool FIRST>
inline __attribute__((always_inline)) void add_line(const uint8_t* line, const int8_t* from, int64_t columns, __m256i (&sums)[M][2]) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i* both = reinterpret_cast<const __m256i*>(line);
  fetch(line);
  add_columns<M, FIRST>(_mm256_and_si256(_mm256_loadu_si256(both), low), _mm256_and_si256(_mm256_loadu_si256(both + 1), low), from,
                        columns, sums);
  add_columns<M, false>(_mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(both), 4), low),
                        _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256(both + 1), 4), low), from + 4, columns, sums);
}

// What groups give is kept in memory, so that the sums of a group of columns have the registers: eight rows use a line.
template <int M>
void block_int4(const uint8_t* weight, const Rounded& x, int64_t first, const Out& out) {
  const int64_t groups = x.columns / GROUP;
  const int8_t* values = x.row(first);
  const float* group_sums = x.group_sums.data() + first * groups;
  const __m256i ones = _mm256_set1_epi16(1);
  alignas(32) float products[M][OUTPUTS] = {};
  for (int64_t g = 0; g < groups; g++, weight += LINE) {
    __m256i sums[M][2];
    const int8_t* from = values + g * GROUP;
    add_line<M, true>(weight, from, x.columns, sums);
    weight += LINE;
#pragma GCC unroll 1
    for (int line = 1; line < GROUP_LINES - 1; line++, weight += LINE) {
      from += 8;
      add_line<M, false>(weight, from, x.columns, sums);
    }
    for (int half = 0; half < 2; half++) {
      const uint8_t* halves = weight + half * 16;
      const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
      const __m256 least = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 32)));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        float* product = products[m] + half * 8;
        const __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(sums[m][half], ones));
        const __m256 more = _mm256_fmadd_ps(sum, scale, _mm256_load_ps(product));
        _mm256_store_ps(product, _mm256_fmadd_ps(_mm256_set1_ps(group_sums[m * groups + g]), least, more));
      }
    }
  }
  for (int m = 0; m < M; m++) {
    for (int half = 0; half < 2; half++) {
      float found[8];
      _mm256_storeu_ps(found, _mm256_mul_ps(_mm256_load_ps(products[m] + half * 8), _mm256_set1_ps(x.scales[first + m])));
      store(found, half, out, m);
    }
  }
}

#else
#error "needs AVX-512 VNNI, or AVX2 with FMA and F16C"
#endif

// A thread's part of the blocks: the next that is to be computed. In a line of its own.
struct alignas(LINE) Part {
  std::atomic<int64_t> next;
  int64_t end;
};

// each(block) for all of them. A thread computes its part one after the other, and what others have left of theirs: one may be
// slower, and it makes no difference who computes a block.
template <class F>
void share_blocks(int64_t blocks, const F& each) {
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>({torch::stable::get_num_threads(), blocks, MOST_PARTS}));
  const int64_t some = std::max<int64_t>(1, blocks / (threads * TURNS));
  Part parts[MOST_PARTS];
  for (int64_t i = 0; i < threads; i++) {
    parts[i].next.store(blocks * i / threads, std::memory_order_relaxed);
    parts[i].end = blocks * (i + 1) / threads;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    for (int64_t i = 0; i < threads; i++) {
      Part& part = parts[(first + i) % threads];
      for (int64_t begin = part.next.fetch_add(some); begin < part.end; begin = part.next.fetch_add(some)) {
        for (int64_t n = begin; n < std::min(begin + some, part.end); n++) each(n);
      }
    }
  });
}

template <int M, class F>
void call_with(int64_t rows, int64_t first, const F& block) {
  if (rows == M) {
    block(std::integral_constant<int, M>(), first);
  } else if constexpr (M > 1) {
    call_with<M - 1>(rows, first, block);
  }
}

// Calls `block(rows, first row)` until all rows are done, in parts of about the same size; `rows`, at most MOST, is known when
// it is compiled.
template <int MOST, class F>
void by_rows(int64_t rows, const F& block) {
  const int64_t parts = (rows + MOST - 1) / MOST;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t first = rows * i / parts, until = rows * (i + 1) / parts;
    call_with<MOST>(until - first, first, block);
  }
}

// What a layer reads of x [rows, given]: x itself, or what a norm or a gate makes of it.
const float* before(const Layer& layer, const float* x, int64_t rows) {
  if (!layer.norm.has_value() && !layer.gated()) return x;
  static thread_local Room kept;
  const int64_t columns = layer.columns;
  float* to = kept.of(rows * columns);
  if (layer.gated()) {
    torch::stable::parallel_for(0, rows * columns, SHARE, [=](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t m = begin / columns, k = begin % columns, count = std::min(columns - k, end - begin);
        const float* row = x + 2 * m * columns + k;
        gated_row(row, row + columns, count, to + begin);
        begin += count;
      }
    });
  } else {
    const Norm norm = *layer.norm;
    for_rows(rows, columns, [=](int64_t m) { norm.of_row(x + m * columns, columns, to + m * columns); });
  }
  return to;
}

template <int MOST, class F>
void multiply_blocks(const Layer& layer, const Rounded& rounded, const float* added, float* out, const F& block) {
  const int64_t outputs = layer.outputs;
  share_blocks(blocks_of(outputs), [&](int64_t n) {
    by_rows<MOST>(rounded.rows, [&](auto count, int64_t first) {
      const int64_t at = n * OUTPUTS, from = first * outputs + at;
      const Out here{out + from, layer.bias == nullptr ? nullptr : layer.bias + at, added == nullptr ? nullptr : added + from,
                     outputs, outputs - at};
      block(count, n, first, here);
    });
  });
}

// Several dimensions but the last are rows.
struct Given {
  Tensor tensor;
  int64_t rows, columns;
};

Given rows_of(const Tensor& given) {
  STD_TORCH_CHECK(is_float(given) && given.dim() > 0, "activations must be float32 [.., columns]");
  const Tensor x = whole(given);
  const int64_t columns = x.size(x.dim() - 1);
  return {x, columns == 0 ? 0 : x.numel() / columns, columns};
}

Tensor multiplied(const Given& x, const Layer& layer, const std::optional<Tensor>& added) {
  STD_TORCH_CHECK(!added.has_value() || (is_float(*added) && added->numel() == x.rows * layer.outputs),
                  "what is added must be float32, a number for each result");
  const std::optional<Tensor> beside = added.has_value() ? std::optional<Tensor>(whole(*added)) : std::nullopt;
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.tensor.dim(); i++) shape.push_back(x.tensor.size(i));
  shape.push_back(layer.outputs);
  Tensor out = torch::stable::new_empty(x.tensor, {shape.data(), shape.size()});
  multiply(layer, floats(x.tensor), x.rows, beside.has_value() ? floats(*beside) : nullptr, static_cast<float*>(out.data_ptr()));
  return out;
}

// x [.., columns], weight as `pack_int8` gives it, scales [outputs, filled up], bias [outputs] or none -> [.., outputs]
Tensor linear_int8(Tensor x, Tensor weight, Tensor scales, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, std::nullopt, 0.0, 0.0, false, weight, scales, bias, outputs), std::nullopt);
}

// x [.., columns], weight as `pack_int4` gives it, bias [outputs] or none -> [.., outputs]
Tensor linear_int4(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, std::nullopt, 0.0, 0.0, false, weight, std::nullopt, bias, outputs), std::nullopt);
}

// The same of `rms_norm(x, norm, eps, more)`, or of silu(gate) * other for x [.., gate and other] -> added + [.., outputs]
Tensor fused_int8(Tensor x, std::optional<Tensor> norm, double eps, double more, bool gated, std::optional<Tensor> added,
                  Tensor weight, Tensor scales, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, norm, eps, more, gated, weight, scales, bias, outputs), added);
}

Tensor fused_int4(Tensor x, std::optional<Tensor> norm, double eps, double more, bool gated, std::optional<Tensor> added,
                  Tensor weight, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, norm, eps, more, gated, weight, std::nullopt, bias, outputs), added);
}

}  // namespace

Layer OUTRIDER_NAMESPACE::layer_of(int64_t given, const std::optional<Tensor>& norm, double eps, double more, bool gated,
                                   const Tensor& weight, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
                                   int64_t outputs) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(!gated || (!norm.has_value() && given % 2 == 0), "a gate and what it is for are as wide, without a norm");
  const int64_t dimensions = scales.has_value() ? 3 : 4, step = scales.has_value() ? 4 : GROUP;
  STD_TORCH_CHECK(is(weight, ScalarType::Byte) && weight.dim() == dimensions && weight.size(0) == blocks_of(outputs) &&
                      weight.size(dimensions - 1) == LINE && (scales.has_value() || weight.size(2) == GROUP_LINES),
                  "the weight is not one of so many outputs");
  STD_TORCH_CHECK(!scales.has_value() || (is(*scales, ScalarType::Float) && scales->numel() == blocks_of(outputs) * OUTPUTS),
                  "scales must be float32, a number for each output of every block");
  STD_TORCH_CHECK(!bias.has_value() || (is(*bias, ScalarType::Float) && bias->numel() == outputs),
                  "a bias must be float32, a number for each output");
  Layer layer{static_cast<const uint8_t*>(weight.data_ptr()), nullptr, nullptr, given, gated ? given / 2 : given,
              weight.size(1) * step, outputs, std::nullopt};
  STD_TORCH_CHECK(layer.columns > 0 && layer.columns <= layer.padded && layer.padded - layer.columns < step,
                  "activations and weights have other columns");
  if (scales.has_value()) layer.scales = floats(*scales);
  if (bias.has_value()) layer.bias = floats(*bias);
  if (norm.has_value()) layer.norm = norm_of(*norm, layer.columns, eps, more);
  return layer;
}

void OUTRIDER_NAMESPACE::multiply(const Layer& layer, const float* x, int64_t rows, const float* added, float* out) {
  const bool by_group = layer.scales == nullptr;
  const Rounded& rounded = round_rows(before(layer, x, rows), rows, layer.columns, layer.padded, by_group);
  if (by_group) {
    const int64_t bytes = layer.padded / GROUP * GROUP_LINES * LINE;
    multiply_blocks<MOST_ROWS_INT4>(layer, rounded, added, out, [&](auto count, int64_t n, int64_t first, const Out& here) {
      block_int4<count()>(layer.weight + n * bytes, rounded, first, here);
    });
  } else {
    const int64_t bytes = layer.padded / 4 * LINE;
    multiply_blocks<MOST_ROWS_INT8>(layer, rounded, added, out, [&](auto count, int64_t n, int64_t first, const Out& here) {
      block_int8<count()>(layer.weight + n * bytes, layer.scales + n * OUTPUTS, rounded, first, here);
    });
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("linear_int8(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int outputs) -> Tensor");
  library.def("linear_int4(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor");
  library.def("fused_int8(Tensor x, Tensor? norm, float eps, float more, bool gated, Tensor? added, Tensor weight, Tensor scales, Tensor? bias, int outputs) -> Tensor");
  library.def("fused_int4(Tensor x, Tensor? norm, float eps, float more, bool gated, Tensor? added, Tensor weight, Tensor? bias, int outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("linear_int8", TORCH_BOX(&linear_int8));
  library.impl("linear_int4", TORCH_BOX(&linear_int4));
  library.impl("fused_int8", TORCH_BOX(&fused_int8));
  library.impl("fused_int4", TORCH_BOX(&fused_int4));
}
