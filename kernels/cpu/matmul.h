// y[m, n] = sum_k x[m, k] * w[n, k], in float32.
//
// Weights are packed in panels of 32 output columns, [N / 32][K][32], so that a step over k reads one line of a panel.
// Each y[m, n] is one chain of fused multiply-adds over k = 0, 1, 2, ...: its bits depend on x[m] and w[n] alone, never
// on how many rows there are or which thread has them.
#pragma once
#include <algorithm>
#include "vec.h"

namespace ms {

constexpr int PANEL = 32;
constexpr int PANEL_VECTORS = PANEL / VL;
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 3;   // 12 of 16
#else
constexpr int TILE_ROWS = 3;  // NEON: 24 of 32
#endif
constexpr int BLOCK_ROWS = 96;  // rows that stay in the L2 cache while the panels pass
constexpr int BLOCK_K = 1536;   // of k, likewise; partial sums are kept in y, exactly

template <int ROWS>
inline void tile(const float* x, long x_stride, const float* panel, float* y, long y_stride, int k_len, bool first) {
    vf acc[ROWS][PANEL_VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANEL_VECTORS; j++) acc[i][j] = first ? vf{} : load(y + i * y_stride + j * VL);
    for (int k = 0; k < k_len; k++) {
        prefetch_step(panel + k * PANEL);
        vf w[PANEL_VECTORS];
        for (int j = 0; j < PANEL_VECTORS; j++) w[j] = load(panel + k * PANEL + j * VL);
        for (int i = 0; i < ROWS; i++) {
            const float a = x[i * x_stride + k];
            for (int j = 0; j < PANEL_VECTORS; j++) acc[i][j] += a * w[j];
        }
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < PANEL_VECTORS; j++) store(y + i * y_stride + j * VL, acc[i][j]);
}

// The rows that are left over after whole tiles.
template <int ROWS>
inline void rest(int rows, const float* x, long x_stride, const float* panel, float* y, long y_stride, int k_len,
                 bool first) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return tile<ROWS>(x, x_stride, panel, y, y_stride, k_len, first);
        rest<ROWS - 1>(rows, x, x_stride, panel, y, y_stride, k_len, first);
    }
}

// Columns [panel_begin, panel_end) * 32 of y, for all rows.
inline void matmul(const float* x, long x_stride, const float* packed, float* y, long y_stride, int rows, int k_len,
                   int panel_begin, int panel_end) {
    for (int m0 = 0; m0 < rows; m0 += BLOCK_ROWS) {
        const int m1 = std::min(rows, m0 + BLOCK_ROWS);
        for (int k0 = 0; k0 < k_len; k0 += BLOCK_K) {
            const int k1 = std::min(k_len, k0 + BLOCK_K);
            for (int p = panel_begin; p < panel_end; p++) {
                const float* panel = packed + (static_cast<long>(p) * k_len + k0) * PANEL;
                int m = m0;
                for (; m + TILE_ROWS <= m1; m += TILE_ROWS)
                    tile<TILE_ROWS>(x + m * x_stride + k0, x_stride, panel, y + m * y_stride + p * PANEL, y_stride,
                                    k1 - k0, k0 == 0);
                rest<TILE_ROWS - 1>(m1 - m, x + m * x_stride + k0, x_stride, panel, y + m * y_stride + p * PANEL,
                                    y_stride, k1 - k0, k0 == 0);
            }
        }
    }
}

}  // namespace ms
