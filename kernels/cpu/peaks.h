// What the processor could do at most, for bench.ops: products from registers, and bytes read in order.
#pragma once
#include "dot.h"
#include "vec.h"

namespace ms {

constexpr int PEAK_SUMS = 12;  // independent chains: more than a product's latency

// Operations (two for each product) of `rounds` rounds of fused multiply-adds; *sink keeps them from being left out.
inline double multiply_floats(long rounds, float* sink) {
    vf sums[PEAK_SUMS] = {};
    vf a = splat(*sink), b = splat(1.0f - *sink);
    for (long round = 0; round < rounds; round++)
        for (vf& sum : sums) {
            a = as_is(a);  // may have changed, for all that the compiler knows: else all sums would share one product
            sum += a * b;
        }
    for (const vf& sum : sums) *sink += sum[0];
    return 2.0 * rounds * PEAK_SUMS * VL;
}

// Of sums that `add` adds to, with codes of int8: `lane` products in a lane each.
template <typename Sum, typename Add>
inline double multiply_codes(long rounds, int lane, Add add, float* sink) {
    Sum sums[PEAK_SUMS] = {};
    const vi codes = splat(0x01020304);
    vi weights = splat(static_cast<int32_t>(*sink) + 0x01020304);
    for (long round = 0; round < rounds; round++)
        for (Sum& sum : sums) {
            weights = as_is(weights);
            sum = add(sum, weights, codes);
        }
    for (const Sum& sum : sums) *sink += sum[0];
    return 2.0 * rounds * PEAK_SUMS * VL * lane;
}

inline double read_bytes(const uint8_t* bytes, long count, float* sink) {
    vi sums[4] = {};
    for (long at = 0; at + 16 * VL <= count; at += 16 * VL)
        for (int i = 0; i < 4; i++) sums[i] ^= load_bytes(bytes + at + i * 4 * VL);
    for (const vi& sum : sums) *sink += sum[0] & 1;
    return static_cast<double>(count);
}

}  // namespace ms
