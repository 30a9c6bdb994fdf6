// y = x @ w in float32, where w was laid out for it: an XLA custom call for CPUs with AVX-512 or AVX2.
//
// x is [rows, in] and y [rows, out], row after row. w is [blocks, in, 48]: block b holds the columns from 48 b on, so
// that one tile of y reads one stretch of memory from its beginning to its end, whatever the number of rows. XLA's own
// product copies the weight into such an order at every call. Only the first `count` rows are computed, and the others
// become zero: rows that fill up a compiled shape cost next to nothing.
//
// Each number of y is one sum over `in`, in its order, in one register: neither the number of rows nor the number of
// threads changes a bit of it.

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "helpers.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kColumns = 48;
constexpr int64_t kRowsAtOnce = 96;  // of x, which stay in the cache while blocks of w go by
constexpr int64_t kRowsOfWide = 8, kRowsOfNarrow = 6;  // of y, in registers

struct Shape {
  int64_t rows, in, out, blocks;
};

#define AVX512 __attribute__((target("avx512f"), always_inline)) inline
#define AVX2 __attribute__((target("avx2,fma"), always_inline)) inline

// R rows and all 48 columns of a block: 3 R of the 32 registers are sums. Where it `fetches`, that is one line of `later`
// a step: memory that is read afterwards.
template <int R, bool fetches>
AVX512 void Tile512(const float* const* x, const float* w, float* const* y, const Shape& s, int64_t columns,
                    const float* later) {
  __m512 sum[R][3];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = sum[r][2] = _mm512_setzero_ps();
  for (int64_t k = 0; k < s.in; ++k, w += kColumns) {
    const __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + 16), w2 = _mm512_loadu_ps(w + 32);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns + 16), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns + 32), _MM_HINT_T0);
    if constexpr (fetches) {
      _mm_prefetch(reinterpret_cast<const char*>(later), _MM_HINT_T0);
      later += 16;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 a = _mm512_set1_ps(x[r][k]);
      sum[r][0] = _mm512_fmadd_ps(a, w0, sum[r][0]);
      sum[r][1] = _mm512_fmadd_ps(a, w1, sum[r][1]);
      sum[r][2] = _mm512_fmadd_ps(a, w2, sum[r][2]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 3
    for (int c = 0; c < 3; ++c) {
      const int64_t left = columns - 16 * c;
      float* to = y[r] + 16 * c;
      if (left >= 16) {
        _mm512_storeu_ps(to, sum[r][c]);
      } else if (left > 0) {
        _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << left) - 1), sum[r][c]);
      }
    }
  }
}

// R rows and 16 columns from `first` on: 2 R of the 16 registers are sums.
template <int R>
AVX2 void Tile2(const float* const* x, const float* w, float* const* y, const Shape& s, int64_t columns, int first) {
  __m256 sum[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
  w += first;
  for (int64_t k = 0; k < s.in; ++k, w += kColumns) {
    const __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns), _MM_HINT_T0);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 a = _mm256_set1_ps(x[r][k]);
      sum[r][0] = _mm256_fmadd_ps(a, w0, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(a, w1, sum[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    alignas(32) float values[16];
    _mm256_store_ps(values, sum[r][0]);
    _mm256_store_ps(values + 8, sum[r][1]);
    for (int64_t c = 0; c < 16 && first + c < columns; ++c) y[r][first + c] = values[c];
  }
}

template <int R>
AVX2 void Tile2(const float* const* x, const float* w, float* const* y, const Shape& s, int64_t columns) {
  for (int first = 0; first < columns && first < kColumns; first += 16) Tile2<R>(x, w, y, s, columns, first);
}

template <bool fetches>
AVX512 void TileOfHeight512(int64_t height, const float* const* x, const float* w, float* const* y, const Shape& s,
                            int64_t columns, const float* later) {
  switch (height) {
    case 1: return Tile512<1, fetches>(x, w, y, s, columns, later);
    case 2: return Tile512<2, fetches>(x, w, y, s, columns, later);
    case 3: return Tile512<3, fetches>(x, w, y, s, columns, later);
    case 4: return Tile512<4, fetches>(x, w, y, s, columns, later);
    case 5: return Tile512<5, fetches>(x, w, y, s, columns, later);
    case 6: return Tile512<6, fetches>(x, w, y, s, columns, later);
    case 7: return Tile512<7, fetches>(x, w, y, s, columns, later);
    case 8: return Tile512<8, fetches>(x, w, y, s, columns, later);
  }
}

// Some rows of one block, in tiles of as much the same height as can be: one of one row takes as long as one of four.
// The second to fourth tile, which find `w` in the cache, fetch a third of `next` each, so its first tile does too.
__attribute__((target("avx512f"))) void Block512(const float* const* x, const float* w, float* const* y, const Shape& s,
                                                  int64_t columns, int64_t rows, const float* next) {
  const int64_t all = (rows + kRowsOfWide - 1) / kRowsOfWide;
  for (int64_t tiles = all; tiles > 0; --tiles) {
    const int64_t height = rows / tiles, third = all - tiles - 1;
    if (third >= 0 && third < 3) {
      TileOfHeight512<true>(height, x, w, y, s, columns, next + third * 16 * s.in);
    } else {
      TileOfHeight512<false>(height, x, w, y, s, columns, nullptr);
    }
    rows -= height;
    x += height;
    y += height;
  }
}

__attribute__((target("avx2,fma"))) void Block2(const float* const* x, const float* w, float* const* y, const Shape& s,
                                                int64_t columns, int64_t rows) {
  for (int64_t tiles = (rows + kRowsOfNarrow - 1) / kRowsOfNarrow; tiles > 0; --tiles) {
    const int64_t height = rows / tiles;
    switch (height) {
      case 1: Tile2<1>(x, w, y, s, columns); break;
      case 2: Tile2<2>(x, w, y, s, columns); break;
      case 3: Tile2<3>(x, w, y, s, columns); break;
      case 4: Tile2<4>(x, w, y, s, columns); break;
      case 5: Tile2<5>(x, w, y, s, columns); break;
      case 6: Tile2<6>(x, w, y, s, columns); break;
    }
    rows -= height;
    x += height;
    y += height;
  }
}

// What is to be computed, in parts: some neighbouring blocks of w, for up to kRowsAtOnce rows.
struct Product {
  const float* x;
  const float* w;
  float* y;
  const int32_t* order;
  Shape shape;
  bool is_wide;
  int64_t blocks_of_part, stretches, threads;

  int64_t Parts() const { return stretches * ((shape.rows + kRowsAtOnce - 1) / kRowsAtOnce); }

  void Part(int64_t part) const {
    const int64_t first = part % stretches * blocks_of_part, begin = part / stretches * kRowsAtOnce;
    const int64_t end = std::min(begin + kRowsAtOnce, shape.rows);
    const float* from[kRowsAtOnce];
    float* to[kRowsAtOnce];
    for (int64_t block = first; block < std::min(first + blocks_of_part, shape.blocks); ++block) {
      const float* of_block = w + block * shape.in * kColumns;
      for (int64_t row = begin; row < end; ++row) {
        from[row - begin] = x + order[row] * shape.in;
        to[row - begin] = y + order[row] * shape.out + block * kColumns;
      }
      const int64_t columns = shape.out - block * kColumns, height = end - begin;
      if (is_wide) {
        // Where there are several tiles, a part is one block, and parts go to the threads in turn.
        const float* next = w + std::min(block + threads, shape.blocks - 1) * shape.in * kColumns;
        Block512(from, of_block, to, shape, columns, height, next);
      } else {
        Block2(from, of_block, to, shape, columns, height);
      }
    }
  }
};

template <bool is_wide>
ffi::Error Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::S32> order,
               ffi::Buffer<ffi::S32> count, ffi::ResultBuffer<ffi::F32> y) {
  const auto of_x = x.dimensions(), of_w = w.dimensions(), of_y = y->dimensions();
  if (of_x.size() != 2 || of_w.size() != 3 || of_y.size() != 2 || of_w[2] != kColumns || of_w[1] != of_x[1] ||
      of_y[0] != of_x[0] || static_cast<int64_t>(order.element_count()) != of_x[0] || count.element_count() != 1 ||
      of_w[0] != (of_y[1] + kColumns - 1) / kColumns) {
    return ffi::Error::InvalidArgument("x [rows, in] and w [blocks, in, 48] do not give y [rows, out]");
  }
  const int32_t* of_order = order.typed_data();
  if (std::any_of(of_order, of_order + of_x[0], [&](int32_t row) { return row < 0 || row >= of_x[0]; })) {
    return ffi::Error::InvalidArgument("the order names a row that x does not have");
  }
  const int64_t rows = std::clamp<int64_t>(count.typed_data()[0], 0, of_x[0]);
  for (int64_t row = rows; row < of_x[0]; ++row) std::fill_n(y->typed_data() + of_order[row] * of_y[1], of_y[1], 0.0f);
  if (rows == 0) return ffi::Error::Success();
  // Few rows are bound by memory: each thread then reads two long stretches of it. Many are bound by arithmetic.
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1), blocks = of_w[0];
  const int64_t blocks_of_part = rows <= kRowsOfWide ? (blocks + 2 * threads - 1) / (2 * threads) : 1;
  const int64_t stretches = (blocks + blocks_of_part - 1) / blocks_of_part;
  const Product product{x.typed_data(),
                        w.typed_data(),
                        y->typed_data(),
                        of_order,
                        Shape{rows, of_x[1], of_y[1], blocks},
                        is_wide,
                        blocks_of_part,
                        stretches,
                        threads};
  InParts(pool, product, threads, rows <= kRowsOfWide);
  return ffi::Error::Success();
}

}  // namespace

// 2: AVX-512, 1: AVX2, 0: neither; of the machine that asks.
extern "C" int PackedProductLevel() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
}

#define BOUND                       \
  ffi::Ffi::Bind()                  \
      .Ctx<ffi::ThreadPool>()       \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::F32>>() \
      .Arg<ffi::Buffer<ffi::S32>>() \
      .Arg<ffi::Buffer<ffi::S32>>() \
      .Ret<ffi::Buffer<ffi::F32>>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(PackedProduct512, Run<true>, BOUND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(PackedProduct2, Run<false>, BOUND);
