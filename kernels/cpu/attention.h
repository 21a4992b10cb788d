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
constexpr int MAX_HEAD_DIM = 256;
constexpr int QUERY_ROWS = 48;  // rows (queries x heads of a group) of one task
static_assert(QUERY_ROWS % VL == 0);

// Query rows, and vectors of each, that are summed at once: as many sums as registers hold beside what they take. Of prompts,
// rows enough for a broad group of them; of a decode, mostly one of three.
constexpr int BROAD_ROWS = 6, NARROW_ROWS = 3, NARROW_WIDTH = 4;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int BROAD_WIDTH = 2;  // 12 of 16
#else
constexpr int BROAD_WIDTH = 4;  // 24 of 32
#endif

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
// Where it ASKS, it also asks memory for the same tokens' values, from a pointer for each group on: a decode waits for memory, a
// fifth less so. That is a hint: in small blocks, or of int8, it names some lines in vain. Neither this nor mix_rows is inlined,
// as matmul.h's tile.
template <int ROWS, int WIDTH, bool ASKS, typename T>
__attribute__((noinline)) static void score_rows(const float* q, int head_dim, const T* const* keys, long stride,
                                                 const T* const* values, float* scores) {
    vf sums[ROWS][WIDTH];
    for (auto& row : sums)
        for (vf& sum : row) sum = vf{};
    for (int d = 0; d < head_dim; d++) {
        vf k[WIDTH];
        if constexpr (ASKS)
            for (int g = 0; g * GROUP_VECTORS < WIDTH; g++) __builtin_prefetch(values[g] + d * GROUP, 0, 2);
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

// Calls work(rows of a call, vectors of a call, first row, end) for as many broad groups of rows as fit, then narrow ones, then
// single rows.
template <typename Work>
inline void in_groups(int rows, Work work) {
    const int broad = rows / BROAD_ROWS * BROAD_ROWS, narrow = broad + (rows - broad) / NARROW_ROWS * NARROW_ROWS;
    using std::integral_constant;
    if (broad) work(integral_constant<int, BROAD_ROWS>{}, integral_constant<int, BROAD_WIDTH>{}, 0, broad);
    if (broad < narrow) work(integral_constant<int, NARROW_ROWS>{}, integral_constant<int, NARROW_WIDTH>{}, broad, narrow);
    if (narrow < rows) work(integral_constant<int, 1>{}, integral_constant<int, NARROW_WIDTH>{}, narrow, rows);
}

// The softmax of some query rows over the tiles so far.
struct Softmax {
    float top[QUERY_ROWS], total[QUERY_ROWS];  // the largest score, the sum of exp(score - top)
    float keep[QUERY_ROWS];                    // what the last tile left of earlier weights, and of what they have mixed

    explicit Softmax(int rows) {
        std::fill(top, top + rows, -std::numeric_limits<float>::infinity());
        std::fill(total, total + rows, 0.0f);
        std::fill(keep, keep + QUERY_ROWS, 0.0f);
    }

    // Scores [rows][KEY_TILE] become weights; each row sees the tile's tokens [begin(row), end(row)), all others weigh 0. Each
    // step is taken for all rows before the next, so that they do not wait for a row's own chain of steps.
    template <typename Begin, typename End>
    void weigh(float* scores, int rows, float softcap, const float* key_scales, const float* value_scales, Begin begin, End end) {
        for (int r = 0; r < rows; r++) {
            float* s = scores + r * KEY_TILE;
            const int from = begin(r), to = end(r), padded = whole_groups(from, to);
            const float before = top[r];
            if (padded) {
                if (key_scales)
                    for (int j = 0; j < padded; j += VL) store(s + j, load(s + j) * load(key_scales + j));
                if (softcap > 0)
                    for (int j = 0; j < padded; j += VL) store(s + j, softcap * tanh(load(s + j) / softcap));
                std::fill(s, s + from, -std::numeric_limits<float>::infinity());
                std::fill(s + to, s + padded, -std::numeric_limits<float>::infinity());
                vf most = load(s);
                for (int j = VL; j < padded; j += VL) most = larger(load(s + j), most);
                top[r] = std::max(before, fold(most, larger));
            }
            keep[r] = top[r] > before ? before - top[r] : 0.0f;
        }
        for (int r = 0; r < rows; r += VL) store(keep + r, exp(load(keep + r)));
        for (int r = 0; r < rows; r++) {
            float* s = scores + r * KEY_TILE;
            const int padded = whole_groups(begin(r), end(r));
            std::fill(s + padded, s + KEY_TILE, 0.0f);
            vf sums[GROUP_VECTORS] = {};
            for (int group = 0; group < padded; group += GROUP)
                for (int v = 0; v < GROUP_VECTORS; v++) {
                    const int j = group + v * VL;
                    const vf weight = exp(load(s + j) - top[r]);
                    store(s + j, value_scales ? weight * load(value_scales + j) : weight);
                    sums[v] += weight;
                }
            for (int width = GROUP_VECTORS / 2; width; width /= 2)
                for (int v = 0; v < width; v++) sums[v] += sums[v + width];
            total[r] = total[r] * keep[r] + fold(sums[0], [](vf a, vf b) { return a + b; });
        }
    }

  private:
    // Tokens whose scores are looked at: up to the last that is seen, in whole groups; none where none is seen.
    static int whole_groups(int from, int to) { return from < to ? (to + GROUP - 1) / GROUP * GROUP : 0; }
};

// All query rows of one task: `rows` of them, row r at position position[r], in q [rows][head_dim] (scaled already).
// `out` [rows][head_dim]. `table` are the sequence's blocks. window 0: all earlier tokens; softcap 0: none.
template <typename T>
inline void attend(const Paged<T>& pool, const int* table, int head, const float* q, const int* position, int rows,
                   int window, float softcap, float* out) {
    const int dim = pool.head_dim, block = pool.block_size;
    alignas(64) float scores[QUERY_ROWS * KEY_TILE];
    alignas(64) float key_scales[KEY_TILE] = {}, value_scales[KEY_TILE] = {};  // int8 only
    alignas(64) T gathered[GROUPS][MAX_HEAD_DIM * GROUP];  // small blocks only: a group of keys side by side
    Softmax softmax(rows);
    int first = std::numeric_limits<int>::max(), last = 0;
    for (int r = 0; r < rows; r++) {
        first = std::min(first, window ? std::max(0, position[r] - window + 1) : 0);
        last = std::max(last, position[r]);
    }
    std::memset(out, 0, sizeof(float) * rows * dim);
    for (int tile = first / KEY_TILE * KEY_TILE; tile <= last; tile += KEY_TILE) {
        const int count = std::min(KEY_TILE, last + 1 - tile);
        const T *key[GROUPS], *value[GROUPS];
        int stride = block;
        for (int g = 0; g < GROUPS; g++) {
            const int token = tile + std::min(g * GROUP, (count - 1) / GROUP * GROUP);  // past the end: any that exists
            value[g] = pool.v + pool.at(table[token / block], head) + token % block * dim;
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
        in_groups(rows, [&](auto group, auto width, int begin, int end) {
            for (int first = 0; first * VL < count; first += width) {  // few enough keys to stay in the L1 cache
                const T* keys[width];
                for (int j = 0; j < width; j++) keys[j] = key[(first + j) / GROUP_VECTORS] + (first + j) % GROUP_VECTORS * VL;
                const T* const* values = value + first / GROUP_VECTORS;
                for (int r = begin; r < end; r += group) {
                    float* to = scores + r * KEY_TILE + first * VL;
                    if (r)
                        score_rows<group, width, false>(q + r * dim, dim, keys, stride, values, to);
                    else
                        score_rows<group, width, true>(q, dim, keys, stride, values, to);
                }
            }
        });
        softmax.weigh(
            scores, rows, softcap, Paged<T>::IS_CODED ? key_scales : nullptr, Paged<T>::IS_CODED ? value_scales : nullptr,
            [&](int r) { return window ? std::max(0, position[r] + 1 - window - tile) : 0; },
            [&](int r) { return std::min(KEY_TILE, position[r] + 1 - tile); });
        for (int r = 0; r < rows; r++)
            if (softmax.keep[r] != 1.0f)
                for (int d = 0; d < dim; d++) out[r * dim + d] *= softmax.keep[r];
        Stretch<T> stretches[KEY_TILE], *end = stretches;
        for (int t = 0; t < count; t += end++->count) {
            const int token = tile + t;
            *end = {pool.v + pool.at(table[token / block], head) + static_cast<long>(token % block) * dim,
                    std::min(count - t, block - token % block)};
        }
        in_groups(rows, [&](auto group, auto width, int begin, int above) {
            int d = 0;
            for (; d + width * VL <= dim; d += width * VL)  // few enough numbers to stay in the L1 cache
                for (int r = begin; r < above; r += group)
                    mix_rows<group, width>(scores + r * KEY_TILE, stretches, end, dim, d, out + r * dim + d);
            for (; d < dim; d += GROUP)
                for (int r = begin; r < above; r += group)
                    mix_rows<group, GROUP_VECTORS>(scores + r * KEY_TILE, stretches, end, dim, d, out + r * dim + d);
        });
    }
    for (int r = 0; r < rows; r++) {
        const float scale = 1.0f / softmax.total[r];
        for (int d = 0; d < dim; d++) out[r * dim + d] *= scale;
    }
}

}  // namespace ms
