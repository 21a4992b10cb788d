// y[m, n] = sum_k x[m, k] * w[n, k], in float32, whatever w is kept in (panels.h).
//
// Each y[m, n] is one chain of fused multiply-adds over k = 0, 1, 2, ...: its bits depend on x[m] and w[n] alone, never
// on how many rows there are or which thread has them.
#pragma once
#include <type_traits>
#include "panels.h"

namespace ms {

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12;  // 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6;  // 12 of 16
#else
constexpr int TILE_ROWS = 3;  // NEON: 24 of 32
#endif
// So many rows read the weights straight into their tiles; for more they become floats once. With AVX2 a tile of six has no
// registers left to make floats of codes with.
template <typename Strip>
constexpr int FEW_ROWS = 2 * TILE_ROWS;
#if defined(__AVX2__) && !defined(__AVX512F__)
template <int BITS, bool IS_NEAR>
constexpr int FEW_ROWS<Grouped<BITS, IS_NEAR>> = TILE_ROWS - 1;
#endif
constexpr int BLOCK_ROWS = 96;  // rows that stay in the L2 cache while the strips pass
constexpr int BLOCK_K = 576;    // of k, likewise; a multiple of WEIGHT_GROUP. Partial sums are kept in y, exactly

// Of a product in progress: rows of x from some k on, and where their sums go.
struct Part {
    const float* x;
    long x_stride;
    float* y;
    long y_stride;
    int k_len;
    bool is_first;  // of k: sums start at zero
};

// ROWS rows by N strips that lie side by side. Not inlined: amid the loops around it the compiler runs out of registers for
// the addresses.
template <int ROWS, int N, typename Strip>
__attribute__((noinline)) static void tile(const Part& part, const Strip* strips) {
    const float* const x = part.x;
    const long x_stride = part.x_stride, y_stride = part.y_stride, k_len = part.k_len;
    vf sums[ROWS][N * STRIP_VECTORS];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < N * STRIP_VECTORS; j++)
            sums[i][j] = part.is_first ? vf{} : load(part.y + i * y_stride + j * VL);
    for (long begin = 0; begin < k_len; begin += Strip::RUN) {
        typename Strip::Run runs[N];
        for (int n = 0; n < N; n++) runs[n] = strips[n].run(begin);
        const int count = std::min<long>(Strip::RUN, k_len - begin);
        const auto step = [&](auto at, int k) __attribute__((always_inline)) {
            vf w[N * STRIP_VECTORS];
            for (int n = 0; n < N; n++) runs[n].template load<at.value>(k, w + n * STRIP_VECTORS);
            for (int i = 0; i < ROWS; i++) {
                const float a = x[i * x_stride + begin + k + at.value];
                for (int j = 0; j < N * STRIP_VECTORS; j++) sums[i][j] += a * w[j];
            }
        };
        for (int k = 0; k < count; k += Strip::TOGETHER)
            each_of<Strip::TOGETHER>([&](auto at) __attribute__((always_inline)) { step(at, k); });
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < N * STRIP_VECTORS; j++) store(part.y + i * y_stride + j * VL, sums[i][j]);
}

// The same of `rows` rows, ROWS at most.
template <int ROWS, int N, typename Strip>
inline void short_tile(int rows, const Part& part, const Strip* strips) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) return tile<ROWS, N>(part, strips);
        short_tile<ROWS - 1, N>(rows, part, strips);
    }
}

// A strip by any number of rows.
template <typename Strip>
inline void by_tiles(int rows, Part part, const Strip& strip) {
    static_assert(FEW_ROWS<Strip> >= TILE_ROWS - 1, "more rows than a short tile has would be left out");
    if constexpr (FEW_ROWS<Strip> >= TILE_ROWS)
        for (; rows >= TILE_ROWS; rows -= TILE_ROWS) {
            tile<TILE_ROWS, 1>(part, &strip);
            part.x += TILE_ROWS * part.x_stride;
            part.y += TILE_ROWS * part.y_stride;
        }
    short_tile<TILE_ROWS - 1, 1>(rows, part, &strip);
}

// Columns [panel_begin, panel_end) * 32 of y, for all rows.
template <typename Strip>
inline void matmul(const float* x, long x_stride, const uint8_t* packed, float* y, long y_stride, int rows, int k_len,
                   int panel_begin, int panel_end) {
    alignas(64) float room[std::is_same_v<Strip, Floats> ? 1 : BLOCK_K * STRIP];
    for (int m0 = 0; m0 < rows; m0 += BLOCK_ROWS) {
        const int count = std::min(rows - m0, BLOCK_ROWS);
        for (int k0 = 0; k0 < k_len; k0 += BLOCK_K) {
            for (int p = panel_begin; p < panel_end; p++) {
                Strip strips[STRIPS];
                for (int n = 0; n < STRIPS; n++) strips[n] = Strip(packed + (p * STRIPS + n) * Strip::bytes(k_len), k0);
                Part part{x + m0 * x_stride + k0, x_stride, y + m0 * y_stride + p * PANEL,
                                y_stride, std::min(k_len - k0, BLOCK_K), k0 == 0};
                if (count == 1) {  // so few sums wait for each other: all strips at once
                    tile<1, STRIPS>(part, strips);
                    continue;
                }
                for (int n = 0; n < STRIPS; n++, part.y += STRIP)
                    if (count <= FEW_ROWS<Strip>)
                        by_tiles(count, part, strips[n]);
                    else
                        by_tiles(count, part, to_floats(strips[n], part.k_len, room));
            }
        }
    }
}

}  // namespace ms
