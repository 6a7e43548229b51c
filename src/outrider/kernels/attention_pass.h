// What attention of a chunk of columns is made of, whatever the processor has.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "attention.h"

namespace OUTRIDER_NAMESPACE {
namespace {

constexpr int64_t CHUNK = 256;  // columns
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// [batch, heads, tokens, size], the last dimension in one piece.
struct Part {
  const float* at;
  int64_t batch, head, token;

  explicit Part(const Tensor& x)
      : at(static_cast<const float*>(x.data_ptr())), batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
  Part(const float* x, int64_t heads, int64_t tokens, int64_t size)  // in one piece
      : at(x), batch(heads * tokens * size), head(tokens * size), token(size) {}
  const float* of(int64_t b, int64_t h, int64_t n) const { return at + b * batch + h * head + n * token; }
};

// What all chunks need. seen: of a row and a column, or none for all.
struct Pass {
  Part queries;
  Kept keys, values;
  const bool* seen;
  int64_t seen_batch, seen_token;
  int64_t groups, times, tokens, columns, size;
  float scale;

  int64_t rows() const { return times * tokens; }
};

// A chunk's largest score of each row, the sum of weights, and the weighted values, for a row after the other.
struct Found {
  float *largest, *weight, *values;
};

}  // namespace
}  // namespace OUTRIDER_NAMESPACE
