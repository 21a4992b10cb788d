// Vectors of floats as GCC and clang know them: one source, built once per instruction set (build.py). Every build does
// the same operations on each element in the same order, so they agree to the bit.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ms {

#if defined(__AVX512F__)
constexpr int VL = 16;  // floats in a register
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
constexpr int GROUP = 16;  // floats that are handled together, whatever the registers hold
typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vf_unaligned __attribute__((vector_size(VL * 4), aligned(4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef int8_t vb __attribute__((vector_size(VL)));
typedef uint8_t vub __attribute__((vector_size(VL)));
#if defined(__AVX512F__)
constexpr vi LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
constexpr vi LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7};
#else
constexpr vi LANE_NUMBERS = {0, 1, 2, 3};
#endif

inline vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
// VL bytes, each to a lane; GCC 12 widens them in pieces where it is not told.
inline vi load_wide(const int8_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<vi>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<vi>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    vb bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}
inline vi load_wide(const uint8_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<vi>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<vi>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    vub bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vi);
#endif
}
inline vf load(const int8_t* p) { return __builtin_convertvector(load_wide(p), vf); }
inline void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
// Asks for the cache lines of BYTES that are AHEAD bytes on: where rows share the weights, the processor's own prefetch comes
// too late (measured: 4 rows in float32 take 30% less time with it).
constexpr int AHEAD = 4096;
template <int BYTES>
inline void prefetch(const void* p) {
    for (int at = 0; at < BYTES; at += 64) __builtin_prefetch(static_cast<const char*>(p) + AHEAD + at);
}

inline vf splat(float x) { return x - vf{}; }

// The value as it is in a register: the compiler knows nothing of it, so cannot make one fused operation of what made it and
// what takes it.
template <typename V>
inline V as_is(V v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

inline vi splat(int32_t x) { return x - vi{}; }
inline vi load_bytes(const void* p) {
    vi bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return bytes;
}

inline vf as_floats(vi bits) {
    vf floats;
    std::memcpy(&floats, &bits, sizeof floats);
    return floats;
}
// The low four bits of each lane, as floats. AVX-512 looks them up in a register: one operation instead of two.
inline vf low_nibbles(vi lanes) {
#if defined(__AVX512F__)
    const vf numbers = __builtin_convertvector(LANE_NUMBERS, vf);
    return reinterpret_cast<vf>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(lanes), reinterpret_cast<__m512>(numbers)));
#else
    return __builtin_convertvector(lanes & 15, vf);
#endif
}

// 1 + n / 2^(23 - BIT), n being the BITS bits of each lane from BIT on, plus ZERO (none, or half of what they can count).
template <int BITS, int BIT, int ZERO>
inline vf one_and(vi lanes) {
    constexpr int MASK = ((1 << BITS) - 1) << BIT, OTHERS = 0x3F800000 | ZERO << BIT;
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_ternarylogic_epi32(  // one operation instead of two
        reinterpret_cast<__m512i>(lanes), _mm512_set1_epi32(MASK), _mm512_set1_epi32(OTHERS), (0xF0 & 0xCC) ^ 0xAA));
#else
    return as_floats((lanes & MASK) ^ OTHERS);
#endif
}
inline vi as_bits(vf floats) {
    vi bits;
    std::memcpy(&bits, &floats, sizeof bits);
    return bits;
}

// Floats of half precision, and back; a float that half precision cannot hold comes back as another.
inline vf load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<vf>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
    typedef __fp16 vh __attribute__((vector_size(VL * 2)));
    vh halves;
    std::memcpy(&halves, p, sizeof halves);
    return __builtin_convertvector(halves, vf);
#endif
}
inline uint16_t to_half(float x) {
#if defined(__AVX2__)
    return _cvtss_sh(x, 0);
#else
    const __fp16 half = x;
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
#endif
}
inline float from_half(uint16_t bits) {
#if defined(__AVX2__)
    return _cvtsh_ss(bits);
#else
    __fp16 half;
    std::memcpy(&half, &bits, sizeof bits);
    return half;
#endif
}

// The lanes' low bytes; GCC 12 takes them one by one where it is not told.
inline vb low_bytes(vi v) {
#if defined(__AVX512F__)
    return reinterpret_cast<vb>(_mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(v)));
#elif defined(__AVX2__)
    const __m256i bytes = _mm256_shuffle_epi8(
        reinterpret_cast<__m256i>(v), _mm256_set1_epi64x(static_cast<int64_t>(0x808080800C080400)));
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    vb low;
    std::memcpy(&low, &both, sizeof low);
    return low;
#else
    return __builtin_convertvector(v, vb);
#endif
}

// All lanes by op, by halves: a fixed tree.
template <typename V, typename Op>
inline auto fold(V v, Op op) {
    for (int width = VL / 2; width; width /= 2) {
        const vi lane = LANE_NUMBERS ^ width;
        V other;
#if defined(__clang__)
        for (int i = 0; i < VL; i++) other[i] = v[lane[i]];
#else
        other = __builtin_shuffle(v, lane);
#endif
        v = op(v, other);
    }
    return v[0];
}

// The larger and the smaller of each lane; b where one of them is not a number. GCC 12 compares and blends where it is not told.
inline vf larger(vf a, vf b) {
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<vf>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}
inline vf smaller(vf a, vf b) {
#if defined(__AVX512F__)
    return reinterpret_cast<vf>(_mm512_min_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__)
    return reinterpret_cast<vf>(_mm256_min_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
    return a < b ? a : b;
#endif
}

// Sum of 16 floats by halves: a fixed tree.
inline float sum16(const float* p) {
    float x[GROUP];
    std::memcpy(x, p, sizeof x);
    for (int width = GROUP / 2; width; width /= 2)
        for (int i = 0; i < width; i++) x[i] += x[i + width];
    return x[0];
}

// Added to a float of at most 2^22 it leaves the nearest integer (of two, the even one) in the last bits of the sum.
constexpr float TO_NEAREST = 12582912;  // 1.5 * 2^23

// exp by 2^n * polynomial (Cephes' expf coefficients), relative error under 2e-7; below -87 it is 0.
inline vf exp(vf x) {
    const vf low = splat(-87.0f);
    const vi is_low = x < low;
    x = smaller(splat(88.0f), larger(low, x));
    const vf shifted = as_is(x * 1.44269504088896341f + TO_NEAREST), n = shifted - TO_NEAREST;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const vf y = p * (r * r) + r + 1.0f;
    const vf scale = as_floats((as_bits(shifted) << 23) + 0x3F800000);  // 2^n
    return as_floats(as_bits(y * scale) & ~is_low);
}

inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace ms
