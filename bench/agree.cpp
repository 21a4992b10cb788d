// Forwards of small models with made-up weights, and a digest of their logits' bits: builds for any instruction set must
// print the same lines. bench/agree.py compiles it with kernels/cpu on the include path.
#include "forward.cpp"
#include <cstdio>
#include <deque>

namespace {

uint64_t state = 88172645463325252;
uint32_t random_bits() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state >> 32;
}
float random_float() { return static_cast<int32_t>(random_bits()) / 2147483648.0f; }

constexpr int HIDDEN = 128, HEADS = 7, HEAD_DIM = 64, INTERMEDIATE = 160, LAYERS = 2, VOCAB = 100, MAX_LEN = 400;
constexpr int BLOCK = 16, BLOCKS = 64, TABLE = 12;

struct Weights {
    std::deque<std::vector<float>> floats;
    std::deque<std::vector<uint8_t>> panels;

    float* numbers(size_t count, float spread, float middle = 0) {
        floats.emplace_back(count);
        for (float& x : floats.back()) x = random_float() * spread + middle;
        return floats.back().data();
    }

    // In the form given; for int8 products anything but GROUPED4 becomes CODES.
    Matrix matrix(int n, int k, int form, bool is_coded) {
        if (is_coded && form != GROUPED4) {
            std::vector<int8_t> codes(static_cast<size_t>(n) * k);
            for (int8_t& code : codes) code = static_cast<int>(random_bits() % 255) - 127;
            panels.emplace_back(padded(n) / PANEL * ms_panel_bytes(CODES, k));
            ms_pack_int8(codes.data(), n, k, panels.back().data());
            return {panels.back().data(), numbers(padded(n), 0.0005f, 0.001f), CODES};
        }
        std::vector<float> w(static_cast<size_t>(n) * k);
        for (size_t i = 0; i < w.size(); i++) w[i] = random_float() * 0.1f;
        if (form == HALVES)
            for (float& x : w) {
                uint32_t bits;
                std::memcpy(&bits, &x, sizeof bits);
                bits &= 0xFFFF0000;
                std::memcpy(&x, &bits, sizeof bits);
            }
        if (form == NEAR4 || form == GROUPED4 || form == GROUPED8) {
            const int first = form == GROUPED8 ? -127 : -8, count = form == GROUPED8 ? 255 : 16;
            for (size_t group = 0; group < w.size(); group += WEIGHT_GROUP) {
                const float scale = from_half(to_half((0.01f + random_bits() % 100 * 1e-4f) * 16 / count));
                const float offset = form == GROUPED4 ? from_half(to_half(scale / 1000)) : scale * first;  // or as NEAR4 has it
                for (int i = 0; i < WEIGHT_GROUP; i++)  // both ends are in use
                    w[group + i] = std::fma(scale, i < 2 ? i * (count - 1) : static_cast<int>(random_bits() % count), offset);
            }
        }
        panels.emplace_back(padded(n) / PANEL * ms_panel_bytes(form, k));
        if (!ms_pack(w.data(), n, k, form, panels.back().data())) std::printf("form %d does not hold the weights\n", form);
        return {panels.back().data(), nullptr, form};
    }
};

}  // namespace

int main() {
    for (const int is_coded : {0, 1})
        for (const int is_kv_coded : {0, 1})
            for (const int form : {FLOATS, HALVES, GROUPED8, GROUPED4, NEAR4}) {
                Weights weights;
                Layer layers[LAYERS] = {};
                const float *cosine = weights.numbers(MAX_LEN * HEAD_DIM / 2, 1), *sine = weights.numbers(MAX_LEN * HEAD_DIM / 2, 1);
                for (Layer& layer : layers) {
                    layer.attention_norm = weights.numbers(HIDDEN, 0.5f, 1);
                    layer.attention_post_norm = weights.numbers(HIDDEN, 0.5f, 1);
                    layer.mlp_norm = weights.numbers(HIDDEN, 0.5f, 1);
                    layer.qkv = weights.matrix((HEADS + 2) * HEAD_DIM, HIDDEN, form, is_coded);
                    layer.attention_out = weights.matrix(HIDDEN, HEADS * HEAD_DIM, form, is_coded);
                    layer.gate_up = weights.matrix(2 * INTERMEDIATE, HIDDEN, form, is_coded);
                    layer.down = weights.matrix(HIDDEN, INTERMEDIATE, form, is_coded);
                    layer.cosine = cosine;
                    layer.sine = sine;
                    layer.window = &layer == layers ? 37 : 0;
                }
                Model model{};
                model.hidden = HIDDEN;
                model.heads = HEADS;
                model.kv_heads = 1;
                model.head_dim = model.rotary_dim = HEAD_DIM;
                model.intermediate = INTERMEDIATE;
                model.num_layers = LAYERS;
                model.vocab = VOCAB;
                model.activation = form == HALVES ? GELU_TANH : SILU;
                model.threads = 2;
                model.is_coded = is_coded;
                model.norm_eps = 1e-5f;
                model.attention_scale = 0.11f;
                model.attention_softcap = form == HALVES ? 5.0f : 0.0f;
                model.embedding_scale = 1;
                model.embedding = weights.numbers(VOCAB * HIDDEN, 1);
                model.final_norm = weights.numbers(HIDDEN, 0.5f, 1);
                model.head = weights.matrix(VOCAB, HIDDEN, form, is_coded);
                model.layers = layers;
                Decoder* decoder = ms_open(&model);

                std::vector<std::vector<float>> pools(2 * LAYERS, std::vector<float>(BLOCKS * BLOCK * (HEAD_DIM + 4)));
                void *keys[LAYERS], *values[LAYERS];
                for (int l = 0; l < LAYERS; l++) keys[l] = pools[2 * l].data(), values[l] = pools[2 * l + 1].data();
                uint64_t digest = 1469598103934665603;
                const auto step = [&](std::vector<int> starts, std::vector<int> first_positions, int num_logits) {
                    const int num_tokens = starts.back(), num_rows = static_cast<int>(first_positions.size());
                    std::vector<int> ids(num_tokens), positions(num_tokens), tables(num_rows * TABLE), places(num_logits);
                    for (int row = 0; row < num_rows; row++)
                        for (int t = starts[row]; t < starts[row + 1]; t++) {
                            ids[t] = random_bits() % VOCAB;
                            positions[t] = first_positions[row] + t - starts[row];
                        }
                    for (int i = 0; i < num_rows * TABLE; i++) tables[i] = i;
                    for (int i = 0; i < num_logits; i++) places[i] = num_tokens - num_logits + i;
                    std::vector<float> logits(static_cast<size_t>(num_logits) * padded(VOCAB));
                    std::vector<int> best(num_logits);
                    Batch batch{num_tokens, num_rows, num_logits, BLOCK, TABLE, ids.data(), positions.data(), starts.data(),
                                tables.data(), places.data(), keys, values, is_kv_coded, logits.data(), best.data(), nullptr};
                    ms_forward(decoder, &batch);
                    for (const int token : best) digest = (digest ^ token) * 1099511628211;
                    for (int row = 0; row < num_logits; row++)
                        for (int column = 0; column < VOCAB; column++) {
                            uint32_t bits;
                            std::memcpy(&bits, &logits[row * padded(VOCAB) + column], sizeof bits);
                            digest = (digest ^ bits) * 1099511628211;
                        }
                };
                step({0, 130}, {0}, 130);
                step({0, 1}, {130}, 1);
                step({0, 5}, {131}, 3);
                step({0, 1, 2, 40}, {136, 0, 0}, 3);
                ms_close(decoder);
                std::printf("int8 %d, KV int8 %d, form %d: %016llx\n", is_coded, is_kv_coded, form,
                            static_cast<unsigned long long>(digest));
            }
}
