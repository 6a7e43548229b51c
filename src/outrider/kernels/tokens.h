// What a pass computes of its tokens and of where they stand, before its first layer.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>

#include "rows.h"

namespace OUTRIDER_NAMESPACE {

inline bool is_bfloat(const Tensor& x) { return x.scalar_type() == torch::headeronly::ScalarType::BFloat16; }

// Exact: the upper half of a number in float32.
inline void from_bfloats(const uint16_t* x, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k++) {
    const uint32_t bits = static_cast<uint32_t>(x[k]) << 16;
    std::memcpy(out + k, &bits, sizeof(bits));
  }
}

// Rows [count, size], in float32 or bfloat16, or in 8 bits with a scale for each. It reads what its tensors hold.
struct Table {
  enum Type : int64_t { FLOAT, BFLOAT, CHAR };

  const void* rows;
  const float* scales;
  int64_t count, size;
  Type type;

  void of_row(int64_t id, float* out) const {
    const int64_t from = id * size;
    if (type == FLOAT) {
      const float* row = static_cast<const float*>(rows) + from;
      std::copy(row, row + size, out);
    } else if (type == BFLOAT) {
      from_bfloats(static_cast<const uint16_t*>(rows) + from, size, out);
    } else {
      const int8_t* row = static_cast<const int8_t*>(rows) + from;
      for (int64_t k = 0; k < size; k++) out[k] = static_cast<float>(row[k]) * scales[id];
    }
  }
};

// scales: float32 [V, 1] beside int8.
inline Table table_of(const Tensor& rows, const std::optional<Tensor>& scales) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous(), "a table is [V, size], in one piece");
  const int64_t count = rows.size(0);
  if (!scales.has_value()) {
    STD_TORCH_CHECK(is_float(rows) || is_bfloat(rows), "a table without scales is of float32 or bfloat16");
    return {rows.data_ptr(), nullptr, count, rows.size(1), is_float(rows) ? Table::FLOAT : Table::BFLOAT};
  }
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Char, "a table with scales is of int8");
  STD_TORCH_CHECK(is(*scales, ScalarType::Float) && scales->numel() == count, "scales are float32, one for each row");
  return {rows.data_ptr(), floats(*scales), count, rows.size(1), Table::CHAR};
}

// Whole numbers [B, N] of any strides: tokens, columns or positions.
struct Numbers {
  const int64_t* at;
  int64_t batch, tokens, row, token;

  int64_t of(int64_t b, int64_t n) const { return at[b * row + n * token]; }
};

inline Numbers numbers_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == torch::headeronly::ScalarType::Long, "tokens and positions are int64 [B, N]");
  return {static_cast<const int64_t*>(x.data_ptr()), x.size(0), x.size(1), x.stride(0), x.stride(1)};
}

// Cosines and sines of a position's angles with so many frequencies, twice each, times `times`.
inline void angles_at(int64_t position, const float* frequencies, int64_t count, float times, float* cosines, float* sines) {
  for (int64_t k = 0; k < count; k++) {
    const float angle = static_cast<float>(position) * frequencies[k];
    cosines[k] = cosines[k + count] = std::cos(angle) * times;
    sines[k] = sines[k + count] = std::sin(angle) * times;
  }
}

// What a token sees, of so many columns: those up to its position, `window` of them if that is not 0; or, `apart` from its
// position, those before it and its `own`.
inline void seen_at(int64_t position, bool apart, int64_t own, int64_t window, int64_t columns, bool* seen) {
  const int64_t end = std::min(apart ? position : position + 1, columns);
  const int64_t begin = window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
  std::fill(seen, seen + columns, false);
  if (begin < end) std::fill(seen + begin, seen + end, true);
  if (apart && 0 <= own && own < columns) seen[own] = true;
}

}  // namespace OUTRIDER_NAMESPACE
