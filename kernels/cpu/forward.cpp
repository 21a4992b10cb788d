// One forward of a decoder over a plan's rows in one call: norm, qkv, rope, KV write, paged attention, projections,
// gated MLP, logits; float32. The numerics are invariant: a row's result is the same to the bit alone, in any batch,
// in any chunk, for every block size, on any number of threads.
#include <atomic>
#include <algorithm>
#include "attention.h"
#include "matmul.h"
#include "rows.h"
#include "threads.h"

using namespace ms;

// Mirrored in library.py; matrices are packed by ms_pack.
extern "C" {

struct Layer {
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;  // [hidden]; post norms may be null
    const float *query_norm, *key_norm;  // [head_dim] or null
    const float *qkv, *qkv_bias;         // rows: query heads, key heads, value heads; bias may be null
    const float *attention_out;
    const float *gate_up;                // gate's panels, then up's
    const float *down;
    const float *cosine, *sine;          // [max_model_len][rotary_dim / 2]
    int window;                          // how many positions back a query sees, itself included; 0: all
};

struct Model {
    int hidden, heads, kv_heads, head_dim, rotary_dim, intermediate, num_layers, vocab, activation, threads;
    float norm_eps, attention_scale, attention_softcap, embedding_scale;  // softcap 0: none
    const float *embedding;              // [vocab][hidden]
    const float *final_norm, *head;
    const Layer *layers;
};

struct Batch {
    int num_tokens, num_rows, num_logits, block_size, table_stride;
    const int *token_ids, *positions;       // [num_tokens]
    const int *row_starts;                  // [num_rows + 1] into the tokens
    const int *tables;                      // [num_rows][table_stride] block ids
    const int *logit_places;                // [num_logits] into the tokens
    float *const *k_pools, *const *v_pools; // one for each layer, as attention.h lays them out
    float *logits;                          // [num_logits][vocab rounded up to 32]
};

}  // extern "C"

namespace {

int padded(int n) { return (n + PANEL - 1) / PANEL * PANEL; }

struct Range {
    int begin, end;
};

Range share(int count, int member, int members) {
    return {static_cast<int>(static_cast<long>(count) * member / members),
            static_cast<int>(static_cast<long>(count) * (member + 1) / members)};
}

// A piece of attention: some queries of one row, all heads of one KV head.
struct Task {
    int row, head, begin, end;  // tokens [begin, end)
};

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
    std::vector<float> x, normed, qkv, mixed, projected, gate_up;
    std::vector<Task> tasks;
    std::vector<std::atomic<int>> next_task;  // one counter for each layer

    int q_size() const { return m.heads * m.head_dim; }
    int kv_size() const { return m.kv_heads * m.head_dim; }
    int qkv_stride() const { return padded(q_size() + 2 * kv_size()); }
    int hidden_stride() const { return padded(m.hidden); }
    int inner() const { return padded(m.intermediate); }
    float* hidden_of(std::vector<float>& rows, int t) const { return rows.data() + static_cast<long>(t) * m.hidden; }

    void resize(const Batch& batch) {
        const long T = batch.num_tokens;
        x.resize(T * m.hidden);
        normed.resize(std::max<long>(T, batch.num_logits) * m.hidden);
        qkv.resize(T * qkv_stride());
        mixed.resize(T * q_size());
        projected.resize(T * hidden_stride());
        gate_up.resize(T * 2 * inner());
    }

    void plan_attention(const Batch& batch) {
        tasks.clear();
        const int queries = std::max(1, QUERY_ROWS * m.kv_heads / m.heads);
        for (int row = 0; row < batch.num_rows; row++)
            for (int begin = batch.row_starts[row]; begin < batch.row_starts[row + 1]; begin += queries)
                for (int head = 0; head < m.kv_heads; head++)
                    tasks.push_back({row, head, begin, std::min(begin + queries, batch.row_starts[row + 1])});
        std::reverse(tasks.begin(), tasks.end());  // a chunk's last queries see the most: start with them
        next_task = std::vector<std::atomic<int>>(m.num_layers);
    }

    // Each member runs this; the barriers stand where one needs what the others made.
    void work(const Batch& batch, int member) {
        const Range tokens = share(batch.num_tokens, member, team.size());
        for (int t = tokens.begin; t < tokens.end; t++) {
            const float* from = m.embedding + static_cast<long>(batch.token_ids[t]) * m.hidden;
            for (int i = 0; i < m.hidden; i++) hidden_of(x, t)[i] = from[i] * m.embedding_scale;
        }
        for (int l = 0; l < m.num_layers; l++) {
            attention(batch, l, member, tokens);
            mlp(batch, layers[l], member, tokens);
        }
        team.barrier();
        const Range wanted = share(batch.num_logits, member, team.size());
        for (int i = wanted.begin; i < wanted.end; i++)
            rms_norm(hidden_of(x, batch.logit_places[i]), m.final_norm, m.norm_eps, m.hidden, hidden_of(normed, i));
        team.barrier();
        product(normed.data(), m.hidden, m.head, batch.logits, padded(m.vocab), batch.num_logits, m.hidden, member);
    }

    void attention(const Batch& batch, int l, int member, Range tokens) {
        const Layer& layer = layers[l];
        for (int t = tokens.begin; t < tokens.end; t++)
            rms_norm(hidden_of(x, t), layer.attention_norm, m.norm_eps, m.hidden, hidden_of(normed, t));
        team.barrier();
        product(normed.data(), m.hidden, layer.qkv, qkv.data(), qkv_stride(), batch.num_tokens, m.hidden, member);
        team.barrier();
        for (int t = tokens.begin, row = 0; t < tokens.end; t++) {
            while (t >= batch.row_starts[row + 1]) row++;
            const int position = batch.positions[t];
            float* at = &qkv[static_cast<long>(t) * qkv_stride()];
            turn(layer, position, at);
            const int block = batch.tables[static_cast<long>(row) * batch.table_stride + position / batch.block_size];
            write_kv(batch, l, block, position % batch.block_size, at + q_size());
        }
        team.barrier();
        for (int i; (i = next_task[l].fetch_add(1, std::memory_order_relaxed)) < static_cast<int>(tasks.size());)
            attend_to(batch, l, tasks[i]);
        team.barrier();
        product(mixed.data(), q_size(), layer.attention_out, projected.data(), hidden_stride(), batch.num_tokens,
                q_size(), member);
        team.barrier();
        for (int t = tokens.begin; t < tokens.end; t++) {
            add(t, layer.attention_post_norm);
            rms_norm(hidden_of(x, t), layer.mlp_norm, m.norm_eps, m.hidden, hidden_of(normed, t));
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

    void write_kv(const Batch& batch, int l, int block, int slot, const float* keys) const {
        const float* values = keys + kv_size();
        const int dim = m.head_dim;
        for (int h = 0; h < m.kv_heads; h++) {
            const long base = (static_cast<long>(block) * m.kv_heads + h) * dim * batch.block_size;
            float* k = batch.k_pools[l] + base + slot;
            for (int d = 0; d < dim; d++) k[static_cast<long>(d) * batch.block_size] = keys[h * dim + d];
            std::memcpy(batch.v_pools[l] + base + static_cast<long>(slot) * dim, values + h * dim, sizeof(float) * dim);
        }
    }

    void attend_to(const Batch& batch, int l, const Task& task) {
        alignas(64) float q[QUERY_ROWS * MAX_HEAD_DIM], out[QUERY_ROWS * MAX_HEAD_DIM];
        int position[QUERY_ROWS];
        const int dim = m.head_dim, group = m.heads / m.kv_heads, width = group * dim;
        const Paged pool{batch.k_pools[l], batch.v_pools[l], batch.block_size, m.kv_heads, dim};
        const int count = task.end - task.begin;
        for (int i = 0; i < count; i++) {
            const long t = task.begin + i;
            std::memcpy(q + i * width, &qkv[t * qkv_stride() + task.head * width], sizeof(float) * width);
            for (int g = 0; g < group; g++) position[i * group + g] = batch.positions[t];
        }
        attend(pool, batch.tables + static_cast<long>(task.row) * batch.table_stride, task.head, q, position,
               count * group, layers[l].window, m.attention_softcap, out);
        for (int i = 0; i < count; i++)
            std::memcpy(&mixed[static_cast<long>(task.begin + i) * q_size() + task.head * width], out + i * width,
                        sizeof(float) * width);
    }

    void mlp(const Batch& batch, const Layer& layer, int member, Range tokens) {
        const int T = batch.num_tokens, stride = 2 * inner();
        team.barrier();
        const Range mine = share(inner() / PANEL, member, team.size());  // of gate, and the same of up
        for (int half = 0; half < 2; half++) {
            const int first = half * inner() / PANEL;
            matmul(normed.data(), m.hidden, layer.gate_up, gate_up.data(), stride, T, m.hidden, first + mine.begin,
                   first + mine.end);
        }
        for (int t = 0; t < T; t++) {
            float* gate = &gate_up[static_cast<long>(t) * stride + mine.begin * PANEL];
            activate(static_cast<Activation>(m.activation), gate, gate + inner(), (mine.end - mine.begin) * PANEL);
        }
        team.barrier();
        product(gate_up.data(), stride, layer.down, projected.data(), hidden_stride(), T, m.intermediate, member);
        team.barrier();
        for (int t = tokens.begin; t < tokens.end; t++) add(t, layer.mlp_post_norm);
    }

    // This member's share of out = in @ packed.
    void product(const float* in, long in_stride, const float* packed, float* out, int out_stride, int rows, int k,
                 int member) const {
        const Range mine = share(out_stride / PANEL, member, team.size());
        matmul(in, in_stride, packed, out, out_stride, rows, k, mine.begin, mine.end);
    }

    // x += projected, through the family's post norm where it has one.
    void add(int t, const float* post_norm) {
        float* part = &projected[static_cast<long>(t) * hidden_stride()];
        if (post_norm) rms_norm(part, post_norm, m.norm_eps, m.hidden, part);
        for (int i = 0; i < m.hidden; i++) hidden_of(x, t)[i] += part[i];
    }
};

extern "C" {

Decoder* ms_open(const Model* model) { return new Decoder(*model); }
void ms_close(Decoder* decoder) { delete decoder; }
void ms_forward(Decoder* decoder, const Batch* batch) { decoder->forward(*batch); }

// w [n][k] to panels, n padded with zeros to a multiple of 32.
void ms_pack(const float* w, int n, int k, float* packed) {
    for (int p = 0; p < padded(n) / PANEL; p++)
        for (int i = 0; i < k; i++)
            for (int j = 0; j < PANEL; j++) {
                const int column = p * PANEL + j;
                packed[(static_cast<long>(p) * k + i) * PANEL + j] =
                    column < n ? w[static_cast<long>(column) * k + i] : 0.0f;
            }
}

}  // extern "C"
