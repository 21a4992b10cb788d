// How the right factor of a float32 product lies in memory, and how it comes back as the very same floats.
//
// A matrix w [N][K] is cut into panels of 32 output columns and a panel into strips, of as many columns as a tile has side
// by side; the weights of a strip's columns for one k are neighbours. Where all floats survive it to the bit, they are
// kept in fewer bytes than their own, because a decode step takes as long as it takes to read them:
//
//   Halves      the upper half of each float, the lower being zero: a checkpoint in bfloat16
//   Grouped<8>  w = scale * q + offset, 32 k of a column having one scale and offset, both of half precision;
//               q in -127 .. 127, offset 0: GGUF's Q8_0
//   Grouped<4>  the same with q in 0 .. 15 and any offset: GGUF's Q4_0 and Q4_1
//   Near4       Grouped<4> where no offset is so small beside its scale (under a quarter of it, and not zero) that a faster
//               way to floats would round
//   Floats      any other
//
// Each of them has
//   bytes(k_len)          of a strip
//   put(...)              writes one column of a strip; false where a weight would not come back as it was
//   run(k), load<AT>(..)  the floats of STRIP columns at k + AT, AT < TOGETHER, for RUN k that share what run(k) holds
#pragma once
#include <algorithm>
#include <climits>
#include <cmath>
#include <type_traits>
#include "vec.h"

namespace ms {

constexpr int PANEL = 32;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int STRIP = 16;
#else
constexpr int STRIP = 32;
#endif
constexpr int STRIPS = PANEL / STRIP, STRIP_VECTORS = STRIP / VL;
constexpr int WEIGHT_GROUP = 32;

// work(0), work(1), ... as constants.
template <int COUNT, typename Work, int AT = 0>
__attribute__((always_inline)) inline void each_of(Work work) {
    if constexpr (AT < COUNT) {
        work(std::integral_constant<int, AT>{});
        each_of<COUNT, Work, AT + 1>(work);
    }
}

class Floats {
  public:
    using Run = Floats;
    static constexpr int RUN = INT_MAX, TOGETHER = 1;
    Floats() = default;
    static constexpr long bytes(int k_len) { return static_cast<long>(k_len) * STRIP * 4; }
    Floats(const void* strip, int k) : at(static_cast<const float*>(strip) + static_cast<long>(k) * STRIP) {}

    static bool put(void* strip, int k_len, int column, const float* w) {
        for (int k = 0; k < k_len; k++) static_cast<float*>(strip)[k * STRIP + column] = w[k];
        return true;
    }
    Floats run(int) const { return *this; }
    template <int AT>
    void load(int k, vf* w) const {
        prefetch<STRIP * 4>(at + k * STRIP);
        for (int j = 0; j < STRIP_VECTORS; j++) w[j] = ms::load(at + k * STRIP + j * VL);
    }

  private:
    const float* at;
};

// Two vectors share one of twice as narrow numbers: the first has the lower half of each lane, the second the upper.
class Halves {
  public:
    using Run = Halves;
    static constexpr int RUN = INT_MAX, TOGETHER = 1;
    Halves() = default;
    static constexpr long bytes(int k_len) { return static_cast<long>(k_len) * STRIP * 2; }
    Halves(const void* strip, int k) : at(static_cast<const uint16_t*>(strip) + static_cast<long>(k) * STRIP) {}

    static bool put(void* strip, int k_len, int column, const float* w) {
        const int pair = column / (2 * VL), lane = column % VL, is_second = column / VL % 2;
        for (int k = 0; k < k_len; k++) {
            uint32_t bits;
            std::memcpy(&bits, w + k, sizeof bits);
            if (bits & 0xFFFF) return false;
            static_cast<uint16_t*>(strip)[k * STRIP + pair * 2 * VL + lane * 2 + is_second] = bits >> 16;
        }
        return true;
    }
    Halves run(int) const { return *this; }
    template <int AT>
    void load(int k, vf* w) const {
        prefetch<STRIP * 2>(at + k * STRIP);
        for (int j = 0; j < STRIP_VECTORS; j += 2) {
            const vi both = load_bytes(at + k * STRIP + j * VL);
            w[j] = as_floats(both << 16);
            w[j + 1] = as_floats(both & static_cast<int32_t>(0xFFFF0000));
        }
    }

  private:
    const uint16_t* at;
};

// A group of a strip: offsets [STRIP] in half precision, then q by lanes of four bytes, [STRIP][4] for some k, then scales
// [STRIP] in half precision. A lane has four k in 8 bits, or eight in 4 bits, whose low halves are the first four k and
// whose high halves the last four: products of integers (matmul_int8.h) want them so.
//
// A lane becomes a float without being shifted or converted: read so many bytes on that q comes to lie within a float's
// fraction, from bit B on, and given the exponent of 1, it is 1 + (q + Z) / 2^(23 - B), Z being 128 in 8 bits, where q may be
// negative, and else 0. So
//
//   w = (1 + (q + Z) / 2^(23 - B)) * (scale * 2^(23 - B)) + (offset - scale * (2^(23 - B) + Z)),
//
// rounded once, from factors that are exact where IS_NEAR: the float that scale * q + offset is, as long as the compiler fuses
// them (in 8 bits their product has 27 bits). What is read beyond the lanes lies within the group.
template <int BITS, bool IS_NEAR = BITS == 8>
class Grouped {
  public:
    static constexpr int RUN = WEIGHT_GROUP, TOGETHER = 32 / BITS;
    static constexpr long CODES_AT = STRIP * 2, SCALES_AT = CODES_AT + STRIP * WEIGHT_GROUP * BITS / 8;
    static constexpr long GROUP_BYTES = SCALES_AT + STRIP * 2;
    static constexpr int ZERO = BITS == 8 ? 128 : 0;  // is added to q, which may be negative
    static constexpr int FACTORS = IS_NEAR ? 8 / BITS : 1;  // pairs of a scale and an offset: one for each place in a byte
    Grouped() = default;
    static constexpr long bytes(int k_len) { return k_len / WEIGHT_GROUP * GROUP_BYTES; }
    Grouped(const void* strip, int k) : at(static_cast<const uint8_t*>(strip) + k / WEIGHT_GROUP * GROUP_BYTES) {}

    static bool put(void* strip, int k_len, int column, const float* w) {
        uint8_t* group = static_cast<uint8_t*>(strip);
        for (int k = 0; k < k_len; k += WEIGHT_GROUP, group += GROUP_BYTES) {
            uint16_t* offsets = reinterpret_cast<uint16_t*>(group);
            uint16_t* scales = reinterpret_cast<uint16_t*>(group + SCALES_AT);
            int q[WEIGHT_GROUP];
            if (!fit(w + k, &scales[column], &offsets[column], q)) return false;
            uint8_t* lanes = group + CODES_AT + column * 4;
            for (int i = 0; i < WEIGHT_GROUP; i += TOGETHER, lanes += STRIP * 4)
                for (int k = i; k < i + 4; k++) lanes[k - i] = BITS == 8 ? q[k] : q[k] | q[k + 4] << 4;
        }
        return true;
    }

    struct Run {
        vf scale[FACTORS][STRIP_VECTORS], offset[FACTORS][STRIP_VECTORS];
        const uint8_t* lanes;

        template <int AT>
        void load(int k, vf* w) const {
            constexpr int PLACE = AT / 4, BIT = bit(PLACE);
            const uint8_t* at = lanes + k / TOGETHER * STRIP * 4 + (IS_NEAR ? AT % 4 - BIT / 8 : 0);
            for (int j = 0; j < STRIP_VECTORS; j++) {
                const vi lane = load_bytes(at + j * VL * 4);
                if constexpr (IS_NEAR)
                    w[j] = one_and<BITS, BIT, ZERO>(lane) * scale[PLACE][j] + offset[PLACE][j];
                else
                    w[j] = low_nibbles(lane >> (8 * (AT % 4) + 4 * PLACE)) * scale[0][j] + offset[0][j];
            }
        }
    };
    // Of the j-th VL columns of a strip's group.
    static vf scales(const uint8_t* group, int j) { return halves(group + SCALES_AT, j); }
    static vf offsets(const uint8_t* group, int j) { return halves(group, j); }

    Run run(int k) const {
        const uint8_t* group = at + k / WEIGHT_GROUP * GROUP_BYTES;
        prefetch<GROUP_BYTES>(group);
        Run run;
        for (int j = 0; j < STRIP_VECTORS; j++)
            for (int i = 0; i < FACTORS; i++) {
                const vf scale = scales(group, j), offset = offsets(group, j);
                run.scale[i][j] = IS_NEAR ? scale * unit(i) : scale;
                run.offset[i][j] = IS_NEAR ? offset - scale * (unit(i) + ZERO) : offset;
            }
        run.lanes = group + CODES_AT;
        return run;
    }

  private:
    // The lowest bit of q in its float's fraction, by the half of the byte that holds it.
    static constexpr int bit(int place) { return BITS == 8 ? 8 : place ? 12 : 16; }
    static constexpr float unit(int place) { return 1 << (23 - bit(place)); }
    static vf halves(const uint8_t* at, int j) { return load_halves(reinterpret_cast<const uint16_t*>(at) + j * VL); }

    // scale * q + offset == w for the 32 of a group, exactly. The ends of q's range are mostly both in use: so the distance of
    // the extremes tells the scale.
    static bool fit(const float* w, uint16_t* scale, uint16_t* offset, int* q) {
        vf low = load(w), high = low;
        for (int i = VL; i < WEIGHT_GROUP; i += VL) {
            const vf each = load(w + i);
            low = each < low ? each : low;
            high = each > high ? each : high;
        }
        float least = low[0], most = high[0];
        for (int i = 1; i < VL; i++) {
            least = std::min(least, low[i]);
            most = std::max(most, high[i]);
        }
        if (BITS == 8) {
            *offset = to_half(0);
            const float largest = std::max(std::fabs(least), std::fabs(most));
            for (int steps = 127; steps; steps--)
                if (fits(w, *scale = to_half(largest / steps), *offset, q)) return true;
            return false;
        }
        for (int steps = 15; steps; steps--)
            for (const bool is_turned : {false, true})
                if (fits(w, *scale = to_half((is_turned ? least - most : most - least) / steps),
                         *offset = to_half(is_turned ? most : least), q))
                    return true;
        return false;
    }
    static bool fits(const float* w, uint16_t half_scale, uint16_t half_offset, int* q) {
        constexpr float FIRST = BITS == 8 ? -127 : 0, LAST = BITS == 8 ? 127 : 15;
        const float scale = from_half(half_scale), offset = from_half(half_offset), inverse = scale ? 1 / scale : 0;
        for (int place = 0; IS_NEAR && place < FACTORS; place++) {
            const double exact = offset - static_cast<double>(scale) * (unit(place) + ZERO);
            if (static_cast<float>(exact) != exact) return false;
        }
        vi is_wrong{};
        for (int i = 0; i < WEIGHT_GROUP; i += VL) {
            const vf each = load(w + i), nearest = as_is((each - offset) * inverse + TO_NEAREST) - TO_NEAREST;
            is_wrong |= ~((nearest >= FIRST) & (nearest <= LAST) & (nearest * scale + offset == each));
            const vi steps = __builtin_convertvector(nearest, vi);
            std::memcpy(q + i, &steps, sizeof steps);
        }
        return !fold(is_wrong, [](vi a, vi b) { return a | b; });
    }

    const uint8_t* at;
};

using Near4 = Grouped<4, true>;

// The k_len k that a reader stands before, as floats in `room`.
inline Floats to_floats(const Floats& strip, int, float*) { return strip; }
template <typename Strip>
inline Floats to_floats(const Strip& strip, int k_len, float* room) {
    vf w[STRIP_VECTORS];
    const auto put = [&](float* at) {
        for (int j = 0; j < STRIP_VECTORS; j++) store(at + j * VL, w[j]);
    };
    for (long begin = 0; begin < k_len; begin += Strip::RUN) {
        const typename Strip::Run run = strip.run(begin);
        const int count = std::min<long>(Strip::RUN, k_len - begin);
        for (int k = 0; k < count; k += Strip::TOGETHER)
            each_of<Strip::TOGETHER>([&](auto at) __attribute__((always_inline)) {
                run.template load<at.value>(k, w);
                put(room + (begin + k + at.value) * STRIP);
            });
    }
    return Floats(room, 0);
}

}  // namespace ms
