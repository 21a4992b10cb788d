// What is done to one token's row at a time: norm, rotation, activation. Each is a function of its row alone.
#pragma once
#include <cmath>
#include "vec.h"

namespace ms {

// y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
inline void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
    alignas(64) float sums[GROUP] = {};
    int i = 0;
    for (; i + GROUP <= n; i += GROUP)
        for (int j = 0; j < GROUP; j++) sums[j] += x[i + j] * x[i + j];
    float total = sum16(sums);
    for (; i < n; i++) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / n + eps);
    for (i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

// Turns the pairs (x[i], x[i + half]) by the position's angles. Of a sum of two products the compiler may fuse either, and does
// otherwise for other processors: so it is told.
inline void rotate(float* x, const float* cosine, const float* sine, int half) {
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = std::fma(a, cosine[i], -(b * sine[i]));
        x[i + half] = std::fma(b, cosine[i], a * sine[i]);
    }
}

enum Activation { SILU = 0, GELU_TANH = 1 };

// gate = activation(gate) * up; n is a multiple of VL.
inline void activate(Activation kind, float* gate, const float* up, int n) {
    for (int i = 0; i < n; i += VL) {
        const vf g = load(gate + i);
        const vf a = kind == SILU ? g / (1.0f + exp(-g))
                                  : 0.5f * g * (1.0f + tanh(0.7978845608028654f * (g + 0.044715f * g * g * g)));
        store(gate + i, a * load(up + i));
    }
}

}  // namespace ms
