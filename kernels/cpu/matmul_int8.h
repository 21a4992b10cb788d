// y[m, n] = sum_k x[m, k] * w[n, k] with x as codes of 8 bits (codes.h), over groups of 32 k:
//
//   weights of 8 bits   y = weight_scale[n] * sum_g scale[m, g] * dot[m, n, g]
//   weights of 4 bits   y = sum_g (scale[m, g] * w_scale[n, g]) * dot[m, n, g] + w_offset[n, g] * (scale[m, g] * sum_k code[m, k])
//
// dot[m, n, g] = sum_k code[m, k] * q[n, k] is one of integers, below 2^20 and therefore exact; the sum over g = 0, 1, 2, ... is
// a chain of fused multiply-adds. So y's bits depend on row m and column n alone, never on how many rows there are, which
// thread has them, or the instruction set.
//
// Weights lie in panels of 32 output columns and these in strips (panels.h). A group of a strip in 8 bits is [32 / LANE][STRIP]
// [LANE] bytes (dot.h); in 4 bits it is that of Grouped<4>.
#pragma once
#include <algorithm>
#include "codes.h"
#include "dot.h"
#include "panels.h"

namespace ms {

#if defined(__AVX512F__)
constexpr int CODE_TILE_ROWS = 12;  // 24 of 32 registers sum
#elif defined(__AVX2__)
constexpr int CODE_TILE_ROWS = 6;  // 12 of 16
#else
constexpr int CODE_TILE_ROWS = 2;
#endif
constexpr int CODE_BLOCK_ROWS = 96;  // rows that stay in the L2 cache while the strips pass

// Weights of 8 bits. Members are of a strip's columns, VL for each j.
class Weights8 {
  public:
    static constexpr int GROUP_BYTES = CODE_GROUP * STRIP;
    Weights8(const uint8_t* strip, const float* scales, int column) : at_(strip), scales_(scales + column) {}

    // totals += what group g adds, of ROWS rows from `row` on.
    template <int ROWS>
    void add_group(const Codes& x, long row, int g, vf (*totals)[STRIP_VECTORS]) const {
        const long stride = static_cast<long>(x.groups()) * CODE_GROUP;
        const WideCode* codes = x.wide(row) + g * CODE_GROUP;
        const float* scales = x.scales(row) + g;
        const int32_t* offsets = x.offsets(row) + g;
        const uint8_t* group = at_ + static_cast<long>(g) * GROUP_BYTES;
        vi sums[ROWS][STRIP_VECTORS];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < STRIP_VECTORS; j++) sums[i][j] = start_sum(offsets[i * x.groups()]);
        for (int k = 0; k < CODE_GROUP; k += LANE) {
            vi w[STRIP_VECTORS];
            for (int j = 0; j < STRIP_VECTORS; j++)
                w[j] = load_weights(group + k * STRIP + j * VL * LANE);
            for (int i = 0; i < ROWS; i++) {
                const vi lanes = load_codes(codes + i * stride + k);
                for (int j = 0; j < STRIP_VECTORS; j++) sums[i][j] = add_dot(sums[i][j], w[j], lanes);
            }
        }
        for (int i = 0; i < ROWS; i++) {
            const float scale = scales[i * x.groups()];
            for (int j = 0; j < STRIP_VECTORS; j++) totals[i][j] += __builtin_convertvector(sums[i][j], vf) * scale;
        }
    }
    vf finished(vf total, int j) const { return total * load(scales_ + j * VL); }

  private:
    const uint8_t* at_;
    const float* scales_;
};

// Weights of 4 bits with scales and offsets of their own.
class Weights4 {
  public:
    static constexpr int GROUP_BYTES = Grouped<4>::GROUP_BYTES;
    Weights4(const uint8_t* strip, const float*, int) : at_(strip) {}

    template <int ROWS>
    void add_group(const Codes& x, long row, int g, vf (*totals)[STRIP_VECTORS]) const {
        const long stride = static_cast<long>(x.groups()) * CODE_GROUP;
        const int8_t* codes = x.codes(row) + g * CODE_GROUP;
        const float *scales = x.scales(row) + g, *of_codes = x.sums(row) + g;
        const uint8_t* group = at_ + static_cast<long>(g) * GROUP_BYTES;
        Sum4 sums[ROWS][STRIP_VECTORS];
        each_of<CODE_GROUP / 4>([&](auto step) __attribute__((always_inline)) {  // of a lane's eight k the first or last four
            constexpr int K = step.value * 4, IS_LAST = step.value % 2;
            vi w[STRIP_VECTORS];
            for (int j = 0; j < STRIP_VECTORS; j++) {
                const vi both = load_bytes(group + Grouped<4>::CODES_AT + K / 8 * 4 * STRIP + j * VL * 4);
                w[j] = (IS_LAST ? both >> 4 : both) & 0x0F0F0F0F;
            }
            for (int i = 0; i < ROWS; i++) {
                const vi lanes = load_codes(codes + i * stride + K);
                for (int j = 0; j < STRIP_VECTORS; j++) sums[i][j] = K ? add_dot4(sums[i][j], w[j], lanes) : dot4(w[j], lanes);
            }
        });
        vf w_scales[STRIP_VECTORS], w_offsets[STRIP_VECTORS];
        for (int j = 0; j < STRIP_VECTORS; j++) {
            w_scales[j] = Grouped<4>::scales(group, j);
            w_offsets[j] = Grouped<4>::offsets(group, j);
        }
        for (int i = 0; i < ROWS; i++) {
            const float scale = scales[i * x.groups()], sum = of_codes[i * x.groups()];
            for (int j = 0; j < STRIP_VECTORS; j++) {
                vf total = totals[i][j];
                total += __builtin_convertvector(whole_sum(sums[i][j]), vf) * as_is(w_scales[j] * scale);
                total += w_offsets[j] * sum;
                totals[i][j] = total;
            }
        }
    }
    vf finished(vf total, int) const { return total; }

  private:
    const uint8_t* at_;
};

// ROWS rows by a strip. Not inlined, as matmul.h's.
template <int ROWS, typename Weights>
__attribute__((noinline)) static void code_tile(const Codes& x, long row, const Weights& weights, float* y, long y_stride) {
    vf totals[ROWS][STRIP_VECTORS] = {};
    for (int g = 0; g < x.groups(); g++) {
        asm("" : "+m"(totals));  // in memory from group to group: the sums need the registers
        weights.template add_group<ROWS>(x, row, g, totals);
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < STRIP_VECTORS; j++) store(y + i * y_stride + j * VL, weights.finished(totals[i][j], j));
}

// The same of `rows` rows, ROWS at most.
template <int ROWS, typename Weights>
inline void short_code_tile(int rows, const Codes& x, long row, const Weights& weights, float* y, long y_stride) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return code_tile<ROWS>(x, row, weights, y, y_stride);
        short_code_tile<ROWS - 1>(rows, x, row, weights, y, y_stride);
    }
}

// Rows [row_begin, row_end) and columns [panel_begin, panel_end) * 32; y is the first of these rows. Weights4 has no `scales`.
template <typename Weights>
inline void matmul_int8(const Codes& x, const uint8_t* packed, const float* scales, float* y, long y_stride, int row_begin,
                        int row_end, int panel_begin, int panel_end) {
    for (int m0 = row_begin; m0 < row_end; m0 += CODE_BLOCK_ROWS) {
        const int m1 = std::min(row_end, m0 + CODE_BLOCK_ROWS);
        for (int s = panel_begin * STRIPS; s < panel_end * STRIPS; s++) {
            const Weights weights(packed + static_cast<long>(s) * x.groups() * Weights::GROUP_BYTES, scales, s * STRIP);
            const auto to = [&](int m) { return y + s * STRIP + (m - row_begin) * y_stride; };
            int m = m0;
            for (; m + CODE_TILE_ROWS <= m1; m += CODE_TILE_ROWS)
                code_tile<CODE_TILE_ROWS>(x, m, weights, to(m), y_stride);
            short_code_tile<CODE_TILE_ROWS - 1>(m1 - m, x, m, weights, to(m), y_stride);
        }
    }
}

}  // namespace ms
