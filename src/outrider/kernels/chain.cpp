// Operations of a pass that follow each other, as one.
//
// Beside weights that sweep the caches a call of an operation takes some 20 to 100 microseconds, whatever it does: the code of
// the interpreter, of dispatching and of allocating is fetched from memory each time. Here a pass is one call; what its steps
// hand to each other lies in memory that the thread keeps.

#include <cstdint>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "attention.h"
#include "linear.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

// The steps of a chain, as numbers: a kind, then what it is given. `models/kernels/fusing/chains.py` writes them.
enum Kind : int64_t {
  LAYER,      // result, x, norm, gated, added, weight, scales, bias, outputs; eps, more
  ATTENTION,  // result, packed, heads, query norm, key norm, cos, sin, keys, values, at, seen, which of the counts; eps, more, scale
  NORM,       // result, x, weight; eps, more
  ADD,        // result, x, y
};
constexpr int64_t NONE = -1;  // no tensor. From 0 on: one that is given. From -2 down: a result, the first one -2.

// Results of one of the steps' places: in memory that is kept, or in a tensor that is returned.
struct Result {
  float* at = nullptr;
  int64_t width = 0;
};

struct Chain {
  const std::vector<Tensor>& given;
  const std::vector<int64_t>& steps;
  const std::vector<double>& numbers;
  size_t step = 0, number = 0;

  int64_t next() {
    STD_TORCH_CHECK(step < steps.size(), "a chain ends within a step");
    return steps[step++];
  }
  double next_number() {
    STD_TORCH_CHECK(number < numbers.size(), "a chain lacks numbers");
    return numbers[number++];
  }
  const Tensor& tensor(int64_t which) const {
    STD_TORCH_CHECK(0 <= which && which < static_cast<int64_t>(given.size()), "a chain has no such tensor");
    return given[which];
  }
  const Tensor& next_tensor() { return tensor(next()); }
  std::optional<Tensor> perhaps() {
    const int64_t which = next();
    return which == NONE ? std::nullopt : std::optional<Tensor>(tensor(which));
  }
};

// Activations that steps read and write, [batch, tokens, width] in float32.
struct Activations {
  Chain* chain;
  int64_t batch, tokens;
  std::vector<Result> results;
  std::vector<std::optional<Tensor>> returned;  // of each result that is
  std::vector<Tensor> copies = {};              // of what was not in one piece

  int64_t rows() const { return batch * tokens; }

  Result read(int64_t which) {
    if (which <= -2) {
      const size_t i = static_cast<size_t>(-2 - which);
      STD_TORCH_CHECK(i < results.size() && results[i].at != nullptr, "a chain reads what it has not computed");
      return results[i];
    }
    const Tensor& x = chain->tensor(which);
    STD_TORCH_CHECK(is_float(x) && x.dim() == 3 && x.size(0) == batch && x.size(1) == tokens,
                    "activations must be float32 [B, N, width]");
    if (x.is_contiguous()) return {static_cast<float*>(x.data_ptr()), x.size(2)};
    copies.push_back(torch::stable::contiguous(x));
    return {static_cast<float*>(copies.back().data_ptr()), x.size(2)};
  }

  // Where a step's result goes.
  float* write(int64_t which, int64_t width, std::vector<Room>& rooms) {
    const size_t i = static_cast<size_t>(-2 - which);
    STD_TORCH_CHECK(which <= -2 && i < results.size(), "a chain has no such result");
    if (i < returned.size()) {
      STD_TORCH_CHECK(!returned[i].has_value(), "a chain returns a result that is overwritten");
      const int64_t shape[] = {batch, tokens, width};
      returned[i] = torch::stable::empty({shape, 3}, torch::headeronly::ScalarType::Float);
      results[i] = {static_cast<float*>(returned[i]->data_ptr()), width};
    } else {
      results[i] = {rooms[i].of(rows() * width), width};
    }
    return results[i].at;
  }
};

// tensors: what the steps are given, and what they write keys and values into. places: of results, the first `returned` of
// which are returned, [B, N, width] each. like [B, N, any]: how many rows and tokens there are. counts: of columns that
// attention reads.
std::vector<Tensor> chain(Tensor like, std::vector<Tensor> tensors, std::vector<int64_t> steps, std::vector<double> numbers,
                          std::vector<int64_t> counts, int64_t places, int64_t returned) {
  STD_TORCH_CHECK(like.dim() == 3 && 0 <= returned && returned <= places, "a chain is of activations [B, N, width]");
  Chain chain{tensors, steps, numbers};
  Activations all{&chain, like.size(0), like.size(1), std::vector<Result>(places), std::vector<std::optional<Tensor>>(returned)};
  static thread_local std::vector<Room> rooms;
  if (static_cast<int64_t>(rooms.size()) < places) rooms.resize(places);
  const int64_t rows = all.rows();
  while (chain.step < steps.size()) {
    const int64_t kind = chain.next(), to = chain.next();
    const Result x = all.read(chain.next());
    if (kind == LAYER) {
      const std::optional<Tensor> norm = chain.perhaps();
      const bool gated = chain.next() != 0;
      const int64_t beside = chain.next();
      const Result added = beside == NONE ? Result() : all.read(beside);
      const Tensor& weight = chain.next_tensor();
      const std::optional<Tensor> scales = chain.perhaps(), bias = chain.perhaps();
      const int64_t outputs = chain.next();
      const double eps = chain.next_number(), more = chain.next_number();
      STD_TORCH_CHECK(beside == NONE || added.width == outputs, "what is added has another width");
      const Layer layer = layer_of(x.width, norm, eps, more, gated, weight, scales, bias, outputs);
      multiply(layer, x.at, rows, added.at, all.write(to, outputs, rooms));
    } else if (kind == ATTENTION) {
      const int64_t heads = chain.next();
      const std::optional<Tensor> query_norm = chain.perhaps(), key_norm = chain.perhaps();
      const Tensor &cos = chain.next_tensor(), &sin = chain.next_tensor(), &keys = chain.next_tensor();
      const Tensor &values = chain.next_tensor(), &at = chain.next_tensor();
      const std::optional<Tensor> seen = chain.perhaps();
      const int64_t which = chain.next();
      STD_TORCH_CHECK(0 <= which && which < static_cast<int64_t>(counts.size()), "a chain has no such count");
      const double eps = chain.next_number(), more = chain.next_number(), scale = chain.next_number();
      const NewAttention pass =
          new_attention(heads, query_norm, key_norm, eps, more, cos, sin, keys, values, at, seen, counts[which], scale);
      STD_TORCH_CHECK(pass.batch == all.batch && pass.tokens == all.tokens && pass.given() == x.width, "heads can't share these keys");
      attend_new(pass, x.at, all.write(to, heads * pass.size, rooms));
    } else if (kind == NORM) {
      const Tensor& weight = chain.next_tensor();
      const double eps = chain.next_number(), more = chain.next_number();
      const Norm norm = norm_of(weight, x.width, eps, more);
      float* out = all.write(to, x.width, rooms);
      for_rows(rows, x.width, [=](int64_t m) { norm.of_row(x.at + m * x.width, x.width, out + m * x.width); });
    } else {
      STD_TORCH_CHECK(kind == ADD, "a chain has no such step");
      const Result y = all.read(chain.next());
      STD_TORCH_CHECK(y.width == x.width, "what is added has another width");
      float* out = all.write(to, x.width, rooms);
      for (int64_t k = 0; k < rows * x.width; k++) out[k] = x.at[k] + y.at[k];
    }
  }
  std::vector<Tensor> found;
  for (const std::optional<Tensor>& each : all.returned) {
    STD_TORCH_CHECK(each.has_value(), "a chain returns what it has not computed");
    found.push_back(*each);
  }
  return found;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("chain(Tensor like, Tensor(a!)[] tensors, int[] steps, float[] numbers, int[] counts, int places, int returned) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("chain", TORCH_BOX(&chain));
}
