// What crosses over from Python: a model's weights and one step's rows. Mirrored in library.py.
#pragma once

extern "C" {

// How a matrix is kept: all but CODES come back as the floats that they were made of (panels.h).
enum Form { FLOATS, HALVES, GROUPED8, GROUPED4, CODES, NEAR4 };

// Packed by ms_pack or, as CODES, by ms_pack_int8.
struct Matrix {
    const void* panels;
    const float* scales;  // of CODES: one for each output column; else null
    int form;
};

struct Layer {
    const float *attention_norm, *attention_post_norm, *mlp_norm, *mlp_post_norm;  // [hidden]; post norms may be null
    const float *query_norm, *key_norm;  // [head_dim] or null
    Matrix qkv;                          // rows: query heads, key heads, value heads
    const float* qkv_bias;               // may be null
    Matrix attention_out;
    Matrix gate_up;                      // gate's panels, then up's, each padded to whole groups of 32 columns
    Matrix down;
    const float *cosine, *sine;          // [max_model_len][rotary_dim / 2]
    int window;                          // how many positions back a query sees, itself included; 0: all
};

struct Model {
    int hidden, heads, kv_heads, head_dim, rotary_dim, intermediate, num_layers, vocab, activation, threads;
    int is_coded;  // products take codes of the activations, and matrices in CODES or GROUPED4
    float norm_eps, attention_scale, attention_softcap, embedding_scale;  // softcap 0: none
    const float *embedding;              // [vocab][hidden]
    const float *final_norm;
    Matrix head;
    const Layer *layers;
};

struct Batch {
    int num_tokens, num_rows, num_logits, block_size, table_stride;
    const int *token_ids, *positions;       // [num_tokens]
    const int *row_starts;                  // [num_rows + 1] into the tokens
    const int *tables;                      // [num_rows][table_stride] block ids
    const int *logit_places;                // [num_logits] into the tokens
    void *const *k_pools, *const *v_pools;  // one for each layer, as attention.h lays them out
    int is_kv_coded;                        // int8 with scales, else float32
    float *logits;                          // [num_logits][vocab rounded up to 32]
    int *best;                              // [num_logits]: the token of each row's largest logit, as largest.h has it
    long long *phase_ns;                    // [NUM_PHASES], added to: what bench.ops measures; null: nothing is
};

// Parts of a forward, each a layer's but the last.
enum Phase { NORMS, QKV, ROPE_AND_WRITE, ATTENTION, ATTENTION_OUT, GATE_UP, DOWN, HEAD, NUM_PHASES };

}  // extern "C"
