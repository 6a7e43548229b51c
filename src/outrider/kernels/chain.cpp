// Operations of a pass that follow each other, as one.
//
// Beside weights that sweep the caches a call of an operation takes some 20 to 100 microseconds, whatever it does: the code of
// the interpreter, of dispatching and of allocating is fetched from memory each time. Here a pass is one call; what its steps
// hand to each other lies in memory that the thread keeps.

#include <algorithm>
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

// What steps hand to each other, [batch, tokens, width] in float32.
struct Activations {
  float* at = nullptr;  // of a result in memory that the thread keeps: once all steps have been read
  int64_t width = 0;
  int64_t place = NONE;  // such a result's
};

// One of the kinds: a layer, attention, a norm, or else a sum.
struct Step {
  Activations x, y, out;  // y: what is added, or nothing
  std::optional<Layer> layer;
  std::optional<NewAttention> attention;
  std::optional<Norm> norm;
};

// Reads and checks all steps before the first is run: no key is written by a chain that is refused, and their code is read
// while it is in the caches.
class Reader {
 public:
  Reader(const Tensor& like, const std::vector<Tensor>& given, const std::vector<int64_t>& steps, const std::vector<double>& numbers,
         const std::vector<int64_t>& counts, int64_t places, int64_t returned)
      : given_(given), steps_(steps), numbers_(numbers), counts_(counts), batch_(like.size(0)), tokens_(like.size(1)),
        results_(places), widest_(places), returned_(returned) {}

  int64_t rows() const { return batch_ * tokens_; }

  bool more() const { return at_ < steps_.size(); }

  Step read() {
    const int64_t kind = next(), to = next();
    Step step{activations(next())};
    int64_t width = step.x.width;
    if (kind == LAYER) {
      const std::optional<Tensor> norm = perhaps();
      const bool gated = next() != 0;
      const int64_t added = next();
      const Tensor& weight = next_tensor();
      const std::optional<Tensor> scales = perhaps(), bias = perhaps();
      width = next();
      const double eps = number(), more = number();
      step.layer = layer_of(step.x.width, norm, eps, more, gated, weight, scales, bias, width);
      if (added != NONE) step.y = activations(added);
      STD_TORCH_CHECK(added == NONE || step.y.width == width, "what is added has another width");
    } else if (kind == ATTENTION) {
      const int64_t heads = next();
      const std::optional<Tensor> query_norm = perhaps(), key_norm = perhaps();
      const Tensor &cos = next_tensor(), &sin = next_tensor(), &keys = next_tensor(), &values = next_tensor(), &at = next_tensor();
      const std::optional<Tensor> seen = mask_in_one_piece(perhaps());
      if (seen.has_value()) copies_.push_back(*seen);
      const int64_t which = next();
      STD_TORCH_CHECK(0 <= which && which < static_cast<int64_t>(counts_.size()), "a chain has no such count");
      const double eps = number(), more = number(), scale = number();
      step.attention =
          new_attention(heads, query_norm, key_norm, eps, more, cos, sin, keys, values, at, seen, counts_[which], scale);
      STD_TORCH_CHECK(step.attention->batch == batch_ && step.attention->tokens == tokens_ && step.attention->given() == width,
                      "heads can't share these keys");
      width = heads * step.attention->size;
    } else if (kind == NORM) {
      const Tensor& weight = next_tensor();
      const double eps = number(), more = number();
      step.norm = norm_of(weight, width, eps, more);
    } else {
      STD_TORCH_CHECK(kind == ADD, "a chain has no such step");
      step.y = activations(next());
      STD_TORCH_CHECK(step.y.width == width, "what is added has another width");
    }
    step.out = place(to, width);
    return step;
  }

  // Where results lie, so that steps can be run.
  void settle(std::vector<Step>& steps) const {
    static thread_local std::vector<Room> kept;
    if (kept.size() < results_.size()) kept.resize(results_.size());
    for (Step& step : steps) {
      for (Activations* each : {&step.x, &step.y, &step.out}) {
        if (each->place != NONE) each->at = kept[each->place].of(rows() * widest_[each->place]);
      }
    }
  }

  std::vector<Tensor> returned() const {
    std::vector<Tensor> found;
    for (const std::optional<Tensor>& each : returned_) {
      STD_TORCH_CHECK(each.has_value(), "a chain returns what it has not computed");
      found.push_back(*each);
    }
    return found;
  }

 private:
  const std::vector<Tensor>& given_;
  const std::vector<int64_t>& steps_;
  const std::vector<double>& numbers_;
  const std::vector<int64_t>& counts_;
  const int64_t batch_, tokens_;
  std::vector<Activations> results_;             // of each place, as it is at this step
  std::vector<int64_t> widest_;                  // that a place is to hold
  std::vector<std::optional<Tensor>> returned_;  // of the first places
  std::vector<Tensor> copies_;                   // of what was not in one piece, and masks
  size_t at_ = 0, number_ = 0;

  int64_t next() {
    STD_TORCH_CHECK(at_ < steps_.size(), "a chain ends within a step");
    return steps_[at_++];
  }
  double number() {
    STD_TORCH_CHECK(number_ < numbers_.size(), "a chain lacks numbers");
    return numbers_[number_++];
  }
  const Tensor& tensor(int64_t which) const {
    STD_TORCH_CHECK(0 <= which && which < static_cast<int64_t>(given_.size()), "a chain has no such tensor");
    return given_[which];
  }
  const Tensor& next_tensor() { return tensor(next()); }
  std::optional<Tensor> perhaps() {
    const int64_t which = next();
    return which == NONE ? std::nullopt : std::optional<Tensor>(tensor(which));
  }

  Activations activations(int64_t which) {
    if (which <= -2) {
      const size_t i = static_cast<size_t>(-2 - which);
      STD_TORCH_CHECK(i < results_.size() && results_[i].width > 0, "a chain reads what it has not computed");
      return results_[i];
    }
    const Tensor& x = tensor(which);
    STD_TORCH_CHECK(is_float(x) && x.dim() == 3 && x.size(0) == batch_ && x.size(1) == tokens_,
                    "activations must be float32 [B, N, width]");
    if (x.is_contiguous()) return {static_cast<float*>(x.data_ptr()), x.size(2)};
    copies_.push_back(torch::stable::contiguous(x));
    return {static_cast<float*>(copies_.back().data_ptr()), x.size(2)};
  }

  // Where a step's result goes.
  Activations place(int64_t which, int64_t width) {
    const size_t i = static_cast<size_t>(-2 - which);
    STD_TORCH_CHECK(which <= -2 && i < results_.size(), "a chain has no such result");
    if (i >= returned_.size()) {
      widest_[i] = std::max(widest_[i], width);
      return results_[i] = {nullptr, width, static_cast<int64_t>(i)};
    }
    STD_TORCH_CHECK(!returned_[i].has_value(), "a chain returns a result that is overwritten");
    const int64_t shape[] = {batch_, tokens_, width};
    returned_[i] = torch::stable::empty({shape, 3}, torch::headeronly::ScalarType::Float);
    return results_[i] = {static_cast<float*>(returned_[i]->data_ptr()), width};
  }
};

void run(const Step& step, int64_t rows) {
  const int64_t width = step.x.width;
  const float *x = step.x.at, *y = step.y.at;
  float* out = step.out.at;
  if (step.layer.has_value()) {
    multiply(*step.layer, x, rows, y, out);
  } else if (step.attention.has_value()) {
    attend_new(*step.attention, x, out);
  } else if (step.norm.has_value()) {
    const Norm norm = *step.norm;
    for_rows(rows, width, [=](int64_t m) { norm.of_row(x + m * width, width, out + m * width); });
  } else {
    for_rows(rows, width, [=](int64_t m) {
      for (int64_t k = m * width; k < (m + 1) * width; k++) out[k] = x[k] + y[k];
    });
  }
}

// tensors: what the steps are given, and what they write keys and values into. places: of results, the first `returned` of
// which are returned, [B, N, width] each. like [B, N, any]: how many rows and tokens there are. counts: of columns that
// attention reads.
std::vector<Tensor> chain(Tensor like, std::vector<Tensor> tensors, std::vector<int64_t> steps, std::vector<double> numbers,
                          std::vector<int64_t> counts, int64_t places, int64_t returned) {
  STD_TORCH_CHECK(like.dim() == 3 && 0 <= returned && returned <= places, "a chain is of activations [B, N, width]");
  Reader reader(like, tensors, steps, numbers, counts, places, returned);
  std::vector<Step> all;
  while (reader.more()) all.push_back(reader.read());
  reader.settle(all);
  for (const Step& step : all) run(step, reader.rows());
  return reader.returned();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("chain(Tensor like, Tensor(a!)[] tensors, int[] steps, float[] numbers, int[] counts, int places, int returned) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("chain", TORCH_BOX(&chain));
}
