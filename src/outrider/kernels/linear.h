// Linear layers with rounded weights, over plain memory: what `rounded_linear.cpp` computes and `packing.cpp` lays out.

#pragma once

#include <cstdint>
#include <optional>

#include "rows.h"

namespace OUTRIDER_NAMESPACE {

constexpr int64_t OUTPUTS = 16;      // of a block
constexpr int64_t LINE = 64;         // bytes
constexpr int64_t GROUP = 32;        // columns that share a scale and a least value, in 4 bits
constexpr int64_t GROUP_LINES = 5;   // 4 of weights, then 16 scales and 16 least values in float16
#if defined(__AVX512VNNI__)
constexpr int32_t MOVED = 128;  // added to weights in 8 bits, so that they are unsigned
#else
constexpr int32_t MOVED = 64;
#endif

inline int64_t blocks_of(int64_t outputs) { return (outputs + OUTPUTS - 1) / OUTPUTS; }
inline int64_t rounded_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// A layer, and what stands before it: a norm, or a gate silu(x) * y of rows that have both, the gate first. It reads what its
// tensors hold, which have to outlive it.
struct Layer {
  const uint8_t* weight;
  const float *scales, *bias;  // scales: none in 4 bits
  int64_t given, columns, padded, outputs;  // given: numbers of a row, before a gate
  std::optional<Norm> norm;

  bool gated() const { return given != columns; }
};

// weight: as `pack_int8` gives it where there are scales, else as `pack_int4` does.
Layer layer_of(int64_t given, const std::optional<Tensor>& norm, double eps, double more, bool gated, const Tensor& weight,
               const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, int64_t outputs);

// x [rows, given], added [rows, outputs] or none -> out [rows, outputs], which may be either of these.
void multiply(const Layer& layer, const float* x, int64_t rows, const float* added, float* out);

}  // namespace OUTRIDER_NAMESPACE
