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

// The numbers of LARS in the precision of the arithmetic.
template <class T>
struct Lars {
    T scale, decay, momentum, gain, sign;
    bool nesterov, combined;

    Lars(const LarsOptions& o, double ratio)
        : scale(T(o.handling.gradient_scale)), decay(T(o.handling.weight_decay)), momentum(T(o.momentum)),
          gain(T(o.lr_inside ? ratio * o.handling.lr : ratio)), sign(T(o.lr_inside ? -1.0 : -o.handling.lr)),
          nesterov(o.nesterov), combined(o.combined) {}

    template <class X> X gradient(X g) const { return g * scale; }
    template <class X> X decayed(X g, X p) const { return g * scale + p * decay; }
    template <class X> X measured(X g, X p) const { return combined ? decayed(g, p) : gradient(g); }
    template <class X> X step(X g, X p) const { return decayed(g, p) * gain; }
    template <class X> X moved(X p, X step, X buffer) const {
        return p + (nesterov ? step + buffer * momentum : buffer) * sign;
    }
};

template <class T>
bool lars(const Job& job, int64_t begin, int64_t end, Tasks tasks) {
    const Tensor& tensor = *job.tensor;
    const auto& o = *static_cast<const LarsOptions*>(job.options);
    const Lars<T> rule(o, o.handling.adapt ? job.outcome->stats[0] : 1.0);
    const bool has_momentum = tensor.state[0];
    bool finite = true;
    T p_tile[TILE], g_tile[TILE], m_tile[TILE], old[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = least(TILE, end - at);
        const T* g = input(tensor.g, tensor.g_dtype, at, n, g_tile);
        InOut<T> p_out(tensor.p, tensor.p_dtype, at, n, tasks.dry, p_tile);
        T* p = p_out.data();
        Sum<T> p_squares, g_squares;
        if (!tasks.write) {
            over<T>(n, [&](auto x, int64_t i, int k) {
                using X = decltype(x);
                const X weight = load<X>(p + i), measured = rule.measured(load<X>(g + i), weight);
                p_squares.add(weight * weight, k);
                g_squares.add(measured * measured, k);
            });
        } else {
            InOut<T> m_out(tensor.state[0], tensor.state_dtype[0], at, n, tasks.dry, m_tile);
            T* m = m_out.data();
            over<T>(n, [&](auto x, int64_t i, int k) {
                using X = decltype(x);
                const X weight = load<X>(p + i), gradient = load<X>(g + i), step = rule.step(gradient, weight);
                if (tasks.sums) {
                    const X measured = rule.measured(gradient, weight);
                    p_squares.add(weight * weight, k);
                    g_squares.add(measured * measured, k);
                    store(old + i, weight);
                }
                X buffer = step;
                if (has_momentum) {
                    buffer = load<X>(m + i) * rule.momentum + step;
                    store(m + i, buffer);
                }
                store(p + i, has_momentum ? rule.moved(weight, step, buffer) : weight + step * rule.sign);
            });
            finite &= m_out.close_state();
            if (o.handling.stochastic) round_stochastically(p, n, tensor, o.handling.t, at);
            finite &= p_out.close();
        }
        if (!tasks.sums) continue;
        const T* before = tasks.write ? old : p;
        tasks.sums[0] += checked_squares<T>(p_squares.total(), n, [&](int64_t i) { return before[i]; });
        tasks.sums[1] +=
            checked_squares<T>(g_squares.total(), n, [&](int64_t i) { return rule.measured(g[i], before[i]); });
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

    template <class X> X gradient(X g, X p) const {
        if constexpr (MODE == L2) return g * scale + p * decay;
        return g * scale;
    }
    template <class X> X first(X m, X g) const { return m * b1 + g * gain1; }
    template <class X> X second(X v, X g) const { return v * b2 + (g * g) * gain2; }
    template <class X> X direction(X m, X v, X p) const {
        const X u = m * correction1 / (root(v * correction2 + eps_root) + eps);
        if constexpr (MODE == IN_UPDATE) return u + p * decay;
        return u;
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
    const bool keep = !eager && !tasks.write;  // what is measured is not yet to be written
    bool finite = true;
    T p_tile[TILE], g_tile[TILE], m_tile[TILE], v_tile[TILE], u[TILE], gradient[TILE], old[TILE];
    const auto moved = [&](auto weight, auto direction) {
        if constexpr (MODE == DECOUPLED) return weight + (direction * step - weight * decay);
        else return weight + direction * step;
    };
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = least(TILE, end - at);
        InOut<T> p_out(tensor.p, tensor.p_dtype, at, n, tasks.dry, p_tile);
        InOut<T> m_out(tensor.state[0], tensor.state_dtype[0], at, n, tasks.dry || keep, m_tile);
        InOut<T> v_out(tensor.state[1], tensor.state_dtype[1], at, n, tasks.dry || keep, v_tile);
        T *p = p_out.data(), *m = m_out.data(), *v = v_out.data();
        if (moments_done) {
            over<T>(n, [&](auto x, int64_t i, int) {
                using X = decltype(x);
                const X weight = load<X>(p + i);
                store(p + i, moved(weight, rule.direction(load<X>(m + i), load<X>(v + i), weight)));
            });
        } else {
            const T* g = input(tensor.g, tensor.g_dtype, at, n, g_tile);
            Sum<T> p_squares, u_squares, g_squares;
            over<T>(n, [&](auto x, int64_t i, int k) {
                using X = decltype(x);
                const X weight = load<X>(p + i), slope = rule.gradient(load<X>(g + i), weight);
                const X first = rule.first(load<X>(m + i), slope), second = rule.second(load<X>(v + i), slope);
                const X direction = rule.direction(first, second, weight);
                store(m + i, first);
                store(v + i, second);
                if (tasks.sums) {
                    p_squares.add(weight * weight, k);
                    u_squares.add(direction * direction, k);
                    g_squares.add(slope * slope, k);
                    store(u + i, direction);
                    store(gradient + i, slope);
                }
                if (tasks.write) {
                    store(old + i, weight);
                    store(p + i, moved(weight, direction));
                }
            });
            if (tasks.sums) {
                const T* before = tasks.write ? old : p;
                tasks.sums[0] += checked_squares<T>(p_squares.total(), n, [&](int64_t i) { return before[i]; });
                tasks.sums[1] += checked_squares<T>(u_squares.total(), n, [&](int64_t i) { return u[i]; });
                tasks.sums[2] += checked_squares<T>(g_squares.total(), n, [&](int64_t i) { return gradient[i]; });
            }
            if (!keep) finite &= m_out.close_state() & v_out.close_state();
        }
        if (!tasks.write) continue;
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
        const double* g = input(job.tensor->g, job.tensor->g_dtype, at, n, g_tile);
        Sum<double> sum;
        over<double>(n, [&](auto x, int64_t i, int k) {
            const auto slope = load<decltype(x)>(g + i);
            sum.add(slope * slope, k);
        });
        sums[0] += sum.total();
    }
}

}  // namespace
