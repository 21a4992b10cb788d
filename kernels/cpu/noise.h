// The words of sampling's noise: Philox4x32-10 (Salmon et al., SC 2011), as engine/noise.py defines it, for several groups
// of four tokens at once, and the search for the tokens that they let win.
#pragma once
#include "vec.h"
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ms {

constexpr int LANES = VL / 2;  // groups of four tokens at once: 64 bits each
typedef uint64_t vl __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

// The products of the lanes' low halves.
inline vl multiply_low(vl a, vl b) {
#if defined(__AVX512F__)
    return reinterpret_cast<vl>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<vl>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#elif defined(__aarch64__)
    return reinterpret_cast<vl>(vmull_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(a)),
                                          vmovn_u64(reinterpret_cast<uint64x2_t>(b))));
#else
    return (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF);
#endif
}

struct DrawKey {
    uint32_t seed_low, seed_high, output_index, choice;
};

// words[i] of token 4 * group + i, for groups [group, group + LANES). The lanes' high halves hold leftovers.
inline void philox(const DrawKey& key, uint32_t group, uint32_t* words) {
    const vl first = vl{} + 0xD2511F53, third = vl{} + 0xCD9E8D57;
    vl x0, x1 = vl{} + key.output_index, x2 = vl{} + key.choice, x3{};
    for (int i = 0; i < LANES; i++) x0[i] = group + i;
    uint32_t low = key.seed_low, high = key.seed_high;
    for (int round = 0; round < 10; round++, low += 0x9E3779B9, high += 0xBB67AE85) {
        const vl left = multiply_low(x0, first), right = multiply_low(x2, third);
        x0 = (right >> 32) ^ x1 ^ low;
        x1 = right;
        x2 = (left >> 32) ^ x3 ^ high;
        x3 = left;
    }
    const vl front = (x0 & 0xFFFFFFFF) | x1 << 32, back = (x2 & 0xFFFFFFFF) | x3 << 32;
    for (int i = 0; i < LANES; i++) {
        std::memcpy(words + 4 * i, reinterpret_cast<const uint64_t*>(&front) + i, 8);
        std::memcpy(words + 4 * i + 2, reinterpret_cast<const uint64_t*>(&back) + i, 8);
    }
}

// The tokens of a row with word <= exp((logit - score) * inverse_scale): their ids and words, ascending; how many.
inline int rivals(const float* logits, int vocab, const DrawKey& key, float score, float inverse_scale, int* ids,
                  uint32_t* words) {
    int found = 0;
    const int step = 4 * LANES;  // two vectors
    for (int id = 0; id < vocab; id += step) {
        alignas(64) uint32_t drawn[4 * LANES];
        alignas(64) float padded[4 * LANES] = {};
        philox(key, id / 4, drawn);
        const float* row = logits + id;
        const int count = std::min(step, vocab - id);
        if (count < step) {
            std::memcpy(padded, row, sizeof(float) * count);
            row = padded;
        }
        for (int part = 0; part < step; part += VL) {
            vu word;
            std::memcpy(&word, drawn + part, sizeof word);
            const vi is_rival = __builtin_convertvector(word, vf) <= exp((load(row + part) - score) * inverse_scale);
            vl any;
            std::memcpy(&any, &is_rival, sizeof any);
            uint64_t some = 0;
            for (int i = 0; i < LANES; i++) some |= any[i];
            if (!some) continue;
            for (int i = 0; i < VL && part + i < count; i++)
                if (is_rival[i]) {
                    ids[found] = id + part + i;
                    words[found++] = drawn[part + i];
                }
        }
    }
    return found;
}

}  // namespace ms
