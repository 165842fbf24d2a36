// Passes over tensors with statistics of rows and columns: matrices (rows, columns x after), several of them where
// there are axes before or between.
#pragma once

#include "blocks.h"

namespace {

constexpr int64_t STREAMS = 4;
constexpr int64_t GROUP = 8;  // rows of each stream whose terms are added up in the precision of the arithmetic

// Scratch of a tensor, in the precision of the arithmetic: slots of rows, then slots of columns.
template <class T>
struct Slots {
    int64_t rows, run;  // of all matrices
    T* first;
    int32_t row_slots;

    Slots(const Job& job, const Cut& cut)
        : rows(cut.slices * job.tensor->rows * job.tensor->after),
          run(cut.slices * job.tensor->columns * job.tensor->after), first(reinterpret_cast<T*>(job.own)),
          row_slots(job.program().between->rows) {}
    T* row(int slot) const { return first + slot * rows; }
    T* column(int slot) const { return first + row_slots * rows + slot * run; }
};

// Partial sums: of columns for each of the cuts along rows, of rows for each cut along columns.
struct Partial {
    double* first;
    int64_t columns_size, rows_size;  // of one sum
    int32_t column_sums;

    Partial(const Job& job, const Cut& cut, const Pass& pass)
        : first(reinterpret_cast<double*>(job.work) + cut.tasks * SUMS),
          columns_size(cut.slices * cut.tall * job.tensor->columns * job.tensor->after),
          rows_size(cut.wide * cut.slices * job.tensor->rows * job.tensor->after), column_sums(pass.column_sums) {}
    double* columns(int sum) const { return first + sum * columns_size; }
    double* rows(int sum) const { return first + column_sums * columns_size + sum * rows_size; }
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

// The first `period` elements over and over, until there are n.
template <class T>
void repeat(T* to, const T* from, int64_t period, int64_t n) {
    std::memcpy(to, from, size_t(period) * sizeof(T));
    for (int64_t done = period; done < n; done *= 2) std::memcpy(to + done, to, size_t(least(done, n - done)) * sizeof(T));
}

// Adds some columns of a row to its sums, one for each place behind the columns.
template <class T>
void add_to_row(const Pass& pass, const Tile<T>& tile, int sum, int64_t after, double* row) {
    if (after == 1 && fits<T>(tile.sums[sum])) {  // else lanes may have overflowed where the sum does not
        row[0] += tile.sums[sum];
        return;
    }
    const Terms<T> terms(pass, tile, sum);
    if (after == 1) {
        row[0] += terms.careful_sum();
        return;
    }
    T added[TILE];
    for (int64_t i = 0; i < terms.n; i++) added[i] = terms[i];
    int64_t columns_left = terms.n / after;
    while (columns_left > 1) {  // the second half of the columns is added to the first
        const int64_t half = columns_left / 2, first = columns_left - half;
        for (int64_t i = 0; i < half * after; i++) added[i] += added[first * after + i];
        columns_left = first;
    }
    bool fine = true;
    for (int64_t k = 0; k < after; k++) fine &= std::fabs(added[k]) < T(0x1p126);
    for (int64_t k = 0; k < after && fine; k++) row[k] += double(added[k]);
    for (int64_t i = 0; i < terms.n && !fine; i++) row[i % after] += double(terms[i]);
}

// One pass over one window.
template <class T>
bool run_window(const Job& job, const Cut& cut, const Pass& pass, Code code, int64_t task, double* sums, bool dry) {
    const Tensor& tensor = *job.tensor;
    const Window window(tensor, cut, task);
    const Slots<T> slots(job, cut);
    const Partial partial(job, cut, pass);
    const int64_t after = tensor.after, run = tensor.columns * after, n = window.n, piece = piece_of(after);
    const int64_t a = window.slice / tensor.between, b = window.slice % tensor.between;
    T numbers[MOST_NUMBERS], buffers[OPERANDS * TILE], kept[SUMS * TILE], repeated[SLOTS * TILE];
    fetch_numbers(numbers, pass.registers, pass.numbers, job.registers);
    T column_sums[SLOTS][WIDEST];
    Tile<T> tile;
    tile.numbers = numbers, tile.kept = kept;
    bool finite = true;

    const auto pass_over = [&](int64_t row, int64_t column, int64_t count, bool is_dry) {
        tile.n = count;
        for (int k = 0; k < pass.rows; k++) {
            const T* own = slots.row(pass.row[k]) + ((a * tensor.rows + row) * tensor.between + b) * after;
            tile.row[k] = own[0], tile.across[k] = nullptr;
            if (after > 1) {
                repeat(repeated + k * TILE, own, after, count);
                tile.across[k] = repeated + k * TILE;
            }
        }
        for (int k = 0; k < pass.columns; k++)
            tile.column[k] = slots.column(pass.column[k]) + window.slice * run + window.first_col + column;
        for (int k = 0; k < pass.column_sums; k++) tile.column_sums[k] = column_sums[k] + column;
        finite &= run_tile(job, pass, code, window.at(row, column), tile, sums, is_dry, buffers);
        const int64_t place = ((window.cut_col * cut.slices + window.slice) * tensor.rows + row) * after;
        for (int k = 0; k < pass.row_sums && !is_dry; k++)
            add_to_row(pass, tile, pass.sums + k, after, partial.rows(k) + place);
    };

    if (pass.row_sums + pass.column_sums == 0) {
        window.in_turn(0, window.rows_by_stream(), piece,
                       [&](int64_t row, int64_t column, int64_t count) { pass_over(row, column, count, dry); });
        return finite;
    }
    double* columns[SLOTS];
    for (int k = 0; k < pass.column_sums; k++) {
        columns[k] = partial.columns(k) + (window.slice * cut.tall + window.cut_row) * run + window.first_col;
        for (int64_t i = 0; i < n; i++) columns[k][i] = 0;
    }
    for (int k = 0; k < pass.row_sums; k++) {
        double* rows = partial.rows(k) + (window.cut_col * cut.slices + window.slice) * tensor.rows * after;
        for (int64_t i = window.first_row * after; i < window.last_row * after; i++) rows[i] = 0;
    }
    for (int64_t first = 0; first < window.rows_by_stream(); first += GROUP) {
        const int64_t last = least(first + GROUP, window.rows_by_stream());
        for (int k = 0; k < pass.column_sums; k++)
            for (int64_t i = 0; i < n; i++) column_sums[k][i] = 0;
        window.in_turn(first, last, piece,
                       [&](int64_t row, int64_t column, int64_t count) { pass_over(row, column, count, dry); });
        bool fine = true;
        for (int k = 0; k < pass.column_sums; k++)
            for (int64_t i = 0; i < n; i++) fine &= std::fabs(column_sums[k][i]) < T(0x1p126);
        if (fine || sizeof(T) == 8) {
            for (int k = 0; k < pass.column_sums; k++)
                for (int64_t i = 0; i < n; i++) columns[k][i] += double(column_sums[k][i]);
            continue;
        }
        // too large to be added up in float32: computed again, for what is summed of each
        window.in_turn(first, last, piece, [&](int64_t row, int64_t column, int64_t count) {
            pass_over(row, column, count, true);
            for (int k = 0; k < pass.column_sums; k++) {
                const Terms<T> terms(pass, tile, pass.sums + pass.row_sums + k);
                for (int64_t i = 0; i < count; i++) columns[k][column + i] += double(terms[i]);
            }
        });
    }
    return finite;
}

// ---- between passes

template <class T>
void compute_rows_and_columns(const Job& job, const Cut& cut, Code code) {
    const Tensor& t = *job.tensor;
    const Program& program = job.program();
    const Between& between = *program.between;
    const Pass& pass = program.passes[between.after_pass];
    const Slots<T> slots(job, cut);
    const Partial partial(job, cut, pass);
    const int64_t run = t.columns * t.after, height = t.rows * t.after;
    // the parts of each sum are added to the first of them
    for (int k = 0; k < pass.column_sums; k++)
        for (int64_t slice = 0; slice < cut.slices; slice++) {
            double* whole = partial.columns(k) + slice * cut.tall * run;
            for (int64_t part = 1; part < cut.tall; part++)
                for (int64_t i = 0; i < run; i++) whole[i] += whole[part * run + i];
        }
    for (int k = 0; k < pass.row_sums; k++)
        for (int64_t part = 1; part < cut.wide; part++)
            for (int64_t i = 0; i < cut.slices * height; i++)
                partial.rows(k)[i] += partial.rows(k)[part * cut.slices * height + i];
    for (int k = 0; k < between.rows; k++)
        if (const int which = between.row_state[k]; which >= 0)
            widen(slots.row(k), t.operand[which], t.dtype[which], slots.rows);
    for (int k = 0; k < between.columns; k++)
        if (const int which = between.column_state[k]; which >= 0)
            widen(slots.column(k), t.operand[which], t.dtype[which], slots.run);
    T numbers[MOST_NUMBERS];
    fetch_numbers(numbers, between.registers, between.numbers, job.registers);
    for (int64_t slice = 0; slice < cut.slices; slice++) {
        Matrix<T> matrix;
        matrix.rows = t.rows, matrix.columns = t.columns, matrix.after = t.after;
        matrix.row_stride = t.between * t.after, matrix.numbers = numbers;
        // rows of all matrices lie between one another: (before, rows, between, after)
        const int64_t first = (slice / t.between * t.rows * t.between + slice % t.between) * t.after;
        for (int k = 0; k < between.rows; k++) matrix.row[k] = slots.row(k) + first;
        for (int k = 0; k < between.columns; k++) matrix.column[k] = slots.column(k) + slice * run;
        for (int k = 0; k < pass.row_sums; k++) matrix.row_sums[k] = partial.rows(k) + slice * height;
        for (int k = 0; k < pass.column_sums; k++) matrix.column_sums[k] = partial.columns(k) + slice * cut.tall * run;
        code(&matrix);
    }
}

template <class T>
bool keep_rows_and_columns(const Job& job, const Cut& cut, bool dry) {
    const Between& between = *job.program().between;
    const Slots<T> slots(job, cut);
    bool fine = true;
    const auto keep = [&](int which, const T* x, int64_t n) {
        if (which < 0) return;
        if (dry) fine &= storable(x, n, job.tensor->dtype[which]);
        else narrow(job.tensor->operand[which], job.tensor->dtype[which], x, n);
    };
    for (int k = 0; k < between.rows; k++) keep(between.row_state[k], slots.row(k), slots.rows);
    for (int k = 0; k < between.columns; k++) keep(between.column_state[k], slots.column(k), slots.run);
    return fine;
}

}  // namespace
