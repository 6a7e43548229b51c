// Activations in 8 bits, a scale for each row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"

namespace OUTRIDER_NAMESPACE {
namespace {

constexpr float LARGEST = 127.0f;    // of a rounded activation
constexpr float ZERO = 128.0f;       // added before rounding, as torch's kernels do: the same ties

// Activations [rows, columns] in 8 bits: x = value * scale. A row whose numbers are not all finite has a scale that is not.
struct Rounded {
  int64_t rows, columns;  // columns: filled up with zeros
  std::vector<int8_t> values;
  std::vector<float> scales;
  std::vector<int32_t> sums;       // of a row's values
  std::vector<int16_t> group_sums;  // of each group of columns

  const int8_t* row(int64_t m) const { return values.data() + m * columns; }
};

inline void round_row(const float* x, int64_t columns, int64_t padded, int8_t* values, float* scale, int32_t* sum) {
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

// group: columns of one, 0 for none. Kept by each thread, so that a call allocates nothing.
inline const Rounded& round_rows(const float* x, int64_t rows, int64_t columns, int64_t padded, int64_t group) {
  static thread_local Rounded kept;
  Rounded& out = kept;
  out.rows = rows;
  out.columns = padded;
  out.values.resize(rows * padded);
  out.scales.resize(rows);
  out.sums.resize(rows);
  const int64_t groups = group == 0 ? 0 : padded / group;
  out.group_sums.resize(rows * groups + 1);  // they are read by two
  for_rows(rows, columns, [&out, x, columns, padded, group, groups](int64_t m) {
    int8_t* values = out.values.data() + m * padded;
    round_row(x + m * columns, columns, padded, values, &out.scales[m], &out.sums[m]);
    for (int64_t g = 0; g < groups; g++) {
      int16_t sum = 0;
      for (int64_t k = 0; k < group; k++) sum += values[g * group + k];
      out.group_sums[m * groups + g] = sum;
    }
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
