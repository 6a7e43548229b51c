// Activations in 8 bits, a scale for each block of columns of a row.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"

namespace OUTRIDER_NAMESPACE {
namespace {

constexpr int64_t BLOCK = 256;       // columns that are quantized by one scale, beside weights in 8 bits
constexpr float LARGEST = 127.0f;    // of a quantized activation
constexpr float ZERO = 128.0f;       // added before rounding, as torch's kernels do: the same ties

// Activations [rows, columns] in 8 bits: x = value * scale, a scale for each block of columns, so that a number that is large
// leaves the others as they are. A block whose numbers are not all finite has a scale that is not.
struct Quantized {
  int64_t rows, columns, block, blocks;  // columns: filled up with zeros. block: columns of one, but for the last
  std::vector<int8_t> values;
  std::vector<float> scales;        // [rows, blocks]
  std::vector<int32_t> sums;        // of the values of each
  std::vector<int16_t> group_sums;  // and of each group of columns

  const int8_t* row(int64_t m) const { return values.data() + m * columns; }
};

#if defined(__AVX512F__)

inline __m512 next_of(const float* x, int64_t left, __mmask16* mask) {
  *mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
  return _mm512_maskz_loadu_ps(*mask, x);
}

// The largest of them, without its sign; `finite` is 0, or no number if one of them is not finite.
inline float largest_of(const float* x, int64_t count, float* finite) {
  __m512 largest = _mm512_setzero_ps(), zeros = _mm512_setzero_ps();
  for (int64_t k = 0; k < count; k += 16) {
    __mmask16 mask;
    const __m512 here = next_of(x + k, count - k, &mask);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(here));
    zeros = _mm512_fmadd_ps(here, _mm512_setzero_ps(), zeros);
  }
  *finite = _mm512_reduce_add_ps(zeros);
  return _mm512_reduce_max_ps(largest);
}

// -> the sum of the values.
inline int32_t divide(const float* x, int64_t count, float divisor, int8_t* values) {
  const __m512i zero = _mm512_set1_epi32(static_cast<int32_t>(ZERO));
  __m512i total = _mm512_setzero_si512();
  for (int64_t k = 0; k < count; k += 16) {
    __mmask16 mask;
    const __m512 here = _mm512_div_ps(next_of(x + k, count - k, &mask), _mm512_set1_ps(divisor));
    const __m512i value = _mm512_sub_epi32(_mm512_cvtps_epi32(_mm512_add_ps(here, _mm512_set1_ps(ZERO))), zero);
    const __m128i bytes = _mm512_cvtepi32_epi8(value);
    if (mask == 0xffff) {  // some processors store by a mask slowly
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + k), bytes);
    } else {
      _mm_mask_storeu_epi8(values + k, mask, bytes);
    }
    total = _mm512_add_epi32(total, value);
  }
  return _mm512_reduce_add_epi32(total);
}

#else

inline float largest_of(const float* x, int64_t count, float* finite) {
  float largest = 0.0f, zeros = 0.0f;
#pragma omp simd reduction(max : largest) reduction(+ : zeros)
  for (int64_t k = 0; k < count; k++) {
    largest = std::max(largest, std::fabs(x[k]));
    zeros += x[k] * 0.0f;
  }
  *finite = zeros;
  return largest;
}

inline int32_t divide(const float* x, int64_t count, float divisor, int8_t* values) {
  int32_t total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t k = 0; k < count; k++) {
    const float moved = x[k] / divisor + ZERO;
    const int32_t value = static_cast<int32_t>(std::nearbyint(moved)) - static_cast<int32_t>(ZERO);
    values[k] = static_cast<int8_t>(value);
    total += static_cast<int8_t>(value);
  }
  return total;
}

#endif

inline void round_block(const float* x, int64_t columns, int64_t padded, int8_t* values, float* scale, int32_t* sum) {
  float finite;
  const float largest = largest_of(x, columns, &finite);
  *scale = std::max(largest, 1e-30f) / LARGEST + finite;
  if (!std::isfinite(*scale)) {  // whatever the integers are, the results are no numbers
    std::memset(values, 0, padded);
    *sum = 0;
    return;
  }
  *sum = divide(x, columns, *scale, values);
  std::memset(values + columns, 0, padded - columns);
}

// Sums of so many groups of 16 or 32 values.
inline void sum_groups(const int8_t* values, int64_t groups, int64_t group, int16_t* sums) {
  const __m128i ones = _mm_set1_epi8(1);
  for (int64_t g = 0; g < groups; g++) {
    __m128i pairs = _mm_setzero_si128();
    for (int64_t k = 0; k < group; k += 16, values += 16) {
      pairs = _mm_add_epi16(pairs, _mm_maddubs_epi16(ones, _mm_loadu_si128(reinterpret_cast<const __m128i*>(values))));
    }
    __m128i four = _mm_madd_epi16(pairs, _mm_set1_epi16(1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(2, 3, 0, 1)));
    sums[g] = static_cast<int16_t>(_mm_cvtsi128_si32(four));
  }
}

// For weights of that layout. Kept by each thread, so that a call allocates nothing.
inline const Quantized& quantize_rows(const float* x, int64_t rows, int64_t columns, const Layout& layout) {
  static thread_local Quantized kept;
  Quantized& out = kept;
  out.rows = rows;
  const int64_t padded = layout.padded(columns), block = layout.bits == 8 ? BLOCK : layout.columns;
  const int64_t blocks = rounded_up(padded, block) / block;
  out.columns = padded;
  out.block = block;
  out.blocks = blocks;
  out.values.resize(rows * padded);
  out.scales.resize(rows * blocks);
  out.sums.resize(rows * blocks);
  const int64_t group = layout.group, groups = group == 0 ? 0 : padded / group;
  out.group_sums.resize(rows * groups + 1);  // they are read by two
  for_rows(rows, columns, [&out, x, columns, padded, block, blocks, group, groups](int64_t m) {
    int8_t* values = out.values.data() + m * padded;
    for (int64_t s = 0; s < blocks; s++) {
      const int64_t at = s * block, i = m * blocks + s;
      const int64_t given = std::min(block, columns - at), filled = std::min(block, padded - at);
      round_block(x + m * columns + at, given, filled, values + at, &out.scales[i], &out.sums[i]);
    }
    if (groups > 0) sum_groups(values, groups, group, out.group_sums.data() + m * groups);
  });
  return out;
}

inline int32_t four_at(const int8_t* values) {
  int32_t found;
  std::memcpy(&found, values, sizeof(found));
  return found;
}

inline int32_t two_at(const int16_t* values) {
  int32_t found;
  std::memcpy(&found, values, sizeof(found));
  return found;
}

}  // namespace
}  // namespace OUTRIDER_NAMESPACE
