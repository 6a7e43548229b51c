// Linear layers with quantized weights, over plain memory: what `quantized_linear.cpp` computes and `packing.cpp` lays out.

#pragma once

#include <cstdint>
#include <optional>

#include "rows.h"

namespace OUTRIDER_NAMESPACE {

constexpr int64_t OUTPUTS = 16;      // of a block
constexpr int64_t LINE = 64;         // bytes
#if defined(__AVX512VNNI__)
constexpr int32_t MOVED = 128;  // added to weights in 8 bits, so that they are unsigned
#else
constexpr int32_t MOVED = 64;
#endif

constexpr int64_t rounded_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// How the weights of 16 outputs lie, so many columns after so many. In 8 bits a line has 4 columns. In fewer bits columns come
// in groups, each with a whole number that multiplies it, and up to 256 of them share a scale in floating point:
//
//   4 bits: weight = scale * n * (0 .. 15) - step * m; groups of 32, at most 8. First the n of each output in 8 bits, those of
//   two groups side by side, then the m in the same way, in one line 16 scales and 16 steps in float16, then lines of 8 columns
//   (4 in the lower halves of the bytes). So llama.cpp's Q4_K is exact, and what was never quantized finds its n and m.
//   6 bits: weight = scale * n * (0 .. 63 - 32), 16 groups of 16: 4 lines of n, signed, a line of scales in float32, then for
//   each group three lines: 12 columns in the lower bits, the last 4 in the upper two of each. So Q6_K is exact.
//
// What is needed first lies first: it was fetched with the weights before it.
struct Layout {
  int64_t bits, columns, group, lines;  // group: columns of one; 0 in 8 bits

  int64_t padded(int64_t count) const { return rounded_up(count, columns); }
};

constexpr Layout INT8{8, 4, 0, 1}, INT6{6, 256, 16, 53};
constexpr int64_t MOST_GROUPS = 8;  // in 4 bits
constexpr int64_t PAIR = 2 * OUTPUTS;  // bytes: a number for each output and both of two groups

constexpr Layout int4(int64_t groups) { return {4, groups * 32, 32, 4 * groups + (groups + 1) / 2 + 1}; }

inline int64_t blocks_of(int64_t outputs) { return (outputs + OUTPUTS - 1) / OUTPUTS; }

// The layout of so many lines: no two have as many.
inline Layout grouped_layout(int64_t lines) {
  if (lines == INT6.lines) return INT6;
  for (int64_t groups = 1; groups <= MOST_GROUPS; groups++) {
    if (lines == int4(groups).lines) return int4(groups);
  }
  STD_TORCH_CHECK(false, "no weights have so many lines");
}

// A layer, and what stands before it: a norm, or a gate silu(x) * y of rows that have both, the gate first. It reads what its
// tensors hold, which have to outlive it.
struct Layer {
  Layout layout;
  const uint8_t* weight;
  const float *scales, *bias;  // scales: in 8 bits only
  int64_t given, columns, padded, outputs;  // given: numbers of a row, before a gate
  std::optional<Norm> norm;

  bool gated() const { return given != columns; }
};

// weight: as `pack_int8` gives it where there are scales, else as `pack_int4` or `pack_k` do.
Layer layer_of(int64_t given, const std::optional<Tensor>& norm, double eps, double more, bool gated, const Tensor& weight,
               const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, int64_t outputs);

// x [rows, given], added [rows, outputs] or none -> out [rows, outputs], which may be either of these.
void multiply(const Layer& layer, const float* x, int64_t rows, const float* added, float* out);

}  // namespace OUTRIDER_NAMESPACE
