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

// [heads, tokens, size], the last dimension in one piece.
struct Part {
  const float* at;
  int64_t head, token;

  Part(const Tensor& x, int64_t b)
      : at(static_cast<const float*>(x.data_ptr()) + b * x.stride(0)), head(x.stride(1)), token(x.stride(2)) {}
  Part(const float* x, int64_t tokens, int64_t size) : at(x), head(tokens * size), token(size) {}  // in one piece
  const float* of(int64_t h, int64_t n) const { return at + h * head + n * token; }
};

// What all chunks of a sequence need. row: where its keys are. seen: of a token and a column, or none for all. Results go to
// [tokens, heads, size].
struct Pass {
  Part queries;
  Kept keys, values;
  int64_t row;
  const bool* seen;
  int64_t seen_token;
  int64_t groups, times, tokens, columns, size;
  float scale;
  float* to;

  int64_t rows() const { return times * tokens; }
  int64_t chunks() const { return (columns + CHUNK - 1) / CHUNK; }
  int64_t tasks() const { return groups * chunks(); }
};

// A chunk's largest score of each row, the sum of weights, and the weighted values, for a row after the other.
struct Found {
  float *largest, *weight, *values;
};

}  // namespace
}  // namespace OUTRIDER_NAMESPACE
