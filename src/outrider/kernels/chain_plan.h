// What a chain of operations is, as bytes: see `chain.cpp`.

#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "attention.h"
#include "linear.h"
#include "tokens.h"

namespace OUTRIDER_NAMESPACE {

// The steps of a chain, as numbers: a kind, then what it is given. `models/kernels/fusing/chains.py` writes them.
enum Kind : int64_t {
  LAYER,      // result, x, norm, gated, added, weight, scales, bias, outputs; eps, more
  ATTENTION,  // result, packed, heads, query norm, key norm, keys, values, cos, sin, at, seen, count; eps, more, scale
  NORM,       // result, x, weight; eps, more
  ADD,        // result, x, y
  EMBED,      // result, tokens, table, scales
  JOIN,       // result, how many, their width with zeros behind them, then of each x, weight; eps, more
  // The same attention, of tokens that are turned by where they stand, and see what is before them; `apart`: not at their columns.
  PLACED,  // result, packed, heads, query norm, key norm, keys, values, frequencies, positions, limit, apart, window, at, count;
           // eps, more, scale, times
  LAST,  // result, x: of each row's last token alone; what is computed of these is, too
};
// Activations, tokens, positions, cosines, sines, columns and masks are given to `chain`, and named from 0 on; other tensors are
// given to `chain_plan`, and named from 0 on. From -2 down: a result, the first one -2.
constexpr int64_t NONE = -1;

// What steps hand to each other, [batch, tokens, width] in float32; [batch, 1, width] if it is `single`.
struct Activations {
  int64_t which = NONE, width = 0;
  bool single = false;

  bool is_result() const { return which < NONE; }
  int64_t place() const { return -2 - which; }
};

// How angles, and what is seen, follow from positions.
struct Places {
  const float* frequencies;
  int64_t turned;           // twice as many as frequencies
  int64_t positions, limit;  // which are given, and the largest of them
  int64_t window;
  bool apart;
  float times;

  bool operator==(const Places& other) const {
    return frequencies == other.frequencies && turned == other.turned && positions == other.positions && limit == other.limit &&
           window == other.window && apart == other.apart && times == other.times;
  }
};

// What attention is told of the tokens of a pass: which of the tensors and counts that are given.
struct Told {
  int64_t cos, sin, at, seen, count;
  std::optional<Places> places;  // in place of cos, sin and seen

  bool operator==(const Told& other) const {
    return cos == other.cos && sin == other.sin && at == other.at && seen == other.seen && count == other.count &&
           places == other.places;
  }
};

// Rows of a table, for tokens that are given.
struct Lookup {
  int64_t tokens;
  Table table;
};

// So many parts of the plan's, from `first` on.
struct Join {
  int64_t first, count;
};

// One of them.
struct Joined {
  Activations x;
  Norm norm;
};

// One of the kinds: a layer, attention, a norm, a lookup, a join, the last tokens, or else a sum.
struct Step {
  Activations x, y, out;  // y: what is added, or nothing
  bool last = false;
  std::optional<Layer> layer;
  std::optional<KeptAttention> attention;
  int64_t told = 0;  // which of the plan's
  std::optional<Norm> norm;
  std::optional<Lookup> lookup;
  std::optional<Join> join;
};

// A plan is this, then its steps, what attention is told, parts that are joined, how wide each place's results are, of each that
// is returned whether it is `single`, and of each tensor that is given how wide it is, 0 if it is no activation.
struct Head {
  int64_t mark, steps, told, parts, places, returned, given;
};
constexpr int64_t MARK = 0x6f75747269646572;
static_assert(std::is_trivially_copyable_v<Step> && std::is_trivially_copyable_v<Told> && std::is_trivially_copyable_v<Joined> &&
              std::is_trivially_copyable_v<Head>);
static_assert(sizeof(Step) % alignof(int64_t) == 0 && sizeof(Told) % alignof(int64_t) == 0 && sizeof(Joined) % alignof(int64_t) == 0);
static_assert(alignof(Step) == alignof(int64_t) && alignof(Told) == alignof(int64_t) && alignof(Joined) == alignof(int64_t));

struct Plan {
  const Head* head;
  const Step* steps;
  const Told* told;
  const Joined* parts;
  const int64_t *widths, *single, *given;

  static int64_t bytes_of(const Head& head) {
    return sizeof(Head) + head.steps * sizeof(Step) + head.told * sizeof(Told) + head.parts * sizeof(Joined) +
           (head.places + head.returned + head.given) * sizeof(int64_t);
  }

  explicit Plan(const Tensor& plan) : Plan(bytes_at(plan), plan.numel()) {}

  Plan(const char* at, int64_t size) {
    STD_TORCH_CHECK(size >= static_cast<int64_t>(sizeof(Head)), "a plan is of bytes");
    head = reinterpret_cast<const Head*>(at);
    STD_TORCH_CHECK(head->mark == MARK && size == bytes_of(*head), "this is not a plan");
    steps = reinterpret_cast<const Step*>(at += sizeof(Head));
    told = reinterpret_cast<const Told*>(at += head->steps * sizeof(Step));
    parts = reinterpret_cast<const Joined*>(at += head->told * sizeof(Told));
    widths = reinterpret_cast<const int64_t*>(at += head->parts * sizeof(Joined));
    single = widths + head->places;
    given = single + head->returned;
  }

 private:
  static const char* bytes_at(const Tensor& plan) {
    STD_TORCH_CHECK(is(plan, torch::headeronly::ScalarType::Byte), "a plan is of bytes");
    return static_cast<const char*>(plan.data_ptr());
  }
};

}  // namespace OUTRIDER_NAMESPACE
