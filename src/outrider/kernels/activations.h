// Activations in 8 bits, a scale for each block of columns of a row.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "linear.h"

namespace OUTRIDER_NAMESPACE {
namespace {

constexpr int64_t BLOCK = 256;       // columns that are rounded by one scale, beside weights in 8 bits
constexpr float LARGEST = 127.0f;    // of a rounded activation
constexpr float ZERO = 128.0f;       // added before rounding, as torch's kernels do: the same ties

// Activations [rows, columns] in 8 bits: x = value * scale, a scale for each block of columns, so that a number that is large
// leaves the others as they are. A block whose numbers are not all finite has a scale that is not.
struct Rounded {
  int64_t rows, columns, block, blocks;  // columns: filled up with zeros. block: columns of one, but for the last
  std::vector<int8_t> values;
  std::vector<float> scales;        // [rows, blocks]
  std::vector<int32_t> sums;        // of the values of each
  std::vector<int16_t> group_sums;  // and of each group of columns

  const int8_t* row(int64_t m) const { return values.data() + m * columns; }
};

inline void round_block(const float* x, int64_t columns, int64_t padded, int8_t* values, float* scale, int32_t* sum) {
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

// For weights of that layout. Kept by each thread, so that a call allocates nothing.
inline const Rounded& round_rows(const float* x, int64_t rows, int64_t columns, const Layout& layout) {
  static thread_local Rounded kept;
  Rounded& out = kept;
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
