// Makes the plan of a chain of operations: see `chain.cpp`.

#include "chain_plan.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <torch/csrc/stable/library.h>

using namespace OUTRIDER_NAMESPACE;

namespace {

// Reads and checks all steps.
class Planner {
 public:
  Planner(const std::vector<Tensor>& kept, const std::vector<int64_t>& steps, const std::vector<double>& numbers,
          const std::vector<int64_t>& given, int64_t places, int64_t returned)
      : kept_(kept), numbers_in_(steps), reals_in_(numbers), given_(given), results_(places), widths_(places), single_(places),
        returned_(returned) {}

  Tensor plan() {
    while (at_ < numbers_in_.size()) steps_.push_back(read());
    for (int64_t i = 0; i < returned_; i++) STD_TORCH_CHECK(results_[i] > 0, "a chain returns what it has not computed");
    const Head head{MARK,
                    static_cast<int64_t>(steps_.size()),
                    static_cast<int64_t>(told_.size()),
                    static_cast<int64_t>(parts_.size()),
                    static_cast<int64_t>(widths_.size()),
                    returned_,
                    static_cast<int64_t>(given_.size())};
    const int64_t shape[] = {Plan::bytes_of(head)};
    Tensor out = torch::stable::empty({shape, 1}, torch::headeronly::ScalarType::Byte);
    char* to = static_cast<char*>(out.data_ptr());
    to = put(to, &head, 1);
    to = put(to, steps_.data(), steps_.size());
    to = put(to, told_.data(), told_.size());
    to = put(to, parts_.data(), parts_.size());
    to = put(to, widths_.data(), widths_.size());
    to = put(to, single_.data(), static_cast<size_t>(returned_));
    put(to, given_.data(), given_.size());
    return out;
  }

 private:
  const std::vector<Tensor>& kept_;
  const std::vector<int64_t>& numbers_in_;
  const std::vector<double>& reals_in_;
  const std::vector<int64_t>& given_;
  std::vector<int64_t> results_;  // widths, of each place, as it is at this step
  std::vector<int64_t> widths_;   // the widest that a place is to hold
  std::vector<int64_t> single_;   // whether it is of the last tokens alone, as it is at this step
  const int64_t returned_;
  std::vector<Step> steps_;
  std::vector<Told> told_;
  std::vector<Joined> parts_;
  size_t at_ = 0, number_ = 0;

  template <class T>
  static char* put(char* to, const T* from, size_t count) {
    if (count > 0) std::memcpy(to, from, count * sizeof(T));
    return to + count * sizeof(T);
  }

  Step read() {
    const int64_t kind = next(), to = next();
    Step step;
    int64_t width = 0;
    bool single = false;
    if (kind == EMBED) {
      const int64_t tokens = given(next());
      const Tensor& rows = tensor(next());
      step.lookup = Lookup{tokens, table_of(rows, perhaps())};
      width = step.lookup->table.size;
    } else if (kind == JOIN) {
      step.join = Join{static_cast<int64_t>(parts_.size()), next()};
      width = next();
      single = join(*step.join, width);
    } else {
      step.x = activations(next());
      width = of_activations(kind, step);
      STD_TORCH_CHECK(step.y.which == NONE || step.y.single == step.x.single, "what is added is of other tokens");
      single = step.x.single || step.last;
    }
    step.out = place(to, width, single);
    return step;
  }

  // -> how wide its result is
  int64_t of_activations(int64_t kind, Step& step) {
    const int64_t width = step.x.width;
    if (kind == LAYER) return layer(step);
    if (kind == ATTENTION || kind == PLACED) return attention(step, kind == PLACED);
    if (kind == LAST) {
      step.last = true;
    } else if (kind == NORM) {
      const Tensor& weight = tensor(next());
      const double eps = number(), more = number();
      step.norm = norm_of(weight, width, eps, more);
    } else {
      STD_TORCH_CHECK(kind == ADD, "a chain has no such step");
      step.y = activations(next());
      STD_TORCH_CHECK(step.y.width == width, "what is added has another width");
    }
    return width;
  }

  int64_t layer(Step& step) {
    const std::optional<Tensor> norm = perhaps();
    const bool gated = next() != 0;
    const int64_t added = next();
    const Tensor& weight = tensor(next());
    const std::optional<Tensor> scales = perhaps(), bias = perhaps();
    const int64_t width = next();
    const double eps = number(), more = number();
    step.layer = layer_of(step.x.width, norm, eps, more, gated, weight, scales, bias, width);
    if (added != NONE) step.y = activations(added);
    STD_TORCH_CHECK(added == NONE || step.y.width == width, "what is added has another width");
    return width;
  }

  int64_t attention(Step& step, bool placed) {
    const int64_t heads = next();
    const std::optional<Tensor> query_norm = perhaps(), key_norm = perhaps();
    const Tensor &keys = tensor(next()), &values = tensor(next());
    Told found{NONE, NONE, NONE, NONE, NONE, std::nullopt};
    if (placed) {
      found.places = places();
      found.at = given(next());
    } else {
      found.cos = given(next());
      found.sin = given(next());
      found.at = given(next());
      const int64_t seen = next();
      found.seen = seen == NONE ? NONE : given(seen);
    }
    found.count = next();
    const double eps = number(), more = number(), scale = number();
    if (placed) found.places->times = static_cast<float>(number());
    step.told = told(found);
    step.attention = kept_attention(heads, query_norm, key_norm, eps, more, keys, values, scale);
    STD_TORCH_CHECK(step.attention->given() == step.x.width, "heads can't share these keys");
    STD_TORCH_CHECK(!step.x.single, "attention is of all tokens");
    return heads * step.attention->size;
  }

  Places places() {
    const Tensor& frequencies = tensor(next());
    STD_TORCH_CHECK(is_float(frequencies) && frequencies.is_contiguous() && frequencies.dim() == 1, "frequencies are float32 [F]");
    Places found{floats(frequencies), 2 * frequencies.numel(), given(next()), 0, 0, false, 1.0f};
    found.limit = next();
    found.apart = next() != 0;
    found.window = next();
    STD_TORCH_CHECK(found.window >= 0, "a window has columns, or is 0");
    return found;
  }

  // -> whether it is of the last tokens alone
  bool join(const Join& about, int64_t width) {
    const double eps = number(), more = number();
    int64_t together = 0;
    size_t single = 0;
    for (int64_t i = 0; i < about.count; i++) {
      const Activations x = activations(next());
      const Tensor& weight = tensor(next());
      parts_.push_back({x, norm_of(weight, x.width, eps, more)});
      together += x.width;
      single += x.single;
    }
    STD_TORCH_CHECK(about.count > 0 && together <= width, "what is joined is wider than its result");
    STD_TORCH_CHECK(single == 0 || static_cast<int64_t>(single) == about.count, "what is joined is of other tokens");
    return single > 0;
  }

  int64_t next() {
    STD_TORCH_CHECK(at_ < numbers_in_.size(), "a chain ends within a step");
    return numbers_in_[at_++];
  }
  double number() {
    STD_TORCH_CHECK(number_ < reals_in_.size(), "a chain lacks numbers");
    return reals_in_[number_++];
  }
  const Tensor& tensor(int64_t which) const {
    STD_TORCH_CHECK(0 <= which && which < static_cast<int64_t>(kept_.size()), "a chain has no such tensor");
    return kept_[which];
  }
  std::optional<Tensor> perhaps() {
    const int64_t which = next();
    return which == NONE ? std::nullopt : std::optional<Tensor>(tensor(which));
  }
  int64_t given(int64_t which) const {
    STD_TORCH_CHECK(0 <= which && which < static_cast<int64_t>(given_.size()), "a chain is not given this");
    return which;
  }

  Activations activations(int64_t which) const {
    const Activations found{which, 0, false};
    if (!found.is_result()) {
      const int64_t width = given_[given(which)];
      STD_TORCH_CHECK(width > 0, "activations have a width");
      return {which, width, false};
    }
    const size_t i = static_cast<size_t>(found.place());
    STD_TORCH_CHECK(i < results_.size() && results_[i] > 0, "a chain reads what it has not computed");
    return {which, results_[i], single_[i] != 0};
  }

  int64_t told(const Told& one) {
    const auto found = std::find(told_.begin(), told_.end(), one);
    if (found != told_.end()) return found - told_.begin();
    told_.push_back(one);
    return static_cast<int64_t>(told_.size()) - 1;
  }

  // Where a step's result goes.
  Activations place(int64_t which, int64_t width, bool single) {
    const Activations to{which, width, single};
    const size_t i = static_cast<size_t>(to.place());
    STD_TORCH_CHECK(to.is_result() && i < results_.size(), "a chain has no such result");
    STD_TORCH_CHECK(static_cast<int64_t>(i) >= returned_ || results_[i] == 0, "a chain returns a result that is overwritten");
    widths_[i] = std::max(widths_[i], width);
    results_[i] = width;
    single_[i] = single;
    return to;
  }
};

// tensors: what does not differ from pass to pass, among them keys and values, which are written. given: the width of each
// tensor that `chain` is given, 0 if it is no activation. places: of results, the first `returned` of which are returned.
// -> bytes, which hold addresses: they are good as long as these tensors are where they are.
Tensor chain_plan(std::vector<Tensor> tensors, std::vector<int64_t> steps, std::vector<double> numbers, std::vector<int64_t> given,
                  int64_t places, int64_t returned) {
  STD_TORCH_CHECK(0 <= returned && returned <= places, "a chain returns more than it computes");
  return Planner(tensors, steps, numbers, given, places, returned).plan();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("chain_plan(Tensor(a!)[] tensors, int[] steps, float[] numbers, int[] given, int places, int returned) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) { library.impl("chain_plan", TORCH_BOX(&chain_plan)); }
