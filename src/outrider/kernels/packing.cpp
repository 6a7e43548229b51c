// The layout that the products of `quantized_linear.cpp` read, made of weights once.

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

constexpr int64_t GROUP = 32, SUPER = 256;  // in 4 bits: columns of a group, and the most that share a scale
constexpr float FOUND = 1e-4f;       // squared error of a group over its squared range: it was in 4 bits before

// values [outputs, columns] int8 -> [blocks, lines, 64] uint8, MOVED
Tensor pack_int8(Tensor values) {
  STD_TORCH_CHECK(is(values, torch::headeronly::ScalarType::Char) && values.dim() == 2, "weights must be int8 in one piece");
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

// 32 columns of an output as least + scale * (0 .. 15), least at most 0.
struct Group {
  float scale = 0.0f, least = 0.0f, error = std::numeric_limits<float>::infinity();
  uint8_t values[GROUP] = {};
};

// Rounds a group by a scale and a least value. -> the squared error
float round_by(const float* weights, float scale, float least, uint8_t* values) {
  const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  float error = 0.0f;
#pragma omp simd reduction(+ : error)
  for (int64_t k = 0; k < GROUP; k++) {
    const float value = std::min(15.0f, std::max(0.0f, std::nearbyint((weights[k] - least) * inverse)));  // of NaN: 0
    const float off = value * scale + least - weights[k];
    error += off * off;
    values[k] = static_cast<uint8_t>(value);
  }
  return error;
}

// Keeps that if nothing before was nearer.
void try_group(const float* weights, float scale, float least, Group* best) {
  Group found{scale, std::min(least, 0.0f)};
  found.error = round_by(weights, found.scale, found.least, found.values);
  if (found.error < best->error) *best = found;
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
  float range = high - low;
  const float found = range * range * FOUND;
  for (int steps = 15; steps >= 7 && best.error > found; steps--) {
    const float scale = range / static_cast<float>(steps), above = low > 0.0f && scale > 0.0f ? std::ceil(low / scale) : 0.0f;
    try_group(weights, scale, low - above * scale, &best);
  }
  if (best.error <= found) return best;
  low = std::min(low, 0.0f);
  range = high - low;
  for (float kept : {1.0f, 0.95f, 0.9f, 0.85f, 0.8f}) {
    for (float side : {0.0f, 0.5f, 1.0f}) try_group(weights, range * kept / 15.0f, low + range * (1.0f - kept) * side, &best);
  }
  refit(weights, &best);
  refit(weights, &best);
  return best;
}

// Columns of an output that share a scale, in whole numbers. 4 bits: factors n and offsets m; 6 bits: signed factors.
struct Super {
  uint8_t values[SUPER] = {}, factors[16] = {}, offsets[MOST_GROUPS] = {};
  uint16_t scale = 0, step = 0;  // float16
};

float from_half(uint16_t value) { return _cvtsh_ss(value); }

// What times 0 .. 255 reaches a number, in float16.
uint16_t unit_of(float largest) { return _cvtss_sh(largest / 255.0f, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }

uint8_t in_units(float value, float unit) {
  return unit > 0.0f ? static_cast<uint8_t>(std::min(std::nearbyint(value / unit), 255.0f)) : 0;
}

// weights [groups * 32] -> these, and the squared error of the groups by themselves: not finite if they are beyond float16
Super round_super(const float* weights, int64_t groups, float* error) {
  Group all[MOST_GROUPS];
  float scale = 0.0f, least = 0.0f;
  for (int64_t g = 0; g < groups; g++) {
    all[g] = round_group(weights + g * GROUP);
    scale = std::max(scale, all[g].scale);
    least = std::max(least, -all[g].least);
    *error += all[g].error;
  }
  Super found;
  found.scale = unit_of(scale);
  found.step = unit_of(least);
  const float unit = from_half(found.scale), step = from_half(found.step);
  if (!std::isfinite(unit) || !std::isfinite(step)) *error = std::numeric_limits<float>::infinity();
  if (!std::isfinite(*error)) return found;
  for (int64_t g = 0; g < groups; g++) {
    found.factors[g] = in_units(all[g].scale, unit);
    float sum = 0.0f;
    for (int64_t k = 0; k < GROUP; k++) sum += all[g].values[k];
    const float lost = (all[g].scale - found.factors[g] * unit) * sum / GROUP;  // by rounding the factor, in the middle
    found.offsets[g] = in_units(std::max(-all[g].least - lost, 0.0f), step);
    round_by(weights + g * GROUP, found.factors[g] * unit, -step * found.offsets[g], found.values + g * GROUP);
  }
  return found;
}

// Where the number of a group and an output lies: beside that of the other group of a pair.
uint8_t* number_at(uint8_t* numbers, int64_t group, int64_t lane) { return numbers + group / 2 * PAIR + lane * 2 + group % 2; }

void write_int4(const Super& super, int64_t groups, uint8_t* lines, int64_t lane) {
  const int64_t bytes = (groups + 1) / 2 * PAIR;
  uint8_t *offsets = lines + bytes, *last = offsets + bytes, *weights = last + LINE;
  for (int64_t g = 0; g < groups; g++) {
    *number_at(lines, g, lane) = super.factors[g];
    *number_at(offsets, g, lane) = super.offsets[g];
  }
  std::memcpy(last + lane * 2, &super.scale, 2);
  std::memcpy(last + 32 + lane * 2, &super.step, 2);
  for (int64_t k = 0; k < groups * GROUP; k++) {
    weights[k / 8 * LINE + lane * 4 + k % 4] |= static_cast<uint8_t>(super.values[k] << (k % 8 < 4 ? 0 : 4));
  }
}

void write_int6(const Super& super, uint8_t* lines, int64_t lane) {
  const float scale = from_half(super.scale);
  for (int64_t g = 0; g < 16; g++) *number_at(lines, g, lane) = super.factors[g];
  std::memcpy(lines + 4 * LINE + lane * 4, &scale, 4);
  for (int64_t k = 0; k < SUPER; k++) {
    uint8_t* group = lines + (5 + k / 16 * 3) * LINE + lane * 4 + k % 4;
    if (k % 16 < 12) {
      group[k % 16 / 4 * LINE] |= super.values[k];
    } else {
      for (int64_t i = 0; i < 3; i++) group[i * LINE] |= static_cast<uint8_t>((super.values[k] >> 2 * i & 3) << 6);
    }
  }
}

// How many groups are to share a scale, so that there are the fewest bytes.
int64_t shared_by(int64_t columns) {
  const int64_t groups = rounded_up(columns, GROUP) / GROUP;
  int64_t best = 1;
  const auto lines = [=](int64_t n) { return (groups + n - 1) / n * int4(n).lines; };
  for (int64_t n = 2; n <= MOST_GROUPS; n++) {
    if (lines(n) <= lines(best)) best = n;
  }
  return best;
}

// weights [outputs, columns] float32 -> [blocks, .., lines, 64] uint8 in 4 bits, and squared errors [outputs], before groups
// share a scale
std::tuple<Tensor, Tensor> pack_int4(Tensor weights) {
  STD_TORCH_CHECK(is(weights, torch::headeronly::ScalarType::Float) && weights.dim() == 2, "weights must be float32 in one piece");
  const int64_t outputs = weights.size(0), columns = weights.size(1), groups = shared_by(columns);
  const Layout layout = int4(groups);
  const int64_t supers = layout.padded(columns) / layout.columns;
  const int64_t shape[] = {blocks_of(outputs), supers, layout.lines, LINE}, rows[] = {outputs};
  Tensor out = torch::stable::new_empty(weights, {shape, 4}, torch::headeronly::ScalarType::Byte);
  Tensor errors = torch::stable::new_empty(weights, {rows, 1});
  const float* from = static_cast<const float*>(weights.data_ptr());
  uint8_t* to = static_cast<uint8_t*>(out.data_ptr());
  float* error = static_cast<float*>(errors.data_ptr());
  std::memset(to, 0, shape[0] * supers * layout.lines * LINE);
  torch::stable::parallel_for(0, outputs, 16, [=](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; n++) {
      error[n] = 0.0f;
      for (int64_t s = 0; s < supers; s++) {
        float some[SUPER];
        const float* first = from + n * columns + s * layout.columns;
        const int64_t count = std::min(layout.columns, columns - s * layout.columns), used = rounded_up(count, GROUP);
        std::copy(first, first + count, some);
        for (int64_t k = count; k < used; k++) some[k] = some[k - count % GROUP];  // the weights again: what is nearest stays so
        const Super found = round_super(some, used / GROUP, error + n);
        write_int4(found, groups, to + (n / OUTPUTS * supers + s) * layout.lines * LINE, n % OUTPUTS);
      }
    }
  });
  return {out, errors};
}

constexpr int64_t Q4_K_BYTES = 144, Q6_K_BYTES = 210;

Super read_q4_k(const uint8_t* block) {
  Super found;
  std::memcpy(&found.scale, block, 2);
  std::memcpy(&found.step, block + 2, 2);
  const uint8_t *packed = block + 4, *weights = block + 16;
  for (int g = 0; g < 4; g++) {
    found.factors[g] = packed[g] & 63;
    found.offsets[g] = packed[g + 4] & 63;
    found.factors[g + 4] = (packed[g + 8] & 15) | (packed[g] >> 6 << 4);
    found.offsets[g + 4] = (packed[g + 8] >> 4) | (packed[g + 4] >> 6 << 4);
  }
  for (int k = 0; k < SUPER; k++) {
    const uint8_t both = weights[k / 64 * 32 + k % 32];
    found.values[k] = k % 64 < 32 ? both & 15 : both >> 4;
  }
  return found;
}

Super read_q6_k(const uint8_t* block) {
  Super found;
  std::memcpy(found.factors, block + 192, 16);
  std::memcpy(&found.scale, block + 208, 2);
  for (int k = 0; k < SUPER; k++) {
    const int half = k / 128, part = k % 128 / 32, l = k % 32;
    const uint8_t low = block[half * 64 + part % 2 * 32 + l], high = block[128 + half * 32 + l];
    found.values[k] = (part < 2 ? low & 15 : low >> 4) | ((high >> 2 * part & 3) << 4);
  }
  return found;
}

// Rows of llama.cpp's K-quants, [outputs, blocks of 256 columns, bytes] uint8.
struct KQuants {
  const uint8_t* from;
  int64_t outputs, supers, bytes;
  bool four;  // else 6 bits

  explicit KQuants(const Tensor& raw) {
    STD_TORCH_CHECK(is(raw, torch::headeronly::ScalarType::Byte) && raw.dim() == 3, "K-quants are uint8 in one piece");
    STD_TORCH_CHECK(raw.size(2) == Q4_K_BYTES || raw.size(2) == Q6_K_BYTES, "of K-quants there are Q4_K and Q6_K here");
    from = static_cast<const uint8_t*>(raw.data_ptr());
    outputs = raw.size(0);
    supers = raw.size(1);
    bytes = raw.size(2);
    four = bytes == Q4_K_BYTES;
  }

  // each(super, output, which of its row)
  template <class F>
  void read(const F& each) const {
    torch::stable::parallel_for(0, outputs, 16, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; n++) {
        for (int64_t s = 0; s < supers; s++) {
          const uint8_t* block = from + (n * supers + s) * bytes;
          each(four ? read_q4_k(block) : read_q6_k(block), n, s);
        }
      }
    });
  }
};

// raw: Q4_K (144 bytes) or Q6_K (210) -> [blocks, .., lines, 64] uint8 in 4 or 6 bits
Tensor pack_k(Tensor raw) {
  const KQuants given(raw);
  const int64_t lines = given.four ? int4(MOST_GROUPS).lines : INT6.lines;
  const int64_t shape[] = {blocks_of(given.outputs), given.supers, lines, LINE};
  Tensor out = torch::stable::new_empty(raw, {shape, 4});
  uint8_t* to = static_cast<uint8_t*>(out.data_ptr());
  std::memset(to, 0, shape[0] * shape[1] * lines * LINE);
  given.read([=, &given](const Super& super, int64_t n, int64_t s) {
    uint8_t* at = to + (n / OUTPUTS * given.supers + s) * lines * LINE;
    given.four ? write_int4(super, MOST_GROUPS, at, n % OUTPUTS) : write_int6(super, at, n % OUTPUTS);
  });
  return out;
}

// raw: the same -> weights [outputs, columns] float32, by the operations of gguf's reader in its order: the same bits
Tensor unpack_k(Tensor raw) {
  const KQuants given(raw);
  const int64_t shape[] = {given.outputs, given.supers * SUPER};
  Tensor out = torch::stable::new_empty(raw, {shape, 2}, torch::headeronly::ScalarType::Float);
  float* to = static_cast<float*>(out.data_ptr());
  given.read([=, &given](const Super& super, int64_t n, int64_t s) {
    float* at = to + (n * given.supers + s) * SUPER;
    const float scale = from_half(super.scale), step = from_half(super.step);
    for (int64_t k = 0; k < SUPER; k++) {
      if (given.four) {
        const float factor = scale * super.factors[k / 32], least = step * super.offsets[k / 32];
        at[k] = factor * super.values[k] - least;
      } else {
        const float factor = scale * static_cast<int8_t>(super.factors[k / 16]);
        at[k] = factor * static_cast<float>(super.values[k] - 32);
      }
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("pack_int8(Tensor values) -> Tensor");
  library.def("pack_int4(Tensor weights) -> (Tensor, Tensor)");
  library.def("pack_k(Tensor raw) -> Tensor");
  library.def("unpack_k(Tensor raw) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("pack_int8", TORCH_BOX(&pack_int8));
  library.impl("pack_int4", TORCH_BOX(&pack_int4));
  library.impl("pack_k", TORCH_BOX(&pack_k));
  library.impl("unpack_k", TORCH_BOX(&unpack_k));
}
