// What happens before and between linear layers, a token at a time: looking up, normalising, an activation function, turning
// queries and keys to their positions, and what these positions see.
//
// Each of these is several operations of torch, whose calls take longer than their work where a pass has few tokens. A row's
// result has the same bits whatever rows are beside it.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "rows.h"
#include "tokens.h"

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

// of(x) of each number of x.
template <class F>
Tensor activated(const Tensor& given, const F& of) {
  STD_TORCH_CHECK(is_float(given) && given.dim() > 0, "this function is of float32");
  const int64_t size = given.size(given.dim() - 1);
  const Tensor x = whole(given);
  Tensor out = torch::stable::empty_like(x);
  const float* from = floats(x);
  float* to = static_cast<float*>(out.data_ptr());
  for_rows(size == 0 ? 0 : x.numel() / size, size, [=](int64_t m) { each_number(from + m * size, size, to + m * size, of); });
  return out;
}

// x -> x / (1 + e^-x)
Tensor silu(Tensor x) {
  return activated(x, [](__m256 some) { return silu_of(some); });
}

// form: 0 by the error function, 1 by tanh, 2 by the logistic function (quick).
Tensor gelu(Tensor x, int64_t form) {
  STD_TORCH_CHECK(form >= 0 && form <= 2, "no such form of GELU");
  if (form == 0) return activated(x, [](__m256 some) { return gelu_of(some); });
  if (form == 1) return activated(x, [](__m256 some) { return gelu_by_tanh(some); });
  return activated(x, [](__m256 some) { return quick_gelu_of(some); });
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
Tensor rows_int8(Tensor rows, Tensor scales, Tensor given) {
  const Table table = table_of(rows, scales);
  STD_TORCH_CHECK(given.scalar_type() == torch::headeronly::ScalarType::Long, "ids are int64");
  const Tensor ids = whole(given);
  const int64_t* id = static_cast<const int64_t*>(ids.data_ptr());
  const int64_t wanted = ids.numel();
  for (int64_t i = 0; i < wanted; i++) STD_TORCH_CHECK(0 <= id[i] && id[i] < table.count, "an id lies outside of the table");
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < ids.dim(); i++) shape.push_back(ids.size(i));
  shape.push_back(table.size);
  Tensor out = torch::stable::new_empty(scales, {shape.data(), shape.size()});
  float* to = static_cast<float*>(out.data_ptr());
  for_rows(wanted, table.size, [=](int64_t m) { table.of_row(id[m], to + m * table.size); });
  return out;
}

// positions int64 [B, N], frequencies float32 [F] -> cosines and sines of their products, twice each, times `times`, [B, N, 2F]
std::tuple<Tensor, Tensor> angles(Tensor positions, Tensor frequencies, double times) {
  STD_TORCH_CHECK(is_float(frequencies) && frequencies.dim() == 1, "frequencies are float32 [F]");
  const Numbers at = numbers_of(positions);
  const Tensor each = whole(frequencies);
  const int64_t count = each.numel(), shape[] = {at.batch, at.tokens, 2 * count};
  Tensor cos = torch::stable::new_empty(each, {shape, 3}), sin = torch::stable::new_empty(each, {shape, 3});
  const float* by = floats(each);
  float *cosines = static_cast<float*>(cos.data_ptr()), *sines = static_cast<float*>(sin.data_ptr());
  for_rows(at.batch * at.tokens, 2 * count, [=](int64_t m) {
    const int64_t position = at.of(m / at.tokens, m % at.tokens), to = m * 2 * count;
    angles_at(position, by, count, static_cast<float>(times), cosines + to, sines + to);
  });
  return {cos, sin};
}

// positions int64 [B, N]; at int64 [B, N]: in which columns these tokens are, if not at their positions; window: of positions that
// each sees, 0 for all before it -> which of so many columns it sees, bool [B, 1, N, columns]
Tensor seen(Tensor positions, std::optional<Tensor> at, int64_t columns, int64_t window) {
  const Numbers from = numbers_of(positions), own = at.has_value() ? numbers_of(*at) : from;
  STD_TORCH_CHECK(own.batch == from.batch && own.tokens == from.tokens, "these are columns of other tokens");
  STD_TORCH_CHECK(columns >= 0 && window >= 0, "a window has columns, or is 0");
  const int64_t shape[] = {from.batch, 1, from.tokens, columns};
  Tensor out = torch::stable::empty({shape, 4}, torch::headeronly::ScalarType::Bool);
  bool* to = static_cast<bool*>(out.data_ptr());
  const bool apart = at.has_value();
  for_rows(from.batch * from.tokens, columns, [=](int64_t m) {
    const int64_t b = m / from.tokens, n = m % from.tokens;
    seen_at(from.of(b, n), apart, own.of(b, n), window, columns, to + m * columns);
  });
  return out;
}

// parts [.., any], each normalised with its weight, beside each other, and zeros behind them -> [.., width]
Tensor join(std::vector<Tensor> parts, std::vector<Tensor> weights, double eps, double more, int64_t width) {
  STD_TORCH_CHECK(!parts.empty() && parts.size() == weights.size(), "each part that is joined has a norm");
  std::vector<Tensor> held;
  std::vector<Norm> norms;
  int64_t together = 0;
  for (size_t i = 0; i < parts.size(); i++) {
    STD_TORCH_CHECK(is_float(parts[i]) && parts[i].dim() > 0, "a norm is of float32");
    const int64_t size = parts[i].size(parts[i].dim() - 1);
    norms.push_back(norm_of(weights[i], size, eps, more));
    held.push_back(whole(parts[i]));
    STD_TORCH_CHECK(held[i].numel() / size == held[0].numel() / held[0].size(held[0].dim() - 1), "parts have other rows");
    together += size;
  }
  STD_TORCH_CHECK(together <= width, "what is joined is wider than its result");
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < held[0].dim(); i++) shape.push_back(held[0].size(i));
  shape.push_back(width);
  Tensor out = torch::stable::new_empty(held[0], {shape.data(), shape.size()});
  float* to = static_cast<float*>(out.data_ptr());
  for_rows(out.numel() / std::max<int64_t>(width, 1), width, [&](int64_t m) {
    float* at = to + m * width;
    for (size_t i = 0; i < held.size(); i++) {
      const int64_t size = held[i].size(held[i].dim() - 1);
      norms[i].of_row(floats(held[i]) + m * size, size, at);
      at += size;
    }
    std::fill(at, to + (m + 1) * width, 0.0f);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps, float more) -> Tensor");
  library.def("silu(Tensor x) -> Tensor");
  library.def("gelu(Tensor x, int form) -> Tensor");
  library.def("rows_int8(Tensor table, Tensor scales, Tensor ids) -> Tensor");
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  library.def("angles(Tensor positions, Tensor frequencies, float times) -> (Tensor, Tensor)");
  library.def("seen(Tensor positions, Tensor? at, int columns, int window) -> Tensor");
  library.def("join(Tensor[] parts, Tensor[] weights, float eps, float more, int width) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
  library.impl("silu", TORCH_BOX(&silu));
  library.impl("gelu", TORCH_BOX(&gelu));
  library.impl("rows_int8", TORCH_BOX(&rows_int8));
  library.impl("rotate", TORCH_BOX(&rotate));
  library.impl("angles", TORCH_BOX(&angles));
  library.impl("seen", TORCH_BOX(&seen));
  library.impl("join", TORCH_BOX(&join));
}
