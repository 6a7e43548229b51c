// What is computed of one row, by the operation of its own and inside of larger ones: the same bits in both.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace OUTRIDER_NAMESPACE {

using torch::stable::Tensor;

constexpr int64_t LANE = 8;  // numbers that are computed at once
constexpr int64_t SUMS = 16;  // side by side, on any processor
constexpr int64_t MANY = 1 << 15;  // numbers from which several threads share the rows

// A number in float16.
struct Half {
  uint16_t bits;
};

inline __m256 eight_of(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 eight_of(const Half* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
inline float number(float x) { return x; }
inline float number(Half x) { return _cvtsh_ss(x.bits); }

// Rounded to the nearest one, as torch does. count: a multiple of `LANE`.
inline void to_halves(const float* x, int64_t count, Half* out) {
  for (int64_t k = 0; k < count; k += LANE) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + k), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + k), halves);
  }
}

// each(m) for all rows.
template <class F>
void for_rows(int64_t rows, int64_t columns, const F& each) {
  auto some = [&each](int64_t from, int64_t to) {
    for (int64_t m = from; m < to; m++) each(m);
  };
  if (rows > 1 && rows * columns >= MANY) {
    torch::stable::parallel_for(0, rows, 1, some);
  } else {
    some(0, rows);
  }
}

inline bool is(const Tensor& x, torch::headeronly::ScalarType type) { return x.scalar_type() == type && x.is_contiguous(); }

inline bool is_float(const Tensor& x) { return x.scalar_type() == torch::headeronly::ScalarType::Float; }

inline bool is_half(const Tensor& x) { return x.scalar_type() == torch::headeronly::ScalarType::Half; }

inline const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }

// The same in one piece.
inline Tensor whole(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

// The same with its last dimension in one piece.
inline Tensor in_one_piece(const Tensor& x) {
  const int64_t last = x.dim() - 1;
  return x.stride(last) == 1 || x.size(last) == 1 ? x : torch::stable::contiguous(x);
}

// e^x for x <= 0, to about one unit of the last place; 0 for less than -87. Of NaN: NaN.
inline __m256 exponential(__m256 x) {
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

#if defined(__AVX512F__)
// The same of sixteen numbers, to the bit.
inline __m512 exponential(__m512 x) {
  const __mmask16 not_small = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
  const __m512 halvings = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 n = _mm512_roundscale_ps(halvings, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0.693359375f), x);
  r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(next));
  }
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_maskz_mul_ps(not_small, sum, _mm512_castsi512_ps(power));
}
#endif

inline float exponential(float x) { return _mm256_cvtss_f32(exponential(_mm256_set1_ps(x))); }

// x / (1 + e^-u)
inline __m256 swish_of(__m256 x, __m256 u) {
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
  const __m256 small = exponential(_mm256_or_ps(u, sign));  // of -|u|
  const __m256 above = _mm256_blendv_ps(one, small, u);     // blends where u is negative
  return _mm256_mul_ps(x, _mm256_div_ps(above, _mm256_add_ps(one, small)));
}

inline __m256 silu_of(__m256 x) { return swish_of(x, x); }

// x * Phi(x), Phi being the normal distribution's: for x < 0 that is e^(-x^2 / 2) times a smooth function, here a polynomial
// of 1 / (1 + .3 |x|) that is right to 6e-8 from -13.5 on, where the other factor is 0.
inline __m256 gelu_of(__m256 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
  const __m256 size = _mm256_andnot_ps(sign, x);
  const __m256 at = _mm256_div_ps(one, _mm256_fmadd_ps(size, _mm256_set1_ps(0.3f), one));
  __m256 sum = _mm256_set1_ps(0.038335129618644714f);
  for (float next : {-0.1689559817314148f, 0.2282252162694931f, -0.07600817829370499f, 0.14219063520431519f, 0.09483075886964798f,
                     0.12188258022069931f, 0.11949299275875092f, 6.856540039734682e-06f}) {
    sum = _mm256_fmadd_ps(sum, at, _mm256_set1_ps(next));
  }
  const __m256 tail = _mm256_mul_ps(sum, exponential(_mm256_mul_ps(_mm256_mul_ps(x, _mm256_set1_ps(-0.5f)), x)));
  return _mm256_mul_ps(x, _mm256_blendv_ps(_mm256_sub_ps(one, tail), tail, x));
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + .044715 x^3)))
inline __m256 gelu_by_tanh(__m256 x) {
  const __m256 factor = _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(0.07135481283f), _mm256_set1_ps(1.595769122f));
  return swish_of(x, _mm256_mul_ps(x, factor));
}

// x / (1 + e^(-1.702 x))
inline __m256 quick_gelu_of(__m256 x) { return swish_of(x, _mm256_mul_ps(x, _mm256_set1_ps(1.702f))); }

// The first `count` numbers, and zeros.
inline __m256 some_of(const float* x, int64_t count) {
  float lanes[LANE] = {};
  std::copy(x, x + count, lanes);
  return _mm256_loadu_ps(lanes);
}

inline void store_some(__m256 x, int64_t count, float* out) {
  float lanes[LANE];
  _mm256_storeu_ps(lanes, x);
  std::copy(lanes, lanes + count, out);
}

// of(x) of each number: its bits do not depend on its place.
template <class F>
void each_number(const float* x, int64_t count, float* out, const F& of) {
  int64_t k = 0;
  for (; k + LANE <= count; k += LANE) _mm256_storeu_ps(out + k, of(_mm256_loadu_ps(x + k)));
  if (k < count) store_some(of(some_of(x + k, count - k)), count - k, out + k);
}

// silu(gate) * x
inline void gated_row(const float* gate, const float* x, int64_t count, float* out) {
  int64_t k = 0;
  for (; k + LANE <= count; k += LANE) {
    _mm256_storeu_ps(out + k, _mm256_mul_ps(silu_of(_mm256_loadu_ps(gate + k)), _mm256_loadu_ps(x + k)));
  }
  const int64_t rest = count - k;
  if (rest > 0) store_some(_mm256_mul_ps(silu_of(some_of(gate + k, rest)), some_of(x + k, rest)), rest, out + k);
}

inline float sum_of_squares(const float* x, int64_t count) {
  float lanes[SUMS] = {};
  int64_t k = 0;
  for (; k + SUMS <= count; k += SUMS) {
    for (int64_t i = 0; i < SUMS; i++) lanes[i] += x[k + i] * x[k + i];
  }
  for (int64_t i = 0; k + i < count; i++) lanes[i] += x[k + i] * x[k + i];
  for (int64_t half = SUMS / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// x / sqrt(mean(x^2) + small) * (weight + added)
struct Norm {
  const float* weight;
  float small, added;

  void of_row(const float* row, int64_t size, float* out) const {
    const float scale = 1.0f / std::sqrt(sum_of_squares(row, size) / static_cast<float>(size) + small);
    for (int64_t k = 0; k < size; k++) out[k] = row[k] * scale * (weight[k] + added);
  }
};

inline Norm norm_of(const Tensor& weight, int64_t size, double eps, double more) {
  STD_TORCH_CHECK(is_float(weight) && weight.is_contiguous(), "a norm is of float32");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == size && size > 0, "a norm is of rows as long as its weight");
  return {floats(weight), static_cast<float>(eps), static_cast<float>(more)};
}

// x * cos + turned(x) * sin, turned(x) being its upper half with the other sign, then its lower half.
inline void rotate_row(const float* row, const float* cosines, const float* sines, int64_t size, float* out) {
  const int64_t half = size / 2;
  for (int64_t k = 0; k < half; k++) {
    out[k] = row[k] * cosines[k] + -row[k + half] * sines[k];
    out[k + half] = row[k + half] * cosines[k + half] + row[k] * sines[k + half];
  }
}

// Cosines or sines, [batch or 1, 1, tokens, size].
struct Angles {
  const float* at;
  int64_t batch, token;

  const float* of(int64_t b, int64_t n) const { return at + b * batch + n * token; }
};

inline Angles angles_of(const Tensor& x, int64_t batch, int64_t tokens, int64_t size) {
  STD_TORCH_CHECK(x.dim() == 4 && is_float(x), "angles are of float32 and have 4 dimensions");
  STD_TORCH_CHECK((x.size(0) == batch || x.size(0) == 1) && x.size(1) == 1 && x.size(2) == tokens && x.size(3) == size &&
                      (x.stride(3) == 1 || size == 1),
                  "angles have other sizes than what is rotated");
  return {floats(x), x.size(0) == 1 ? 0 : x.stride(0), x.stride(2)};
}

// Memory that a thread keeps, so that a call allocates nothing: at least so many numbers, whatever they are. A large one, of a
// long prompt or many rows, is given back by the next call that needs less.
struct Room {
  static constexpr int64_t KEPT = 1 << 20;
  std::unique_ptr<float[]> at;
  int64_t size = 0;

  float* of(int64_t wanted) {
    if (wanted > size || (size > KEPT && wanted <= KEPT)) {
      at.reset(new float[wanted]);
      size = wanted;
    }
    return at.get();
  }
};

}  // namespace OUTRIDER_NAMESPACE
