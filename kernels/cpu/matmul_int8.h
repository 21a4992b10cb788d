// y[m, n] = weight_scale[n] * sum_g scale[m, g] * (sum_k code[m, k] * w[n, k] over the 32 k of group g)
//
// The inner sums are integers, below 2^20 and therefore exact; the outer one is a chain of fused multiply-adds over
// g = 0, 1, 2, ... So y's bits depend on row m and column n alone, never on how many rows there are, which thread has
// them, or the instruction set.
//
// Weights are packed in panels of 32 output columns, [N / 32][K / 4][32][4] bytes (dot.h), K padded to whole groups: a
// vector holds four k of each of its columns.
#pragma once
#include <algorithm>
#include "codes.h"
#include "dot.h"
#include "matmul.h"

namespace ms {

#if defined(__AVX512VNNI__)
constexpr int CODE_TILE_ROWS = 12;  // 24 of 32 registers sum
#elif defined(__AVX512F__)
constexpr int CODE_TILE_ROWS = 4;
#else
constexpr int CODE_TILE_ROWS = 2;  // 8 of 16
#endif
constexpr int CODE_BLOCK_ROWS = 192;  // rows that stay in the L2 cache while the panels pass
constexpr int PANEL_GROUP_BYTES = CODE_GROUP * PANEL;

template <int ROWS>
inline void code_tile(const Codes& x, long row, const uint8_t* panel, const float* weight_scales, float* y,
                      long y_stride) {
    const int8_t* codes = x.codes(row);
    const float* scales = x.scales(row);
    const int32_t* offsets = x.offsets(row);
    const int groups = x.groups(), stride = groups * CODE_GROUP;
    vf total[ROWS][PANEL_VECTORS] = {};
    for (int g = 0; g < groups; g++, panel += PANEL_GROUP_BYTES) {
        vi sum[ROWS][PANEL_VECTORS];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = start_sum(offsets[i * groups + g]);
        for (int k = 0; k < CODE_GROUP; k += 4) {
            prefetch_step(panel + k * PANEL);
            vi w[PANEL_VECTORS];
            for (int j = 0; j < PANEL_VECTORS; j++) w[j] = load_weights(panel + k * PANEL + j * VL * 4);
            for (int i = 0; i < ROWS; i++) {
                const FourCodes four(codes + i * stride + g * CODE_GROUP + k);
                for (int j = 0; j < PANEL_VECTORS; j++) sum[i][j] = add_dot(sum[i][j], w[j], four);
            }
        }
        for (int i = 0; i < ROWS; i++) {
            const float scale = scales[i * groups + g];
            for (int j = 0; j < PANEL_VECTORS; j++)
                total[i][j] += __builtin_convertvector(sum[i][j], vf) * scale;
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANEL_VECTORS; j++)
            store(y + i * y_stride + j * VL, total[i][j] * load(weight_scales + j * VL));
}

template <int ROWS>
inline void code_rest(int rows, const Codes& x, long row, const uint8_t* panel, const float* weight_scales, float* y,
                      long y_stride) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return code_tile<ROWS>(x, row, panel, weight_scales, y, y_stride);
        code_rest<ROWS - 1>(rows, x, row, panel, weight_scales, y, y_stride);
    }
}

// Rows [row_begin, row_end) and columns [panel_begin, panel_end) * 32; y is the first of these rows.
inline void matmul_int8(const Codes& x, const uint8_t* packed, const float* weight_scales, float* y, long y_stride,
                        int row_begin, int row_end, int panel_begin, int panel_end) {
    for (int m0 = row_begin; m0 < row_end; m0 += CODE_BLOCK_ROWS) {
        const int m1 = std::min(row_end, m0 + CODE_BLOCK_ROWS);
        for (int p = panel_begin; p < panel_end; p++) {
            const uint8_t* panel = packed + static_cast<long>(p) * x.groups() * PANEL_GROUP_BYTES;
            float* at = y + p * PANEL;
            int m = m0;
            for (; m + CODE_TILE_ROWS <= m1; m += CODE_TILE_ROWS)
                code_tile<CODE_TILE_ROWS>(x, m, panel, weight_scales + p * PANEL, at + (m - row_begin) * y_stride,
                                          y_stride);
            code_rest<CODE_TILE_ROWS - 1>(m1 - m, x, m, panel, weight_scales + p * PANEL,
                                          at + (m - row_begin) * y_stride, y_stride);
        }
    }
}

}  // namespace ms
