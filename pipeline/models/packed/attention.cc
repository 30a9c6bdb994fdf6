// Attention of new tokens over the key-value cache, read and written where it lies: an XLA custom call for CPUs.
//
// q is [batch, tokens, heads, head_dim], k and v are the same with fewer heads, keys and values are [slots, kv_heads,
// positions, head_dim], all float32. A row is one token. First every row's k, rotated, and v enter the cache at its
// place; then it attends over the positions 0 to its own of its slot, of these the last `window` where there is one.
// Cosines and sines are [batch, tokens, 1, turning]: the pairs (i, i + turning) of a head turn, the rest passes.
// XLA's own attention copies the first 256, 512 or more positions of every slot before it reads them, whatever is in
// them.
//
// Each sum goes over the positions in their order: neither the other rows nor the number of threads changes a bit.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "helpers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;
constexpr int64_t kRowsOfShort = 8;  // as those of a product
constexpr int64_t kNumbersOfThread = 1 << 15;  // read from the cache; below that another thread is not worth a call

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Half __attribute__((vector_size(2 * kLanes)));
typedef float Quarter __attribute__((vector_size(kLanes)));
typedef int32_t Whole __attribute__((vector_size(4 * kLanes)));

#define INLINE __attribute__((always_inline)) inline

INLINE void Load(Vector& to, const float* from) { std::memcpy(&to, from, sizeof to); }

INLINE float Sum(const Vector& v) {
  Half low, high;
  std::memcpy(&low, &v, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
  low += high;
  Quarter a, b;
  std::memcpy(&a, &low, sizeof a);
  std::memcpy(&b, reinterpret_cast<const char*>(&low) + sizeof a, sizeof b);
  a += b;
  return (a[0] + a[2]) + (a[1] + a[3]);
}

// e to the x, for x <= 0, to 2 units in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and the polynomial of
// Cephes' expf for r.
INLINE void Exponential(Vector& x) {
  x = x < -87.0f ? Vector{} - 87.0f : x;
  const Vector shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: what is behind the point is rounded off
  const Vector n = shifted - 12582912.0f;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Whole bits = (__builtin_convertvector(n, Whole) + 127) << 23;
  Vector power;
  std::memcpy(&power, &bits, sizeof power);
  x = p * power;
}

// R query heads of one key-value head over the positions `from` to `to`. `scores` has room for R * (to - from + 16).
template <int R>
INLINE void Heads(const float* q, const float* keys, const float* values, float* mixed, float* scores, int64_t from,
                  int64_t to, int64_t head_dim, float scale) {
  const int64_t num = to - from, room = (num + kLanes - 1) / kLanes * kLanes;
  keys += from * head_dim;
  values += from * head_dim;
  float most[R], total[R];
  for (int r = 0; r < R; ++r) most[r] = -1e30f;
  for (int64_t l = 0; l < num; ++l) {
    Vector sum[R] = {};
    for (int64_t h = 0; h < head_dim; h += kLanes) {
      Vector key;
      Load(key, keys + l * head_dim + h);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Vector query;
        Load(query, q + r * head_dim + h);
        sum[r] += query * key;
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float score = Sum(sum[r]) * scale;
      scores[r * room + l] = score;
      most[r] = std::max(most[r], score);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* row = scores + r * room;
    std::fill(row + num, row + room, -1e30f);
    Vector sum = {};
    for (int64_t l = 0; l < room; l += kLanes) {
      Vector weight;
      Load(weight, row + l);
      weight -= most[r];
      Exponential(weight);
      std::memcpy(row + l, &weight, sizeof weight);
    }
    std::fill(row + num, row + room, 0.0f);
    for (int64_t l = 0; l < room; l += kLanes) {
      Vector weight;
      Load(weight, row + l);
      sum += weight;
    }
    total[r] = Sum(sum);
  }
  for (int64_t h = 0; h < head_dim; h += kLanes) {
    Vector sum[R] = {};
    for (int64_t l = 0; l < num; ++l) {
      Vector value;
      Load(value, values + l * head_dim + h);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] += value * scores[r * room + l];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      sum[r] /= total[r];
      std::memcpy(mixed + r * head_dim + h, &sum[r], sizeof sum[r]);
    }
  }
}

INLINE void Group(const float* q, const float* keys, const float* values, float* mixed, float* scores, int64_t from,
                  int64_t to, int64_t head_dim, int64_t num_heads, float scale) {
  for (; num_heads >= 4; num_heads -= 4, q += 4 * head_dim, mixed += 4 * head_dim) {
    Heads<4>(q, keys, values, mixed, scores, from, to, head_dim, scale);
  }
  switch (num_heads) {
    case 1: return Heads<1>(q, keys, values, mixed, scores, from, to, head_dim, scale);
    case 2: return Heads<2>(q, keys, values, mixed, scores, from, to, head_dim, scale);
    case 3: return Heads<3>(q, keys, values, mixed, scores, from, to, head_dim, scale);
  }
}

__attribute__((target("avx512f,prefer-vector-width=512"))) void Group512(
    const float* q, const float* keys, const float* values, float* mixed, float* scores, int64_t from, int64_t to,
    int64_t head_dim, int64_t num_heads, float scale) {
  Group(q, keys, values, mixed, scores, from, to, head_dim, num_heads, scale);
}

__attribute__((target("avx2,fma"))) void Group2(const float* q, const float* keys, const float* values, float* mixed,
                                                float* scores, int64_t from, int64_t to, int64_t head_dim,
                                                int64_t num_heads, float scale) {
  Group(q, keys, values, mixed, scores, from, to, head_dim, num_heads, scale);
}

// x, turned, to `to`.
inline void Rotate(const float* x, float* to, const float* cosines, const float* sines, int64_t turning,
                   int64_t head_dim) {
  for (int64_t i = 0; i < turning; ++i) {
    to[i] = x[i] * cosines[i] - x[turning + i] * sines[i];
    to[turning + i] = x[turning + i] * cosines[i] + x[i] * sines[i];
  }
  std::copy(x + 2 * turning, x + head_dim, to + 2 * turning);
}

// One part is one key-value head of one row.
struct Attention {
  const float *q, *k, *v, *cosines, *sines;
  float *keys, *values;
  const int32_t *slots, *positions;
  float* mixed;
  int64_t rows, num_heads, num_slots, num_groups, num_positions, head_dim, turning, window;
  float scale;
  bool is_wide;

  int64_t Parts() const { return rows * num_groups; }

  // Before any part, since rows of one sequence see each other.
  void Write() const {
    for (int64_t row = 0; row < rows; ++row) {
      if (positions[row] < 0 || positions[row] >= num_positions || slots[row] < 0 || slots[row] >= num_slots) continue;
      for (int64_t group = 0; group < num_groups; ++group) {
        const int64_t from = (row * num_groups + group) * head_dim;
        const int64_t to = ((slots[row] * num_groups + group) * num_positions + positions[row]) * head_dim;
        Rotate(k + from, keys + to, cosines + row * turning, sines + row * turning, turning, head_dim);
        std::copy(v + from, v + from + head_dim, values + to);
      }
    }
  }

  void Part(int64_t number) const {
    const int64_t row = number % rows, group = number / rows, per_group = num_heads / num_groups;
    const int64_t place = (row * num_heads + group * per_group) * head_dim;
    const int64_t to = static_cast<int64_t>(positions[row]) + 1;
    if (to < 1 || to > num_positions) {  // a row that fills up the batch
      std::fill(mixed + place, mixed + place + per_group * head_dim, 0.0f);
      return;
    }
    const int64_t from = window > 0 ? std::max<int64_t>(to - window, 0) : 0;
    const int64_t slot = std::clamp<int64_t>(slots[row], 0, num_slots - 1);
    const int64_t of_group = (slot * num_groups + group) * num_positions * head_dim;
    thread_local std::vector<float> scores, turned;
    scores.resize(4 * (to - from + kLanes));
    turned.resize(per_group * head_dim);
    for (int64_t head = 0; head < per_group; ++head) {
      Rotate(q + place + head * head_dim, turned.data() + head * head_dim, cosines + row * turning,
             sines + row * turning, turning, head_dim);
    }
    (is_wide ? Group512 : Group2)(turned.data(), keys + of_group, values + of_group, mixed + place, scores.data(), from,
                                  to, head_dim, per_group, scale);
  }
};

using In = ffi::Buffer<ffi::F32>;
using Numbers = ffi::Buffer<ffi::S32>;
using Out = ffi::ResultBuffer<ffi::F32>;

template <bool is_wide>
ffi::Error Run(ffi::ThreadPool pool, In q, In k, In v, In keys, In values, Numbers slots, Numbers positions, In cosines,
               In sines, Out mixed, Out new_keys, Out new_values, float scale, int64_t window) {
  const auto of_q = q.dimensions(), of_k = k.dimensions(), of_v = v.dimensions(), of_cache = keys.dimensions();
  const auto of_values = values.dimensions(), of_cosines = cosines.dimensions(), of_sines = sines.dimensions();
  const auto alike = [](const auto& a, const auto& b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); };
  if (of_q.size() != 4 || of_k.size() != 4 || !alike(of_k, of_v) || of_cache.size() != 4 ||
      !alike(of_cache, of_values) || of_q[3] != of_cache[3] || of_q[3] % kLanes != 0 || of_cache[1] == 0 ||
      of_q[2] % of_cache[1] != 0 || of_k[0] != of_q[0] || of_k[1] != of_q[1] || of_k[2] != of_cache[1] ||
      of_k[3] != of_q[3] || of_cosines.size() != 4 || !alike(of_cosines, of_sines) || of_cosines[0] != of_q[0] ||
      of_cosines[1] != of_q[1] ||
      of_cosines[2] != 1 || 2 * of_cosines[3] > of_q[3] ||
      static_cast<int64_t>(slots.element_count()) != of_q[0] * of_q[1] ||
      positions.element_count() != slots.element_count() || mixed->element_count() != q.element_count()) {
    return ffi::Error::InvalidArgument(
        "q, k, v [batch, tokens, heads, head_dim] do not fit keys and values [slots, kv_heads, positions, head_dim]");
  }
  if (new_keys->typed_data() != keys.typed_data() || new_values->typed_data() != values.typed_data()) {
    return ffi::Error::Internal("the cache was copied before it is written");
  }
  const Attention attention{q.typed_data(),
                            k.typed_data(),
                            v.typed_data(),
                            cosines.typed_data(),
                            sines.typed_data(),
                            new_keys->typed_data(),
                            new_values->typed_data(),
                            slots.typed_data(),
                            positions.typed_data(),
                            mixed->typed_data(),
                            of_q[0] * of_q[1],
                            of_q[2],
                            of_cache[0],
                            of_cache[1],
                            of_cache[2],
                            of_q[3],
                            of_cosines[3],
                            window,
                            scale,
                            is_wide};
  attention.Write();
  int64_t seen = 0;
  for (int64_t row = 0; row < attention.rows; ++row) {
    const int64_t position = attention.positions[row];
    if (position >= 0 && position < of_cache[2]) seen += position + 1;
  }
  const int64_t numbers = 2 * seen * of_cache[1] * of_cache[3];
  const int64_t threads = std::min<int64_t>(pool.num_threads(), numbers / kNumbersOfThread);
  InParts(pool, attention, threads, attention.rows <= kRowsOfShort);
  return ffi::Error::Success();
}

}  // namespace

#define BOUND                       \
  ffi::Ffi::Bind()                  \
      .Ctx<ffi::ThreadPool>()       \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::S32>>() \
      .Arg<ffi::Buffer<ffi::S32>>() \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Ret<ffi::Buffer<ffi::F32>>() \
      .Ret<ffi::Buffer<ffi::F32>>() \
      .Ret<ffi::Buffer<ffi::F32>>() \
      .Attr<float>("scale")         \
      .Attr<int64_t>("window")

XLA_FFI_DEFINE_HANDLER_SYMBOL(CachedAttention512, Run<true>, BOUND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(CachedAttention2, Run<false>, BOUND);
