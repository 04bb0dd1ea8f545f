// Loops on XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "ffi_op.h"

namespace sparseserve {

// Runs body(0) ... body(num_tasks - 1), each once, in any order and on any thread; returns when all are done.
//
// The caller works, too, and waits only for tasks that some thread has begun: were every thread of the pool inside a
// handler, each waiting for helpers to start, none would ever start. A helper that comes late finds nothing to claim;
// it touches nothing but the shared state, which it owns a part of.
template <class Body>
void parallel_for(ffi::ThreadPool& pool, int64_t num_tasks, Body&& body) {
  const int64_t num_helpers = std::min<int64_t>(pool.num_threads(), num_tasks) - 1;
  if (num_helpers < 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    int64_t num_tasks;
    std::function<void(int64_t)> body;
    void work() {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
        body(task);
        done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->num_tasks = num_tasks;
  shared->body = std::ref(body);
  for (int64_t i = 0; i < num_helpers; ++i) {
    pool.Schedule([shared] { shared->work(); });
  }
  shared->work();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < num_tasks; ++spins) {
    if (spins > 1000) std::this_thread::yield();
  }
}

// The same in runs of `grain` tasks: waking a thread costs some microseconds, so small tasks go together.
template <class Body>
void parallel_for(ffi::ThreadPool& pool, int64_t num_tasks, int64_t grain, Body&& body) {
  parallel_for(pool, (num_tasks + grain - 1) / grain, [&](int64_t run) {
    for (int64_t task = run * grain; task < std::min(num_tasks, (run + 1) * grain); ++task) body(task);
  });
}

}  // namespace sparseserve
