// A window through one layer with units in the lanes of the vectors: for few series, which would leave lanes of their
// own empty. The sums are the same chains of fma() as in window.h, so that outputs, states and their gradients are equal
// to the last bit; which of the two computes a call depends on its shape alone.
//
// Series are divided into groups of UNITS_GROUP; a group is computed from its first step to its last by one thread. The
// weights are packed by blocks of L units, filled up with zeros, and stream from the second cache once per step and group.
#pragma once
#include "window.h"

namespace FLUXUTILS_UNIT {
namespace {

constexpr int UNITS_GROUP = 8;
constexpr int64_t INPUT_BYTES = 96 << 10;  // of products with inputs that are computed ahead
constexpr int64_t ROWS_TOGETHER = 64;      // steps times series in one block of weight gradients

// Whether few series leave so many lanes empty that units fill them better. r is the ratio of the lanes that both ways
// need, for the widest vectors, whatever the instruction set: results do not depend on it, but what is measured does.
inline bool units_in_lanes(const fluxutils_call &c) {
    constexpr int64_t WIDTH = 16;
    double of_units = double(c.B) * ((c.H + WIDTH - 1) / WIDTH * WIDTH);
    double of_series = double(c.H) * ((c.B + WIDTH - 1) / WIDTH * WIDTH);
    double r = of_units / of_series;
    if (c.H >= 64 && c.B <= 32) return r <= 1.0;  // also more tasks for threads
    return r <= (c.H >= 16 ? 0.8 : 0.5);
}

// The first n lanes, of which the others are zero; n vectors' worth if n is at least L.
template <class T> FK_INLINE typename Lanes<T>::V load_some(const T *p, int64_t n) {
    if (n >= Lanes<T>::L) return load(p);
    T room[Lanes<T>::L] = {};
    for (int64_t i = 0; i < n; i++) room[i] = p[i];
    return load(room);
}
template <class T> FK_INLINE void store_some(T *p, typename Lanes<T>::V v, int64_t n) {
    if (n >= Lanes<T>::L) return store(p, v);
    T room[Lanes<T>::L];
    store(room, v);
    for (int64_t i = 0; i < n; i++) p[i] = room[i];
}

template <class Cell, class T> struct Units : Window<Cell, T> {
    using Base = Window<Cell, T>;
    using V = typename Lanes<T>::V;
    using Base::B, Base::F, Base::H, Base::S, Base::call, Base::L, Base::NH, Base::NX, Base::ROWS, Base::SAVED;

    // Series in one run through a block of units: as many as registers hold.
    static constexpr int MOST = ACCUMULATORS / ROWS > 6 ? 6 : ACCUMULATORS / ROWS;
    // Blocks of units at once: more chains of sums than a processor's latency where series are few.
    template <int NB> static constexpr int blocks_at_once() {
        int sums = NB * (NH ? NH : 1);
        return sums >= 16 ? 1 : 2 * NB * ROWS <= ACCUMULATORS ? 2 : 1;
    }
    // Vectors of units at once in products with the weights' rows.
    template <int NB> static constexpr int columns_at_once() {
        int n = ACCUMULATORS / NB;
        return n >= 16 ? 16 : n >= 8 ? 8 : n >= 4 ? 4 : n;
    }

    const int64_t n_blocks, wide;  // of L units; the units filled up

    explicit Units(const fluxutils_call &c)
        : Base(c, UNITS_GROUP), n_blocks((c.H + L - 1) / L), wide((c.H + L - 1) / L * L) {}

    int64_t width(int64_t block) const { return block + 1 < n_blocks ? L : H - block * L; }
    static int64_t runs(int64_t series) { return (series + MOST - 1) / MOST; }

    // -- packing -----------------------------------------------------------------------------------------------------

    T *biases = nullptr, *of_x = nullptr, *of_h = nullptr;  // [block][row][L], [block][k][q][L], [block][k][q][L]
    T *zeros = nullptr;

    // [block][k][q][L] from rows q H + u of n numbers; rows of four are transposed in registers.
    void pack_rows(T *to, const void *weights, int64_t blocks_of_rows, int64_t n) const {
        constexpr int N = N_BLOCK<T>;
        const T *w = static_cast<const T *>(weights);
        for (int64_t block = 0; block < n_blocks; block++)
            for (int64_t q = 0; q < blocks_of_rows; q++) {
                const T *from = w + (q * H + block * L) * n;
                T *out = to + (block * n * blocks_of_rows + q) * L;
                const int64_t apart = blocks_of_rows * L;
                if (width(block) < L || n < N) {
                    for (int64_t k = 0; k < n; k++)
                        for (int64_t l = 0; l < L; l++)
                            out[k * apart + l] = l < width(block) ? from[l * n + k] : T(0);
                    continue;
                }
                for (int64_t k = 0; k < n; k += N) {
                    if (k > n - N) k = n - N;  // the last block overlaps the one before
                    V lanes[N];
                    FK_UNROLL
                    for (int j = 0; j < N; j++) lanes[j] = quads(from + j * n + k, N * n);
                    transpose(lanes);
                    FK_UNROLL
                    for (int j = 0; j < N; j++) store(out + (k + j) * apart, lanes[j]);
                }
            }
    }

    void pack_biases() const {
        auto b_x = at<T>(call.b_x, 0), b_h = at<T>(call.b_h, 0);
        for (int64_t i = 0; i < n_blocks * ROWS * L; i++) biases[i] = 0;
        for (int64_t u = 0; u < H; u++) {
            T *out = biases + u / L * ROWS * L + u % L;
            for (int q = 0; b_x && q < NX; q++) out[Cell::X_ROWS[q] * L] += b_x[q * H + u];
            for (int q = 0; b_h && q < NH && q < Cell::H_BIASES; q++) out[Cell::H_ROWS[q] * L] += b_h[q * H + u];
        }
    }

    // -- forwards ----------------------------------------------------------------------------------------------------

    struct ForwardRoom {
        T *sums, *c;  // [row][block][ROWS][L] of the inputs of some steps; (series, wide)
        ForwardRoom(Room &room, const Units &u)
            : sums(room.take<T>(u.rows_ahead() * u.n_blocks * ROWS * L)), c(room.take<T>(UNITS_GROUP * u.wide)) {}
    };

    // Steps times series whose products with the inputs are computed ahead; whole steps of a group.
    int64_t rows_ahead() const {
        int64_t rows = INPUT_BYTES / (n_blocks * ROWS * L * static_cast<int64_t>(sizeof(T)));
        return rows < UNITS_GROUP ? UNITS_GROUP : rows;
    }

    template <int R> FK_INLINE void add_inputs(T *sums, const T *const *x, int64_t block) const {
        V a[R][ROWS];
        const T *bias = biases + block * ROWS * L, *w = of_x + block * F * NX * L;
        FK_UNROLL
        for (int r = 0; r < R; r++)
            FK_UNROLL
            for (int i = 0; i < ROWS; i++) a[r][i] = load(bias + i * L);
        for (int64_t k = 0; k < F; k++, w += NX * L) {
            V in[R];
            FK_UNROLL
            for (int r = 0; r < R; r++) in[r] = every(x[r][k]);
            FK_UNROLL
            for (int q = 0; q < NX; q++) {
                V weight = load(w + q * L);
                FK_UNROLL
                for (int r = 0; r < R; r++)
                    a[r][Cell::X_ROWS[q]] = fma(weight, in[r], a[r][Cell::X_ROWS[q]]);
            }
        }
        FK_UNROLL
        for (int r = 0; r < R; r++)
            FK_UNROLL
            for (int i = 0; i < ROWS; i++) store(sums + (r * n_blocks + block) * ROWS * L + i * L, a[r][i]);
    }

    // The sums of n rows, which are those of consecutive steps and series.
    void inputs_forward(T *sums, int64_t b0, int64_t series, int64_t first, int64_t n) const {
        in_parts<MOST>(n, [&](int64_t row, auto constant) {
            constexpr int R = decltype(constant)::value;
            const T *x[R];
            for (int r = 0; r < R; r++) {
                int64_t t = first + (row + r) / series, b = b0 + (row + r) % series;
                x[r] = at<T>(call.x, (t * B + b) * F);
            }
            for (int64_t block = 0; block < n_blocks; block++)
                add_inputs<R>(sums + row * n_blocks * ROWS * L, x, block);
        });
    }

    // One step of NB series through UV blocks of units. saved is that of the step and the group.
    template <int NB, int UV> FK_INLINE void blocks_forward(
        int64_t block, const T *sums, const T *const *before, T *const *after, T *c, T *saved, int64_t b,
        int64_t series) const {
        V a[UV][NB][ROWS];
        FK_UNROLL
        for (int g = 0; g < UV; g++)
            FK_UNROLL
            for (int r = 0; r < NB; r++)
                FK_UNROLL
                for (int i = 0; i < ROWS; i++)
                    a[g][r][i] = load(sums + (r * n_blocks + block + g) * ROWS * L + i * L);
        if constexpr (NH > 0) {
            const T *w = of_h + block * H * NH * L;
            const int64_t apart = H * NH * L;
            for (int64_t k = 0; k < H; k++, w += NH * L) {
                V h[NB];
                FK_UNROLL
                for (int r = 0; r < NB; r++) h[r] = every(before[r][k]);
                FK_UNROLL
                for (int g = 0; g < UV; g++)
                    FK_UNROLL
                    for (int q = 0; q < NH; q++) {
                        V weight = load(w + g * apart + q * L);
                        FK_UNROLL
                        for (int r = 0; r < NB; r++)
                            a[g][r][Cell::H_ROWS[q]] = fma(weight, h[r], a[g][r][Cell::H_ROWS[q]]);
                    }
            }
        }
        FK_UNROLL
        for (int g = 0; g < UV; g++) {
            const int64_t unit = (block + g) * L, n = width(block + g);
            FK_UNROLL
            for (int r = 0; r < NB; r++) {
                V kept[SAVED + 1];
                Step<T> s;
                s.alpha = static_cast<T>(call.alpha);
                if (Cell::NEEDS_BEFORE) s.before = load_some(before[r] + unit, n);
                if (Cell::HAS_C) s.c = load(c + r * wide + unit);
                store_some(after[r] + unit, Cell::template forward<T>(a[g][r], s, kept), n);
                if (Cell::HAS_C) store(c + r * wide + unit, s.c);
                if (!saved) continue;
                T *to = saved + unit * SAVED * series + (b + r) * SAVED * n;
                FK_UNROLL
                for (int i = 0; i < SAVED; i++) store_some(to + i * n, kept[i], n);
            }
        }
    }

    template <int NB> void step_forward(
        const T *sums, int64_t t, int64_t b0, int64_t b, int64_t series, T *c, T *saved) const {
        constexpr int UV = blocks_at_once<NB>();
        const T *before[NB];
        T *after[NB];
        for (int r = 0; r < NB; r++) {
            before[r] = this->rows_before(t, b0 + b + r);
            if (!before[r]) before[r] = zeros;
            after[r] = at<T>(call.y, (t * B + b0 + b + r) * H);
        }
        const int64_t pairs = n_blocks / UV;
        for (int64_t i = 0; i < pairs; i++) {  // odd steps begin with the blocks that the last step left in the cache
            int64_t block = (t % 2 ? pairs - 1 - i : i) * UV;
            blocks_forward<NB, UV>(block, sums, before, after, c, saved, b, series);
        }
        if constexpr (UV > 1)
            for (int64_t block = pairs * UV; block < n_blocks; block++)
                blocks_forward<NB, 1>(block, sums, before, after, c, saved, b, series);
    }

    void units_forward(int64_t group) {
        Room count{nullptr};
        ForwardRoom(count, *this);
        Room room{static_cast<char *>(fk_scratch(1, count.used))};
        if (!room.start) {
            this->out_of_memory = true;
            return;
        }
        ForwardRoom own(room, *this);
        const int64_t b0 = group * UNITS_GROUP, series = this->series_of(group);
        const int64_t steps = rows_ahead() / series, row = n_blocks * ROWS * L;
        if (Cell::HAS_C) this->states_from(own.c, call.c0, b0, series);
        T *saved = at<T>(call.saved, S * b0 * H * SAVED);
        for (int64_t first = 0; first < S; first += steps) {
            const int64_t end = first + steps < S ? first + steps : S;
            inputs_forward(own.sums, b0, series, first, (end - first) * series);
            for (int64_t t = first; t < end; t++) {
                const T *sums = own.sums + (t - first) * series * row;
                in_parts<MOST>(series, [&](int64_t b, auto constant) {
                    step_forward<decltype(constant)::value>(
                        sums + b * row, t, b0, b, series, own.c + b * wide, saved);
                });
                if (saved) saved += H * SAVED * series;
            }
        }
        for (int64_t b = 0; b < series; b++) {
            if (call.h) memcpy(at<T>(call.h, (b0 + b) * H), at<T>(call.y, ((S - 1) * B + b0 + b) * H), H * sizeof(T));
            if (Cell::HAS_C) memcpy(at<T>(call.c, (b0 + b) * H), own.c + b * wide, H * sizeof(T));
        }
    }

    int64_t series_of(int64_t group) const {
        int64_t left = B - group * UNITS_GROUP;
        return left < UNITS_GROUP ? left : UNITS_GROUP;
    }

    // (series, wide) from rows of H numbers, of which null means zeros.
    void states_from(T *to, const void *from, int64_t b0, int64_t series) const {
        memset(to, 0, series * wide * sizeof(T));
        for (int64_t b = 0; from && b < series; b++) memcpy(to + b * wide, at<T>(from, (b0 + b) * H), H * sizeof(T));
    }

    int32_t forward() {
        Room count{nullptr};
        layout_forward(count);
        Room room{static_cast<char *>(fk_scratch(0, count.used))};
        if (!room.start) return FK_OUT_OF_MEMORY;
        layout_forward(room);
        memset(zeros, 0, wide * sizeof(T));
        pack_biases();
        pack_rows(of_x, call.w_x, NX, F);
        if constexpr (NH > 0) pack_rows(of_h, call.w_h, NH, H);
        fk_parallel(
            this->threads(), this->n_groups, [](void *w, int64_t i) { static_cast<Units *>(w)->units_forward(i); },
            this);
        return this->out_of_memory ? FK_OUT_OF_MEMORY : FK_OK;
    }

    void layout_forward(Room &room) {
        biases = room.take<T>(n_blocks * ROWS * L);
        of_x = room.take<T>(n_blocks * F * NX * L);
        of_h = room.take<T>(n_blocks * H * NH * L);
        zeros = room.take<T>(wide);
    }

    // -- backwards ---------------------------------------------------------------------------------------------------

    // Rows of the weights, filled up to whole vectors; the weights themselves where they need no filling.
    const T *rows_h = nullptr, *rows_x = nullptr;
    int64_t wide_x() const { return (F + L - 1) / L * L; }

    struct BackwardRoom {
        T *dh, *dc, *c0;   // (series, wide)
        T *d;              // (rows, ROWS, wide)
        T *panels;         // [ROWS][block][row][L]: the same
        T *z_x, *z_h, *dx;  // (rows, columns), (rows, columns), (rows, wide_x)
        BackwardRoom(Room &room, const Units &u)
            : dh(room.take<T>(UNITS_GROUP * u.wide)),
              dc(room.take<T>(UNITS_GROUP * u.wide)),
              c0(room.take<T>(UNITS_GROUP * u.wide)),
              d(room.take<T>(ROWS_TOGETHER * ROWS * u.wide)),
              panels(room.take<T>(ROWS_TOGETHER * ROWS * u.wide)),
              z_x(room.take<T>(ROWS_TOGETHER * u.x_columns() + L)),
              z_h(room.take<T>(ROWS_TOGETHER * u.h_columns() + L)),
              dx(room.take<T>(UNITS_GROUP * u.wide_x())) {}
    };

    // out[r][j] (+)= sum over blocks q and units u of weights[q H + u][j] * d[r][rows[q]][u], for R rows of d
    template <int R, int BLOCKS> FK_INLINE void back(
        T *out, int64_t apart, bool add, const T *d, const int (&rows)[BLOCKS], const T *weights, int64_t n) const {
        constexpr int C = columns_at_once<R>();
        in_parts<C>(n / L, [&](int64_t c0, auto constant) {
            constexpr int N = decltype(constant)::value;
            V sums[R][N];
            FK_UNROLL
            for (int r = 0; r < R; r++)
                FK_UNROLL
                for (int c = 0; c < N; c++) sums[r][c] = add ? load(out + r * apart + (c0 + c) * L) : every(T(0));
            for (int q = 0; q < BLOCKS; q++) {
                const T *w = weights + q * H * n + c0 * L, *from = d + rows[q] * wide;
                for (int64_t u = 0; u < H; u++, w += n) {
                    V g[R];
                    FK_UNROLL
                    for (int r = 0; r < R; r++) g[r] = every(from[r * ROWS * wide + u]);
                    FK_UNROLL
                    for (int c = 0; c < N; c++) {
                        V weight = load(w + c * L);
                        FK_UNROLL
                        for (int r = 0; r < R; r++) sums[r][c] = fma(weight, g[r], sums[r][c]);
                    }
                }
            }
            FK_UNROLL
            for (int r = 0; r < R; r++)
                FK_UNROLL
                for (int c = 0; c < N; c++) store(out + r * apart + (c0 + c) * L, sums[r][c]);
        });
    }

    // The gradients of the sums of one step.
    void units_backward(const BackwardRoom &r, int64_t t, int64_t row, int64_t b0, int64_t series) const {
        const T *saved = at<T>(call.saved, (S * b0 + t * series) * H * SAVED);
        const T *saved_before = t ? saved - H * SAVED * series : nullptr;
        for (int64_t block = 0; block < n_blocks; block++) {
            const int64_t unit = block * L, n = width(block);
            for (int64_t b = 0; b < series; b++) {
                const int64_t from = unit * SAVED * series + b * SAVED * n;
                V kept[SAVED + 1], gradients[ROWS];
                FK_UNROLL
                for (int i = 0; i < SAVED; i++) kept[i] = load_some(saved + from + i * n, n);
                Step<T> s;
                s.alpha = static_cast<T>(call.alpha);
                if (Cell::NEEDS_BEFORE) {
                    const T *before = this->rows_before(t, b0 + b);
                    s.before = before ? load_some(before + unit, n) : every(T(0));
                }
                if (Cell::NEEDS_AFTER) s.after = load_some(at<T>(call.y, (t * B + b0 + b) * H + unit), n);
                if (Cell::HAS_C) {
                    s.c = kept[SAVED - 1];
                    s.c_before = saved_before ? load_some(saved_before + from + (SAVED - 1) * n, n)
                                              : load(r.c0 + b * wide + unit);
                    s.dc = load(r.dc + b * wide + unit);
                }
                s.dh = load(r.dh + b * wide + unit);
                if (call.dy) s.dh = s.dh + load_some(at<T>(call.dy, (t * B + b0 + b) * H + unit), n);
                Cell::template backward<T>(kept, s, gradients);
                if (Cell::HAS_C) store(r.dc + b * wide + unit, s.dc);
                if (Cell::DIRECT) store(r.dh + b * wide + unit, s.direct);
                FK_UNROLL
                for (int i = 0; i < ROWS; i++) {
                    store(r.d + ((row + b) * ROWS + i) * wide + unit, gradients[i]);
                    store(r.panels + ((i * n_blocks + block) * ROWS_TOGETHER + row + b) * L, gradients[i]);
                }
            }
        }
    }

    void fill_rows(const BackwardRoom &r, int64_t b0, int64_t series, int64_t first, int64_t end) const {
        V one = every(T(0));
        one[0] = 1;
        const int64_t x_columns = this->x_columns(), h_columns = this->h_columns();
        T *to_x = r.z_x, *to_h = r.z_h;
        for (int64_t t = first; t < end; t++)
            for (int64_t b = 0; b < series; b++, to_x += x_columns, to_h += h_columns) {
                memcpy(to_x, at<T>(call.x, (t * B + b0 + b) * F), F * sizeof(T));
                if (NH == 0) {
                    store(to_x + F, one);
                    continue;
                }
                T *states = this->same_rows() ? to_x + F : to_h;
                const T *h = this->rows_before(t, b0 + b);
                if (h)
                    memcpy(states, h, H * sizeof(T));
                else
                    memset(states, 0, H * sizeof(T));
                if (!this->same_rows()) store(to_x + F, one);
                store(states + H, one);
            }
    }

    // Gradients of weights: out[q H + u][k] += sum over rows of d[row][rows[q]][u] * z[row][k]
    template <int BLOCKS> void add_outer(
        T *out, const T *panels, const int (&rows)[BLOCKS], const T *z, int64_t columns, int64_t n) const {
        constexpr int C = 3, U = ACCUMULATORS / C > L ? L : ACCUMULATORS / C;
        for (int q = 0; q < BLOCKS; q++)
            for (int64_t u0 = 0; u0 < H; u0 += U) {
                const T *d = panels + (rows[q] * n_blocks + u0 / L) * ROWS_TOGETHER * L + u0 % L;
                with_constant<U>(H - u0 < U ? H - u0 : U, [&](auto n_units) {
                    constexpr int R = decltype(n_units)::value;
                    in_parts<C>(columns / L, [&](int64_t c0, auto n_columns) {
                        constexpr int N = decltype(n_columns)::value;
                        T *o = out + (q * H + u0) * columns + c0 * L;
                        const T *zr = z + c0 * L, *dr = d;
                        V sums[R][N];
                        FK_UNROLL
                        for (int j = 0; j < R; j++)
                            FK_UNROLL
                            for (int c = 0; c < N; c++) sums[j][c] = load(o + j * columns + c * L);
                        for (int64_t row = 0; row < n; row++, zr += columns, dr += L) {
                            V in[N];
                            FK_UNROLL
                            for (int c = 0; c < N; c++) in[c] = load(zr + c * L);
                            FK_UNROLL
                            for (int j = 0; j < R; j++) {
                                V g = every(dr[j]);
                                FK_UNROLL
                                for (int c = 0; c < N; c++) sums[j][c] = fma(g, in[c], sums[j][c]);
                            }
                        }
                        FK_UNROLL
                        for (int j = 0; j < R; j++)
                            FK_UNROLL
                            for (int c = 0; c < N; c++) store(o + j * columns + c * L, sums[j][c]);
                    });
                });
            }
    }

    void group_backward(int64_t group, const BackwardRoom &r, T *sums_of_part) const {
        const int64_t b0 = group * UNITS_GROUP, series = series_of(group), steps = ROWS_TOGETHER / series;
        states_from(r.dh, call.dh, b0, series);
        if (Cell::HAS_C) {
            states_from(r.dc, call.dc, b0, series);
            states_from(r.c0, call.c0, b0, series);
        }
        for (int64_t end = S; end > 0; end -= steps) {
            const int64_t first = end > steps ? end - steps : 0, rows = (end - first) * series;
            for (int64_t t = end - 1; t >= first; t--) {
                const int64_t row = (t - first) * series;
                units_backward(r, t, row, b0, series);
                if constexpr (NH > 0)
                    if (t || call.dh0)
                        in_parts<MOST>(series, [&](int64_t b, auto constant) {
                            back<decltype(constant)::value>(r.dh + b * wide, wide, Cell::DIRECT,
                                                            r.d + (row + b) * ROWS * wide, Cell::H_ROWS, rows_h, wide);
                        });
            }
            if (call.dx)
                for (int64_t row = 0, R; row < rows; row += R) {
                    R = rows - row < MOST ? rows - row : MOST;
                    with_constant<MOST>(R, [&](auto constant) {
                        back<decltype(constant)::value>(
                            r.dx, wide_x(), false, r.d + row * ROWS * wide, Cell::X_ROWS, rows_x, wide_x());
                    });
                    for (int64_t i = 0; i < R; i++) {
                        int64_t t = first + (row + i) / series, b = b0 + (row + i) % series;
                        memcpy(at<T>(call.dx, (t * B + b) * F), r.dx + i * wide_x(), F * sizeof(T));
                    }
                }
            if (!this->of_weights()) continue;
            fill_rows(r, b0, series, first, end);
            add_outer(sums_of_part, r.panels, Cell::X_ROWS, r.z_x, this->x_columns(), rows);
            if constexpr (NH > 0 && !Base::same_rows())
                add_outer(sums_of_part + NX * H * this->x_columns(), r.panels, Cell::H_ROWS, r.z_h, this->h_columns(),
                          rows);
        }
        for (int64_t b = 0; b < series; b++) {
            if (call.dh0) memcpy(at<T>(call.dh0, (b0 + b) * H), r.dh + b * wide, H * sizeof(T));
            if (Cell::HAS_C && call.dc0) memcpy(at<T>(call.dc0, (b0 + b) * H), r.dc + b * wide, H * sizeof(T));
        }
    }

    void units_part_backward(int64_t part) {
        Room count{nullptr};
        BackwardRoom(count, *this);
        Room room{static_cast<char *>(fk_scratch(1, count.used))};
        if (!room.start) {
            this->out_of_memory = true;
            return;
        }
        BackwardRoom own(room, *this);
        // columns between the last number of a row and its end are multiplied, but not used
        memset(own.z_x, 0, (ROWS_TOGETHER * this->x_columns() + L) * sizeof(T));
        memset(own.z_h, 0, (ROWS_TOGETHER * this->h_columns() + L) * sizeof(T));
        T *sums_of_part = this->sums + part * this->part_numbers();
        memset(sums_of_part, 0, this->part_numbers() * sizeof(T));
        const int64_t n = this->n_groups, parts = this->n_parts();
        for (int64_t g = n * part / parts; g < n * (part + 1) / parts; g++) group_backward(g, own, sums_of_part);
    }

    // (rows, wide) of (rows, n), or these themselves
    static const T *fill_up(T *room, const void *weights, int64_t rows, int64_t n, int64_t to) {
        const T *w = static_cast<const T *>(weights);
        if (n == to) return w;
        memset(room, 0, rows * to * sizeof(T));
        for (int64_t i = 0; i < rows; i++) memcpy(room + i * to, w + i * n, n * sizeof(T));
        return room;
    }

    int32_t backward() {
        Room count{nullptr};
        T *h = nullptr, *x = nullptr;
        auto layout = [&](Room &room) {
            this->sums = room.take<T>(this->n_parts() * this->part_numbers());
            h = room.take<T>(H == wide ? 0 : NH * H * wide);
            x = room.take<T>(F == wide_x() || !call.dx ? 0 : NX * H * wide_x());
        };
        layout(count);
        Room room{static_cast<char *>(fk_scratch(0, count.used))};
        if (!room.start) return FK_OUT_OF_MEMORY;
        layout(room);
        if (NH > 0) rows_h = fill_up(h, call.w_h, NH * H, H, wide);
        if (call.dx) rows_x = fill_up(x, call.w_x, NX * H, F, wide_x());
        fk_parallel(
            this->threads(), this->n_parts(),
            [](void *w, int64_t i) { static_cast<Units *>(w)->units_part_backward(i); }, this);
        if (this->out_of_memory) return FK_OUT_OF_MEMORY;
        this->add_up_parts();
        return FK_OK;
    }
};

}  // namespace
}  // namespace FLUXUTILS_UNIT
