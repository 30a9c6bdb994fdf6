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
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kColumns = 48;
constexpr int64_t kRowsAtOnce = 96;  // of x, which stay in the cache while blocks of w go by

struct Shape {
  int64_t rows, in, out, blocks;
};

#define AVX512 __attribute__((target("avx512f"), always_inline)) inline
#define AVX2 __attribute__((target("avx2,fma"), always_inline)) inline

// R rows and all 48 columns of a block: 3 R of the 32 registers are sums.
template <int R>
AVX512 void Tile512(const float* x, const float* w, float* y, const Shape& s, int64_t columns) {
  __m512 sum[R][3];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = sum[r][2] = _mm512_setzero_ps();
  for (int64_t k = 0; k < s.in; ++k, w += kColumns) {
    const __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + 16), w2 = _mm512_loadu_ps(w + 32);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns + 16), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns + 32), _MM_HINT_T0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 a = _mm512_set1_ps(x[r * s.in + k]);
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
      float* to = y + r * s.out + 16 * c;
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
AVX2 void Tile2(const float* x, const float* w, float* y, const Shape& s, int64_t columns, int first) {
  __m256 sum[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
  w += first;
  for (int64_t k = 0; k < s.in; ++k, w += kColumns) {
    const __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
    _mm_prefetch(reinterpret_cast<const char*>(w + 32 * kColumns), _MM_HINT_T0);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 a = _mm256_set1_ps(x[r * s.in + k]);
      sum[r][0] = _mm256_fmadd_ps(a, w0, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(a, w1, sum[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    alignas(32) float values[16];
    _mm256_store_ps(values, sum[r][0]);
    _mm256_store_ps(values + 8, sum[r][1]);
    for (int64_t c = 0; c < 16 && first + c < columns; ++c) y[r * s.out + first + c] = values[c];
  }
}

template <int R>
AVX2 void Tile2(const float* x, const float* w, float* y, const Shape& s, int64_t columns) {
  for (int first = 0; first < columns && first < kColumns; first += 16) Tile2<R>(x, w, y, s, columns, first);
}

// Rows `begin` to `end` of one block.
__attribute__((target("avx512f"))) void Block512(const float* x, const float* w, float* y, const Shape& s,
                                                  int64_t columns, int64_t begin, int64_t end) {
  int64_t m = begin;
  for (; m + 8 <= end; m += 8) Tile512<8>(x + m * s.in, w, y + m * s.out, s, columns);
  x += m * s.in;
  y += m * s.out;
  switch (end - m) {
    case 1: return Tile512<1>(x, w, y, s, columns);
    case 2: return Tile512<2>(x, w, y, s, columns);
    case 3: return Tile512<3>(x, w, y, s, columns);
    case 4: return Tile512<4>(x, w, y, s, columns);
    case 5: return Tile512<5>(x, w, y, s, columns);
    case 6: return Tile512<6>(x, w, y, s, columns);
    case 7: return Tile512<7>(x, w, y, s, columns);
  }
}

__attribute__((target("avx2,fma"))) void Block2(const float* x, const float* w, float* y, const Shape& s,
                                                int64_t columns, int64_t begin, int64_t end) {
  int64_t m = begin;
  for (; m + 6 <= end; m += 6) Tile2<6>(x + m * s.in, w, y + m * s.out, s, columns);
  x += m * s.in;
  y += m * s.out;
  switch (end - m) {
    case 1: return Tile2<1>(x, w, y, s, columns);
    case 2: return Tile2<2>(x, w, y, s, columns);
    case 3: return Tile2<3>(x, w, y, s, columns);
    case 4: return Tile2<4>(x, w, y, s, columns);
    case 5: return Tile2<5>(x, w, y, s, columns);
  }
}

// What the threads of one product share. A thread that comes when everything is given out touches nothing but this.
struct Product {
  const float* x;
  const float* w;
  float* y;
  Shape shape;
  bool is_wide;
  int64_t parts;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  void Work() {
    for (int64_t part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      const int64_t block = part % shape.blocks, begin = part / shape.blocks * kRowsAtOnce;
      const int64_t end = begin + kRowsAtOnce < shape.rows ? begin + kRowsAtOnce : shape.rows;
      const float* of_block = w + block * shape.in * kColumns;
      float* to = y + block * kColumns;
      const int64_t columns = shape.out - block * kColumns;
      if (is_wide) {
        Block512(x, of_block, to, shape, columns, begin, end);
      } else {
        Block2(x, of_block, to, shape, columns, begin, end);
      }
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

ffi::Error Run(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::S32> count,
               ffi::ResultBuffer<ffi::F32> y, bool is_wide) {
  const auto of_x = x.dimensions(), of_w = w.dimensions(), of_y = y->dimensions();
  if (of_x.size() != 2 || of_w.size() != 3 || of_y.size() != 2 || of_w[2] != kColumns || of_w[1] != of_x[1] ||
      of_y[0] != of_x[0] || count.element_count() != 1 || of_w[0] != (of_y[1] + kColumns - 1) / kColumns) {
    return ffi::Error::InvalidArgument("x [rows, in] and w [blocks, in, 48] do not give y [rows, out]");
  }
  auto product = std::make_shared<Product>();
  product->x = x.typed_data();
  product->w = w.typed_data();
  product->y = y->typed_data();
  const int64_t rows = std::clamp<int64_t>(count.typed_data()[0], 0, of_x[0]);
  std::fill(product->y + rows * of_y[1], product->y + of_y[0] * of_y[1], 0.0f);
  product->shape = {rows, of_x[1], of_y[1], of_w[0]};
  product->is_wide = is_wide;
  product->parts = of_w[0] * ((rows + kRowsAtOnce - 1) / kRowsAtOnce);
  // This thread takes part too, and ends when the parts have: a pool whose threads are all busy cannot hold it up.
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), product->parts) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([product] { product->Work(); });
  product->Work();
  for (int spins = 0; product->done.load(std::memory_order_acquire) < product->parts; ++spins) {
    if (spins < 10000) {
      _mm_pause();
    } else {
      std::this_thread::yield();
    }
  }
  return ffi::Error::Success();
}

ffi::Error RunWide(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::S32> count,
                   ffi::ResultBuffer<ffi::F32> y) {
  return Run(pool, x, w, count, y, true);
}

ffi::Error RunNarrow(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::S32> count,
                     ffi::ResultBuffer<ffi::F32> y) {
  return Run(pool, x, w, count, y, false);
}

}  // namespace

// 2: AVX-512, 1: AVX2, 0: neither; of the machine that asks.
extern "C" int PackedProductLevel() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 1 : 0;
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PackedProduct512, RunWide,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PackedProduct2, RunNarrow,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
