// The integer products under matmul_int8.h: in each lane some weights times as many codes, added up exactly. So every
// instruction set gives the same bits.
//
// Weights of 8 bits, -127 .. 127: a lane takes LANE k at once, of codes as WideCode. A weight w lies in memory as the byte
// w + WEIGHT_ZERO, which is how VNNI's instruction wants one of its factors: there a sum starts at -128 times the sum of the
// codes, `offset`.
//
// Weights of 4 bits, 0 .. 15: a lane takes 4 k at once, of codes as int8. A Sum4 holds a group of 32 k.
#pragma once
#include "vec.h"
#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace ms {

#if defined(__AVX512VNNI__) && !defined(MS_PORTABLE_DOT)

constexpr int LANE = 4, WEIGHT_ZERO = 128;
using WideCode = int8_t;
inline vi start_sum(int32_t offset) { return splat(offset); }
inline vi load_weights(const uint8_t* p) { return load_bytes(p); }
inline vi add_dot(vi sum, vi weights, vi codes) {
    return reinterpret_cast<vi>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(weights),
                                                    reinterpret_cast<__m512i>(codes)));
}
using Sum4 = vi;
inline Sum4 dot4(vi weights, vi codes) { return add_dot(vi{}, weights, codes); }
inline Sum4 add_dot4(Sum4 sum, vi weights, vi codes) { return add_dot(sum, weights, codes); }
inline vi whole_sum(Sum4 sum) { return sum; }

#elif defined(__AVX2__) && !defined(MS_PORTABLE_DOT)

// Products of 16 bits, two to a lane: those of bytes (`maddubs`) take one factor without sign, so that signs would have to be
// moved for each product, and add up in 16 bits that must not saturate. Weights of 4 bits have no sign, and 16 bits hold a
// group's sum: eight times two products of at most 15 * 127.
constexpr int LANE = 2, WEIGHT_ZERO = 0;
using WideCode = int16_t;
inline vi start_sum(int32_t) { return vi{}; }
typedef int16_t vs __attribute__((vector_size(VL * 4)));
using Sum4 = vs;
#if defined(__AVX512BW__)
typedef __m512i vq;
inline vq widened(const uint8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline vq pairs(vq a, vq b) { return _mm512_madd_epi16(a, b); }
inline vq byte_pairs(vq a, vq b) { return _mm512_maddubs_epi16(a, b); }
#else
typedef __m256i vq;
inline vq widened(const uint8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vq pairs(vq a, vq b) { return _mm256_madd_epi16(a, b); }
inline vq byte_pairs(vq a, vq b) { return _mm256_maddubs_epi16(a, b); }
#endif
inline vi load_weights(const uint8_t* p) { return reinterpret_cast<vi>(widened(p)); }
inline vi add_dot(vi sum, vi weights, vi codes) {
    return sum + reinterpret_cast<vi>(pairs(reinterpret_cast<vq>(weights), reinterpret_cast<vq>(codes)));
}
// as_is: two sums must not be drawn together, or products would wait for each other in memory.
inline Sum4 dot4(vi weights, vi codes) {
    return as_is(reinterpret_cast<vs>(byte_pairs(reinterpret_cast<vq>(weights), reinterpret_cast<vq>(codes))));
}
// In place: told in C++, GCC 12 moves each sum to another register and back, which takes a sixth of a tile's time.
inline Sum4 add_dot4(Sum4 sum, vi weights, vi codes) {
    const Sum4 product = dot4(weights, codes);
    asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(product));
    return sum;
}
inline vi whole_sum(Sum4 sum) { return reinterpret_cast<vi>(pairs(reinterpret_cast<vq>(sum), reinterpret_cast<vq>(vs{} + 1))); }

#else

constexpr int LANE = 4, WEIGHT_ZERO = 0;
using WideCode = int8_t;
inline vi start_sum(int32_t) { return vi{}; }
inline vi load_weights(const uint8_t* p) { return load_bytes(p); }
#if defined(__ARM_FEATURE_DOTPROD) && !defined(MS_PORTABLE_DOT)
inline vi add_dot(vi sum, vi weights, vi codes) {
    return reinterpret_cast<vi>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(weights),
                                          reinterpret_cast<int8x16_t>(codes)));
}
#else
inline vi add_dot(vi sum, vi weights, vi codes) {  // byte 0 of a lane is its lowest
    return sum + ((weights << 24) >> 24) * ((codes << 24) >> 24) + ((weights << 16) >> 24) * ((codes << 16) >> 24) +
           ((weights << 8) >> 24) * ((codes << 8) >> 24) + (weights >> 24) * (codes >> 24);
}
#endif
using Sum4 = vi;
inline Sum4 dot4(vi weights, vi codes) { return add_dot(vi{}, weights, codes); }
inline Sum4 add_dot4(Sum4 sum, vi weights, vi codes) { return add_dot(sum, weights, codes); }
inline vi whole_sum(Sum4 sum) { return sum; }

#endif

// The next four bytes of a row's codes, in every lane.
inline vi load_codes(const void* p) {
    int32_t lane;
    std::memcpy(&lane, p, sizeof lane);
    return splat(lane);
}
static_assert(LANE * sizeof(WideCode) == 4);

}  // namespace ms
