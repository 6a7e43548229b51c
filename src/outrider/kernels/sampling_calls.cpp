// Whole steps in one call: a drafted token, and what a round keeps. From and to plain memory, for `ctypes`.
//
// Beside a model whose weights have just swept the caches, a call of a torch operation costs more than the work it does here.

#include <cstdint>
#include <vector>

#include "laws.h"
#include "race.h"

namespace {

thread_local std::vector<float> kept_law, kept_weights;
thread_local std::vector<double> kept_sums;
thread_local std::vector<Other> kept_others;

float* scratch(int64_t count) {
  if (static_cast<int64_t>(kept_law.size()) < count) kept_law.resize(count);
  return kept_law.data();
}

// call(row) with the numbers at `from`, in bfloat16 or float32.
template <class F>
void with_row(const void* from, int64_t at, int64_t half, const F& call) {
  if (half) {
    call(Bfloat16{static_cast<const uint16_t*>(from) + at});
  } else {
    call(Float{static_cast<const float*>(from) + at});
  }
}

}  // namespace

extern "C" {

// A token a row from a draft's logits, [rows, count], rows `stride` apart; half: in bfloat16, else float32.
//
// temperature 0: the best one. Else its law is drawn from by uniforms [rows], and kept at laws[row] over `width` tokens: those of
// `ids` [count], or the first ones, and 0 for all others. By keys and positions [rows] in place of uniforms: who wins the race.
//
// -> tokens [rows], -1 where there is no law. shares [rows], unless null: the token's probability at temperature 1. others: of
// what else is more likely than `least`, the likeliest first, `most` of them at most: tokens and probabilities [rows, most],
// how many there are [rows]. Returns 0, or 1 if one of the ids is beyond the width; nothing is written then.
int64_t outrider_step(const void* logits, int64_t half, int64_t rows, int64_t stride, int64_t count, double temperature,
                      int64_t top_k, double top_p, double min_p, const double* uniforms, const int64_t* keys,
                      const int64_t* positions, const int64_t* ids, float* const* laws, int64_t width, int64_t* tokens, double* shares, int64_t most,
                      double least, int64_t* others, double* other_shares, int64_t* counts) {
  uint64_t most_named = 0;
  for (int64_t k = 0; ids && k < count; k++) most_named = std::max(most_named, static_cast<uint64_t>(ids[k]));
  if (ids && width > 0 && most_named >= static_cast<uint64_t>(width)) return 1;
  const Settings how{static_cast<float>(temperature), top_k, top_p, static_cast<float>(min_p)};
  const auto named = [=](int64_t column) { return ids ? ids[column] : column; };
  for_rows(rows, count, [=](int64_t m) {
    with_row(logits, m * stride, half, [=](const auto& row) {
      int64_t column;
      if (temperature == 0.0) {
        column = best_of(row, count);
      } else {
        float* wide = laws[m];
        float* law = ids ? scratch(count) : wide;
        law_of(row, count, how, law, kept_weights);
        std::fill(ids ? wide : wide + count, wide + width, 0.0f);
        for (int64_t k = 0; ids && k < count; k++) wide[ids[k]] = law[k];
        if (keys) {
          const int64_t won = race_won(wide, width, key_of(keys[m]), static_cast<uint32_t>(positions[m]));
          column = ids && won >= 0 ? std::lower_bound(ids, ids + count, won) - ids : won;
        } else {
          column = drawn_from(Float{law}, count, uniforms[m], kept_sums);
        }
      }
      tokens[m] = column < 0 ? -1 : named(column);
      if (most > 0) counts[m] = 0;
      if (!shares || column < 0) return;
      double total;
      shares[m] = share_of(row, count, column, most, least, kept_others, &total);
      if (most == 0) return;
      counts[m] = kept_others.size();
      for (size_t i = 0; i < kept_others.size(); i++) {
        others[m * most + i] = named(kept_others[i].token);
        other_shares[m * most + i] = kept_others[i].weight / total;
      }
    });
  });
  return 0;
}

// What is kept of a draft. logits of the target: [rows, places, count], of which a row's own begin at place first[row].
// tokens [rows, width] were drafted, lengths [rows] of them, each drawn by drafts [rows, width, count] (null: certain).
// uniforms [rows, width + 1]: one a drafted token, then one for the token after them. Or keys and positions [rows], of the first
// of these: what is drafted is kept as far as it wins the races. The other arguments: as above.
//
// -> found [rows, 2]: how many are accepted, and the token after them, -1 where there is no law. Returns 0, or 1 if a token or
// a place does not exist; nothing is read then.
int64_t outrider_decide(const void* logits, int64_t half, int64_t rows, int64_t places, int64_t row_stride, int64_t stride,
                        int64_t count, double temperature, int64_t top_k, double top_p, double min_p, const int64_t* first,
                        const int64_t* tokens, int64_t width, const int64_t* lengths, const double* uniforms,
                        const int64_t* keys, const int64_t* positions, const float* drafts, int64_t drafts_row_stride,
                        int64_t drafts_stride, int64_t* found) {
  for (int64_t m = 0; m < rows; m++) {
    if (first[m] < 0 || lengths[m] < 0 || lengths[m] > width || first[m] + lengths[m] >= places) return 1;
    for (int64_t n = 0; n < lengths[m]; n++) {
      if (tokens[m * width + n] < 0 || tokens[m * width + n] >= count) return 1;
    }
  }
  const Settings how{static_cast<float>(temperature), top_k, top_p, static_cast<float>(min_p)};
  for_rows(rows, (width + 1) * count, [=](int64_t m) {
    const int64_t from = m * row_stride + first[m] * stride, offered = lengths[m];
    const int64_t* own = tokens + m * width;
    // Kept as far as it is what the target says at each place, which follows.
    const auto agreed = [=](const auto& said_at) {
      int64_t n = 0, said = -1;
      for (;; n++) {
        said = said_at(n);
        if (n == offered || said != own[n]) break;
      }
      found[2 * m] = n;
      found[2 * m + 1] = said;
    };
    if (temperature == 0.0) {
      agreed([=](int64_t n) {
        int64_t best;
        with_row(logits, from + n * stride, half, [&](const auto& row) { best = best_of(row, count); });
        return best;
      });
      return;
    }
    float* law = scratch(count);
    const auto law_at = [=](int64_t n) {
      with_row(logits, from + n * stride, half, [=](const auto& row) { law_of(row, count, how, law, kept_weights); });
      return law;
    };
    if (keys) {
      agreed([=](int64_t n) {
        return race_won(law_at(n), count, key_of(keys[m]), static_cast<uint32_t>(positions[m] + n));
      });
      return;
    }
    const double* points = uniforms + m * (width + 1);
    const Decided one = decide(law_at, drafts ? drafts + m * drafts_row_stride : nullptr, drafts_stride, count, own, offered,
                               points, points[offered], kept_sums);
    found[2 * m] = one.accepted;
    found[2 * m + 1] = one.next;
  });
  return 0;
}
}
