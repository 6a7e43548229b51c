// What happens before and between linear layers, a token at a time: looking up, normalising, an activation function, and turning
// queries and keys to their positions.
//
// Each of these is several operations of torch, whose calls take longer than their work where a pass has few tokens. A row's
// result has the same bits whatever rows are beside it.

#include <cstdint>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "rows.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

// x [.., size], weight [size] -> x / sqrt(mean(x^2) + eps) * (weight + more), [.., size]
Tensor rms_norm(Tensor given, Tensor weight, double eps, double more) {
  STD_TORCH_CHECK(is_float(given), "a norm is of float32");
  const int64_t size = given.size(given.dim() - 1);
  const Norm norm = norm_of(weight, size, eps, more);
  const Tensor x = whole(given);
  Tensor out = torch::stable::empty_like(x);
  const float* from = floats(x);
  float* to = static_cast<float*>(out.data_ptr());
  for_rows(x.numel() / size, size, [=](int64_t m) { norm.of_row(from + m * size, size, to + m * size); });
  return out;
}

// x -> x / (1 + e^-x)
Tensor silu(Tensor given) {
  STD_TORCH_CHECK(is_float(given) && given.dim() > 0, "this function is of float32");
  const int64_t size = given.size(given.dim() - 1);
  const Tensor x = whole(given);
  Tensor out = torch::stable::empty_like(x);
  const float* from = floats(x);
  float* to = static_cast<float*>(out.data_ptr());
  for_rows(size == 0 ? 0 : x.numel() / size, size, [=](int64_t m) { silu_row(from + m * size, size, to + m * size); });
  return out;
}

// x [B, heads, N, size], cos and sin [B or 1, 1, N, size] -> x * cos + turned(x) * sin [B, heads, N, size], turned(x) being
// its upper half with the other sign, then its lower half. The bits of these operations, called one by one.
Tensor rotate(Tensor x, Tensor cos, Tensor sin) {
  STD_TORCH_CHECK(x.dim() == 4 && is_float(x), "what is rotated is of float32 and has 4 dimensions");
  const int64_t batch = x.size(0), heads = x.size(1), length = x.size(2), size = x.size(3);
  const Angles cosines = angles_of(cos, batch, length, size), sines = angles_of(sin, batch, length, size);
  STD_TORCH_CHECK(size % 2 == 0 && (x.stride(3) == 1 || size == 0), "halves are rotated that lie in one piece");
  const int64_t shape[] = {batch, heads, length, size};
  Tensor out = torch::stable::new_empty(x, {shape, 4});
  const float* from = floats(x);
  float* to = static_cast<float*>(out.data_ptr());
  const int64_t xb = x.stride(0), xh = x.stride(1), xn = x.stride(2);
  for_rows(batch * heads * length, size, [=](int64_t m) {
    const int64_t n = m % length, h = m / length % heads, b = m / length / heads;
    rotate_row(from + b * xb + h * xh + n * xn, cosines.of(b, n), sines.of(b, n), size, to + m * size);
  });
  return out;
}

// table int8 [V, size], scales float32 [V, 1], ids int64 [..] -> a row's numbers times its scale, float32 [.., size]
Tensor rows_int8(Tensor table, Tensor scales, Tensor given) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(is(table, ScalarType::Char) && table.dim() == 2, "a table is int8 [V, size], in one piece");
  const int64_t count = table.size(0), size = table.size(1);
  STD_TORCH_CHECK(is(scales, ScalarType::Float) && scales.numel() == count, "scales are float32, one for each row");
  STD_TORCH_CHECK(given.scalar_type() == ScalarType::Long, "ids are int64");
  const Tensor ids = whole(given);
  const int64_t* id = static_cast<const int64_t*>(ids.data_ptr());
  const int64_t wanted = ids.numel();
  for (int64_t i = 0; i < wanted; i++) STD_TORCH_CHECK(0 <= id[i] && id[i] < count, "an id lies outside of the table");
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < ids.dim(); i++) shape.push_back(ids.size(i));
  shape.push_back(size);
  Tensor out = torch::stable::new_empty(scales, {shape.data(), shape.size()});
  const int8_t* rows = static_cast<const int8_t*>(table.data_ptr());
  const float* scale = floats(scales);
  float* to = static_cast<float*>(out.data_ptr());
  for_rows(wanted, size, [=](int64_t m) {
    for (int64_t k = 0; k < size; k++) to[m * size + k] = static_cast<float>(rows[id[m] * size + k]) * scale[id[m]];
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, float more) -> Tensor");
  library.def("silu(Tensor x) -> Tensor");
  library.def("rows_int8(Tensor table, Tensor scales, Tensor ids) -> Tensor");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("silu", TORCH_BOX(&silu));
  library.impl("rows_int8", TORCH_BOX(&rows_int8));
  library.impl("rotate", TORCH_BOX(&rotate));
}
