#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

namespace qrnn {
namespace {

// More than any call gains from; keeps a wrong thread count from starting thousands.
constexpr int64_t kMostWorkers = 255;

struct Job {
    qrnn_task task;
    void* data;
    int64_t count;
    int64_t helpers_wanted;
    std::atomic<int64_t> next{0};
    int64_t helpers_inside = 0;  // guarded by the pool's mutex
    std::condition_variable helpers_left;

    void work() {
        for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(data, i);
    }
};

class ThreadPool {
  public:
    void run(int64_t threads, Job& job) {
        std::unique_lock<std::mutex> lock(mutex_);
        start_workers(threads - 1);
        jobs_.push_back(&job);
        lock.unlock();
        for (int64_t i = 0; i < job.helpers_wanted; ++i) work_waiting_.notify_one();
        job.work();
        lock.lock();
        jobs_.remove(&job);
        job.helpers_left.wait(lock, [&] { return job.helpers_inside == 0; });
    }

  private:
    void start_workers(int64_t wanted) {
        for (; workers_ < std::min(wanted, kMostWorkers); ++workers_) {
            try {
                std::thread([this] { work_forever(); }).detach();
            } catch (const std::system_error&) {
                // No more threads to be had: the caller and the workers there are do the work.
                return;
            }
        }
    }

    void work_forever() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            work_waiting_.wait(lock, [&] { return !jobs_.empty(); });
            Job& job = *jobs_.front();
            if (++job.helpers_inside >= job.helpers_wanted) jobs_.pop_front();
            lock.unlock();
            job.work();
            lock.lock();
            // Every index is taken by now, so nobody else need look at this job.
            jobs_.remove(&job);
            if (--job.helpers_inside == 0) job.helpers_left.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_waiting_;
    std::list<Job*> jobs_;  // with indices left and room for helpers
    int64_t workers_ = 0;
};

std::atomic<ThreadPool*> current_pool{nullptr};

ThreadPool& pool() {
    static std::once_flag once;
    std::call_once(once, [] {
        current_pool.store(new ThreadPool);
        // The threads of the parent do not exist in a forked child, and its mutex may be held for
        // ever.
        pthread_atfork(nullptr, nullptr, [] { current_pool.store(new ThreadPool); });
    });
    // Never deleted: workers may still wait on it while the process exits.
    return *current_pool.load();
}

}  // namespace

void run_on_pool(int64_t threads, qrnn_task task, int64_t count, void* data) {
    threads = std::min(threads, count);
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) task(data, i);
        return;
    }
    Job job;
    job.task = task;
    job.data = data;
    job.count = count;
    job.helpers_wanted = threads - 1;
    pool().run(threads, job);
}

}  // namespace qrnn
