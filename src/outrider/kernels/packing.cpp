// The layout that the products of `rounded_linear.cpp` read, made of weights once.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "linear.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t MOST_COLUMNS = 130000;  // in 8 bits: 255 * 127 of each, in 32
constexpr float FOUND = 1e-4f;       // squared error of a group over its squared range: it was in 4 bits before

// values [outputs, columns] int8 -> [blocks, lines, 64] uint8, MOVED
Tensor pack_int8(Tensor values) {
  STD_TORCH_CHECK(is(values, torch::headeronly::ScalarType::Char) && values.dim() == 2, "weights must be int8 in one piece");
  STD_TORCH_CHECK(values.size(1) <= MOST_COLUMNS, "sums of so many columns may not fit");
  const int64_t outputs = values.size(0), columns = values.size(1), lines = rounded_up(columns, 4) / 4;
  const int64_t shape[] = {blocks_of(outputs), lines, LINE};
  Tensor out = torch::stable::new_empty(values, {shape, 3}, torch::headeronly::ScalarType::Byte);
  const int8_t* from = static_cast<const int8_t*>(values.data_ptr());
  uint8_t* to = static_cast<uint8_t*>(out.data_ptr());
  std::memset(to, MOVED, shape[0] * lines * LINE);
  torch::stable::parallel_for(0, outputs, 16, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      uint8_t* lane = to + n / OUTPUTS * lines * LINE + n % OUTPUTS * 4;
      for (int64_t k = 0; k < columns; k++) lane[k / 4 * LINE + k % 4] = static_cast<uint8_t>(from[n * columns + k] + MOVED);
    }
  });
  return out;
}

// One group of weights as least + scale * (0 .. 15), both in float16.
struct Group {
  float scale = 0.0f, least = 0.0f, error = std::numeric_limits<float>::infinity();
  uint8_t values[GROUP] = {};
};

float in_half(float value) { return _cvtsh_ss(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

// Rounds a group by a scale and a least value, and keeps that if nothing before was nearer.
void try_group(const float* weights, float scale, float least, Group* best) {
  scale = in_half(scale);
  least = in_half(least);
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  float values[GROUP], error = 0.0f;
#pragma omp simd reduction(+ : error)
  for (int64_t k = 0; k < GROUP; k++) {
    values[k] = std::min(std::max(std::nearbyint((weights[k] - least) * inverse), 0.0f), 15.0f);
    const float off = values[k] * scale + least - weights[k];
    error += off * off;
  }
  if (!(error < best->error)) return;
  best->scale = scale;
  best->least = least;
  best->error = error;
  for (int64_t k = 0; k < GROUP; k++) best->values[k] = static_cast<uint8_t>(values[k]);
}

// Scale and least value that are nearest to the weights with the integers that they have.
void refit(const float* weights, Group* best) {
  float n = GROUP, v = 0.0f, vv = 0.0f, w = 0.0f, vw = 0.0f;
#pragma omp simd reduction(+ : v, vv, w, vw)
  for (int64_t k = 0; k < GROUP; k++) {
    const float value = best->values[k];
    v += value;
    vv += value * value;
    w += weights[k];
    vw += value * weights[k];
  }
  const float spread = n * vv - v * v;
  if (spread <= 0.0f) return;
  const float scale = (n * vw - v * w) / spread;
  try_group(weights, scale, (w - scale * v) / n, best);
}

// The nearest of some: all 15 steps or fewer between the extremes (weights that were in 4 bits before are found again), and
// ranges that leave the extremes out.
Group round_group(const float* weights) {
  float low = weights[0], high = weights[0];
  for (int64_t k = 1; k < GROUP; k++) {
    low = std::min(low, weights[k]);
    high = std::max(high, weights[k]);
  }
  Group best;
  const float range = high - low, found = range * range * FOUND;
  for (int steps = 15; steps >= 7 && best.error > found; steps--) {
    try_group(weights, range / static_cast<float>(steps), low, &best);
  }
  if (best.error <= found) return best;
  for (float kept : {0.95f, 0.9f, 0.85f, 0.8f}) {
    for (float side : {0.0f, 0.5f, 1.0f}) try_group(weights, range * kept / 15.0f, low + range * (1.0f - kept) * side, &best);
  }
  refit(weights, &best);
  refit(weights, &best);
  return best;
}

// weights [outputs, columns] float32 -> [blocks, groups, 5, 64] uint8, and squared errors [outputs]
std::tuple<Tensor, Tensor> pack_int4(Tensor weights) {
  STD_TORCH_CHECK(is(weights, torch::headeronly::ScalarType::Float) && weights.dim() == 2, "weights must be float32 in one piece");
  const int64_t outputs = weights.size(0), columns = weights.size(1), groups = rounded_up(columns, GROUP) / GROUP;
  const int64_t shape[] = {blocks_of(outputs), groups, GROUP_LINES, LINE}, rows[] = {outputs};
  Tensor out = torch::stable::new_empty(weights, {shape, 4}, torch::headeronly::ScalarType::Byte);
  Tensor errors = torch::stable::new_empty(weights, {rows, 1});
  const float* from = static_cast<const float*>(weights.data_ptr());
  uint8_t* to = static_cast<uint8_t*>(out.data_ptr());
  float* error = static_cast<float*>(errors.data_ptr());
  std::memset(to, 0, shape[0] * groups * GROUP_LINES * LINE);
  torch::stable::parallel_for(0, outputs, 16, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      error[n] = 0.0f;
      for (int64_t g = 0; g < groups; g++) {
        float group[GROUP];
        const float* first = from + n * columns + g * GROUP;
        const int64_t count = std::min(GROUP, columns - g * GROUP);
        std::copy(first, first + count, group);
        for (int64_t k = count; k < GROUP; k++) group[k] = group[k - count];  // the weights again: what is nearest stays so
        const Group found = round_group(group);
        error[n] += found.error;
        uint8_t* lines = to + (n / OUTPUTS * groups + g) * GROUP_LINES * LINE;
        const int64_t lane = n % OUTPUTS;
        for (int64_t k = 0; k < GROUP; k++) {
          lines[k / 8 * LINE + lane * 4 + k % 4] |= static_cast<uint8_t>(found.values[k] << (k % 8 < 4 ? 0 : 4));
        }
        const uint16_t scale = _cvtss_sh(found.scale, 0), least = _cvtss_sh(found.least, 0);
        uint8_t* last = lines + (GROUP_LINES - 1) * LINE;
        std::memcpy(last + lane * 2, &scale, 2);
        std::memcpy(last + 32 + lane * 2, &least, 2);
      }
    }
  });
  return {out, errors};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("pack_int8(Tensor values) -> Tensor");
  library.def("pack_int4(Tensor weights) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("pack_int8", TORCH_BOX(&pack_int8));
  library.impl("pack_int4", TORCH_BOX(&pack_int4));
}
