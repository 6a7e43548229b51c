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
#include <deque>
#include <optional>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "chain_plan.h"

using namespace OUTRIDER_NAMESPACE;

namespace {

// Memory that a thread keeps, as often as it is needed at once.
class Rooms {
 public:
  void make(int64_t count) {
    if (static_cast<int64_t>(rooms_.size()) < count) rooms_.resize(count);
  }
  Room& operator[](int64_t i) { return rooms_[i]; }

 private:
  std::vector<Room> rooms_;
};

// What differs, as the steps read it.
class Given {
 public:
  Given(const Plan& plan, const Tensor& like, const std::vector<Tensor>& tensors, const std::vector<int64_t>& counts)
      : batch_(like.size(0)), tokens_(like.size(1)), parts_(plan.parts), ids_(plan.head->given) {
    STD_TORCH_CHECK(static_cast<int64_t>(tensors.size()) == plan.head->given, "a chain is given other tensors than was planned");
    static thread_local Rooms for_given, for_angles, for_seen, for_results;
    for_given.make(plan.head->given);
    for (int64_t i = 0; i < plan.head->given; i++) {
      at_.push_back(plan.given[i] == 0 ? nullptr : activations(tensors[i], plan.given[i], for_given[i]));
    }
    for (int64_t i = 0; i < plan.head->steps; i++) {  // before anything is as large as these say
      if (plan.steps[i].attention.has_value()) check_columns(plan.told[plan.steps[i].told], *plan.steps[i].attention, counts);
    }
    for_angles.make(plan.head->told);
    for_seen.make(plan.head->told);
    for (int64_t i = 0; i < plan.head->told; i++) told_.push_back(told(plan.told[i], tensors, counts, for_angles[i], for_seen[i]));
    for (int64_t i = 0; i < plan.head->steps; i++) look_up(plan.steps[i], tensors);
    for (int64_t i = 0; i < plan.head->steps; i++) {  // no key is written by a chain that is refused
      if (plan.steps[i].attention.has_value()) check_fit(*plan.steps[i].attention, told_[plan.steps[i].told]);
    }
    for_results.make(plan.head->places);
    for (int64_t i = 0; i < plan.head->places; i++) {
      if (i >= plan.head->returned) {
        results_.push_back(for_results[i].of(rows() * plan.widths[i]));
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
  const Numbers& tokens(const Lookup& lookup) const { return ids_[lookup.tokens]; }
  const Joined* parts(const Join& join) const { return parts_ + join.first; }
  const std::vector<Tensor>& returned() const { return returned_; }

 private:
  const int64_t batch_, tokens_;
  const Joined* parts_;
  std::vector<Numbers> ids_;  // of each tensor that is given, if it is looked up
  std::vector<const float*> at_;
  std::vector<float*> results_;
  std::vector<NewTokens> told_;
  std::vector<Tensor> returned_;
  std::deque<Tensor> copies_;  // of what was not in one piece, and masks

  void look_up(const Step& step, const std::vector<Tensor>& tensors) {
    if (!step.lookup.has_value()) return;
    const Numbers ids = ids_[step.lookup->tokens] = numbers_of(tensors[step.lookup->tokens]);
    STD_TORCH_CHECK(ids.batch == batch_ && ids.tokens == tokens_, "these are other tokens");
    for (int64_t b = 0; b < batch_; b++) {
      for (int64_t n = 0; n < tokens_; n++) {
        STD_TORCH_CHECK(0 <= ids.of(b, n) && ids.of(b, n) < step.lookup->table.count, "a token lies outside of the table");
      }
    }
  }

  // Float32 in one piece.
  const float* activations(const Tensor& x, int64_t width, Room& room) {
    STD_TORCH_CHECK((is_float(x) || is_bfloat(x)) && x.dim() == 3 && x.size(0) == batch_ && x.size(1) == tokens_ && x.size(2) == width,
                    "activations must be float32 or bfloat16 [B, N, width]");
    const Tensor& piece = x.is_contiguous() ? x : copies_.emplace_back(torch::stable::contiguous(x));
    if (is_float(piece)) return floats(piece);
    float* to = room.of(rows() * width);
    from_bfloats(static_cast<const uint16_t*>(piece.data_ptr()), rows() * width, to);
    return to;
  }

  static void check_columns(const Told& told, const KeptAttention& kept, const std::vector<int64_t>& counts) {
    STD_TORCH_CHECK(0 <= told.count && told.count < static_cast<int64_t>(counts.size()), "a chain has no such count");
    STD_TORCH_CHECK(0 <= counts[told.count] && counts[told.count] <= kept.capacity, "keys and values are kept in other sizes");
  }

  // room: for angles, and for what is seen.
  NewTokens told(const Told& which, const std::vector<Tensor>& tensors, const std::vector<int64_t>& counts, Room& angles, Room& seen) {
    NewTokens found = new_tokens(numbers_of(tensors[which.at]), counts[which.count]);
    STD_TORCH_CHECK(found.at.batch == batch_ && found.at.tokens == tokens_, "these are other tokens");
    if (which.places.has_value()) {
      place(found, *which.places, numbers_of(tensors[which.places->positions]), angles, seen);
    } else {
      turn_by(found, tensors[which.cos], tensors[which.sin]);
      if (which.seen != NONE) see(found, copies_.emplace_back(*mask_in_one_piece(tensors[which.seen])));
    }
    return found;
  }

  void place(NewTokens& found, const Places& places, const Numbers& positions, Room& angles, Room& seen) {
    STD_TORCH_CHECK(positions.batch == batch_ && positions.tokens == tokens_, "these are positions of other tokens");
    const int64_t turned = places.turned, all = rows() * turned;
    float* cosines = angles.of(2 * all);
    bool* sees = reinterpret_cast<bool*>(seen.of((rows() * found.columns + sizeof(float) - 1) / sizeof(float)));
    for_rows(rows(), turned + found.columns, [=](int64_t m) {
      const int64_t b = m / tokens_, n = m % tokens_, position = std::min(positions.of(b, n), places.limit);
      angles_at(position, places.frequencies, turned / 2, places.times, cosines + m * turned, cosines + all + m * turned);
      seen_at(position, places.apart, found.at.of(b, n), places.window, found.columns, sees + m * found.columns);
    });
    found.cosines = {cosines, tokens_ * turned, turned};
    found.sines = {cosines + all, tokens_ * turned, turned};
    found.turned = turned;
    found.seen = sees;
    found.seen_row = tokens_ * found.columns;
    found.seen_token = found.columns;
  }
};

void join(const Joined* parts, int64_t count, const Given& given, int64_t width, float* out) {
  for_rows(given.rows(), width, [=, &given](int64_t m) {
    float* to = out + m * width;
    for (int64_t i = 0; i < count; i++) {
      const int64_t size = parts[i].x.width;
      parts[i].norm.of_row(given.read(parts[i].x) + m * size, size, to);
      to += size;
    }
    std::fill(to, out + (m + 1) * width, 0.0f);
  });
}

void run(const Step& step, const Given& given) {
  const int64_t rows = given.rows(), width = step.x.width;
  float* out = given.write(step.out);
  if (step.lookup.has_value()) {
    const Table table = step.lookup->table;
    const Numbers ids = given.tokens(*step.lookup);
    for_rows(rows, table.size, [=](int64_t m) { table.of_row(ids.of(m / ids.tokens, m % ids.tokens), out + m * table.size); });
    return;
  }
  if (step.join.has_value()) return join(given.parts(*step.join), step.join->count, given, step.out.width, out);
  const float* x = given.read(step.x);
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

// like [B, N] or [B, N, any]: how many rows and tokens there are. given: what differs from pass to pass; counts: of columns that
// attention reads. -> [B, N, width] each
std::vector<Tensor> chain(Tensor like, Tensor plan, std::vector<Tensor> given, std::vector<int64_t> counts) {
  STD_TORCH_CHECK(like.dim() == 2 || like.dim() == 3, "a chain is of tokens [B, N] or activations [B, N, width]");
  const Plan planned(plan);
  const Given now(planned, like, given, counts);
  for (int64_t i = 0; i < planned.head->steps; i++) run(planned.steps[i], now);
  return now.returned();
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  // It writes keys and values by their addresses, which nothing but this annotation tells.
  library.def("chain(Tensor like, Tensor(a!) plan, Tensor[] given, int[] counts) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("chain", TORCH_BOX(&chain));
}
