// Operations of a pass that follow each other, as one.
//
// Beside weights that sweep the caches a call of an operation takes some 20 to 100 microseconds, whatever it does: the code of
// the interpreter, of dispatching and of allocating is fetched from memory each time. Here a pass is one call; what its steps
// hand to each other lies in memory that the thread keeps.
//
// What is the same in each pass, weights and the memory of keys and values, is read once: `chain_plan` makes bytes of it, which
// hold addresses, and `chain` is given these and what differs.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "attention.h"
#include "linear.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

// The steps of a chain, as numbers: a kind, then what it is given. `models/kernels/fusing/chains.py` writes them.
enum Kind : int64_t {
  LAYER,      // result, x, norm, gated, added, weight, scales, bias, outputs; eps, more
  ATTENTION,  // result, packed, heads, query norm, key norm, keys, values, cos, sin, at, seen, count; eps, more, scale
  NORM,       // result, x, weight; eps, more
  ADD,        // result, x, y
};
// Activations, cosines, sines, columns and masks are given to `chain`, and named from 0 on; other tensors are given to
// `chain_plan`, and named from 0 on. From -2 down: a result, the first one -2.
constexpr int64_t NONE = -1;

// What steps hand to each other, [batch, tokens, width] in float32.
struct Activations {
  int64_t which = NONE, width = 0;

  bool is_result() const { return which < NONE; }
  int64_t place() const { return -2 - which; }
};

// What attention is told of the tokens of a pass: which of the tensors and counts that are given.
struct Told {
  int64_t cos, sin, at, seen, count;

  bool operator==(const Told& other) const {
    return cos == other.cos && sin == other.sin && at == other.at && seen == other.seen && count == other.count;
  }
};

// One of the kinds: a layer, attention, a norm, or else a sum.
struct Step {
  Activations x, y, out;  // y: what is added, or nothing
  std::optional<Layer> layer;
  std::optional<KeptAttention> attention;
  int64_t told = 0;  // which of the plan's
  std::optional<Norm> norm;
};

// A plan is this, then its steps, what attention is told, how wide each place's results are, and each tensor that is given, 0
// if it is no activation.
struct Head {
  int64_t mark, steps, told, places, returned, given;
};
constexpr int64_t MARK = 0x6f75747269646572;
static_assert(std::is_trivially_copyable_v<Step> && std::is_trivially_copyable_v<Told> && std::is_trivially_copyable_v<Head>);
static_assert(alignof(Step) == alignof(int64_t) && sizeof(Step) % alignof(int64_t) == 0);

struct Plan {
  const Head* head;
  const Step* steps;
  const Told* told;
  const int64_t *widths, *given;

  static int64_t bytes_of(const Head& head) {
    return sizeof(Head) + head.steps * sizeof(Step) + head.told * sizeof(Told) + (head.places + head.given) * sizeof(int64_t);
  }

  explicit Plan(const Tensor& plan) {
    STD_TORCH_CHECK(is(plan, torch::headeronly::ScalarType::Byte) && plan.numel() >= static_cast<int64_t>(sizeof(Head)),
                    "a plan is of bytes");
    const char* at = static_cast<const char*>(plan.data_ptr());
    head = reinterpret_cast<const Head*>(at);
    STD_TORCH_CHECK(head->mark == MARK && plan.numel() == bytes_of(*head), "this is not a plan");
    steps = reinterpret_cast<const Step*>(at += sizeof(Head));
    told = reinterpret_cast<const Told*>(at += head->steps * sizeof(Step));
    widths = reinterpret_cast<const int64_t*>(at += head->told * sizeof(Told));
    given = widths + head->places;
  }
};

// Reads and checks all steps.
class Planner {
 public:
  Planner(const std::vector<Tensor>& kept, const std::vector<int64_t>& steps, const std::vector<double>& numbers,
          const std::vector<int64_t>& given, int64_t places, int64_t returned)
      : kept_(kept), numbers_in_(steps), reals_in_(numbers), given_(given), results_(places), widths_(places), returned_(returned) {}

  Tensor plan() {
    while (at_ < numbers_in_.size()) steps_.push_back(read());
    for (int64_t i = 0; i < returned_; i++) STD_TORCH_CHECK(results_[i] > 0, "a chain returns what it has not computed");
    const Head head{MARK,
                    static_cast<int64_t>(steps_.size()),
                    static_cast<int64_t>(told_.size()),
                    static_cast<int64_t>(widths_.size()),
                    returned_,
                    static_cast<int64_t>(given_.size())};
    const int64_t shape[] = {Plan::bytes_of(head)};
    Tensor out = torch::stable::empty({shape, 1}, torch::headeronly::ScalarType::Byte);
    char* to = static_cast<char*>(out.data_ptr());
    to = put(to, &head, 1);
    to = put(to, steps_.data(), steps_.size());
    to = put(to, told_.data(), told_.size());
    to = put(to, widths_.data(), widths_.size());
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
  const int64_t returned_;
  std::vector<Step> steps_;
  std::vector<Told> told_;
  size_t at_ = 0, number_ = 0;

  template <class T>
  static char* put(char* to, const T* from, size_t count) {
    if (count > 0) std::memcpy(to, from, count * sizeof(T));
    return to + count * sizeof(T);
  }

  Step read() {
    const int64_t kind = next(), to = next();
    Step step;
    step.x = activations(next());
    int64_t width = step.x.width;
    if (kind == LAYER) {
      const std::optional<Tensor> norm = perhaps();
      const bool gated = next() != 0;
      const int64_t added = next();
      const Tensor& weight = tensor(next());
      const std::optional<Tensor> scales = perhaps(), bias = perhaps();
      width = next();
      const double eps = number(), more = number();
      step.layer = layer_of(step.x.width, norm, eps, more, gated, weight, scales, bias, width);
      if (added != NONE) step.y = activations(added);
      STD_TORCH_CHECK(added == NONE || step.y.width == width, "what is added has another width");
    } else if (kind == ATTENTION) {
      const int64_t heads = next();
      const std::optional<Tensor> query_norm = perhaps(), key_norm = perhaps();
      const Tensor &keys = tensor(next()), &values = tensor(next());
      const int64_t cos = given(next()), sin = given(next()), at = given(next()), seen = next();
      step.told = told({cos, sin, at, seen == NONE ? NONE : given(seen), next()});
      const double eps = number(), more = number(), scale = number();
      step.attention = kept_attention(heads, query_norm, key_norm, eps, more, keys, values, scale);
      STD_TORCH_CHECK(step.attention->given() == width, "heads can't share these keys");
      width = heads * step.attention->size;
    } else if (kind == NORM) {
      const Tensor& weight = tensor(next());
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
    const Activations found{which, 0};
    if (!found.is_result()) {
      const int64_t width = given_[given(which)];
      STD_TORCH_CHECK(width > 0, "activations have a width");
      return {which, width};
    }
    const size_t i = static_cast<size_t>(found.place());
    STD_TORCH_CHECK(i < results_.size() && results_[i] > 0, "a chain reads what it has not computed");
    return {which, results_[i]};
  }

  int64_t told(const Told& one) {
    const auto found = std::find(told_.begin(), told_.end(), one);
    if (found != told_.end()) return found - told_.begin();
    told_.push_back(one);
    return static_cast<int64_t>(told_.size()) - 1;
  }

  // Where a step's result goes.
  Activations place(int64_t which, int64_t width) {
    const Activations to{which, width};
    const size_t i = static_cast<size_t>(to.place());
    STD_TORCH_CHECK(to.is_result() && i < results_.size(), "a chain has no such result");
    STD_TORCH_CHECK(static_cast<int64_t>(i) >= returned_ || results_[i] == 0, "a chain returns a result that is overwritten");
    widths_[i] = std::max(widths_[i], width);
    results_[i] = width;
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

// What differs, as the steps read it.
class Given {
 public:
  Given(const Plan& plan, const Tensor& like, const std::vector<Tensor>& tensors, const std::vector<int64_t>& counts)
      : batch_(like.size(0)), tokens_(like.size(1)) {
    STD_TORCH_CHECK(static_cast<int64_t>(tensors.size()) == plan.head->given, "a chain is given other tensors than was planned");
    for (int64_t i = 0; i < plan.head->given; i++) {
      at_.push_back(plan.given[i] == 0 ? nullptr : activations(tensors[i], plan.given[i]));
    }
    for (int64_t i = 0; i < plan.head->told; i++) told_.push_back(told(plan.told[i], tensors, counts));
    for (int64_t i = 0; i < plan.head->steps; i++) {  // no key is written by a chain that is refused
      if (plan.steps[i].attention.has_value()) check_fit(*plan.steps[i].attention, told_[plan.steps[i].told]);
    }
    static thread_local std::vector<Room> kept;
    if (static_cast<int64_t>(kept.size()) < plan.head->places) kept.resize(plan.head->places);
    for (int64_t i = 0; i < plan.head->places; i++) {
      if (i >= plan.head->returned) {
        results_.push_back(kept[i].of(rows() * plan.widths[i]));
        continue;
      }
      const int64_t shape[] = {batch_, tokens_, plan.widths[i]};
      returned_.push_back(torch::stable::empty({shape, 3}, torch::headeronly::ScalarType::Float));
      results_.push_back(static_cast<float*>(returned_.back().data_ptr()));
    }
  }

  int64_t rows() const { return batch_ * tokens_; }
  const float* read(const Activations& x) const { return x.is_result() ? results_[x.place()] : at_[x.which]; }
  float* write(const Activations& x) const { return results_[x.place()]; }
  const NewTokens& told(int64_t which) const { return told_[which]; }
  const std::vector<Tensor>& returned() const { return returned_; }

 private:
  const int64_t batch_, tokens_;
  std::vector<const float*> at_;
  std::vector<float*> results_;
  std::vector<NewTokens> told_;
  std::vector<Tensor> returned_;
  std::vector<Tensor> copies_;  // of what was not in one piece, and masks

  const float* activations(const Tensor& x, int64_t width) {
    STD_TORCH_CHECK(is_float(x) && x.dim() == 3 && x.size(0) == batch_ && x.size(1) == tokens_ && x.size(2) == width,
                    "activations must be float32 [B, N, width]");
    if (x.is_contiguous()) return floats(x);
    copies_.push_back(torch::stable::contiguous(x));
    return floats(copies_.back());
  }

  NewTokens told(const Told& which, const std::vector<Tensor>& tensors, const std::vector<int64_t>& counts) {
    std::optional<Tensor> seen;
    if (which.seen != NONE) {
      seen = mask_in_one_piece(tensors[which.seen]);
      copies_.push_back(*seen);
    }
    STD_TORCH_CHECK(0 <= which.count && which.count < static_cast<int64_t>(counts.size()), "a chain has no such count");
    const NewTokens found = new_tokens(tensors[which.cos], tensors[which.sin], tensors[which.at], seen, counts[which.count]);
    STD_TORCH_CHECK(found.batch == batch_ && found.tokens == tokens_, "these are other tokens");
    return found;
  }
};

void run(const Step& step, const Given& given) {
  const int64_t rows = given.rows(), width = step.x.width;
  const float* x = given.read(step.x);
  float* out = given.write(step.out);
  if (step.layer.has_value()) {
    multiply(*step.layer, x, rows, step.y.which == NONE ? nullptr : given.read(step.y), out);
  } else if (step.attention.has_value()) {
    attend_new(*step.attention, given.told(step.told), x, out);
  } else if (step.norm.has_value()) {
    const Norm norm = *step.norm;
    for_rows(rows, width, [=](int64_t m) { norm.of_row(x + m * width, width, out + m * width); });
  } else {
    const float* y = given.read(step.y);
    for_rows(rows, width, [=](int64_t m) {
      for (int64_t k = m * width; k < (m + 1) * width; k++) out[k] = x[k] + y[k];
    });
  }
}

// like [B, N, any]: how many rows and tokens there are. given: what differs from pass to pass; counts: of columns that attention
// reads. -> [B, N, width] each
std::vector<Tensor> chain(Tensor like, Tensor plan, std::vector<Tensor> given, std::vector<int64_t> counts) {
  STD_TORCH_CHECK(like.dim() == 3, "a chain is of activations [B, N, width]");
  const Plan planned(plan);
  const Given now(planned, like, given, counts);
  for (int64_t i = 0; i < planned.head->steps; i++) run(planned.steps[i], now);
  return now.returned();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  library.def("chain_plan(Tensor(a!)[] tensors, int[] steps, float[] numbers, int[] given, int places, int returned) -> Tensor");
  // It writes keys and values by their addresses, which nothing but this annotation tells.
  library.def("chain(Tensor like, Tensor(a!) plan, Tensor[] given, int[] counts) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("chain_plan", TORCH_BOX(&chain_plan));
  library.impl("chain", TORCH_BOX(&chain));
}
