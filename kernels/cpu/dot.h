// The integer product under matmul_int8.h: in each lane four weights times four codes, added up in 32 bits, exactly.
// So every instruction set gives the same bits.
//
// A weight w in -127 .. 127 is stored as the byte w + 128, which is how the processors' instruction for such products
// (VNNI) wants one of its factors: there a sum starts at -128 times the sum of the codes. The others take 128 off first.
#pragma once
#include "vec.h"
#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace ms {

inline int32_t four_codes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}
constexpr int32_t EACH_128 = static_cast<int32_t>(0x80808080);

#if defined(__AVX512VNNI__) && !defined(MS_PORTABLE_DOT)

struct FourCodes {
    vi all;
    explicit FourCodes(const int8_t* p) : all(splat(four_codes(p))) {}
};
inline vi start_sum(int32_t offset) { return splat(offset); }
inline vi load_weights(const uint8_t* p) { return load_bytes(p); }
inline vi add_dot(vi sum, vi weights, const FourCodes& codes) {
    return reinterpret_cast<vi>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(weights),
                                                    reinterpret_cast<__m512i>(codes.all)));
}

#elif defined(__AVX512BW__) && !defined(MS_PORTABLE_DOT)

// |code| * (weight with the code's sign): a pair of products is at most 2 * 127 * 127, which 16 bits hold. The sign is
// taken by turning the weights' bits and adding one where the code is negative.
struct FourCodes {
    __m512i magnitude, is_negative;
    explicit FourCodes(const int8_t* p) {
        const __m512i all = reinterpret_cast<__m512i>(splat(four_codes(p)));
        magnitude = _mm512_abs_epi8(all);
        is_negative = _mm512_movm_epi8(_mm512_movepi8_mask(all));
    }
};
inline vi start_sum(int32_t) { return vi{}; }
inline vi load_weights(const uint8_t* p) { return load_bytes(p) ^ EACH_128; }
inline vi add_dot(vi sum, vi weights, const FourCodes& codes) {
    const __m512i turned = _mm512_sub_epi8(_mm512_xor_si512(reinterpret_cast<__m512i>(weights), codes.is_negative),
                                           codes.is_negative);
    const __m512i pairs = _mm512_maddubs_epi16(codes.magnitude, turned);
    return sum + reinterpret_cast<vi>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

#elif defined(__AVX2__) && !defined(MS_PORTABLE_DOT)

// |code| * (weight with the code's sign): a pair of products is at most 2 * 127 * 127, which 16 bits hold.
struct FourCodes {
    __m256i all, magnitude;
    explicit FourCodes(const int8_t* p)
        : all(reinterpret_cast<__m256i>(splat(four_codes(p)))), magnitude(_mm256_abs_epi8(all)) {}
};
inline vi start_sum(int32_t) { return vi{}; }
inline vi load_weights(const uint8_t* p) { return load_bytes(p) ^ EACH_128; }
inline vi add_dot(vi sum, vi weights, const FourCodes& codes) {
    const __m256i turned = _mm256_sign_epi8(reinterpret_cast<__m256i>(weights), codes.all);
    const __m256i pairs = _mm256_maddubs_epi16(codes.magnitude, turned);
    return sum + reinterpret_cast<vi>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#elif defined(__ARM_FEATURE_DOTPROD) && !defined(MS_PORTABLE_DOT)

struct FourCodes {
    vi all;
    explicit FourCodes(const int8_t* p) : all(splat(four_codes(p))) {}
};
inline vi start_sum(int32_t) { return vi{}; }
inline vi load_weights(const uint8_t* p) { return load_bytes(p) ^ EACH_128; }
inline vi add_dot(vi sum, vi weights, const FourCodes& codes) {
    return reinterpret_cast<vi>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(weights),
                                          reinterpret_cast<int8x16_t>(codes.all)));
}

#else

struct FourCodes {
    int32_t code[4];
    explicit FourCodes(const int8_t* p) : code{p[0], p[1], p[2], p[3]} {}
};
inline vi start_sum(int32_t) { return vi{}; }
inline vi load_weights(const uint8_t* p) { return load_bytes(p) ^ EACH_128; }
inline vi add_dot(vi sum, vi weights, const FourCodes& codes) {  // byte 0 of a lane is its lowest
    return sum + ((weights << 24) >> 24) * codes.code[0] + ((weights << 16) >> 24) * codes.code[1] +
           ((weights << 8) >> 24) * codes.code[2] + (weights >> 24) * codes.code[3];
}

#endif

}  // namespace ms
