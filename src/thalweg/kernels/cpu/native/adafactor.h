// Adafactor. Factored: three passes; all squares: two.
//
// Bytes a parameter, float32, factored: reads g and p (8) for sums of rows and columns, g (4) for
// the RMS of u, then g, p and writes p (12). All squares: reads g, p, v and writes v (16), then
// reads g, p, v and writes p (16).
#pragma once

#include "elementwise.h"
#include "passes.h"
#include "tiles.h"

namespace {

// ---- the last part, common to both kinds: from u to p

// `u(X, i)` is the direction. Its figures (clip factor, step size) have been decided.
template <class T, class Direction>
bool apply(const Job& job, int64_t at, int64_t n, Direction u, bool dry, T* p_tile, T* m_tile) {
    const Tensor& tensor = *job.tensor;
    const auto& o = *static_cast<const AdafactorOptions*>(job.options);
    const double clip = job.outcome->stats[1], alpha = job.outcome->stats[3];
    const double decays[] = {alpha, o.nominal, 1.0};
    const T decay = T(decays[o.decay_mode] * o.handling.weight_decay);
    InOut<T> p_out(tensor.p, tensor.p_dtype, at, n, dry, p_tile);
    T* p = p_out.data();
    bool finite = true;
    if (tensor.state[2]) {
        InOut<T> m_out(tensor.state[2], tensor.state_dtype[2], at, n, dry, m_tile);
        T* m = m_out.data();
        const T weight = T(1 - o.momentum), kept = T(1 - (1 - o.momentum));
        const T inside = T(o.after_lr ? alpha * clip : clip), outside = T(o.after_lr ? 1.0 : alpha);
        over<T>(n, [&](auto x, int64_t i, int) {
            using X = decltype(x);
            const X old = load<X>(p + i), average = load<X>(m + i) * kept + (u(x, i) * inside) * weight;
            store(m + i, average);
            store(p + i, old - (average * outside + old * decay));
        });
        finite &= m_out.close_state();
    } else {
        const T step = T(alpha * clip);
        over<T>(n, [&](auto x, int64_t i, int) {
            using X = decltype(x);
            const X old = load<X>(p + i);
            store(p + i, old - (u(x, i) * step + old * decay));
        });
    }
    if (o.handling.stochastic) round_stochastically(p, n, tensor, o.handling.t, at);
    return p_out.close() && finite;
}

// ---- all squares

template <class T>
bool all_squares(const Job& job, int64_t begin, int64_t end, Tasks tasks) {
    const Tensor& tensor = *job.tensor;
    const auto& o = *static_cast<const AdafactorOptions*>(job.options);
    const T scale = T(o.handling.gradient_scale), weight = T(o.weight), kept = T(1 - o.weight);
    const T eps = T(o.clamp ? 0.0 : o.eps), floor = T(o.eps);
    const bool eager = is_eager(job), averaged = eager && tasks.write, keep = !eager && !tasks.write, clamp = o.clamp;
    bool finite = true;
    T p_tile[TILE], g_tile[TILE], v_tile[TILE], m_tile[TILE], u[TILE];
    for (int64_t at = begin; at < end; at += TILE) {
        const int64_t n = least(TILE, end - at);
        const T* g = input(tensor.g, tensor.g_dtype, at, n, g_tile);
        InOut<T> v_out(tensor.state[0], tensor.state_dtype[0], at, n, tasks.dry || keep, v_tile);
        T* v = v_out.data();
        const auto direction = [&](auto x, int64_t i) {
            using X = decltype(x);
            const X slope = load<X>(g + i) * scale, square = load<X>(v + i);
            return clamp ? slope * ((X{} + 1) / at_least(root(square), floor)) : slope * inverse_root(square);
        };
        const auto averages = [&](auto x, int64_t i) {
            using X = decltype(x);
            const X slope = load<X>(g + i) * scale;
            store(v + i, load<X>(v + i) * kept + (slope * slope + eps) * weight);
        };
        if (tasks.sums) {
            const T* p = input(tensor.p, tensor.p_dtype, at, n, p_tile);
            Sum<T> p_squares, u_squares, g_squares;
            over<T>(n, [&](auto x, int64_t i, int k) {
                using X = decltype(x);
                averages(x, i);
                const X old = load<X>(p + i), towards = direction(x, i), slope = load<X>(g + i) * scale;
                p_squares.add(old * old, k);
                u_squares.add(towards * towards, k);
                g_squares.add(slope * slope, k);
                store(u + i, towards);
            });
            tasks.sums[0] += checked_squares<T>(p_squares.total(), n, [&](int64_t i) { return p[i]; });
            tasks.sums[1] += checked_squares<T>(u_squares.total(), n, [&](int64_t i) { return u[i]; });
            tasks.sums[2] += checked_squares<T>(g_squares.total(), n, [&](int64_t i) { return scale * g[i]; });
        } else if (!averaged) {
            over<T>(n, [&](auto x, int64_t i, int) { averages(x, i); });
        }
        if (tasks.write) finite &= apply(job, at, n, direction, tasks.dry, p_tile, m_tile);
        if (!averaged && !keep) finite &= v_out.close_state();
    }
    return finite;
}

// ---- factored: matrices (rows, columns x after), several of them where there are axes before or between

constexpr int64_t STREAMS = 4;
constexpr int64_t GROUP = 8;  // rows of each stream whose squares are added up in float32

// Scratch of a factored tensor, in the precision of the arithmetic: new statistics and what g is multiplied by.
template <class T>
struct Factors {
    int64_t rows, run;  // of all matrices
    T *row_var, *row_factor, *col_var, *col_factor;

    Factors(const Job& job, const Cut& cut)
        : rows(cut.slices * job.tensor->rows * job.tensor->after),
          run(cut.slices * job.tensor->columns * job.tensor->after),
          row_var(reinterpret_cast<T*>(job.own)), row_factor(row_var + rows), col_var(row_factor + rows),
          col_factor(col_var + run) {}
};

// Partial sums: of columns for each of the cuts along rows, of rows for each cut along columns.
struct Partial {
    double *columns, *rows;

    Partial(const Job& job, const Cut& cut) {
        columns = reinterpret_cast<double*>(job.work) + cut.tasks * SUMS;
        rows = columns + cut.slices * cut.tall * job.tensor->columns * job.tensor->after;
    }
};

// One task: some rows and some columns of one matrix.
struct Window {
    int64_t slice, first_row, last_row, first_col, n, cut_row, cut_col;
    int64_t base, stride;  // of its matrix: where it begins, and from row to row

    Window(const Tensor& t, const Cut& cut, int64_t task) {
        const int64_t run = t.columns * t.after;
        slice = task / (cut.tall * cut.wide);
        cut_row = task / cut.wide % cut.tall;
        cut_col = task % cut.wide;
        first_row = cut_row * cut.height;
        last_row = least(first_row + cut.height, t.rows);
        first_col = cut_col * cut.width;
        n = least(cut.width, run - first_col);
        stride = t.between * run;
        base = slice / t.between * t.rows * stride + slice % t.between * run;
    }
    int64_t at(int64_t row, int64_t column) const { return base + row * stride + first_col + column; }

    int64_t rows_by_stream() const { return (last_row - first_row + STREAMS - 1) / STREAMS; }

    // Calls each(row, column, n) for pieces of all rows, a few from here and there in turn: processors
    // fetch ahead along each stream of addresses by itself, and one stream alone does not fill the memory's lanes.
    template <class Each>
    void in_turn(int64_t begin, int64_t end, int64_t piece, Each each) const {
        const int64_t apart = rows_by_stream();
        for (int64_t k = begin; k < end; k++)
            for (int64_t column = 0; column < n; column += piece)
                for (int64_t stream = 0; stream < STREAMS; stream++) {
                    const int64_t row = first_row + stream * apart + k;
                    if (row < last_row) each(row, column, least(piece, n - column));
                }
    }
};


// Adds squares of some columns of a row to the sums of columns and of the row (one for each place behind the
// columns), and those of p to their sum.
template <class T>
void add_squares(const T* g, const T* p, T scale, int64_t n, int64_t after, T* columns, double* row, double* p_sum) {
    T squares[TILE];
    Sum<T> row_squares, p_squares;
    over<T>(n, [&](auto x, int64_t i, int k) {
        using X = decltype(x);
        const X slope = load<X>(g + i) * scale, square = slope * slope, weight = load<X>(p + i);
        store(columns + i, load<X>(columns + i) + square);
        row_squares.add(square, k);
        p_squares.add(weight * weight, k);
        if (after > 1) store(squares + i, square);
    });
    *p_sum += checked_squares<T>(p_squares.total(), n, [&](int64_t i) { return p[i]; });
    if (after > 1) {
        bool fine = true;
        int64_t columns_left = n / after;
        while (columns_left > 1) {  // the second half of the columns is added to the first
            const int64_t half = columns_left / 2, kept = columns_left - half;
            for (int64_t i = 0; i < half * after; i++) squares[i] += squares[kept * after + i];
            columns_left = kept;
        }
        for (int64_t k = 0; k < after; k++) fine &= squares[k] < T(0x1p126);
        for (int64_t k = 0; k < after && fine; k++) row[k] += double(squares[k]);
        for (int64_t i = 0; i < n && !fine; i++) row[i % after] += double(T((scale * g[i]) * (scale * g[i])));
        return;
    }
    double total = row_squares.total();
    if (!(total < 0x1p126)) {  // lanes may have overflowed where the sum does not
        total = 0;
        for (int64_t i = 0; i < n; i++) total += double(T((scale * g[i]) * (scale * g[i])));
    }
    row[0] += total;
}

template <class T>
void measure_factored(const Job& job, const Cut& cut, int64_t task, double* sums) {
    const Tensor& tensor = *job.tensor;
    const Window window(tensor, cut, task);
    const Partial partial(job, cut);
    const int64_t after = tensor.after, run = tensor.columns * after, n = window.n, piece = piece_of(tensor.after);
    const T scale = T(handling_of(job).gradient_scale);
    double* columns = partial.columns + (window.slice * cut.tall + window.cut_row) * run + window.first_col;
    double* rows = partial.rows + (window.cut_col * cut.slices + window.slice) * tensor.rows * after;
    for (int64_t i = 0; i < n; i++) columns[i] = 0;
    for (int64_t i = window.first_row * after; i < window.last_row * after; i++) rows[i] = 0;
    T p_tile[TILE], g_tile[TILE], column_sums[WIDEST];
    for (int64_t first = 0; first < window.rows_by_stream(); first += GROUP) {
        const int64_t last = least(first + GROUP, window.rows_by_stream());
        for (int64_t i = 0; i < n; i++) column_sums[i] = 0;
        window.in_turn(first, last, piece, [&](int64_t row, int64_t column, int64_t count) {
            const T* g = input(tensor.g, tensor.g_dtype, window.at(row, column), count, g_tile);
            const T* p = input(tensor.p, tensor.p_dtype, window.at(row, column), count, p_tile);
            add_squares(g, p, scale, count, after, column_sums + column, rows + row * after, sums);
        });
        bool fine = true;
        for (int64_t i = 0; i < n; i++) fine &= column_sums[i] < T(0x1p126);
        if (fine || sizeof(T) == 8) {
            for (int64_t i = 0; i < n; i++) columns[i] += double(column_sums[i]);
            continue;
        }
        window.in_turn(first, last, piece, [&](int64_t row, int64_t column, int64_t count) {
            const T* g = input(tensor.g, tensor.g_dtype, window.at(row, column), count, g_tile);
            for (int64_t i = 0; i < count; i++) {  // too large to be added up in float32
                const T x = scale * g[i];
                columns[column + i] += double(T(x * x));
            }
        });
    }
}

// From sums to the new statistics, and to what each row and column multiplies g by.
template <class T>
void factor(const Job& job, const Cut& cut) {
    const Tensor& t = *job.tensor;
    const auto& o = *static_cast<const AdafactorOptions*>(job.options);
    const Partial partial(job, cut);
    const Factors<T> f(job, cut);
    const int64_t run = t.columns * t.after, height = t.rows * t.after;
    const T eps = T(o.clamp ? 0.0 : o.eps), weight = T(o.weight), kept = T(1 - o.weight), floor = T(o.eps);
    const double by_row = 1.0 / double(t.columns > 0 ? t.columns : 1), by_col = 1.0 / double(t.rows);

    widen(f.col_var, t.state[1], t.state_dtype[1], f.run);
    for (int64_t slice = 0; slice < cut.slices; slice++) {
        double sums[TILE];
        T* var = f.col_var + slice * run;
        for (int64_t first = 0; first < run; first += TILE) {
            const int64_t n = least(TILE, run - first);
            for (int64_t i = 0; i < n; i++) sums[i] = 0;
            for (int64_t k = 0; k < cut.tall; k++) {
                const double* part = partial.columns + (slice * cut.tall + k) * run + first;
                for (int64_t i = 0; i < n; i++) sums[i] += part[i];
            }
            for (int64_t i = 0; i < n; i++)
                var[first + i] = kept * var[first + i] + weight * (T(sums[i] * by_col) + eps);
        }
    }
    // rows of all matrices lie between one another: (before, rows, between, after)
    widen(f.row_var, t.state[0], t.state_dtype[0], f.rows);
    for (int64_t slice = 0; slice < cut.slices; slice++) {
        const int64_t a = slice / t.between, b = slice % t.between;
        double means[MOST_AFTER] = {};
        for (int64_t row = 0; row < t.rows; row++) {
            T* var = f.row_var + ((a * t.rows + row) * t.between + b) * t.after;
            for (int64_t k = 0; k < t.after; k++) {
                double sum = 0;
                for (int64_t c = 0; c < cut.wide; c++)
                    sum += partial.rows[(c * cut.slices + slice) * height + row * t.after + k];
                var[k] = kept * var[k] + weight * (T(sum * by_row) + eps);
                means[k] += double(var[k]);
            }
        }
        T mean[MOST_AFTER];
        for (int64_t k = 0; k < t.after; k++) mean[k] = T(means[k] * by_col);
        for (int64_t row = 0; row < t.rows; row++) {
            const int64_t at = ((a * t.rows + row) * t.between + b) * t.after;
            for (int64_t k = 0; k < t.after; k++) {
                const T var = f.row_var[at + k];
                f.row_factor[at + k] = o.clamp ? var : inverse_root(var / (mean[k] > T(0) ? mean[k] : T(1)));
            }
        }
        T *to = f.col_factor + slice * run, *from = f.col_var + slice * run;
        if (o.clamp) {
            for (int64_t i = 0; i < run; i += t.after)
                for (int64_t k = 0; k < t.after; k++) to[i + k] = from[i + k] / (mean[k] < floor ? floor : mean[k]);
        } else {
            for (int64_t i = 0; i < run; i++) to[i] = inverse_root(from[i]);
        }
    }
}

// u for some columns of one row: g over the root of the factored estimate.
template <class T>
struct Whitened {
    const T *g, *column;
    const T* rows;  // one for each element where something lies behind the columns, else null
    T row, scale, floor;
    bool clamp;

    template <class X>
    X operator()(X, int64_t i) const {
        const X slope = load<X>(g + i) * scale, across = rows ? load<X>(rows + i) : X{} + row;
        if (!clamp) return slope * across * load<X>(column + i);
        return slope * ((X{} + 1) / at_least(root(across * load<X>(column + i)), floor));
    }
};

// The first `period` elements over and over, until there are n.
template <class T>
void repeat(T* to, const T* from, int64_t period, int64_t n) {
    std::memcpy(to, from, size_t(period) * sizeof(T));
    for (int64_t done = period; done < n; done *= 2) std::memcpy(to + done, to, size_t(least(done, n - done)) * sizeof(T));
}

// Over a window: add up u**2, or go on to p.
template <class T>
bool factored(const Job& job, const Cut& cut, int64_t task, double* sums, bool write, bool dry) {
    const Tensor& tensor = *job.tensor;
    const auto& o = *static_cast<const AdafactorOptions*>(job.options);
    const Window window(tensor, cut, task);
    const Factors<T> f(job, cut);
    const int64_t after = tensor.after, a = window.slice / tensor.between, b = window.slice % tensor.between;
    const T* column = f.col_factor + window.slice * tensor.columns * after + window.first_col;
    bool finite = true;
    T p_tile[TILE], g_tile[TILE], m_tile[TILE], repeated[TILE];
    window.in_turn(0, window.rows_by_stream(), piece_of(tensor.after), [&](int64_t row, int64_t first, int64_t n) {
        const T* g = input(tensor.g, tensor.g_dtype, window.at(row, first), n, g_tile);
        const T* factor = f.row_factor + ((a * tensor.rows + row) * tensor.between + b) * after;
        if (after > 1) repeat(repeated, factor, after, n);
        const T *across = after > 1 ? repeated : nullptr, scale = T(o.handling.gradient_scale);
        const Whitened<T> u{g, column + first, across, factor[0], scale, T(o.eps), o.clamp != 0};
        if (write) {
            finite &= apply(job, window.at(row, first), n, u, dry, p_tile, m_tile);
            return;
        }
        Sum<T> squares;
        over<T>(n, [&](auto x, int64_t i, int k) {
            const auto towards = u(x, i);
            squares.add(towards * towards, k);
        });
        sums[1] += checked_squares<T>(squares.total(), n, [&](int64_t i) { return u(T(0), i); });
    });
    return finite;
}

// Keep the new statistics.
template <class T>
void store_factors(const Job& job, const Cut& cut) {
    const Factors<T> f(job, cut);
    narrow(job.tensor->state[0], job.tensor->state_dtype[0], f.row_var, f.rows);
    narrow(job.tensor->state[1], job.tensor->state_dtype[1], f.col_var, f.run);
}

template <class T>
bool storable(const T* x, int64_t n, uint8_t dtype) {
    bool fine = true;
    for (int64_t i = 0; i < n && dtype == FLOAT16; i++) fine &= std::fabs(x[i]) < T(65520);
    return fine;
}

template <class T>
bool factors_storable(const Job& job, const Cut& cut) {
    const Factors<T> f(job, cut);
    return storable(f.row_var, f.rows, job.tensor->state_dtype[0]) &&
           storable(f.col_var, f.run, job.tensor->state_dtype[1]);
}

}  // namespace
