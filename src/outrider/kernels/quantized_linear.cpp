// Linear layers with weights in 8, 6 or 4 bits and activations in 8, for x86 processors with AVX-512 VNNI or AVX2.
//
// A row's result has the same bits whatever rows are beside it and however many threads there are: activations are quantized by
// scales of their row, products are summed as integers in blocks of up to 256 columns, and what is added in floating point is
// added in the order of the columns, one output in one lane.
//
// Weights lie as they are read, in blocks of 16 outputs, so that an instruction multiplies 4 columns of 16 outputs with 4
// activations of a row (`blocks.h`). Up to 8 rows use a line while it is at hand (by AVX2 5 in 8 bits, 32 in fewer): at the
// memory's pace they cost as much as one. More rows take turns, and the next blocks are fetched in all of them.
//
// `fused_int8` and `fused_grouped` do what stands before and behind a layer, too: a norm or a gate, and adding what goes past it.
// They give the bits of these operations, called one by one.
//
// `packing.cpp` makes that layout, and `chain.cpp` calls these products without torch in between. All are operations of torch,
// callable by its interpreter (TorchScript), and compiled against the part of torch's headers whose binary interface is stable.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "activations.h"
#include "blocks.h"
#include "linear.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

constexpr int64_t TURNS = 8;         // in which a thread computes its part of the blocks, about
constexpr int64_t MOST_PARTS = 64;
constexpr int64_t SHARE = 1 << 12;   // activations that a thread gates at least

// A thread's part of the blocks: the next that is to be computed. In a line of its own.
struct alignas(LINE) Part {
  std::atomic<int64_t> next;
  int64_t end;
};

// each(first block, the one after the last) for all of them, `together` at once where there are as many. A thread computes its
// part one after the other, and what others have left of theirs: one may be slower, and it makes no difference who computes a block.
template <class F>
void share_blocks(int64_t blocks, int64_t together, const F& each) {
  const int64_t threads = std::max<int64_t>(1, std::min<int64_t>({torch::stable::get_num_threads(), blocks, MOST_PARTS}));
  const int64_t some = rounded_up(std::max<int64_t>(1, blocks / (threads * TURNS)), together);
  Part parts[MOST_PARTS];
  for (int64_t i = 0; i < threads; i++) {
    parts[i].next.store(blocks * i / threads, std::memory_order_relaxed);
    parts[i].end = blocks * (i + 1) / threads;
  }
  torch::stable::parallel_for(0, threads, 1, [&](int64_t first, int64_t) {
    for (int64_t i = 0; i < threads; i++) {
      Part& part = parts[(first + i) % threads];
      for (int64_t begin = part.next.fetch_add(some); begin < part.end; begin = part.next.fetch_add(some)) {
        each(begin, std::min(begin + some, part.end));
      }
    }
  });
}

// block(integral constant M, ..) with M rows, or 0 for a number that is not known when it is compiled.
template <int M, bool ALL, class F>
void call_with(int64_t rows, const F& block) {
  if (rows == M) {
    block(std::integral_constant<int, M>());
  } else if constexpr (M > 1) {
    call_with<M - 1, ALL>(rows, block);
  } else if constexpr (!ALL) {
    block(std::integral_constant<int, 0>());
  }
}

// Calls `block(rows as a constant, first row, rows, part, parts)` until all are done, in parts of about the same size.
template <int MOST, int KNOWN, class F>
void by_rows(int64_t rows, const F& block) {
  const int64_t parts = (rows + MOST - 1) / MOST;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t first = rows * i / parts, count = rows * (i + 1) / parts - first;
    call_with<KNOWN, KNOWN == MOST>(count, [&](auto known) { block(known, first, count, i, parts); });
  }
}

// What a layer reads of x [rows, given]: x itself, or what a norm or a gate makes of it.
const float* before(const Layer& layer, const float* x, int64_t rows) {
  if (!layer.norm.has_value() && !layer.gated()) return x;
  static thread_local Room kept;
  const int64_t columns = layer.columns;
  float* to = kept.of(rows * columns);
  if (layer.gated()) {
    torch::stable::parallel_for(0, rows * columns, SHARE, [=](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t m = begin / columns, k = begin % columns, count = std::min(columns - k, end - begin);
        const float* row = x + 2 * m * columns + k;
        gated_row(row, row + columns, count, to + begin);
        begin += count;
      }
    });
  } else {
    const Norm norm = *layer.norm;
    for_rows(rows, columns, [=](int64_t m) { norm.of_row(x + m * columns, columns, to + m * columns); });
  }
  return to;
}

// Products of B blocks from the n-th on.
template <int B, class R, class F>
void multiply_some(const Layer& layer, int64_t n, const Quantized& quantized, const float* added, float* out, const F& block) {
  const int64_t outputs = layer.outputs, bytes = layer.padded / layer.layout.columns * layer.layout.lines * LINE;
  const uint8_t* weight = layer.weight + n * bytes;
  by_rows<R::most, R::known>(quantized.rows, [&](auto known, int64_t first, int64_t rows, int64_t part, int64_t parts) {
    const int64_t at = n * OUTPUTS, from = first * outputs + at;
    const Out here{out + from, layer.bias == nullptr ? nullptr : layer.bias + at, added == nullptr ? nullptr : added + from,
                   outputs, outputs - at};
    const Ahead ahead{weight + (rounded_up(AHEAD, B * bytes) + part * B * bytes / parts), std::max<int64_t>(1, LINE / parts)};
    block(known, std::integral_constant<int, B>(), weight, bytes, n, first, rows, ahead, here);
  });
}

// R: `Rows`.
template <class R, class F>
void multiply_blocks(const Layer& layer, const R&, const Quantized& quantized, const float* added, float* out, const F& block) {
  const bool pairs = R::pairs && quantized.rows > R::most;
  share_blocks(blocks_of(layer.outputs), pairs ? 2 : 1, [&](int64_t n, int64_t end) {
    if constexpr (R::pairs) {
      for (; pairs && n + 2 <= end; n += 2) multiply_some<2, R>(layer, n, quantized, added, out, block);
    }
    for (; n < end; n++) multiply_some<1, R>(layer, n, quantized, added, out, block);
  });
}

template <int BITS>
void multiply_grouped(const Layer& layer, const Quantized& quantized, const float* added, float* out) {
  const auto block = [&](auto known, auto blocks, const uint8_t* weight, int64_t bytes, int64_t, int64_t first, int64_t rows,
                         const Ahead& ahead, const Out& here) {
    block_grouped<BITS, known(), blocks()>(weight, bytes, layer.layout.columns, quantized, first, rows, ahead, here);
  };
  multiply_blocks(layer, ROWS_GROUPED, quantized, added, out, block);
}

// Several dimensions but the last are rows.
struct Given {
  Tensor tensor;
  int64_t rows, columns;
};

Given rows_of(const Tensor& given) {
  STD_TORCH_CHECK(is_float(given) && given.dim() > 0, "activations must be float32 [.., columns]");
  const Tensor x = whole(given);
  const int64_t columns = x.size(x.dim() - 1);
  return {x, columns == 0 ? 0 : x.numel() / columns, columns};
}

Tensor multiplied(const Given& x, const Layer& layer, const std::optional<Tensor>& added) {
  STD_TORCH_CHECK(!added.has_value() || (is_float(*added) && added->numel() == x.rows * layer.outputs),
                  "what is added must be float32, a number for each result");
  const std::optional<Tensor> beside = added.has_value() ? std::optional<Tensor>(whole(*added)) : std::nullopt;
  std::vector<int64_t> shape;
  for (int64_t i = 0; i + 1 < x.tensor.dim(); i++) shape.push_back(x.tensor.size(i));
  shape.push_back(layer.outputs);
  Tensor out = torch::stable::new_empty(x.tensor, {shape.data(), shape.size()});
  multiply(layer, floats(x.tensor), x.rows, beside.has_value() ? floats(*beside) : nullptr, static_cast<float*>(out.data_ptr()));
  return out;
}

// x [.., columns], weight as `pack_int8` gives it, scales [outputs, filled up], bias [outputs] or none -> [.., outputs]
Tensor linear_int8(Tensor x, Tensor weight, Tensor scales, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, std::nullopt, 0.0, 0.0, false, weight, scales, bias, outputs), std::nullopt);
}

// x [.., columns], weight as `pack_int4` or `pack_k` gives it, bias [outputs] or none -> [.., outputs]
Tensor linear_grouped(Tensor x, Tensor weight, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, std::nullopt, 0.0, 0.0, false, weight, std::nullopt, bias, outputs), std::nullopt);
}

// The same of `rms_norm(x, norm, eps, more)`, or of silu(gate) * other for x [.., gate and other] -> added + [.., outputs]
Tensor fused_int8(Tensor x, std::optional<Tensor> norm, double eps, double more, bool gated, std::optional<Tensor> added,
                  Tensor weight, Tensor scales, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, norm, eps, more, gated, weight, scales, bias, outputs), added);
}

Tensor fused_grouped(Tensor x, std::optional<Tensor> norm, double eps, double more, bool gated, std::optional<Tensor> added,
                     Tensor weight, std::optional<Tensor> bias, int64_t outputs) {
  const Given given = rows_of(x);
  return multiplied(given, layer_of(given.columns, norm, eps, more, gated, weight, std::nullopt, bias, outputs), added);
}

}  // namespace

Layer OUTRIDER_NAMESPACE::layer_of(int64_t given, const std::optional<Tensor>& norm, double eps, double more, bool gated,
                                   const Tensor& weight, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
                                   int64_t outputs) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(!gated || (!norm.has_value() && given % 2 == 0), "a gate and what it is for are as wide, without a norm");
  STD_TORCH_CHECK(is(weight, ScalarType::Byte) && weight.dim() == (scales.has_value() ? 3 : 4) &&
                      weight.size(0) == blocks_of(outputs) && weight.size(weight.dim() - 1) == LINE,
                  "the weight is not one of so many outputs");
  const Layout layout = scales.has_value() ? INT8 : grouped_layout(weight.size(2));
  STD_TORCH_CHECK(!scales.has_value() || (is(*scales, ScalarType::Float) && scales->numel() == blocks_of(outputs) * OUTPUTS),
                  "scales must be float32, a number for each output of every block");
  STD_TORCH_CHECK(!bias.has_value() || (is(*bias, ScalarType::Float) && bias->numel() == outputs),
                  "a bias must be float32, a number for each output");
  Layer layer{layout, static_cast<const uint8_t*>(weight.data_ptr()), nullptr, nullptr, given, gated ? given / 2 : given,
              weight.size(1) * layout.columns, outputs, std::nullopt};
  STD_TORCH_CHECK(layer.columns > 0 && layer.columns <= layer.padded && layer.padded == layout.padded(layer.columns),
                  "activations and weights have other columns");
  if (scales.has_value()) layer.scales = floats(*scales);
  if (bias.has_value()) layer.bias = floats(*bias);
  if (norm.has_value()) layer.norm = norm_of(*norm, layer.columns, eps, more);
  return layer;
}

void OUTRIDER_NAMESPACE::multiply(const Layer& layer, const float* x, int64_t rows, const float* added, float* out) {
  const Layout& layout = layer.layout;
  const Quantized& quantized = quantize_rows(before(layer, x, rows), rows, layer.columns, layout);
  if (layout.bits == 8) {
    const auto block = [&](auto known, auto blocks, const uint8_t* weight, int64_t bytes, int64_t n, int64_t first, int64_t,
                           const Ahead& ahead, const Out& here) {
      block_int8<known(), blocks()>(weight, bytes, layer.scales + n * OUTPUTS, quantized, first, ahead, here);
    };
    multiply_blocks(layer, ROWS_INT8, quantized, added, out, block);
  } else if (layout.bits == 6) {
    multiply_grouped<6>(layer, quantized, added, out);
  } else {
    multiply_grouped<4>(layer, quantized, added, out);
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("linear_int8(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int outputs) -> Tensor");
  library.def("linear_grouped(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor");
  library.def("fused_int8(Tensor x, Tensor? norm, float eps, float more, bool gated, Tensor? added, Tensor weight, Tensor scales, Tensor? bias, int outputs) -> Tensor");
  library.def("fused_grouped(Tensor x, Tensor? norm, float eps, float more, bool gated, Tensor? added, Tensor weight, Tensor? bias, int outputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("linear_int8", TORCH_BOX(&linear_int8));
  library.impl("linear_grouped", TORCH_BOX(&linear_grouped));
  library.impl("fused_int8", TORCH_BOX(&fused_int8));
  library.impl("fused_grouped", TORCH_BOX(&fused_grouped));
}
