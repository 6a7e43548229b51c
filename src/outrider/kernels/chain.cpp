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
#include <exception>
#include <optional>
#include <string>
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

// One of what differs, as plain memory: numbers of some type, [B, N] or [B, N, width].
struct Piece {
  enum Type : int64_t { FLOAT, BFLOAT, LONG, OTHER };

  const void* at = nullptr;
  Type type = OTHER;
  int64_t batch = 0, tokens = 0, width = 0;  // width: 0 of what has none
  int64_t row = 0, token = 0;                // strides

  bool is_activations(int64_t rows, int64_t each, int64_t wide) const {
    return (type == FLOAT || type == BFLOAT) && batch == rows && tokens == each && width == wide;
  }
  Numbers numbers() const {
    STD_TORCH_CHECK(type == LONG && width == 0, "tokens and positions are int64 [B, N]");
    return {static_cast<const int64_t*>(at), batch, tokens, row, token};
  }
};

Piece::Type type_of(const Tensor& x) {
  using torch::headeronly::ScalarType;
  if (is_float(x)) return Piece::FLOAT;
  if (is_bfloat(x)) return Piece::BFLOAT;
  return x.scalar_type() == ScalarType::Long ? Piece::LONG : Piece::OTHER;
}

// Activations of another layout are copied to where `copies` keeps them. What is neither activations nor whole numbers has no
// piece.
Piece piece_of(const Tensor& x, bool activations, std::deque<Tensor>& copies) {
  if (x.dim() != (activations ? 3 : 2)) return {};
  const Tensor& whole = x.is_contiguous() || !activations ? x : copies.emplace_back(torch::stable::contiguous(x));
  return {whole.data_ptr(), type_of(x), x.size(0), x.size(1), activations ? x.size(2) : 0, whole.stride(0), whole.stride(1)};
}

// What differs, as the steps read it.
class Given {
 public:
  // spans: of the tokens of one row, if these are several sequences'; of each row's otherwise. results: where those are written that
  // are returned; nullptr: in new tensors. tensors: what is given, where cosines, sines and masks are among it.
  Given(const Plan& plan, int64_t batch, int64_t tokens, const std::vector<Piece>& pieces, const std::vector<int64_t>& counts,
        const std::vector<Span>& spans, float* const* results, const std::vector<Tensor>* tensors = nullptr)
      : batch_(batch), tokens_(tokens), spans_(spans), parts_(plan.parts), ids_(plan.head->given), tensors_(tensors) {
    check_spans();
    STD_TORCH_CHECK(static_cast<int64_t>(pieces.size()) == plan.head->given, "a chain is given other tensors than was planned");
    static thread_local Rooms for_given, for_angles, for_seen, for_results;
    for_given.make(plan.head->given);
    for (int64_t i = 0; i < plan.head->given; i++) {
      at_.push_back(plan.given[i] == 0 ? nullptr : activations(pieces[i], plan.given[i], for_given[i]));
    }
    for (int64_t i = 0; i < plan.head->steps; i++) {  // before anything is as large as these say
      if (plan.steps[i].attention.has_value()) check_columns(plan.told[plan.steps[i].told], *plan.steps[i].attention, counts);
    }
    for_angles.make(plan.head->told);
    for_seen.make(plan.head->told);
    for (int64_t i = 0; i < plan.head->told; i++) told_.push_back(told(plan.told[i], pieces, counts, for_angles[i], for_seen[i]));
    for (int64_t i = 0; i < plan.head->steps; i++) look_up(plan.steps[i], pieces);
    for (int64_t i = 0; i < plan.head->steps; i++) {  // no key is written by a chain that is refused
      if (plan.steps[i].attention.has_value()) check_fit(*plan.steps[i].attention, told_[plan.steps[i].told]);
    }
    for_results.make(plan.head->places);
    for (int64_t i = 0; i < plan.head->places; i++) {
      if (i >= plan.head->returned) {
        results_.push_back(for_results[i].of(batch_ * tokens_ * plan.widths[i]));
      } else if (results != nullptr) {
        results_.push_back(results[i]);
      } else {
        const int64_t shape[] = {batch_, plan.single[i] != 0 ? 1 : tokens_, plan.widths[i]};  // of rows that are a sequence each
        returned_.push_back(torch::stable::empty({shape, 3}, torch::headeronly::ScalarType::Float));
        results_.push_back(static_cast<float*>(returned_.back().data_ptr()));
      }
    }
  }

  int64_t sequences() const { return spans_.empty() ? batch_ : static_cast<int64_t>(spans_.size()); }
  int64_t rows(const Activations& x) const { return x.single ? sequences() : batch_ * tokens_; }
  // Behind the last token of a sequence.
  int64_t end(int64_t sequence) const {
    return spans_.empty() ? (sequence + 1) * tokens_ : spans_[sequence].first + spans_[sequence].count;
  }
  const float* read(const Activations& x) const { return x.is_result() ? results_[x.place()] : at_[x.which]; }
  float* write(const Activations& x) const { return results_[x.place()]; }
  const NewTokens& told(int64_t which) const { return told_[which]; }
  const Numbers& tokens(const Lookup& lookup) const { return ids_[lookup.tokens]; }
  const Joined* parts(const Join& join) const { return parts_ + join.first; }
  const std::vector<Tensor>& returned() const { return returned_; }

 private:
  const int64_t batch_, tokens_;
  const std::vector<Span>& spans_;
  const Joined* parts_;
  std::vector<Numbers> ids_;  // of each tensor that is given, if it is looked up
  const std::vector<Tensor>* tensors_;
  std::vector<const float*> at_;
  std::vector<float*> results_;
  std::vector<NewTokens> told_;
  std::vector<Tensor> returned_;
  std::deque<Tensor> copies_;  // of masks

  void check_spans() const {
    int64_t next = 0;
    for (const Span& span : spans_) {
      STD_TORCH_CHECK(span.batch == 0 && span.first == next && span.count > 0, "sequences are of tokens one after the other");
      next += span.count;
    }
    STD_TORCH_CHECK(spans_.empty() || (batch_ == 1 && next == tokens_), "sequences are of all tokens of one row");
  }

  void look_up(const Step& step, const std::vector<Piece>& pieces) {
    if (!step.lookup.has_value()) return;
    const Numbers ids = ids_[step.lookup->tokens] = pieces[step.lookup->tokens].numbers();
    STD_TORCH_CHECK(ids.batch == batch_ && ids.tokens == tokens_, "these are other tokens");
    for (int64_t b = 0; b < batch_; b++) {
      for (int64_t n = 0; n < tokens_; n++) {
        STD_TORCH_CHECK(0 <= ids.of(b, n) && ids.of(b, n) < step.lookup->table.count, "a token lies outside of the table");
      }
    }
  }

  // Float32.
  const float* activations(const Piece& x, int64_t width, Room& room) {
    STD_TORCH_CHECK(x.is_activations(batch_, tokens_, width), "activations must be float32 or bfloat16 [B, N, width]");
    if (x.type == Piece::FLOAT) return static_cast<const float*>(x.at);
    const int64_t all = batch_ * tokens_ * width;
    float* to = room.of(all);
    from_bfloats(static_cast<const uint16_t*>(x.at), all, to);
    return to;
  }

  static void check_columns(const Told& told, const KeptAttention& kept, const std::vector<int64_t>& counts) {
    STD_TORCH_CHECK(0 <= told.count && told.count < static_cast<int64_t>(counts.size()), "a chain has no such count");
    STD_TORCH_CHECK(0 <= counts[told.count] && counts[told.count] <= kept.capacity, "keys and values are kept in other sizes");
  }

  // room: for angles, and for what is seen.
  NewTokens told(const Told& which, const std::vector<Piece>& pieces, const std::vector<int64_t>& counts, Room& angles, Room& seen) {
    const Numbers at = pieces[which.at].numbers();
    NewTokens found = spans_.empty() ? new_tokens(at, counts[which.count]) : new_tokens_of(at, counts[which.count], spans_);
    STD_TORCH_CHECK(found.at.batch == batch_ && found.at.tokens == tokens_, "these are other tokens");
    if (which.places.has_value()) {
      place(found, *which.places, pieces[which.places->positions].numbers(), angles, seen);
    } else {
      STD_TORCH_CHECK(tensors_ != nullptr, "a chain is given cosines and masks as tensors alone");
      turn_by(found, (*tensors_)[which.cos], (*tensors_)[which.sin]);
      if (which.seen != NONE) see(found, copies_.emplace_back(*mask_in_one_piece((*tensors_)[which.seen])));
    }
    return found;
  }

  void place(NewTokens& found, const Places& places, const Numbers& positions, Room& angles, Room& seen) {
    STD_TORCH_CHECK(positions.batch == batch_ && positions.tokens == tokens_, "these are positions of other tokens");
    const int64_t turned = places.turned, rows = batch_ * tokens_, all = rows * turned;
    float* cosines = angles.of(2 * all);
    bool* sees = reinterpret_cast<bool*>(seen.of((rows * found.columns + sizeof(float) - 1) / sizeof(float)));
    for_rows(rows, turned + found.columns, [=](int64_t m) {
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
  for_rows(given.rows(parts->x), width, [=, &given](int64_t m) {
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
  const int64_t rows = given.rows(step.out), width = step.x.width;
  float* out = given.write(step.out);
  if (step.lookup.has_value()) {
    const Table table = step.lookup->table;
    const Numbers ids = given.tokens(*step.lookup);
    for_rows(rows, table.size, [=](int64_t m) { table.of_row(ids.of(m / ids.tokens, m % ids.tokens), out + m * table.size); });
    return;
  }
  if (step.join.has_value()) return join(given.parts(*step.join), step.join->count, given, step.out.width, out);
  const float* x = given.read(step.x);
  if (step.last) {
    for (int64_t b = 0; b < given.sequences(); b++) {
      const float* row = x + (step.x.single ? b : given.end(b) - 1) * width;
      std::copy(row, row + width, out + b * width);
    }
  } else if (step.layer.has_value()) {
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
  std::deque<Tensor> copies;
  std::vector<Piece> pieces;
  STD_TORCH_CHECK(static_cast<int64_t>(given.size()) == planned.head->given, "a chain is given other tensors than was planned");
  for (size_t i = 0; i < given.size(); i++) pieces.push_back(piece_of(given[i], planned.given[i] != 0, copies));
  const std::vector<Span> rows;  // each is a sequence
  const Given now(planned, like.size(0), like.size(1), pieces, counts, rows, nullptr, &given);
  for (int64_t i = 0; i < planned.head->steps; i++) run(planned.steps[i], now);
  return now.returned();
}

}  // namespace

// Of each result that is returned whether it is not wanted (no memory is given for it). No other step may read one.
std::vector<bool> unwanted(const Plan& plan, float* const* results) {
  std::vector<bool> found(plan.head->returned);
  for (int64_t i = 0; i < plan.head->returned; i++) found[i] = results[i] == nullptr;
  const auto check = [&](const Activations& x) {
    const bool missing = x.is_result() && x.place() < plan.head->returned && found[x.place()];
    STD_TORCH_CHECK(!missing, "a chain is given no memory for results that its steps read");
  };
  for (int64_t i = 0; i < plan.head->steps; i++) {
    const Step& step = plan.steps[i];
    if (step.lookup.has_value()) continue;
    if (step.join.has_value()) {
      for (int64_t j = 0; j < step.join->count; j++) check(plan.parts[step.join->first + j].x);
      continue;
    }
    check(step.x);
    check(step.y);
  }
  return found;
}

// The same of the tokens of some sequences, one after the other, from and to plain memory (`chain_calls.py`). sequences: of each the
// row of keys and values, its tokens and the columns that it reads. given: of each an address, a type as `Piece` has them, and its
// width, 0 of tokens and positions; all in one piece. results: addresses of float32, of as many as are returned; nullptr for one
// that is not wanted, whose step is left out.
// -> nullptr, or what is wrong with it
extern "C" const char* outrider_chain(const char* plan, int64_t size, int64_t of, const int64_t* sequences, int64_t count,
                                      const int64_t* given, int64_t numbers, const int64_t* counts, int64_t returned,
                                      float* const* results) {
  static thread_local std::string wrong;
  try {
    const Plan planned(plan, size);
    std::vector<Span> spans;
    int64_t tokens = 0;
    for (const int64_t* one = sequences; one < sequences + 3 * of; tokens += one[1], one += 3) {
      STD_TORCH_CHECK(one[1] > 0, "a sequence has tokens");
      spans.push_back({one[0], 0, tokens, one[1], one[2]});
    }
    STD_TORCH_CHECK(tokens > 0 && returned == planned.head->returned, "a chain returns other results than are asked for");
    std::vector<Piece> pieces;
    for (const int64_t* one = given; one < given + 3 * count; one += 3) {
      const int64_t width = one[2], stride = std::max<int64_t>(width, 1);
      STD_TORCH_CHECK(one[0] != 0, "a chain is given a tensor without memory");
      pieces.push_back({reinterpret_cast<const void*>(one[0]), static_cast<Piece::Type>(one[1]), 1, tokens, width, tokens * stride, stride});
    }
    const std::vector<bool> left_out = unwanted(planned, results);
    const Given now(planned, 1, tokens, pieces, std::vector<int64_t>(counts, counts + numbers), spans, results);
    for (int64_t i = 0; i < planned.head->steps; i++) {
      const int64_t place = planned.steps[i].out.place();
      if (place >= returned || !left_out[place]) run(planned.steps[i], now);
    }
    return nullptr;
  } catch (const std::exception& error) {
    wrong = error.what();
    return wrong.c_str();
  }
}

// -> how many results are returned, -1 if this is no plan. found, if it has room for so many: how wide each is, then whether each
// is of the last token alone.
extern "C" int64_t outrider_chain_results(const char* plan, int64_t size, int64_t room, int64_t* found) {
  try {
    const Plan planned(plan, size);
    const int64_t count = planned.head->returned;
    if (room >= count) {
      std::copy(planned.widths, planned.widths + count, found);
      std::copy(planned.single, planned.single + count, found + count);
    }
    return count;
  } catch (const std::exception&) {
    return -1;
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(OUTRIDER_NAMESPACE, library) {
  // It writes keys and values by their addresses, which nothing but this annotation tells.
  library.def("chain(Tensor like, Tensor(a!) plan, Tensor[] given, int[] counts) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(OUTRIDER_NAMESPACE, CPU, library) {
  library.impl("chain", TORCH_BOX(&chain));
}
