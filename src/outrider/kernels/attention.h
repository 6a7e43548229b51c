// Attention of new tokens with all that keeps them, over plain memory: what `attention.cpp` computes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "rows.h"
#include "tokens.h"

namespace OUTRIDER_NAMESPACE {

// What becomes of a query or a key, [size]: it is normalised, if there is a norm, and its first `turned` numbers are rotated.
struct Turn {
  std::optional<Norm> norm;
  int64_t size, turned;

  void operator()(const float* row, const float* cosines, const float* sines, float* room, float* out) const {
    if (norm.has_value()) {
      norm->of_row(row, size, room);
      row = room;
    }
    rotate_row(row, cosines, sines, turned, out);
    std::copy(row + turned, row + size, out + turned);
  }
};

// Keys or values [B, groups, C, size], in float32 or in float16 (half), the last dimension in one piece.
struct Kept {
  void* at;
  bool half;
  int64_t batch, group, column;

  explicit Kept(const Tensor& x)
      : at(x.data_ptr()), half(is_half(x)), batch(x.stride(0)), group(x.stride(1)), column(x.stride(2)) {}

  // Cell: `float` or `Half`, as `half` says.
  template <class Cell>
  Cell* of(int64_t b, int64_t g, int64_t c) const {
    return static_cast<Cell*>(at) + b * batch + g * group + c * column;
  }
  void put(const float* row, int64_t size, int64_t b, int64_t g, int64_t c) const {
    if (half) {
      to_halves(row, size, of<Half>(b, g, c));
    } else {
      std::copy(row, row + size, of<float>(b, g, c));
    }
  }
};

// Attention to the keys and values of a layer. It reads and writes what its tensors hold, which have to outlive it.
struct KeptAttention {
  Kept keys, values;
  std::optional<Norm> of_queries, of_keys;
  int64_t batch, groups, heads, size, capacity;
  float scale;

  int64_t given() const { return (heads + 2 * groups) * size; }  // numbers of a token
};

// Tokens of one sequence: `count` of a pass's, from [batch, first] on. They see up to `columns` columns of what row `kept` keeps.
struct Span {
  int64_t kept, batch, first, count, columns;
};

// What all layers are told of the tokens of a pass; the same holds for its tensors.
struct NewTokens {
  Numbers at;  // their columns
  int64_t last;  // the largest of these
  int64_t columns;  // that are read of a sequence, the most
  std::vector<Span> spans{};  // all of the tokens, one after the other
  bool by_rows = true;        // each row of the pass is the sequence that is kept there
  Angles cosines{}, sines{};
  int64_t turned = 0;
  const bool* seen = nullptr;  // or none for all
  int64_t seen_row = 0, seen_token = 0;
};

// What is seen, as attention wants it: its last dimension in one piece.
inline std::optional<Tensor> mask_in_one_piece(const std::optional<Tensor>& mask) {
  return mask.has_value() && mask->dim() > 0 ? std::optional<Tensor>(in_one_piece(*mask)) : mask;
}

// keys and values [B, groups, C, size], both in float32 or in float16.
KeptAttention kept_attention(int64_t heads, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm, double eps,
                             double more, const Tensor& keys, const Tensor& values, double scale);

// at: in which columns the tokens are kept; columns: how many are read. They are not turned, and see all of these. Each row of
// the pass is a sequence's.
NewTokens new_tokens(const Numbers& at, int64_t columns);

// The same of a pass of one row, whose tokens are those of several sequences, one after the other.
NewTokens new_tokens_of(const Numbers& at, int64_t columns, const std::vector<Span>& spans);

// cos and sin [B or 1, 1, N, up to size]
void turn_by(NewTokens& tokens, const Tensor& cos, const Tensor& sin);

// seen bool [B or 1, 1, N, columns]
void see(NewTokens& tokens, const Tensor& seen);

// Throws unless these tokens can be kept there.
void check_fit(const KeptAttention& kept, const NewTokens& tokens);

// packed [B, N, (heads + 2 * groups) * size]: queries, keys and values of each token -> out [B, N, heads * size]
void attend_new(const KeptAttention& kept, const NewTokens& tokens, const float* packed, float* out);

}  // namespace OUTRIDER_NAMESPACE
