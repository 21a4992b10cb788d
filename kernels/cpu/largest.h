// Where the largest of some numbers is: the first of equals; NaN is larger than all.
#pragma once
#include <limits>
#include "vec.h"

namespace ms {

struct Largest {
    float value;
    int place;

    // Places ascend: `later` has to be larger, not as large.
    void take(Largest later) {
        if (later.value > value || (later.value != later.value && value == value)) *this = later;
    }
};

// Of x[begin .. end), begin < end.
inline Largest largest(const float* x, int begin, int end) {
    vf most = splat(-std::numeric_limits<float>::infinity());
    vi place = splat(begin), is_nan{};
    int i = begin;
    for (; i + VL <= end; i += VL) {
        const vf each = load(x + i);
        const vi is_larger = each > most;
        most = is_larger ? each : most;
        place = is_larger ? splat(i) : place;
        is_nan |= each != each;
    }
    Largest found{most[0], place[0]};
    if (fold(is_nan, [](vi a, vi b) { return a | b; })) {
        for (found.place = begin; x[found.place] == x[found.place];) found.place++;
        return {x[found.place], found.place};
    }
    for (int lane = 1; lane < VL; lane++) {
        const Largest each{most[lane], place[lane] + lane};
        if (each.value > found.value || (each.value == found.value && each.place < found.place)) found = each;
    }
    for (; i < end; i++) found.take({x[i], i});
    return found;
}

}  // namespace ms
