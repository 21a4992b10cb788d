// Rows of activations as int8: x[m, k] = code[m, k] * scale[m, k / 32], the nearest of 255 steps of each group of 32.
// A group is a function of its own numbers, never of other rows.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>
#include "dot.h"

namespace ms {

constexpr int CODE_GROUP = 32;

// Codes of n numbers, n a multiple of 16, and their sum; returns the scale: x[i] = codes[i] * scale, to the nearest of 255
// steps. A number that is not finite makes the scale NaN, and so everything that is computed from it.
inline float encode(const float* x, int n, int8_t* codes, int32_t* sum) {
    vi most{};  // of the numbers' bits without the sign, which order them: NaN above infinity above the rest
    for (int i = 0; i < n; i += VL) {
        const vi size = load_bytes(x + i) & 0x7FFFFFFF;
        most = size > most ? size : most;
    }
    const int32_t bits = fold(most, [](vi a, vi b) { return a > b ? a : b; });
    const bool is_finite = bits < 0x7F800000;
    float largest = 0;
    if (is_finite) std::memcpy(&largest, &bits, sizeof largest);
    constexpr float LEAST = 4e-37f;  // below it 127 / largest is infinite: as good as zeros
    const float steps = largest > LEAST ? 127.0f / largest : 0.0f;
    vi sums{};
    for (int i = 0; i < n; i += VL) {
        const vi code = as_bits(as_is(load(x + i) * steps) + TO_NEAREST) - as_bits(splat(TO_NEAREST));
        sums += code;
        const vb narrow = low_bytes(code);
        std::memcpy(codes + i, &narrow, sizeof narrow);
    }
    *sum = fold(sums, [](vi a, vi b) { return a + b; });
    return is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
}

class Codes {
  public:
    // Rows of k codes; those between k and the end of its last group are zero.
    void resize(long rows, int k) {
        k_ = k;
        groups_ = (k + CODE_GROUP - 1) / CODE_GROUP;
        codes_.resize(rows * groups_ * CODE_GROUP);
        if (HAS_WIDE) wide_.resize(codes_.size());
        scales_.resize(rows * groups_);
        offsets_.resize(rows * groups_);
        sums_.resize(rows * groups_);
    }
    int groups() const { return groups_; }
    const int8_t* codes(long row) const { return codes_.data() + row * groups_ * CODE_GROUP; }
    const WideCode* wide(long row) const {
        const void* at = HAS_WIDE ? static_cast<const void*>(wide_.data() + row * groups_ * CODE_GROUP) : codes(row);
        return static_cast<const WideCode*>(at);
    }
    const float* scales(long row) const { return scales_.data() + row * groups_; }
    const int32_t* offsets(long row) const { return offsets_.data() + row * groups_; }  // -128 * sum of the codes
    const float* sums(long row) const { return sums_.data() + row * groups_; }          // scale * sum of the codes

    void write(long row, const float* x) { write_groups(row, 0, groups_, x); }

    // Groups [begin, end) of a row, whose numbers start at x.
    void write_groups(long row, int begin, int end, const float* x) {
        for (int g = begin; g < end; g++, x += CODE_GROUP) {
            alignas(64) float padded[CODE_GROUP] = {};
            const float* from = x;
            if (const int left = k_ - g * CODE_GROUP; left < CODE_GROUP) {
                std::memcpy(padded, x, sizeof(float) * std::max(0, left));
                from = padded;
            }
            write_group(from, row * groups_ + g);
        }
    }

  private:
    static constexpr bool HAS_WIDE = sizeof(WideCode) > 1;

    void write_group(const float* x, long at) {
        int8_t* codes = codes_.data() + at * CODE_GROUP;
        int32_t sum;
        scales_[at] = encode(x, CODE_GROUP, codes, &sum);
        offsets_[at] = static_cast<int32_t>(-128u * static_cast<uint32_t>(sum));  // any bits where the scale is NaN
        sums_[at] = scales_[at] * static_cast<float>(sum);
        if (HAS_WIDE)
            for (int i = 0; i < CODE_GROUP; i++) wide_[at * CODE_GROUP + i] = codes[i];
    }

    int k_ = 0, groups_ = 0;
    std::vector<int8_t> codes_;
    std::vector<WideCode> wide_;
    std::vector<float> scales_, sums_;
    std::vector<int32_t> offsets_;
};

}  // namespace ms
