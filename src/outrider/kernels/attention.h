// Attention of new tokens with all that keeps them, over plain memory: what `attention.cpp` computes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "rows.h"

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

// Keys or values [B, groups, C, size] in a cache, the last dimension in one piece.
struct Kept {
  float* at;
  int64_t batch, group, column;

  explicit Kept(const Tensor& x)
      : at(static_cast<float*>(x.data_ptr())), batch(x.stride(0)), group(x.stride(1)), column(x.stride(2)) {}
  float* of(int64_t b, int64_t g, int64_t c) const { return at + b * batch + g * group + c * column; }
};

// It reads and writes what its tensors hold, which have to outlive it.
struct NewAttention {
  Kept keys, values;
  Turn query, key;
  Angles cosines, sines;
  const int64_t* at;  // columns, of a row and a token
  int64_t at_row, at_token;
  const bool* seen;  // or none for all
  int64_t seen_row, seen_token;
  int64_t batch, tokens, groups, heads, size, columns;
  float scale;

  int64_t given() const { return (heads + 2 * groups) * size; }  // numbers of a token
};

// What is seen, as attention wants it: its last dimension in one piece.
inline std::optional<Tensor> mask_in_one_piece(const std::optional<Tensor>& mask) {
  return mask.has_value() && mask->dim() > 0 ? std::optional<Tensor>(in_one_piece(*mask)) : mask;
}

// cos and sin [B or 1, 1, N, up to size]; keys and values [B, groups, C, size] in float32, of which the first `columns` are
// read; at int64 [B, N]: in which columns the tokens are kept; seen bool [B or 1, 1, N, columns] or none.
NewAttention new_attention(int64_t heads, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm, double eps,
                           double more, const Tensor& cos, const Tensor& sin, const Tensor& keys, const Tensor& values,
                           const Tensor& at, const std::optional<Tensor>& seen, int64_t columns, double scale);

// packed [B, N, (heads + 2 * groups) * size]: queries, keys and values of each token -> out [B, N, heads * size]
void attend_new(const NewAttention& pass, const float* packed, float* out);

}  // namespace OUTRIDER_NAMESPACE
