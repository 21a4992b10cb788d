// Processor time of one thread by phase of a forward.
#pragma once
#include <ctime>
#include "model.h"

namespace ms {

class Stopwatch {
  public:
    explicit Stopwatch(long long* spent) : spent_(spent), last_(spent ? now() : 0) {}

    // What has passed since the last call belongs to `phase`.
    void lap(Phase phase) {
        if (!spent_) return;
        const long long time = now();
        spent_[phase] += time - last_;
        last_ = time;
    }

  private:
    static long long now() {
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return time.tv_sec * 1000000000LL + time.tv_nsec;
    }

    long long* spent_;
    long long last_;
};

}  // namespace ms
