// A team of threads that runs one function after another without being put to sleep in between.
//
// A forward is a chain of some hundred short phases; waking a sleeping thread costs as much as a phase. So the members
// spin while a forward runs, and sleep between forwards.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ms {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; i++) members_.emplace_back([this, i] { member(i); });
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& thread : members_) thread.join();
    }
    int size() const { return size_; }

    // Runs work(member) on every member at once, the caller being member 0; returns when all are done.
    // Inside, `barrier()` lines the members up, and `each` shares work out.
    void run(const std::function<void(int)>& work) {
        if (size_ == 1) return work(0);
        {
            std::lock_guard<std::mutex> guard(mutex_);
            work_ = &work;
            done_.store(0, std::memory_order_relaxed);
            round_++;
        }
        wake_.notify_all();
        work(0);
        wait_until([&] { return done_.load(std::memory_order_acquire) == size_ - 1; });
    }

    // work(0) .. work(count - 1), each on whichever member is free: a member that is slowed for a while, by who shares its core,
    // does less instead of being waited for. Called by all members alike; returns when all is done.
    template <typename Work>
    void each(int member, int count, Work work) {
        if (size_ == 1) {
            for (int i = 0; i < count; i++) work(i);
            return;
        }
        long& first = first_[member].number;
        for (long i; (i = next_.fetch_add(1, std::memory_order_relaxed) - first) < count;) work(static_cast<int>(i));
        first += count + size_;  // each member has asked once in vain
        barrier();               // so nobody asks for the next work before that
    }

    void barrier() {
        if (size_ == 1) return;
        int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
        } else {
            wait_until([&] { return phase_.load(std::memory_order_acquire) != phase; });
        }
    }

  private:
    static constexpr int MAX_SPINS = 4000;  // about 50 us

    template <typename Condition>
    static void wait_until(Condition condition) {
        for (int spins = 0; !condition();) {
            relax();
            if (++spins == MAX_SPINS) {  // the other may be waiting for this core
                std::this_thread::yield();
                spins = 0;
            }
        }
    }
    void member(int index) {
        long seen = 0;
        for (;;) {
            const std::function<void(int)>* work;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return stop_ || round_ != seen; });
                if (stop_) return;
                seen = round_;
                work = work_;
            }
            (*work)(index);
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    struct alignas(64) Place {  // a cache line of its own
        long number = 0;
    };

    const int size_;
    std::vector<Place> first_{static_cast<size_t>(size_)};  // of each member: which of next_'s numbers is work(0)
    alignas(64) std::atomic<long> next_{0};
    std::vector<std::thread> members_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)>* work_ = nullptr;
    long round_ = 0;
    bool stop_ = false;
    std::atomic<int> done_{0}, arrived_{0}, phase_{0};
};

}  // namespace ms
