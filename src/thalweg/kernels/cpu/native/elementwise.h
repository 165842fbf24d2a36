// LARS and LAMB: each element by itself, but for the norms.
//
// Bytes a parameter, all float32: LARS reads p, g (8), then reads p, g, m and writes p, m (20).
// LAMB reads p, g, m, v and writes m, v (24), then reads p, m, v and writes p (16). Without trust
// ratios one pass does it: 20 and 28.
#pragma once

#include "passes.h"
#include "tiles.h"

namespace {

// What is to be done with a block: any of these.
struct Tasks {
    double* sums;  // add to these, if given
    bool write;
    bool dry;  // instead of writing, see whether all is finite
};

template <class T>
bool lars(const Job& job, int64_t begin, int64_t end, Tasks tasks) {
    const Tensor& tensor = *job.tensor;
    const auto& o = *static_cast<const LarsOptions*>(job.options);
    const double ratio = o.handling.adapt ? job.outcome->stats[0] : 1.0;
    const T scale = T(o.handling.gradient_scale), decay = T(o.handling.weight_decay), momentum = T(o.momentum);
    const T gain = T(o.lr_inside ? ratio * o.handling.lr : ratio);
    const T sign = T(o.lr_inside ? -1.0 : -o.handling.lr);
    const bool nesterov = o.nesterov, stochastic = o.handling.stochastic;
    bool finite = true;
    T p_tile[TILE], g_tile[TILE], m_tile[TILE], decayed[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = least(TILE, end - at);
        const T* g = input(tensor.g, tensor.g_dtype, at, n, g_tile);
        if (tasks.sums) {
            const T* p = input(tensor.p, tensor.p_dtype, at, n, p_tile);
            tasks.sums[0] += sum_squares(p, n);
            if (o.combined) {
                for (int64_t i = 0; i < n; i++) decayed[i] = scale * g[i] + decay * p[i];
                tasks.sums[1] += sum_squares(decayed, n);
            } else {
                tasks.sums[1] += sum_squares(g, n, scale);
            }
        }
        if (!tasks.write) continue;
        InOut<T> p_out(tensor.p, tensor.p_dtype, at, n, tasks.dry, p_tile);
        InOut<T> m_out(tensor.state[0], tensor.state_dtype[0], at, n, tasks.dry, m_tile);
        T *p = p_out.data(), *m = m_out.data();
        if (tensor.state[0]) {
            INDEPENDENT_ITERATIONS
            for (int64_t i = 0; i < n; i++) {
                const T step = (scale * g[i] + decay * p[i]) * gain;
                const T buffer = momentum * m[i] + step;
                m[i] = buffer;
                p[i] = p[i] + (nesterov ? step + momentum * buffer : buffer) * sign;
            }
            finite &= m_out.close_state();
        } else {
            INDEPENDENT_ITERATIONS
            for (int64_t i = 0; i < n; i++) p[i] = p[i] + ((scale * g[i] + decay * p[i]) * gain) * sign;
        }
        if (stochastic) round_stochastically(p, n, tensor, o.handling.t, at);
        finite &= p_out.close();
    }
    return finite;
}

// The numbers of LAMB in the precision of the arithmetic.
template <class T, LambDecay MODE>
struct Lamb {
    T scale, decay, b1, gain1, b2, gain2, correction1, correction2, eps, eps_root;

    explicit Lamb(const LambOptions& o)
        : scale(T(o.handling.gradient_scale)), decay(T(o.handling.weight_decay)), b1(T(o.b1)), gain1(T(o.gain1)),
          b2(T(o.b2)), gain2(T(o.gain2)), correction1(T(1 / o.correction1)), correction2(T(1 / o.correction2)),
          eps(T(o.eps)), eps_root(T(o.eps_root)) {}

    T gradient(T g, T p) const { return MODE == L2 ? scale * g + decay * p : scale * g; }
    T first(T m, T g) const { return b1 * m + gain1 * g; }
    T second(T v, T g) const { return b2 * v + gain2 * (g * g); }
    T direction(T m, T v, T p) const {
        const T u = m * correction1 / (std::sqrt(v * correction2 + eps_root) + eps);
        return MODE == IN_UPDATE ? u + decay * p : u;
    }
};

template <class T, LambDecay MODE>
bool lamb_as(const Job& job, int64_t begin, int64_t end, Tasks tasks) {
    const Tensor& tensor = *job.tensor;
    const auto& o = *static_cast<const LambOptions*>(job.options);
    const Lamb<T, MODE> rule(o);
    const double lr = o.handling.lr, ratio = o.handling.adapt ? job.outcome->stats[0] : 1.0;
    const T step = T(ratio * -lr), decay = T(MODE == DECOUPLED ? lr * o.handling.weight_decay : 0.0);
    // whether the moments have been written by the first pass, and are read by the second
    const bool eager = is_eager(job), moments_done = eager && tasks.write && !tasks.sums;
    bool finite = true;
    T p_tile[TILE], g_tile[TILE], m_tile[TILE], v_tile[TILE], u[TILE], gradient[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = least(TILE, end - at);
        const bool keep = !eager && !tasks.write;  // what is measured is not yet to be written
        InOut<T> p_out(tensor.p, tensor.p_dtype, at, n, tasks.dry, p_tile);
        InOut<T> m_out(tensor.state[0], tensor.state_dtype[0], at, n, tasks.dry || keep, m_tile);
        InOut<T> v_out(tensor.state[1], tensor.state_dtype[1], at, n, tasks.dry || keep, v_tile);
        T *p = p_out.data(), *m = m_out.data(), *v = v_out.data();
        if (moments_done) {
            INDEPENDENT_ITERATIONS
            for (int64_t i = 0; i < n; i++) u[i] = rule.direction(m[i], v[i], p[i]);
        } else {
            const T* g = input(tensor.g, tensor.g_dtype, at, n, g_tile);
            INDEPENDENT_ITERATIONS
            for (int64_t i = 0; i < n; i++) {
                gradient[i] = rule.gradient(g[i], p[i]);
                m[i] = rule.first(m[i], gradient[i]);
                v[i] = rule.second(v[i], gradient[i]);
                u[i] = rule.direction(m[i], v[i], p[i]);
            }
            if (tasks.sums) {
                tasks.sums[0] += sum_squares(p, n);
                tasks.sums[1] += sum_squares(u, n);
                tasks.sums[2] += sum_squares(gradient, n);
            }
            if (!keep) finite &= m_out.close_state() & v_out.close_state();
        }
        if (!tasks.write) continue;
        INDEPENDENT_ITERATIONS
        for (int64_t i = 0; i < n; i++) p[i] = p[i] + (MODE == DECOUPLED ? u[i] * step - decay * p[i] : u[i] * step);
        if (o.handling.stochastic) round_stochastically(p, n, tensor, o.handling.t, at);
        finite &= p_out.close();
    }
    return finite;
}

template <class T>
bool lamb(const Job& job, int64_t begin, int64_t end, Tasks tasks) {
    switch (static_cast<const LambOptions*>(job.options)->decay_mode) {
        case IN_UPDATE: return lamb_as<T, IN_UPDATE>(job, begin, end, tasks);
        case DECOUPLED: return lamb_as<T, DECOUPLED>(job, begin, end, tasks);
        default: return lamb_as<T, L2>(job, begin, end, tasks);
    }
}

// Squares of gradients alone, in float64 whatever they are.
inline void squares(const Job& job, int64_t begin, int64_t end, double* sums) {
    double g_tile[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = least(TILE, end - at);
        sums[0] += sum_squares(input(job.tensor->g, job.tensor->g_dtype, at, n, g_tile), n);
    }
}

}  // namespace
