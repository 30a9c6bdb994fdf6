// Threads that compute the parts of one custom call, in any order.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "xla/ffi/api/ffi.h"

constexpr int64_t kMostHelpers = 7;                 // short tasks wait for memory, which more do not read faster
constexpr std::chrono::microseconds kLookOut{200};  // more than what lies between two tasks of a step

constexpr int kSpins = 64;

// Threads that have something to do come first.
inline void Pause(int spins) {
  _mm_pause();
  if (spins % kSpins == 0) std::this_thread::yield();
}

struct Task {
  void (*part)(const void* what, int64_t number);
  const void* what;
  int64_t parts;
};

// Threads that take parts of one task at a time beside the thread that asks for it. A decode step is a hundred tasks
// with little in between, and waking a thread takes half as long as one of them: who has just helped looks out for the
// next task before it sleeps.
class Helpers {
 public:
  // Returns when every part is computed. Who asks takes part too, so threads that are late hold nothing up.
  void Compute(const Task& task, int64_t num_helpers) {
    // Where they help with another task (of another model, or another pass of this one), its threads and this one are
    // enough for the processors.
    std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
    if (num_helpers < 1 || !turn.try_lock()) {
      for (int64_t number = 0; number < task.parts; ++number) task.part(task.what, number);
      return;
    }
    for (; num_started_ < std::min(num_helpers, kMostHelpers); ++num_started_) std::thread([this] { Help(); }).detach();
    task_ = task;
    const int64_t parts = task.parts;
    num_done_.store(0, std::memory_order_relaxed);
    num_left_.store(parts, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
      const std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    TakeParts();
    for (int spins = 1; num_done_.load(std::memory_order_acquire) < parts; ++spins) Pause(spins);
  }

 private:
  // `task_` does not change between a part that was taken and its end: `Compute` counts the ends.
  void TakeParts() {
    int64_t left = num_left_.load(std::memory_order_acquire);
    while (left > 0) {
      if (!num_left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      task_.part(task_.what, task_.parts - left);  // upwards, as memory is read ahead
      num_done_.fetch_add(1, std::memory_order_release);
      left = num_left_.load(std::memory_order_acquire);
    }
  }

  void Help() {
    for (auto since = std::chrono::steady_clock::now();; since = std::chrono::steady_clock::now()) {
      for (int spins = 1; num_left_.load(std::memory_order_relaxed) == 0; ++spins) {
        Pause(spins);
        if (spins % kSpins == 0 && std::chrono::steady_clock::now() - since > kLookOut) {
          Sleep();
          since = std::chrono::steady_clock::now();
        }
      }
      TakeParts();
    }
  }

  void Sleep() {
    std::unique_lock<std::mutex> lock(sleep_);
    num_asleep_.fetch_add(1, std::memory_order_seq_cst);
    if (num_left_.load(std::memory_order_seq_cst) == 0) wake_.wait(lock);
    num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
  }

  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  int64_t num_started_ = 0;
  Task task_{};
  alignas(64) std::atomic<int64_t> num_left_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<int64_t> num_asleep_{0};
};

// Those of the process; never deleted, so that its threads end with it.
inline Helpers& AllHelpers() {
  static Helpers* const helpers = new Helpers;
  return *helpers;
}

// A task whose parts threads of XLA's pool take too. One that comes when all are given out touches nothing but this.
template <typename Work>
struct Pooled {
  explicit Pooled(const Work& given) : work(given), parts(given.Parts()) {}

  void TakeParts() {
    for (int64_t number; (number = next.fetch_add(1, std::memory_order_relaxed)) < parts;) {
      work.Part(number);
      done.fetch_add(1, std::memory_order_release);
    }
  }

  const Work work;
  const int64_t parts;
  std::atomic<int64_t> next{0}, done{0};
};

// Calls `work.Part(number)` for every number below `work.Parts()` once, on up to `threads` threads.
//
// A short task is for threads that wait for it. What takes longer than waking a thread is for those of the pool, which
// have other things to do in between: on two cores a thread that looks out takes a seventh of an encoder's speed.
template <typename Work>
void InParts(xla::ffi::ThreadPool& pool, const Work& work, int64_t threads, bool is_short) {
  if (is_short) {
    const auto part = [](const void* what, int64_t number) { static_cast<const Work*>(what)->Part(number); };
    return AllHelpers().Compute(Task{part, &work, work.Parts()}, threads - 1);
  }
  const auto pooled = std::make_shared<Pooled<Work>>(work);
  for (int64_t i = 1; i < std::min(threads, pooled->parts); ++i) pool.Schedule([pooled] { pooled->TakeParts(); });
  pooled->TakeParts();
  for (int spins = 1; pooled->done.load(std::memory_order_acquire) < pooled->parts; ++spins) Pause(spins);
}
