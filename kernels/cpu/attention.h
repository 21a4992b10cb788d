// Paged attention for decode and for prompt chunks alike, in float32 over keys and values in float32 or int8.
//
//   out[q] = sum_j softmax_j(q . k[j]) v[j]   over the keys j that position p of the query may see
//
// Keys are taken in tiles of 64 tokens at absolute positions, with a running maximum (online softmax; Milakov and
// Gimelshein 2018). A query meets the same tiles in the same order alone, in a chunk, in a batch, and for every block
// size; each score is one chain over d, each output one chain over the tokens of a tile. So its bits never change.
//
// Pools, for one layer:  k [num_blocks][kv_heads][head_dim][block_size]   (a group of tokens is one vector for each d)
//                        v [num_blocks][kv_heads][block_size][head_dim]
//
// In int8, behind each head's part of a block follow the scales of its tokens, [block_size] in float32: a key is its codes
// times its scale, which is put on the score, and a value likewise, whose scale is put on its weight.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>
#include "vec.h"

namespace ms {

constexpr int KEY_TILE = 64;                     // tokens
constexpr int GROUPS = KEY_TILE / GROUP;         // 4
constexpr int GROUP_VECTORS = GROUP / VL;
constexpr int WIDTH = 4;  // vectors of a row that are summed at once
#if defined(__AVX512F__)
constexpr int HEAD_ROWS = 6;  // query rows at once: 24 sums
#else
constexpr int HEAD_ROWS = 3;  // 12 sums
#endif
constexpr int MAX_HEAD_DIM = 256;
constexpr int QUERY_ROWS = 48;  // rows (queries x heads of a group) of one task

constexpr int SCALE_BYTES = 4;

// One layer's pools of T, float or int8_t.
template <typename T>
struct Paged {
    static constexpr bool IS_CODED = sizeof(T) == 1;
    T *k, *v;
    int block_size, kv_heads, head_dim;

    long at(int block, int head) const {
        const int width = head_dim + (IS_CODED ? SCALE_BYTES : 0);
        return (static_cast<long>(block) * kv_heads + head) * width * block_size;
    }
    float* scales(T* part) const { return reinterpret_cast<float*>(part + static_cast<long>(head_dim) * block_size); }
};

// scores[r][0 .. WIDTH * VL) = q[r] . k of so many tokens: a pointer for each vector of them, `stride` numbers from d to d + 1.
// Neither this nor mix_rows is inlined, as matmul.h's tile.
template <int ROWS, typename T>
__attribute__((noinline)) static void score_rows(const float* q, int head_dim, const T* const* keys, long stride,
                                                 float* scores) {
    vf sums[ROWS][WIDTH];
    for (auto& row : sums)
        for (vf& sum : row) sum = vf{};
    for (int d = 0; d < head_dim; d++) {
        vf k[WIDTH];
        for (int j = 0; j < WIDTH; j++) k[j] = load(keys[j] + d * stride);
        for (int r = 0; r < ROWS; r++) {
            const float a = q[r * head_dim + d];
            for (int j = 0; j < WIDTH; j++) sums[r][j] += a * k[j];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < WIDTH; j++) store(scores + r * KEY_TILE + j * VL, sums[r][j]);
}

// Tokens that lie side by side in one block.
template <typename T>
struct Stretch {
    const T* values;
    int count;
};

// out[r][0 .. N * VL) += sum_j weights[r][j] * v[j], j ascending over the tokens of all stretches, from `offset` in each value.
template <int ROWS, int N, typename T>
__attribute__((noinline)) static void mix_rows(const float* weights, const Stretch<T>* begin, const Stretch<T>* end,
                                               long head_dim, long offset, float* out) {
    vf sums[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < N; j++) sums[r][j] = load(out + r * head_dim + j * VL);
    for (const Stretch<T>* stretch = begin; stretch < end; stretch++) {
        const T* value = stretch->values + offset;
        for (int t = stretch->count; t > 0; t--, value += head_dim, weights++) {
            vf v[N];
            for (int j = 0; j < N; j++) v[j] = load(value + j * VL);
            for (int r = 0; r < ROWS; r++) {
                const float w = weights[r * KEY_TILE];
                for (int j = 0; j < N; j++) sums[r][j] += w * v[j];
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < N; j++) store(out + r * head_dim + j * VL, sums[r][j]);
}

// Calls work(size, first row) for groups of rows: as many of HEAD_ROWS as fit, then of 3, then single ones.
template <typename Work>
inline void in_groups(int rows, Work work) {
    int r = 0;
    for (; r + HEAD_ROWS <= rows; r += HEAD_ROWS) work(std::integral_constant<int, HEAD_ROWS>{}, r);
    if constexpr (HEAD_ROWS > 3)
        for (; r + 3 <= rows; r += 3) work(std::integral_constant<int, 3>{}, r);
    for (; r < rows; r++) work(std::integral_constant<int, 1>{}, r);
}

// All query rows of one task: `rows` of them, row r at position position[r], in q [rows][head_dim] (scaled already).
// `out` [rows][head_dim]. `table` are the sequence's blocks. window 0: all earlier tokens; softcap 0: none.
template <typename T>
inline void attend(const Paged<T>& pool, const int* table, int head, const float* q, const int* position, int rows,
                   int window, float softcap, float* out) {
    const int dim = pool.head_dim, block = pool.block_size;
    alignas(64) float scores[QUERY_ROWS * KEY_TILE];
    alignas(64) float key_scales[KEY_TILE] = {}, value_scales[KEY_TILE] = {};  // int8 only
    alignas(64) T gathered[GROUPS][MAX_HEAD_DIM * GROUP];  // small blocks only: a group of keys side by side
    float top[QUERY_ROWS], total[QUERY_ROWS];
    int first = std::numeric_limits<int>::max(), last = 0;
    for (int r = 0; r < rows; r++) {
        top[r] = -std::numeric_limits<float>::infinity();
        total[r] = 0;
        first = std::min(first, window ? std::max(0, position[r] - window + 1) : 0);
        last = std::max(last, position[r]);
    }
    std::memset(out, 0, sizeof(float) * rows * dim);
    for (int tile = first / KEY_TILE * KEY_TILE; tile <= last; tile += KEY_TILE) {
        const int count = std::min(KEY_TILE, last + 1 - tile);
        const T* key[GROUPS];
        int stride = block;
        for (int g = 0; g < GROUPS; g++) {
            const int token = tile + std::min(g * GROUP, (count - 1) / GROUP * GROUP);  // past the end: any that exists
            if (block >= GROUP) {
                key[g] = pool.k + pool.at(table[token / block], head) + token % block;
            } else {
                stride = GROUP;
                key[g] = gathered[g];
                for (int part = 0; part < GROUP; part += block) {
                    const int at = std::min(token + part, last / block * block);
                    const T* source = pool.k + pool.at(table[at / block], head);
                    for (int d = 0; d < dim; d++)
                        std::memcpy(gathered[g] + d * GROUP + part, source + d * block, sizeof(T) * block);
                }
            }
        }
        if constexpr (Paged<T>::IS_CODED)
            for (int t = 0; t < count; t++) {
                const int token = tile + t;
                const long part = pool.at(table[token / block], head);
                key_scales[t] = pool.scales(pool.k + part)[token % block];
                value_scales[t] = pool.scales(pool.v + part)[token % block];
            }
        for (int first = 0; first * VL < count; first += WIDTH) {  // few enough keys to stay in the L1 cache
            const T* keys[WIDTH];
            for (int j = 0; j < WIDTH; j++) keys[j] = key[(first + j) / GROUP_VECTORS] + (first + j) % GROUP_VECTORS * VL;
            in_groups(rows, [&](auto group, int r) {
                score_rows<group.value>(q + r * dim, dim, keys, stride, scores + r * KEY_TILE + first * VL);
            });
        }
        for (int r = 0; r < rows; r++) {
            float* s = scores + r * KEY_TILE;
            const int seen = std::min(KEY_TILE, position[r] + 1 - tile);  // tokens of the tile up to the query's own
            const int unseen = window ? std::max(0, position[r] + 1 - window - tile) : 0;
            if (seen <= unseen) {
                std::memset(s, 0, sizeof(float) * KEY_TILE);
                continue;
            }
            const int end = (seen + GROUP - 1) / GROUP * GROUP;  // what lies behind it has weight 0
            if constexpr (Paged<T>::IS_CODED)
                for (int j = 0; j < end; j += VL) store(s + j, load(s + j) * load(key_scales + j));
            if (softcap > 0)
                for (int j = 0; j < end; j += VL) store(s + j, softcap * tanh(load(s + j) / softcap));
            for (int j = 0; j < unseen; j++) s[j] = -std::numeric_limits<float>::infinity();
            for (int j = seen; j < end; j++) s[j] = -std::numeric_limits<float>::infinity();
            vf most = load(s);
            for (int j = VL; j < end; j += VL) {
                const vf other = load(s + j);
                most = other > most ? other : most;
            }
            float highest = top[r];
            for (int j = 0; j < VL; j++) highest = most[j] > highest ? most[j] : highest;
            const float keep = highest > top[r] ? exp(splat(top[r] - highest))[0] : 1.0f;
            vf each[GROUP_VECTORS] = {};
            for (int j = 0; j < end; j += VL) {
                const vf e = exp(load(s + j) - highest);
                store(s + j, Paged<T>::IS_CODED ? e * load(value_scales + j) : e);
                each[j / VL % GROUP_VECTORS] += e;
            }
            std::memset(s + end, 0, sizeof(float) * (KEY_TILE - end));
            alignas(64) float sums[GROUP];
            for (int j = 0; j < GROUP_VECTORS; j++) store(sums + j * VL, each[j]);
            total[r] = total[r] * keep + sum16(sums);
            top[r] = highest;
            if (keep != 1.0f)
                for (int d = 0; d < dim; d++) out[r * dim + d] *= keep;
        }
        Stretch<T> stretches[KEY_TILE], *end = stretches;
        for (int t = 0; t < count; t += end++->count) {
            const int token = tile + t;
            *end = {pool.v + pool.at(table[token / block], head) + static_cast<long>(token % block) * dim,
                    std::min(count - t, block - token % block)};
        }
        int d = 0;
        for (; d + WIDTH * VL <= dim; d += WIDTH * VL)  // few enough numbers to stay in the L1 cache
            in_groups(rows, [&](auto group, int r) {
                mix_rows<group.value, WIDTH>(scores + r * KEY_TILE, stretches, end, dim, d, out + r * dim + d);
            });
        for (; d < dim; d += GROUP)
            in_groups(rows, [&](auto group, int r) {
                mix_rows<group.value, GROUP_VECTORS>(scores + r * KEY_TILE, stretches, end, dim, d, out + r * dim + d);
            });
    }
    for (int r = 0; r < rows; r++) {
        const float scale = 1.0f / total[r];
        for (int d = 0; d < dim; d++) out[r * dim + d] *= scale;
    }
}

}  // namespace ms
