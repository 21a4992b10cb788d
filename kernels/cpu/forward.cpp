// One forward of a decoder over a plan's rows in one call: norm, qkv, rope, KV write, paged attention, projections,
// gated MLP, logits; products in float32 or int8, all else in float32. The numerics are invariant: a row's result is the
// same to the bit alone, in any batch, in any chunk, for every block size, on any number of threads.
#include <algorithm>
#include "attention.h"
#include "largest.h"
#include "matmul.h"
#include "matmul_int8.h"
#include "model.h"
#include "noise.h"
#include "peaks.h"
#include "rows.h"
#include "stopwatch.h"
#include "threads.h"

using namespace ms;

namespace {

int padded(int n, int unit = PANEL) { return (n + unit - 1) / unit * unit; }

// The distance of rows of n floats: never a multiple of 2 KiB, where rows would push each other out of the L1 cache.
int spaced(int n) { return n % 512 ? n : n + PANEL; }

struct Range {
    int begin, end;
};

// The i-th `size` of so many.
Range part(int i, int size, int count) { return {i * size, std::min(count, (i + 1) * size)}; }

Range share(int count, int member, int members) {
    return {static_cast<int>(static_cast<long>(count) * member / members),
            static_cast<int>(static_cast<long>(count) * (member + 1) / members)};
}

// The left factor of products: rows in float32, or as codes.
struct Factor {
    std::vector<float> x;
    long stride = 0;
    bool is_coded = false;
    Codes codes;

    void resize(long rows, int k, long width, bool has_codes) {
        stride = width;
        is_coded = has_codes;
        x.resize(rows * width);
        if (has_codes) codes.resize(rows, k);
    }
    float* row(long t) { return x.data() + t * stride; }
};

// work(strip), with a reader of the form that floats are kept in.
template <typename Work>
auto with_reader(int form, Work work) {
    switch (form) {
        case HALVES: return work(Halves{});
        case GROUPED8: return work(Grouped<8>{});
        case GROUPED4: return work(Grouped<4>{});
        case NEAR4: return work(Near4{});
        default: return work(Floats{});
    }
}

long panel_bytes(int form, int k) {
    if (form == CODES) return static_cast<long>(padded(k, CODE_GROUP)) * PANEL;
    return with_reader(form, [&](auto strip) { return STRIPS * decltype(strip)::bytes(k); });
}

// The matrix from one of its panels on.
Matrix from_panel(const Matrix& matrix, int panel, int k) {
    return {static_cast<const uint8_t*>(matrix.panels) + panel * panel_bytes(matrix.form, k),
            matrix.scales ? matrix.scales + panel * PANEL : nullptr, matrix.form};
}

static_assert(CODE_GROUP == PANEL, "a panel of gate and up makes one group of codes");

// Some rows and panels of out = in @ matrix; `out` is the first of these rows.
void columns(Factor& in, const Matrix& matrix, float* out, long out_stride, Range rows, int k, Range panels) {
    const uint8_t* packed = static_cast<const uint8_t*>(matrix.panels);
    if (in.is_coded) {
        const auto multiply = matrix.form == CODES ? matmul_int8<Weights8> : matmul_int8<Weights4>;
        return multiply(in.codes, packed, matrix.scales, out, out_stride, rows.begin, rows.end, panels.begin, panels.end);
    }
    with_reader(matrix.form, [&](auto strip) {
        matmul<decltype(strip)>(in.row(rows.begin), in.stride, packed, out, out_stride, rows.end - rows.begin, k,
                                panels.begin, panels.end);
    });
}

// Rows that a phase works on, and those of them that this member does where it takes whole rows.
struct Rows {
    int count;
    Range mine;
};

// A piece of attention: some queries of one row, all heads of one KV head.
struct Task {
    int row, head, begin, end;  // tokens [begin, end)
};
constexpr size_t LEAST_TASKS = 3;  // for each member
constexpr int MOST_PIECES = 4;     // of a product, for each member

}  // namespace

class Decoder {
  public:
    explicit Decoder(const Model& model)
        : m(model), layers(model.layers, model.layers + model.num_layers), team(model.threads) {}

    void forward(const Batch& batch) {
        resize(batch);
        plan_attention(batch);
        team.run([&](int member) { work(batch, member); });
    }

  private:
    Model m;
    std::vector<Layer> layers;
    Team team;
    std::vector<float> x, qkv, projected;
    Factor normed, mixed, gated;
    std::vector<Task> tasks;
    std::vector<Largest> best;  // of each piece of the vocabulary, row by row

    int q_size() const { return m.heads * m.head_dim; }
    int kv_size() const { return m.kv_heads * m.head_dim; }
    int qkv_stride() const { return spaced(padded(q_size() + 2 * kv_size())); }
    int hidden_stride() const { return spaced(padded(m.hidden)); }
    int inner() const { return padded(m.intermediate, CODE_GROUP); }
    float* hidden_of(long t) { return x.data() + t * m.hidden; }

    void resize(const Batch& batch) {
        const long T = batch.num_tokens;
        x.resize(T * m.hidden);
        qkv.resize(T * qkv_stride());
        projected.resize(T * hidden_stride());
        normed.resize(std::max<long>(T, team.size()), m.hidden, spaced(m.hidden), m.is_coded);
        mixed.resize(T, q_size(), spaced(q_size()), m.is_coded);
        gated.resize(T, m.intermediate, m.is_coded ? 0 : spaced(inner()), m.is_coded);
        best.resize(static_cast<long>(batch.num_logits) * MOST_PIECES * team.size());
    }

    // Pieces as large as they may be, since each reads its keys and values anew; smaller where there would be too few for all
    // members to be done together.
    void plan_attention(const Batch& batch) {
        int queries = std::max(1, QUERY_ROWS * m.kv_heads / m.heads);
        for (plan_attention(batch, queries); queries > 1 && tasks.size() < LEAST_TASKS * team.size();)
            plan_attention(batch, queries = (queries + 1) / 2);
        std::reverse(tasks.begin(), tasks.end());  // a chunk's last queries see the most: start with them
    }
    void plan_attention(const Batch& batch, int queries) {
        tasks.clear();
        for (int row = 0; row < batch.num_rows; row++)
            for (int begin = batch.row_starts[row]; begin < batch.row_starts[row + 1]; begin += queries)
                for (int head = 0; head < m.kv_heads; head++)
                    tasks.push_back({row, head, begin, std::min(begin + queries, batch.row_starts[row + 1])});
    }

    // Each member runs this; the barriers stand where one needs what the others made.
    void work(const Batch& batch, int member) {
        const Range tokens = share(batch.num_tokens, member, team.size());
        Stopwatch watch(member == 0 ? batch.phase_ns : nullptr);
        for (int t = tokens.begin; t < tokens.end; t++) {
            const float* from = m.embedding + static_cast<long>(batch.token_ids[t]) * m.hidden;
            for (int i = 0; i < m.hidden; i++) hidden_of(t)[i] = from[i] * m.embedding_scale;
            norm(t, layers[0].attention_norm, member);
        }
        const Rows all{batch.num_tokens, tokens}, wanted{batch.num_logits, share(batch.num_logits, member, team.size())};
        for (int l = 0; l < m.num_layers; l++) {
            attention(batch, l, member, tokens, watch);
            const bool is_last = l == m.num_layers - 1;
            if (is_last) keep_wanted(batch, member);
            attention_out(layers[l], member, is_last ? wanted : all, watch);
            mlp(layers[l], is_last ? m.final_norm : layers[l + 1].attention_norm, member, is_last ? wanted : all, watch);
        }
        team.barrier();
        watch.lap(NORMS);
        head(batch, member, wanted.mine);
        watch.lap(HEAD);
    }

    // A row of the next product's left factor. Where that is codes, the floats are a member's own, which its cache keeps.
    void norm(int t, const float* weight, int member) {
        float* to = normed.row(m.is_coded ? member : t);
        rms_norm(hidden_of(t), weight, m.norm_eps, m.hidden, to);
        if (m.is_coded) normed.codes.write(t, to);
    }

    // Behind the last attention nothing but logits follows: the rows that have some move to the front, and the others' work
    // ends here.
    void keep_wanted(const Batch& batch, int member) {
        if (batch.num_logits == batch.num_tokens) return;
        if (member == 0)
            for (int i = 0; i < batch.num_logits; i++) {  // places ascend, so none is written before it is read
                const int place = batch.logit_places[i];
                std::memmove(hidden_of(i), hidden_of(place), sizeof(float) * m.hidden);
                std::memmove(mixed.row(i), mixed.row(place), sizeof(float) * q_size());
            }
        team.barrier();
    }

    void attention(const Batch& batch, int l, int member, Range tokens, Stopwatch& watch) {
        const Layer& layer = layers[l];
        team.barrier();
        watch.lap(NORMS);
        product(normed, layer.qkv, qkv.data(), qkv_stride(), batch.num_tokens, m.hidden, q_size() + 2 * kv_size(),
                member);
        watch.lap(QKV);
        for (int t = tokens.begin, row = 0; t < tokens.end; t++) {
            while (t >= batch.row_starts[row + 1]) row++;
            const int position = batch.positions[t];
            float* at = &qkv[static_cast<long>(t) * qkv_stride()];
            turn(layer, position, at);
            const int block = batch.tables[static_cast<long>(row) * batch.table_stride + position / batch.block_size];
            const int slot = position % batch.block_size;
            if (batch.is_kv_coded)
                write_kv(pool_of<int8_t>(batch, l), block, slot, at + q_size());
            else
                write_kv(pool_of<float>(batch, l), block, slot, at + q_size());
        }
        team.barrier();
        watch.lap(ROPE_AND_WRITE);
        team.each(member, static_cast<int>(tasks.size()), [&](int i) {
            batch.is_kv_coded ? attend_to<int8_t>(batch, l, tasks[i]) : attend_to<float>(batch, l, tasks[i]);
        });
        watch.lap(ATTENTION);
    }

    void attention_out(const Layer& layer, int member, Rows rows, Stopwatch& watch) {
        if (m.is_coded) {
            for (int t = rows.mine.begin; t < rows.mine.end; t++) mixed.codes.write(t, mixed.row(t));
            team.barrier();
        }
        watch.lap(ATTENTION);
        product(mixed, layer.attention_out, projected.data(), hidden_stride(), rows.count, q_size(), m.hidden, member);
        watch.lap(ATTENTION_OUT);
        for (int t = rows.mine.begin; t < rows.mine.end; t++) {
            add(t, layer.attention_post_norm);
            norm(t, layer.mlp_norm, member);
        }
    }

    // Bias, norms of queries and keys, rotation; the queries take the scale of attention.
    void turn(const Layer& layer, int position, float* row) const {
        if (layer.qkv_bias)
            for (int i = 0; i < q_size() + 2 * kv_size(); i++) row[i] += layer.qkv_bias[i];
        const int half = m.rotary_dim / 2;
        const float* cosine = layer.cosine + static_cast<long>(position) * half;
        const float* sine = layer.sine + static_cast<long>(position) * half;
        for (int h = 0; h < m.heads + m.kv_heads; h++) {
            float* head = row + h * m.head_dim;
            const float* norm = h < m.heads ? layer.query_norm : layer.key_norm;
            if (norm) rms_norm(head, norm, m.norm_eps, m.head_dim, head);
            rotate(head, cosine, sine, half);
        }
        for (int i = 0; i < q_size(); i++) row[i] *= m.attention_scale;
    }

    template <typename T>
    Paged<T> pool_of(const Batch& batch, int l) const {
        return {static_cast<T*>(batch.k_pools[l]), static_cast<T*>(batch.v_pools[l]), batch.block_size, m.kv_heads,
                m.head_dim};
    }

    template <typename T>
    void write_kv(const Paged<T>& pool, int block, int slot, const float* keys) const {
        const float* values = keys + kv_size();
        const int dim = m.head_dim;
        for (int h = 0; h < m.kv_heads; h++) {
            T* k = pool.k + pool.at(block, h);
            T* v = pool.v + pool.at(block, h);
            const float* key = keys + h * dim;
            T* value = v + static_cast<long>(slot) * dim;
            if constexpr (Paged<T>::IS_CODED) {
                alignas(64) int8_t codes[MAX_HEAD_DIM];
                int32_t sum;
                pool.scales(k)[slot] = encode(key, dim, codes, &sum);
                for (int d = 0; d < dim; d++) k[static_cast<long>(d) * pool.block_size + slot] = codes[d];
                pool.scales(v)[slot] = encode(values + h * dim, dim, value, &sum);
            } else {
                for (int d = 0; d < dim; d++) k[static_cast<long>(d) * pool.block_size + slot] = key[d];
                std::memcpy(value, values + h * dim, sizeof(float) * dim);
            }
        }
    }

    template <typename T>
    void attend_to(const Batch& batch, int l, const Task& task) {
        alignas(64) float q[QUERY_ROWS * MAX_HEAD_DIM], out[QUERY_ROWS * MAX_HEAD_DIM];
        int position[QUERY_ROWS];
        const int group = m.heads / m.kv_heads, width = group * m.head_dim;
        const int count = task.end - task.begin;
        for (int i = 0; i < count; i++) {
            const long t = task.begin + i;
            std::memcpy(q + i * width, &qkv[t * qkv_stride() + task.head * width], sizeof(float) * width);
            for (int g = 0; g < group; g++) position[i * group + g] = batch.positions[t];
        }
        attend(pool_of<T>(batch, l), batch.tables + static_cast<long>(task.row) * batch.table_stride, task.head, q,
               position, count * group, layers[l].window, m.attention_softcap, out);
        for (int i = 0; i < count; i++)
            std::memcpy(mixed.row(task.begin + i) + task.head * width, out + i * width, sizeof(float) * width);
    }

    // A panel of gate and its panel of up are made for some rows at a time, and their product at once, while all of it
    // is in the L1 cache.
    void mlp(const Layer& layer, const float* following_norm, int member, Rows all, Stopwatch& watch) {
        team.barrier();
        watch.lap(NORMS);
        alignas(64) float both[BLOCK_ROWS][2 * PANEL];
        const int num_panels = inner() / PANEL, step = piece(num_panels, all.count), pieces = (num_panels + step - 1) / step;
        const int blocks = (all.count + BLOCK_ROWS - 1) / BLOCK_ROWS;
        team.each(member, blocks * pieces, [&](int i) {
            const Range rows = part(i / pieces, BLOCK_ROWS, all.count), panels = part(i % pieces, step, num_panels);
            for (int p = panels.begin; p < panels.end; p++) {
                columns(normed, from_panel(layer.gate_up, p, m.hidden), both[0], 2 * PANEL, rows, m.hidden, {0, 1});
                columns(normed, from_panel(layer.gate_up, num_panels + p, m.hidden), both[0] + PANEL, 2 * PANEL, rows,
                        m.hidden, {0, 1});
                for (int t = rows.begin; t < rows.end; t++) {
                    float* gate = both[t - rows.begin];
                    activate(static_cast<Activation>(m.activation), gate, gate + PANEL, PANEL);
                    if (m.is_coded)
                        gated.codes.write_groups(t, p, p + 1, gate);
                    else
                        std::memcpy(gated.row(t) + p * PANEL, gate, sizeof(float) * PANEL);
                }
            }
        });
        watch.lap(GATE_UP);
        product(gated, layer.down, projected.data(), hidden_stride(), all.count, m.intermediate, m.hidden, member);
        watch.lap(DOWN);
        for (int t = all.mine.begin; t < all.mine.end; t++) {
            add(t, layer.mlp_post_norm);
            norm(t, following_norm, member);
        }
    }

    // A piece's logits are searched for the largest while they are in the cache.
    void head(const Batch& batch, int member, Range mine) {
        const int num_panels = padded(m.vocab) / PANEL, step = piece(num_panels, batch.num_logits);
        const int pieces = (num_panels + step - 1) / step, rows = batch.num_logits;
        team.each(member, pieces, [&](int i) {
            const Range panels = part(i, step, num_panels);
            columns(normed, m.head, batch.logits, padded(m.vocab), {0, rows}, m.hidden, panels);
            for (int t = 0; t < rows; t++)
                best[i * rows + t] = largest(batch.logits + static_cast<long>(t) * padded(m.vocab), panels.begin * PANEL,
                                             std::min(panels.end * PANEL, m.vocab));
        });
        for (int t = mine.begin; t < mine.end; t++) {
            Largest found = best[t];
            for (int i = 1; i < pieces; i++) found.take(best[i * rows + t]);
            batch.best[t] = found.place;
        }
    }

    // Panels that a member takes at a time: where there is much to compute several pieces for each, so that none is long waited
    // for; where reading the weights is all, one, which memory reads in order.
    int piece(int num_panels, int rows) const {
        const int pieces = team.size() * (rows < 16 ? 1 : MOST_PIECES);
        return (num_panels + pieces - 1) / pieces;
    }

    // out = in @ matrix, shared out among the members.
    void product(Factor& in, const Matrix& matrix, float* out, int out_stride, int rows, int k, int n, int member) {
        const int num_panels = padded(n) / PANEL, step = piece(num_panels, rows);
        team.each(member, (num_panels + step - 1) / step, [&](int i) {
            columns(in, matrix, out, out_stride, {0, rows}, k, part(i, step, num_panels));
        });
    }

    // x += projected, through the family's post norm where it has one.
    void add(int t, const float* post_norm) {
        float* part = &projected[static_cast<long>(t) * hidden_stride()];
        if (post_norm) rms_norm(part, post_norm, m.norm_eps, m.hidden, part);
        for (int i = 0; i < m.hidden; i++) hidden_of(t)[i] += part[i];
    }
};

extern "C" {

Decoder* ms_open(const Model* model) { return new Decoder(*model); }
void ms_close(Decoder* decoder) { delete decoder; }
void ms_forward(Decoder* decoder, const Batch* batch) { decoder->forward(*batch); }

// y [rows][n rounded up to 32] = x [rows][k] @ matrix, on the caller's thread: a product by itself.
void ms_product(const Matrix* matrix, const float* x, int rows, int k, int n, int is_coded, float* y) {
    Factor in;
    in.resize(rows, k, k, is_coded);
    std::memcpy(in.x.data(), x, sizeof(float) * rows * k);
    if (is_coded)
        for (int m = 0; m < rows; m++) in.codes.write(m, in.row(m));
    columns(in, *matrix, y, padded(n), {0, rows}, k, {0, padded(n) / PANEL});
}

long ms_panel_bytes(int form, int k) { return panel_bytes(form, k); }

// w [n][k] to panels of a form for floats, n padded with zeros to a multiple of 32. 0 where the form cannot hold them all to
// the bit; `packed` then is of no use.
int ms_pack(const float* w, int n, int k, int form, uint8_t* packed) {
    const std::vector<float> zeros(k);
    return with_reader(form, [&](auto strip) {
        using Strip = decltype(strip);
        for (int column = 0; column < padded(n); column++)
            if (!Strip::put(packed + column / STRIP * Strip::bytes(k), k, column % STRIP,
                            column < n ? w + static_cast<long>(column) * k : zeros.data()))
                return 0;
        return 1;
    });
}

// int8 w [n][k] to CODES, k padded with zeros to whole groups.
void ms_pack_int8(const int8_t* w, int n, int k, uint8_t* packed) {
    for (int first = 0; first < padded(n); first += STRIP)
        for (int i = 0; i < padded(k, CODE_GROUP); i += LANE)
            for (int column = first; column < first + STRIP; column++)
                for (int step = 0; step < LANE; step++) {
                    const bool is_inside = column < n && i + step < k;
                    *packed++ = WEIGHT_ZERO + (is_inside ? w[static_cast<long>(column) * k + i + step] : 0);
                }
}

// Of each row of logits [rows][stride], the tokens whose noise may beat a score (engine/gumbel_max.py says why): ids and
// words, row after row, at most [rows * vocab] of them; counts [rows].
void ms_rivals(const float* logits, long stride, int rows, int vocab, const DrawKey* keys, const float* scores,
               const float* inverse_scales, int* ids, uint32_t* words, int* counts) {
    for (int row = 0; row < rows; row++) {
        counts[row] = rivals(logits + row * stride, vocab, keys[row], scores[row], inverse_scales[row], ids, words);
        ids += counts[row];
        words += counts[row];
    }
}

// Work at the processor's limits on the caller's thread; each returns its operations or bytes.
double ms_multiply_floats(long rounds, float* sink) { return multiply_floats(rounds, sink); }
double ms_multiply_codes(long rounds, float* sink) { return multiply_codes<vi>(rounds, LANE, add_dot, sink); }
double ms_multiply_codes4(long rounds, float* sink) { return multiply_codes<Sum4>(rounds, 4, add_dot4, sink); }
double ms_read_bytes(const uint8_t* bytes, long count, float* sink) { return read_bytes(bytes, count, sink); }

}  // extern "C"
