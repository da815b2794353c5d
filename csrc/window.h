// A window of S steps through one layer, forwards and backwards.
//
// Series are divided into groups of GROUP, whatever the instruction set; a group is computed from its first step to its
// last by one thread, W series at a time, with all that a step needs in the nearest caches. No sum runs over series,
// except in the gradients of the weights: there the groups are divided into PARTS, whatever the number of threads, each
// part adds up its groups in order, and the parts are added in order.
#pragma once
#include "cells.h"
#include "kernels.h"
#include "products.h"
#include "threads.h"

namespace FLUXUTILS_UNIT {
namespace {

constexpr int GROUP = 32;
constexpr int MAX_PARTS = 16, MIN_PARTS = 4;
constexpr int64_t PARTS_BYTES = 32 << 20;   // of all parts, unless there are MIN_PARTS
constexpr int64_t STEPS_BYTES = 192 << 10;  // of gradients in one block of time, to stay in the second cache
constexpr int MAX_STEPS = 16;               // in such a block
constexpr int64_t FOR_ONE_THREAD = 400000;  // products; fewer are not worth waking another

// Divides one piece of memory; counts what would be needed as long as there is none.
struct Room {
    char *start;
    size_t used = 0;
    template <class T> T *take(int64_t n) {
        T *found = start ? reinterpret_cast<T *>(start + used) : nullptr;
        used += (n * sizeof(T) + 63) / 64 * 64;
        return found;
    }
};

template <class T> const T *at(const void *p, int64_t offset) {
    return p ? static_cast<const T *>(p) + offset : nullptr;
}
template <class T> T *at(void *p, int64_t offset) { return p ? static_cast<T *>(p) + offset : nullptr; }

// The sum over the parts of n columns; `apart` numbers from row to row of the sums.
template <class T> __attribute__((noinline)) void sum_of_parts(
    T *out, int64_t rows, int64_t n, const T *from, int64_t apart, int64_t parts, int64_t part_numbers) {
    for (int64_t row = 0; row < rows; row++, out += n, from += apart) {
        memcpy(out, from, n * sizeof(T));
        for (int64_t p = 1; p < parts; p++)
            for (int64_t k = 0; k < n; k++) out[k] += from[p * part_numbers + k];
    }
}

// What cells.h says of a cell, at run time: only what a unit makes of its sums is compiled for each cell.
struct Numbers {
    int rows, nx, nh, h_biases, saved;  // nx, nh: blocks of the input and the recurrent weights
    const int *x_rows, *h_rows;
    bool has_c, needs_before, needs_after, direct;

    template <class Cell> static Numbers of() {
        constexpr int NX = sizeof(Cell::X_ROWS) / sizeof(int);
        constexpr int NH = Cell::H_ROWS[0] < 0 ? 0 : sizeof(Cell::H_ROWS) / sizeof(int);
        return {Cell::ROWS,   NX,          NH,                 Cell::H_BIASES,    Cell::SAVED,  Cell::X_ROWS,
                Cell::H_ROWS, Cell::HAS_C, Cell::NEEDS_BEFORE, Cell::NEEDS_AFTER, Cell::DIRECT};
    }
};

// ONE: whether the gradient of a bias is computed as that of a weight by which ones are multiplied, in a column more.
template <class T, int ONE = 1> struct Window {
    using V = typename Lanes<T>::V;
    static constexpr int L = Lanes<T>::L;
    static constexpr int PARTS_OF_GROUP = GROUP / W<T>;
    static constexpr int GROUPS_OF_PART = ONE ? 1 : 4;  // at least; adding parts up counts for more in bfloat16

    fluxutils_call call;
    const Numbers cell;
    const int64_t S, B, F, H, n_groups;

    template <class Cell> Window(const fluxutils_call &c, Cell, int group = GROUP)
        : call(c),
          cell(Numbers::of<Cell>()),
          S(c.S),
          B(c.B),
          F(c.F),
          H(c.H),
          n_groups((c.B + group - 1) / group),
          units_forward(&Window::units_forward_of<Cell>),
          units_backward(&Window::units_backward_of<Cell>) {
        if (cell.h_biases < cell.nh) {  // one bias: of blocks of the state, then of those of the input
            call.b_x = at<T>(c.b_h, cell.h_biases * H);
            call.db_x = at<T>(c.db_h, cell.h_biases * H);
            if (cell.h_biases == 0) call.b_h = call.db_h = nullptr;
        }
    }

    int64_t threads() const {
        return static_cast<double>(S) * B * H * (cell.nx * F + cell.nh * H) < FOR_ONE_THREAD ? 1 : call.threads;
    }

    // -- forwards ------------------------------------------------------------------------------------------------

    // For each of a unit's sums, and some units at a time, what sums_of_units() reads.
    T *packed = nullptr;

    // Which block of the input or the recurrent weights adds to a sum; -1 if none.
    static int block_of(const int *rows, int n, int row) {
        for (int q = 0; q < n; q++)
            if (rows[q] == row) return q;
        return -1;
    }
    int64_t packed_numbers() const { return H * (cell.rows + F * cell.nx + H * cell.nh); }

    void pack() {
        T *to = packed;
        for (int row = 0; row < cell.rows; row++) {
            const int x = block_of(cell.x_rows, cell.nx, row), h = block_of(cell.h_rows, cell.nh, row);
            in_parts_of_length<ACCUMULATORS / 2>(H, [&](int64_t u0, int64_t n) {
                memset(to, 0, n * sizeof(T));
                auto add = [&](const void *biases, int q) {
                    for (int64_t u = 0; biases && u < n; u++) to[u] += at<T>(biases, q * H + u0)[u];
                };
                if (x >= 0) add(call.b_x, x);
                if (h >= 0 && h < cell.h_biases) add(call.b_h, h);
                to += n;
                auto weights = [&](const void *rows, int q, int64_t length) {
                    const T *from = at<T>(rows, (q * H + u0) * length);
                    for (int64_t k = 0; k < length; k++)
                        for (int64_t u = 0; u < n; u++) *to++ = from[u * length + k];
                };
                if (x >= 0) weights(call.w_x, x, F);
                if (h >= 0) weights(call.w_h, h, H);
            });
        }
    }

    struct ForwardRoom {
        T *x, *before, *after, *c, *saved, *rows;
        T *sums;  // (sums of a unit, H, W)
        ForwardRoom(Room &room, const Numbers &cell, int64_t F, int64_t H)
            : x(room.take<T>(F * W<T>)),
              before(room.take<T>(H * W<T>)),
              after(room.take<T>(H * W<T>)),
              c(room.take<T>(H * W<T>)),
              saved(room.take<T>(H * cell.saved * W<T>)),
              rows(room.take<T>((F > H ? F : H) * W<T>)),
              sums(room.take<T>(cell.rows * H * W<T>)) {}
    };

    void step_forward(
        const T *x, const T *before, T *after, T *c, T *saved, const ForwardRoom &own, int vectors) const {
        const T *from = packed;
        for (int row = 0; row < cell.rows; row++) {
            const int64_t n_x = block_of(cell.x_rows, cell.nx, row) < 0 ? 0 : F;
            const int64_t n_h = block_of(cell.h_rows, cell.nh, row) < 0 ? 0 : H;
            T *sums = own.sums + row * H * W<T>;
            vectors == 2 ? sums_of_units<T, 2>(sums, from, x, n_x, before, n_h, H)
                         : sums_of_units<T, 1>(sums, from, x, n_x, before, n_h, H);
            from += H * (1 + n_x + n_h);
        }
        (this->*units_forward)(before, after, c, saved, own.sums, vectors);
    }

    void series_forward(int64_t b0, int live, ForwardRoom room) const {
        const bool direct = call.saved && live == W<T>;
        T *saved = at<T>(call.saved, S * b0 * H * cell.saved);
        to_lanes(room.before, at<T>(call.h0, b0 * H), H, live, room.rows);
        if (cell.has_c) to_lanes(room.c, at<T>(call.c0, b0 * H), H, live, room.rows);
        for (int64_t t = 0; t < S; t++) {
            to_lanes(room.x, at<T>(call.x, (t * B + b0) * F), F, live, room.rows);
            step_forward(room.x, room.before, room.after, room.c, direct ? saved : room.saved, room, live > L ? 2 : 1);
            from_lanes(at<T>(call.y, (t * B + b0) * H), room.after, H, live, room.rows);
            if (call.saved && !direct) squeeze(saved, room.saved, H * cell.saved, live);
            if (call.saved) saved += H * cell.saved * live;
            T *last = room.before;
            room.before = room.after, room.after = last;
        }
        if (call.h) from_lanes(at<T>(call.h, b0 * H), room.before, H, live, room.rows);
        if (cell.has_c) from_lanes(at<T>(call.c, b0 * H), room.c, H, live, room.rows);
    }

    bool out_of_memory = false;

    void group_forward(int64_t group) {
        Room count{nullptr};
        ForwardRoom(count, cell, F, H);
        Room room{static_cast<char *>(fk_scratch(1, count.used))};
        if (!room.start) {
            out_of_memory = true;
            return;
        }
        ForwardRoom own(room, cell, F, H);
        int64_t end = (group + 1) * GROUP < B ? (group + 1) * GROUP : B;
        for (int64_t b0 = group * GROUP; b0 < end; b0 += W<T>) {
            int live = static_cast<int>(end - b0 < W<T> ? end - b0 : W<T>);
            series_forward(b0, live, own);
        }
    }

    int32_t forward() {
        packed = static_cast<T *>(fk_scratch(0, packed_numbers() * sizeof(T)));
        if (!packed) return FK_OUT_OF_MEMORY;
        pack();
        fk_parallel(
            threads(), n_groups, [](void *w, int64_t i) { static_cast<Window *>(w)->group_forward(i); }, this);
        return out_of_memory ? FK_OUT_OF_MEMORY : FK_OK;
    }

    // -- backwards -----------------------------------------------------------------------------------------------

    // The gradients of weights are sums of products with rows of inputs, states, and a one for the bias. Where inputs
    // and states add to the same sums of a cell, one row holds both. Rows are filled up to whole vectors.
    bool same_rows() const {
        if (cell.nx != cell.nh) return false;
        for (int q = 0; q < cell.nx; q++)
            if (cell.x_rows[q] != cell.h_rows[q]) return false;
        return true;
    }
    static int64_t filled(int64_t n) { return (n + L - 1) / L * L; }
    int64_t x_columns() const { return filled(same_rows() ? F + H + ONE : F + ONE); }
    int64_t h_columns() const { return same_rows() || cell.nh == 0 ? 0 : filled(H + ONE); }
    // Behind the gradients of the weights lie those of the sums of all units, if they are those of biases.
    int64_t weight_numbers() const { return cell.nx * H * x_columns() + cell.nh * H * h_columns(); }
    int64_t part_numbers() const { return weight_numbers() + (ONE ? 0 : cell.rows * filled(H)); }
    bool of_weights() const { return call.dw_x || call.dw_h || call.db_x || call.db_h; }

    // A number of parts that depends on the shape alone.
    int64_t n_parts() const {
        int64_t most = PARTS_BYTES / ((cell.nx * F + cell.nh * H) * H * static_cast<int64_t>(sizeof(T)));
        const int64_t enough = n_groups / GROUPS_OF_PART < MAX_PARTS ? n_groups / GROUPS_OF_PART : MAX_PARTS;
        most = most > enough ? enough : most;
        most = most < MIN_PARTS ? MIN_PARTS : most;
        return n_groups < most ? n_groups : most;
    }
    int64_t steps_together() const {
        int64_t n = STEPS_BYTES / (H * cell.rows * GROUP * static_cast<int64_t>(sizeof(T)));
        n = n > MAX_STEPS ? MAX_STEPS : n < 1 ? 1 : n;
        return n < S ? n : S;
    }

    T *sums = nullptr;  // of all parts

    struct BackwardRoom {
        T *dh, *dc;       // (PARTS_OF_GROUP, H, W)
        T *d;             // (steps, PARTS_OF_GROUP, sums of a unit, lanes_apart)
        T *z_x, *z_h;     // (steps, GROUP, columns)
        T *dy, *before, *after, *dx, *c0, *now, *earlier, *rows;
        BackwardRoom(Room &room, const Window &w, int64_t steps)
            : dh(room.take<T>(PARTS_OF_GROUP * w.H * W<T>)),
              dc(room.take<T>(PARTS_OF_GROUP * w.H * W<T>)),
              d(room.take<T>(steps * PARTS_OF_GROUP * w.cell.rows * lanes_apart<T>(w.H))),
              z_x(room.take<T>(steps * GROUP * w.x_columns() + L)),
              z_h(room.take<T>(steps * GROUP * w.h_columns() + L)),
              dy(room.take<T>(w.H * W<T>)),
              before(room.take<T>(w.H * W<T>)),
              after(room.take<T>(w.H * W<T>)),
              dx(room.take<T>(w.F * W<T>)),
              c0(room.take<T>(w.H * W<T>)),
              now(room.take<T>(w.H * w.cell.saved * W<T>)),
              earlier(room.take<T>(w.H * w.cell.saved * W<T>)),
              rows(room.take<T>((w.F > w.H ? w.F : w.H) * W<T>)) {}
    };

    // The output of the step before, as rows.
    const T *rows_before(int64_t t, int64_t b0) const {
        return t ? at<T>(call.y, ((t - 1) * B + b0) * H) : at<T>(call.h0, b0 * H);
    }

    // The steps from `first` to before `end`, last one first, of up to W series.
    void series_backward(
        int64_t b0, int live, int part, int64_t first, int64_t end, BackwardRoom r) const {
        const bool in_place = live == W<T>;
        const int vectors = live > L ? 2 : 1;
        const auto back = vectors == 2 ? back_through<T, 2> : back_through<T, 1>;
        const T *all = at<T>(call.saved, S * b0 * H * cell.saved);
        const int64_t step_numbers = H * cell.saved * live;
        T *dh = r.dh + part * H * W<T>, *dc = r.dc + part * H * W<T>;
        if (cell.has_c && first == 0) to_lanes(r.c0, at<T>(call.c0, b0 * H), H, live, r.rows);
        if (cell.saved && !in_place) spread(r.now, all + (end - 1) * step_numbers, H * cell.saved, live);
        for (int64_t t = end - 1; t >= first; t--) {
            const T *saved = in_place ? all + t * step_numbers : r.now;
            const T *c_before = r.c0;
            int64_t c_apart = W<T>;
            if (cell.has_c && t) {
                if (!in_place) spread(r.earlier, all + (t - 1) * step_numbers, H * cell.saved, live);
                c_before = (in_place ? all + (t - 1) * step_numbers : r.earlier) + (cell.saved - 1) * W<T>;
                c_apart = cell.saved * W<T>;
            } else if (cell.saved && t > first && !in_place) {
                spread(r.earlier, all + (t - 1) * step_numbers, H * cell.saved, live);
            }
            if (call.dy) to_lanes(r.dy, at<T>(call.dy, (t * B + b0) * H), H, live, r.rows);
            if (cell.needs_before) to_lanes(r.before, rows_before(t, b0), H, live, r.rows);
            if (cell.needs_after) to_lanes(r.after, at<T>(call.y, (t * B + b0) * H), H, live, r.rows);
            T *d = r.d + ((t - first) * PARTS_OF_GROUP + part) * cell.rows * lanes_apart<T>(H);
            (this->*units_backward)(saved, c_before, c_apart, r, dh, dc, d, vectors);
            if (cell.nh && (t || call.dh0))
                back(dh, cell.direct, d, cell.h_rows, cell.nh, at<T>(call.w_h, 0), H, H);
            if (call.dx) {
                back(r.dx, false, d, cell.x_rows, cell.nx, at<T>(call.w_x, 0), H, F);
                from_lanes(at<T>(call.dx, (t * B + b0) * F), r.dx, F, live, r.rows);
            }
            T *now = r.now;
            r.now = r.earlier, r.earlier = now;
        }
    }

    // The rows for the steps of a block: of inputs, and of the states before them.
    void fill_rows(const BackwardRoom &r, int64_t b0, int live, int64_t first, int64_t end) const {
        V one = every(T(0));
        one[0] = 1;
        const T *x_end = at<T>(call.x, S * B * F);
        const int64_t x_columns = this->x_columns(), h_columns = this->h_columns();
        const bool same = same_rows();
        for (int64_t t = first; t < end; t++) {
            const T *x = at<T>(call.x, (t * B + b0) * F), *h = rows_before(t, b0);
            const T *h_end = t ? at<T>(call.y, S * B * H) : at<T>(call.h0, B * H);
            T *to_x = r.z_x + (t - first) * GROUP * x_columns, *to_h = r.z_h + (t - first) * GROUP * h_columns;
            for (int b = 0; b < live; b++, to_x += x_columns, to_h += h_columns) {
                copy_over(to_x, x + b * F, F, x_end);
                if (cell.nh == 0) {
                    store(to_x + F, one);
                    continue;
                }
                T *states = same ? to_x + F : to_h;
                if (h)
                    copy_over(states, h + b * H, H, h_end);
                else
                    memset(states, 0, H * sizeof(T));
                if (!same) store(to_x + F, one);
                store(states + H, one);
            }
        }
    }

    void group_backward(int64_t group, BackwardRoom r, T *sums_of_part) const {
        const int64_t b0 = group * GROUP, steps = steps_together();
        const int live = static_cast<int>(B - b0 < GROUP ? B - b0 : GROUP);
        for (int b = 0; b < live; b += W<T>) {
            int n = live - b < W<T> ? live - b : W<T>;
            T *dh = r.dh + b * H;
            to_lanes(dh, at<T>(call.dh, (b0 + b) * H), H, n, r.rows);
            if (cell.has_c) to_lanes(r.dc + b * H, at<T>(call.dc, (b0 + b) * H), H, n, r.rows);
        }
        for (int64_t end = S; end > 0; end -= steps) {
            int64_t first = end > steps ? end - steps : 0;
            for (int b = 0; b < live; b += W<T>) {
                int n = live - b < W<T> ? live - b : W<T>;
                series_backward(b0 + b, n, b / W<T>, first, end, r);
            }
            if (!of_weights()) continue;
            fill_rows(r, b0, live, first, end);
            add_outer_products<T, PARTS_OF_GROUP>(sums_of_part, r.d, cell.rows, cell.x_rows, cell.nx, r.z_x, H,
                                                  x_columns(), end - first, live);
            if (cell.nh && !same_rows())
                add_outer_products<T, PARTS_OF_GROUP>(sums_of_part + cell.nx * H * x_columns(), r.d, cell.rows,
                                                      cell.h_rows, cell.nh, r.z_h, H, h_columns(), end - first, live);
        }
        for (int b = 0; b < live; b += W<T>) {
            int n = live - b < W<T> ? live - b : W<T>;
            if (call.dh0) from_lanes(at<T>(call.dh0, (b0 + b) * H), r.dh + b * H, H, n, r.rows);
            if (cell.has_c && call.dc0)
                from_lanes(at<T>(call.dc0, (b0 + b) * H), r.dc + b * H, H, n, r.rows);
        }
    }

    void part_backward(int64_t part) {
        Room count{nullptr};
        BackwardRoom(count, *this, steps_together());
        Room room{static_cast<char *>(fk_scratch(1, count.used))};
        if (!room.start) {
            out_of_memory = true;
            return;
        }
        BackwardRoom own(room, *this, steps_together());
        T *sums_of_part = sums + part * part_numbers();
        memset(sums_of_part, 0, part_numbers() * sizeof(T));
        for (int64_t g = n_groups * part / n_parts(); g < n_groups * (part + 1) / n_parts(); g++)
            group_backward(g, own, sums_of_part);
    }

    void add_parts(void *to, int64_t rows, int64_t n, const T *from, int64_t apart) const {
        if (to) sum_of_parts(static_cast<T *>(to), rows, n, from, apart, n_parts(), part_numbers());
    }

    int32_t backward() {
        sums = static_cast<T *>(fk_scratch(0, n_parts() * part_numbers() * sizeof(T)));
        if (!sums) return FK_OUT_OF_MEMORY;
        fk_parallel(
            threads(), n_parts(), [](void *w, int64_t i) { static_cast<Window *>(w)->part_backward(i); }, this);
        if (out_of_memory) return FK_OUT_OF_MEMORY;
        add_up_parts();
        return FK_OK;
    }

    // The gradients of the weights, from those of all parts.
    void add_up_parts() const {
        if (!of_weights()) return;
        const int64_t apart = same_rows() ? x_columns() : h_columns();
        const T *of_states = same_rows() ? sums + F : sums + cell.nx * H * x_columns();
        add_parts(call.dw_x, cell.nx * H, F, sums, x_columns());
        add_parts(call.dw_h, cell.nh * H, H, of_states, apart);
        if constexpr (ONE) {
            add_parts(call.db_x, cell.nx * H, 1, same_rows() ? of_states + H : sums + F, x_columns());
            add_parts(call.db_h, cell.h_biases * H, 1, of_states + H, apart);
        } else {
            const T *of_biases = sums + weight_numbers();
            for (int q = 0; q < cell.nx; q++)
                add_parts(at<T>(call.db_x, q * H), 1, H, of_biases + cell.x_rows[q] * filled(H), 0);
            for (int q = 0; q < cell.nh && q < cell.h_biases; q++)
                add_parts(at<T>(call.db_h, q * H), 1, H, of_biases + cell.h_rows[q] * filled(H), 0);
        }
    }

    // -- what depends on the cell --------------------------------------------------------------------------------

    void (Window::*units_forward)(const T *before, T *after, T *c, T *saved, const T *sums, int vectors) const;
    void (Window::*units_backward)(
        const T *saved, const T *c_before, int64_t c_apart, const BackwardRoom &r, T *dh, T *dc, T *d,
        int vectors) const;

    template <class Cell> void units_forward_of(
        const T *before, T *after, T *c, T *saved, const T *sums, int vectors) const {
        constexpr int ROWS = Cell::ROWS, SAVED = Cell::SAVED;
        const T alpha = static_cast<T>(call.alpha);
        const int64_t n = H;
        for (int64_t u = 0; u < n; u++)
            for (int v = 0; v < vectors; v++) {
                const int64_t lane = u * W<T> + v * L;
                V a[ROWS], kept[SAVED + 1];
                FK_UNROLL
                for (int i = 0; i < ROWS; i++) a[i] = load(sums + i * n * W<T> + lane);
                Step<T> s;
                s.alpha = alpha;
                if (Cell::NEEDS_BEFORE) s.before = load(before + lane);
                if (Cell::HAS_C) s.c = load(c + lane);
                store(after + lane, Cell::template forward<T>(a, s, kept));
                if (Cell::HAS_C) store(c + lane, s.c);
                FK_UNROLL
                for (int i = 0; i < SAVED; i++) store(saved + (u * SAVED + i) * W<T> + v * L, kept[i]);
            }
    }

    template <class Cell> void units_backward_of(
        const T *saved, const T *c_before, int64_t c_apart, const BackwardRoom &r, T *dh, T *dc, T *d,
        int vectors) const {
        constexpr int ROWS = Cell::ROWS, SAVED = Cell::SAVED;
        const T *dy = call.dy ? r.dy : nullptr, *before = r.before, *after = r.after;
        const T alpha = static_cast<T>(call.alpha);
        const int64_t n = H, apart = lanes_apart<T>(n);
        for (int64_t u = 0; u < n; u++)
            for (int v = 0; v < vectors; v++) {
                int64_t lane = u * W<T> + v * L;
                V kept[SAVED + 1], gradients[ROWS];
                FK_UNROLL
                for (int i = 0; i < SAVED; i++) {
                    const T *from = saved + (u * SAVED + i) * W<T> + v * L;
                    kept[i] = load(from);
                    // steps are read backwards, which a processor does not foresee
                    __builtin_prefetch(from - n * SAVED * W<T>);
                }
                Step<T> s;
                s.alpha = alpha;
                if (Cell::NEEDS_BEFORE) s.before = load(before + lane);
                if (Cell::NEEDS_AFTER) s.after = load(after + lane);
                if (Cell::HAS_C) {
                    s.c = kept[SAVED - 1];
                    s.c_before = load(c_before + u * c_apart + v * L);
                    s.dc = load(dc + lane);
                }
                s.dh = load(dh + lane);
                if (dy) s.dh = s.dh + load(dy + lane);
                Cell::template backward<T>(kept, s, gradients);
                if (Cell::HAS_C) store(dc + lane, s.dc);
                if (Cell::DIRECT) store(dh + lane, s.direct);
                FK_UNROLL
                for (int i = 0; i < ROWS; i++) store(d + i * apart + lane, gradients[i]);
            }
    }
};

}  // namespace
}  // namespace FLUXUTILS_UNIT
