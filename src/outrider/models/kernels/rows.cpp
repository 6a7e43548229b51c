// What happens between linear layers, a token at a time: normalising, and turning queries and keys to their positions.
//
// Each of these is several operations of torch, whose calls take longer than their work where a pass has few tokens. A row's
// result has the same bits whatever rows are beside it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

using torch::stable::Tensor;

namespace {

constexpr int64_t LANES = 16;          // sums side by side, on any processor
constexpr int64_t PARALLEL = 1 << 15;  // numbers from which several threads share the rows

const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }

bool is_float(const Tensor& x) { return x.scalar_type() == torch::headeronly::ScalarType::Float; }

template <class F>
void for_rows(int64_t rows, int64_t columns, const F& each) {
  auto some = [&each](int64_t from, int64_t to) {
    for (int64_t m = from; m < to; m++) each(m);
  };
  if (rows > 1 && rows * columns >= PARALLEL) {
    torch::stable::parallel_for(0, rows, 1, some);
  } else {
    some(0, rows);
  }
}

float sum_of_squares(const float* x, int64_t count) {
  float lanes[LANES] = {};
  int64_t k = 0;
  for (; k + LANES <= count; k += LANES) {
    for (int64_t i = 0; i < LANES; i++) lanes[i] += x[k + i] * x[k + i];
  }
  for (int64_t i = 0; k + i < count; i++) lanes[i] += x[k + i] * x[k + i];
  for (int64_t half = LANES / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// x [.., size], weight [size] -> x / sqrt(mean(x^2) + eps) * (weight + more), [.., size]
Tensor rms_norm(Tensor given, Tensor weight, double eps, double more) {
  STD_TORCH_CHECK(is_float(given) && is_float(weight) && weight.is_contiguous(), "a norm is of float32");
  const int64_t size = given.size(given.dim() - 1);
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == size && size > 0, "a norm is of rows as long as its weight");
  const Tensor x = given.is_contiguous() ? given : torch::stable::contiguous(given);
  Tensor out = torch::stable::empty_like(x);
  const float *from = floats(x), *weights = floats(weight);
  float* to = static_cast<float*>(out.data_ptr());
  const float small = static_cast<float>(eps), added = static_cast<float>(more);
  for_rows(x.numel() / size, size, [=](int64_t m) {
    const float* row = from + m * size;
    float* result = to + m * size;
    const float scale = 1.0f / std::sqrt(sum_of_squares(row, size) / static_cast<float>(size) + small);
    for (int64_t k = 0; k < size; k++) result[k] = row[k] * scale * (weights[k] + added);
  });
  return out;
}

// x [B, heads, N, size], cos and sin [B or 1, 1, N, size] -> x * cos + turned(x) * sin [B, heads, N, size], turned(x) being
// its upper half with the other sign, then its lower half. The bits of these operations, called one by one.
Tensor rotate(Tensor x, Tensor cos, Tensor sin) {
  STD_TORCH_CHECK(x.dim() == 4 && cos.dim() == 4 && sin.dim() == 4, "what is rotated has 4 dimensions");
  STD_TORCH_CHECK(is_float(x) && is_float(cos) && is_float(sin), "what is rotated is of float32");
  const int64_t batch = x.size(0), heads = x.size(1), length = x.size(2), size = x.size(3), half = size / 2;
  for (const Tensor* each : {&cos, &sin}) {
    STD_TORCH_CHECK((each->size(0) == batch || each->size(0) == 1) && each->size(1) == 1 && each->size(2) == length &&
                        each->size(3) == size && (each->stride(3) == 1 || size == 1),
                    "angles have other sizes than what is rotated");
  }
  STD_TORCH_CHECK(size % 2 == 0 && (x.stride(3) == 1 || size == 0), "halves are rotated that lie in one piece");
  const int64_t shape[] = {batch, heads, length, size};
  Tensor out = torch::stable::new_empty(x, {shape, 4});
  const float *from = floats(x), *c = floats(cos), *s = floats(sin);
  float* to = static_cast<float*>(out.data_ptr());
  const int64_t xb = x.stride(0), xh = x.stride(1), xn = x.stride(2);
  const int64_t cb = cos.size(0) == 1 ? 0 : cos.stride(0), cn = cos.stride(2);
  const int64_t sb = sin.size(0) == 1 ? 0 : sin.stride(0), sn = sin.stride(2);
  for_rows(batch * heads * length, size, [=](int64_t m) {
    const int64_t n = m % length, h = m / length % heads, b = m / length / heads;
    const float *row = from + b * xb + h * xh + n * xn, *cosines = c + b * cb + n * cn, *sines = s + b * sb + n * sn;
    float* result = to + m * size;
    for (int64_t k = 0; k < half; k++) {
      result[k] = row[k] * cosines[k] + -row[k + half] * sines[k];
      result[k + half] = row[k + half] * cosines[k + half] + row[k] * sines[k + half];
    }
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, float more) -> Tensor");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("rotate", TORCH_BOX(&rotate));
}
