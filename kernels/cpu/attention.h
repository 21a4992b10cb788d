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
#if defined(__AVX512F__)
constexpr int HEAD_ROWS = 6;  // query rows at once: 24 accumulators
#else
constexpr int HEAD_ROWS = 1;  // 8 accumulators
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

// scores[r][0..64) = q[r] . k[tile]; `key` has a pointer for each group of 16 tokens, `stride` floats from d to d + 1.
template <int ROWS, typename T>
inline void score_rows(const float* q, int head_dim, const T* const* key, int stride, float* scores) {
    vf acc[ROWS][GROUPS * GROUP_VECTORS];
    for (auto& row : acc)
        for (auto& a : row) a = vf{};
    for (int d = 0; d < head_dim; d++) {
        vf k[GROUPS * GROUP_VECTORS];
        for (int g = 0; g < GROUPS; g++)
            for (int j = 0; j < GROUP_VECTORS; j++)
                k[g * GROUP_VECTORS + j] = load(key[g] + static_cast<long>(d) * stride + j * VL);
        for (int r = 0; r < ROWS; r++) {
            const float a = q[r * head_dim + d];
            for (int j = 0; j < GROUPS * GROUP_VECTORS; j++) acc[r][j] += a * k[j];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < GROUPS * GROUP_VECTORS; j++) store(scores + r * KEY_TILE + j * VL, acc[r][j]);
}

// out[r][d0 .. d0 + 16 * WIDTH) += sum_j weights[r][j] * v[j], j ascending over `count` tokens at `value`.
template <int ROWS, int WIDTH, typename T>
inline void mix_rows(const float* weights, const T* value, int head_dim, int count, float* out) {
    constexpr int N = WIDTH * GROUP_VECTORS;
    vf acc[ROWS][N];
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < N; j++) acc[r][j] = load(out + r * head_dim + j * VL);
    for (int t = 0; t < count; t++) {
        vf v[N];
        for (int j = 0; j < N; j++) v[j] = load(value + static_cast<long>(t) * head_dim + j * VL);
        for (int r = 0; r < ROWS; r++) {
            const float w = weights[r * KEY_TILE + t];
            for (int j = 0; j < N; j++) acc[r][j] += w * v[j];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int j = 0; j < N; j++) store(out + r * head_dim + j * VL, acc[r][j]);
}

template <int ROWS, typename T>
inline void mix(const float* weights, const T* value, int head_dim, int count, float* out) {
    int d = 0;
    for (; d + 64 <= head_dim; d += 64) mix_rows<ROWS, 4>(weights, value + d, head_dim, count, out + d);
    for (; d < head_dim; d += 16) mix_rows<ROWS, 1>(weights, value + d, head_dim, count, out + d);
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
        in_groups(rows, [&](auto group, int r) {
            score_rows<group.value>(q + r * dim, dim, key, stride, scores + r * KEY_TILE);
        });
        for (int r = 0; r < rows; r++) {
            float* s = scores + r * KEY_TILE;
            const int seen = std::min(KEY_TILE, position[r] + 1 - tile);  // tokens of the tile up to the query's own
            const int unseen = window ? std::max(0, position[r] + 1 - window - tile) : 0;
            if (seen <= unseen) {
                std::memset(s, 0, sizeof(float) * KEY_TILE);
                continue;
            }
            if constexpr (Paged<T>::IS_CODED)
                for (int j = 0; j < KEY_TILE; j += VL) store(s + j, load(s + j) * load(key_scales + j));
            if (softcap > 0)
                for (int j = 0; j < KEY_TILE; j += VL) store(s + j, softcap * tanh(load(s + j) / softcap));
            for (int j = 0; j < unseen; j++) s[j] = -std::numeric_limits<float>::infinity();
            for (int j = std::max(0, seen); j < KEY_TILE; j++) s[j] = -std::numeric_limits<float>::infinity();
            vf most = load(s);
            for (int j = VL; j < KEY_TILE; j += VL) {
                const vf other = load(s + j);
                most = other > most ? other : most;
            }
            float highest = top[r];
            for (int j = 0; j < VL; j++) highest = most[j] > highest ? most[j] : highest;
            const float keep = exp(splat(top[r] - highest))[0];
            alignas(64) float sums[GROUP] = {};
            for (int g = 0; g < GROUPS; g++)
                for (int j = 0; j < GROUP_VECTORS; j++) {
                    float* at = s + g * GROUP + j * VL;
                    const vf e = exp(load(at) - highest);
                    store(at, Paged<T>::IS_CODED ? e * load(value_scales + g * GROUP + j * VL) : e);
                    store(sums + j * VL, load(sums + j * VL) + e);
                }
            total[r] = total[r] * keep + sum16(sums);
            top[r] = highest;
            if (keep != 1.0f)
                for (int d = 0; d < dim; d++) out[r * dim + d] *= keep;
        }
        for (int t = 0; t < count;) {  // by runs of tokens that lie in one block
            const int token = tile + t, run = std::min(count - t, block - token % block);
            const T* value = pool.v + pool.at(table[token / block], head) + static_cast<long>(token % block) * dim;
            in_groups(rows, [&](auto group, int r) {
                mix<group.value>(scores + r * KEY_TILE + t, value, dim, run, out + r * dim);
            });
            t += run;
        }
    }
    for (int r = 0; r < rows; r++) {
        const float scale = 1.0f / total[r];
        for (int d = 0; d < dim; d++) out[r * dim + d] *= scale;
    }
}

}  // namespace ms
