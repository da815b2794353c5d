// A window through one layer with units in the lanes of the vectors: for few series, which would leave lanes of their
// own empty. The sums are the same chains of fma() as in window.h, so that outputs, states and their gradients are equal
// to the last bit; which of the two computes a call depends on its shape alone.
//
// Series are divided into groups; a group is computed from its first step to its last by one thread. The weights are
// packed by blocks of L units, filled up with zeros, and stream from the second cache once per step and group.
#pragma once
#include "window.h"

namespace FLUXUTILS_UNIT {
namespace {

constexpr int ROWS_AT_ONCE = 4;  // that share the loads of weights
constexpr int UNITS_GROUP = 8;   // series, where they are enough and the weights are large; else ROWS_AT_ONCE: more
                                 // gain nothing then, and leave threads idle
constexpr int64_t WIDE_BYTES = 512 << 10;   // of weights that are large
constexpr int64_t TILES_BYTES = 128 << 10;  // of weights that several rows read one after the other
constexpr int64_t INPUT_BYTES = 96 << 10;  // of products with inputs that are computed ahead
constexpr int64_t ROWS_TOGETHER = 64;      // steps times series in one block of weight gradients

// Whether few series leave so many lanes empty that units fill them better, by the shape alone. r is the ratio of the
// lanes that both ways need in vectors of 16; the bounds were measured. Up to 32 series are one task for a thread with
// series in the lanes, and several with units in them. For a single step, blocks of units read the weights best, but in
// training, which is told by what is saved, each group adds to all gradients of them: there groups of many series win.
inline bool units_in_lanes(const fluxutils_call &c) {
    constexpr int64_t WIDTH = 16;
    double of_units = double(c.B) * ((c.H + WIDTH - 1) / WIDTH * WIDTH);
    double of_series = double(c.H) * ((c.B + WIDTH - 1) / WIDTH * WIDTH);
    double r = of_units / of_series;
    if (c.H < WIDTH) return r <= 0.5;
    if (c.S == 1 && c.B > WIDTH && c.saved) return false;
    if (c.S == 1 && c.H >= 64 && !c.saved) return r <= 1.1;
    return r <= (c.B <= WIDTH || (c.H >= 64 && c.B <= 32) ? 1.0 : 0.8);
}

// The first n lanes, of which the others are zero; a vector's worth if n is at least L.
#if defined(__AVX512F__)
FK_INLINE uint32_t first_lanes(int64_t n) { return n < 16 ? (1u << n) - 1 : 0xffff; }
FK_INLINE VF load_some(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
FK_INLINE VD load_some(const double *p, int64_t n) { return _mm512_maskz_loadu_pd(first_lanes(n), p); }
FK_INLINE void store_some(float *p, VF v, int64_t n) {  // a masked store is slow
    n < Lanes<float>::L ? _mm512_mask_storeu_ps(p, first_lanes(n), v) : store(p, v);
}
FK_INLINE void store_some(double *p, VD v, int64_t n) {
    n < Lanes<double>::L ? _mm512_mask_storeu_pd(p, first_lanes(n), v) : store(p, v);
}
#else
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
#endif

// What is multiplied, P being float, double, or Bfloat16 of bfloat16.h. Sums and all else are Numbers. A lane holds PER
// operands, which are multiplied one by one and added to the lane's sum. n numbers are packed into lanes(n).
template <class P> struct Operands {
    using Number = P;
    using V = typename Lanes<P>::V;
    static constexpr int PER = 1, ONE = 1;  // ONE: the gradient of a bias is that of a weight of ones

    static FK_INLINE V add_product(V weight, V in, V sum) { return fma(weight, in, sum); }
    static constexpr int64_t lanes(int64_t n) { return n; }
    // A row's numbers from `unit` on, of which the first n belong to units that exist.
    static FK_INLINE void put(P *row, int64_t unit, V v, int64_t) { store(row + unit, v); }
    // lanes(n) of a row.
    static void pack_row(P *to, const P *from, int64_t n) { memcpy(to, from, n * sizeof(P)); }
    // PER rows, of which null means zeros, to n lanes; what lies behind them up to whole vectors may change.
    static void pack_rows(P *to, const P *const *from, int64_t n) {
        if (from[0])
            memcpy(to, from[0], n * sizeof(P));
        else
            memset(to, 0, n * sizeof(P));
    }
};

// -- what does not depend on the cell, and is compiled once for each type -------------------------------------------------

// f(start, Int<length>) for parts of 0...n of MAX, then of half as many, and so on.
template <int MAX, class Fn> FK_INLINE void in_halves(int64_t n, const Fn &f, int64_t start = 0) {
    for (; start + MAX <= n; start += MAX) f(start, Int<MAX>{});
    if constexpr (MAX > 1)
        if (start < n) in_halves<(MAX + 1) / 2>(n, f, start);
}

// Vectors of sums, those of block 0, of block 1, and so on, are computed `tile` at a time: [tile][k][vector][L] from
// rows q H + u of n numbers, with zeros for units that do not exist. The last tile may be smaller.
template <class T> __attribute__((noinline)) void pack_units(
    T *to, const T *weights, int64_t blocks, int64_t H, int64_t n, int64_t tile) {
    constexpr int N = N_BLOCK<T>, L = Lanes<T>::L;
    const int64_t vectors = (H + L - 1) / L * blocks;
    for (int64_t i = 0; i < vectors; i++) {
        const int64_t unit = i / blocks * L, first = i / tile * tile;
        const int64_t apart = (vectors - first < tile ? vectors - first : tile) * L;
        const T *from = weights + (i % blocks * H + unit) * n;
        T *out = to + first * n * L + (i - first) * L;
        if (unit + L > H || n < N) {
            for (int64_t k = 0; k < n; k++)
                for (int64_t l = 0; l < L; l++) out[k * apart + l] = unit + l < H ? from[l * n + k] : T(0);
            continue;
        }
        for (int64_t k = 0; k < n; k += N) {
            if (k > n - N) k = n - N;  // the last block overlaps the one before
            typename Lanes<T>::V lanes[N];
            FK_UNROLL
            for (int j = 0; j < N; j++) lanes[j] = quads(from + j * n + k, N * n);
            transpose(lanes);
            FK_UNROLL
            for (int j = 0; j < N; j++) store(out + (k + j) * apart, lanes[j]);
        }
    }
}

// to[block][rows[q]][L] += biases q H + u, if there are any
template <class T> __attribute__((noinline)) void add_biases(
    T *to, int sums, const T *biases, const int *rows, int blocks, int64_t H) {
    constexpr int L = Lanes<T>::L;
    for (int q = 0; biases && q < blocks; q++)
        for (int64_t u = 0; u < H; u++) to[(u / L * sums + rows[q]) * L + u % L] += biases[q * H + u];
}

// Where the sums of some rows are, and in which order a weight's vectors add to them.
template <class T> struct UnitSums {
    T *sums;
    int64_t apart;  // from row to row
    const int64_t *places;
    int64_t n;
};

// sums[r][place] += sum over n lanes k of weights[k] * in[r][k], for R rows and UV tiles of M vectors
template <class P, int M, int R, int UV, class T> FK_INLINE void add_tile(
    const UnitSums<T> &of, int64_t first, const T *const *in, const T *weights, int64_t n) {
    using V = typename Lanes<T>::V;
    constexpr int L = Lanes<T>::L;
    V a[UV * M][R];
    const int64_t *places = of.places + first;
    FK_UNROLL
    for (int i = 0; i < UV * M; i++)
        FK_UNROLL
        for (int r = 0; r < R; r++) a[i][r] = load(of.sums + r * of.apart + places[i]);
    const T *w = weights + first * n * L;
    for (int64_t k = 0; k < n; k++, w += M * L) {
        auto weight = [&](int i) { return load(w + i / M * n * M * L + i % M * L); };
        if constexpr (R > UV * M) {  // the fewer ones stay in registers
            V weights_of[UV * M];
            FK_UNROLL
            for (int i = 0; i < UV * M; i++) weights_of[i] = weight(i);
            FK_UNROLL
            for (int r = 0; r < R; r++) {
                V x = every(in[r][k]);
                FK_UNROLL
                for (int i = 0; i < UV * M; i++) a[i][r] = Operands<P>::add_product(weights_of[i], x, a[i][r]);
            }
        } else {
            V x[R];
            FK_UNROLL
            for (int r = 0; r < R; r++) x[r] = every(in[r][k]);
            FK_UNROLL
            for (int i = 0; i < UV * M; i++) {
                V one = weight(i);
                FK_UNROLL
                for (int r = 0; r < R; r++) a[i][r] = Operands<P>::add_product(one, x[r], a[i][r]);
            }
        }
    }
    FK_UNROLL
    for (int i = 0; i < UV * M; i++)
        FK_UNROLL
        for (int r = 0; r < R; r++) store(of.sums + r * of.apart + places[i], a[i][r]);
}

// The same for the tiles from `first` to before `last`, two at once where rows are few: more chains of sums than the
// latency of a processor. Backwards: from the last tile on, which the step before has left in the cache.
template <class P, int M, int R, class T> FK_INLINE void add_tiles(
    const UnitSums<T> &of, int64_t first, int64_t last, const T *const *in, const T *weights, int64_t n,
    bool backwards) {
    constexpr int UV = R * M < 16 && 2 * R * M <= ACCUMULATORS ? 2 : 1;
    const int64_t full = of.n / M < last ? of.n / M : last, several = (full - first) / UV;
    for (int64_t i = 0; i < several; i++)
        add_tile<P, M, R, UV>(of, (first + (backwards ? several - 1 - i : i) * UV) * M, in, weights, n);
    if ((full - first) % UV) add_tile<P, M, R, 1>(of, (full - 1) * M, in, weights, n);
    if (full < last)
        with_constant<M - 1>(of.n % M, [&](auto left) {
            add_tile<P, decltype(left)::value, R, 1>(of, full * M, in, weights, n);
        });
}

// Vectors in a tile, where up to `rows` are computed at once: as many as the registers hold.
inline int64_t tile_for(int64_t rows) { return ACCUMULATORS < 16 && rows > 3 ? 3 : 4; }

// The same for all tiles, and up to UNITS_GROUP rows: those that do not fit the registers together read some tiles one
// after the other, while they are in the cache.
template <class P, class T> __attribute__((noinline)) void add_to_sums(
    const UnitSums<T> &of, const T *const *in, const T *weights, int64_t n, int64_t rows, int64_t tile,
    bool backwards) {
    const int64_t tiles = tile == 4 ? (of.n + 3) / 4 : (of.n + 2) / 3;
    const int64_t bytes = tile * n * Lanes<T>::L * static_cast<int64_t>(sizeof(T));
    const int64_t together = rows > ROWS_AT_ONCE ? 1 + TILES_BYTES / bytes : tiles;
    for (int64_t done = 0; done < tiles; done += together) {
        const int64_t end = done + together < tiles ? done + together : tiles;
        const int64_t first = backwards ? tiles - end : done, last = backwards ? tiles - done : end;
        in_parts<ROWS_AT_ONCE>(rows, [&](int64_t r0, auto constant) {
            constexpr int R = decltype(constant)::value;
            UnitSums<T> some = of;
            some.sums += r0 * of.apart;
            if constexpr (4 * R <= ACCUMULATORS)
                if (tile == 4) return add_tiles<P, 4, R>(some, first, last, in + r0, weights, n, backwards);
            if constexpr (ACCUMULATORS < 16)
                add_tiles<P, 3, R>(some, first, last, in + r0, weights, n, backwards);
        });
    }
}

// The gradients of the sums of some rows, and which of them belong to the blocks of a weight.
template <class T> struct RowGradients {
    const T *d;     // (rows, ROWS, wide)
    int64_t apart;  // from row to row
    int64_t wide, H;  // lanes
    const int *rows;
    int blocks;
};

// Columns of a weight, in vectors, that R rows take at once.
constexpr int columns_for(int R) { return ACCUMULATORS / R >= 8 ? 8 : ACCUMULATORS / R >= 4 ? 4 : 3; }

// out[r][j] (+)= sum over blocks q and lanes u of weights[q H + u][j] * d[r][rows[q]][u], for R rows of d and `vectors`
// of the n columns that weights and out have
template <class P, int R, class T> __attribute__((noinline)) void rows_back(
    T *out, bool add, const RowGradients<T> &of, const T *weights, int64_t n, int64_t vectors) {
    using V = typename Lanes<T>::V;
    constexpr int L = Lanes<T>::L;
    in_halves<columns_for(R)>(vectors, [&](int64_t c0, auto constant) {
        constexpr int N = decltype(constant)::value;
        V sums[R][N];
        FK_UNROLL
        for (int r = 0; r < R; r++)
            FK_UNROLL
            for (int c = 0; c < N; c++) sums[r][c] = add ? load(out + r * n + (c0 + c) * L) : every(T(0));
        for (int q = 0; q < of.blocks; q++) {
            const T *w = weights + q * of.H * n + c0 * L, *d = of.d + of.rows[q] * of.wide;
            for (int64_t u = 0; u < of.H; u++, w += n) {
                if constexpr (R > N) {  // the fewer ones stay in registers
                    V weight[N];
                    FK_UNROLL
                    for (int c = 0; c < N; c++) weight[c] = load(w + c * L);
                    FK_UNROLL
                    for (int r = 0; r < R; r++) {
                        V g = every(d[r * of.apart + u]);
                        FK_UNROLL
                        for (int c = 0; c < N; c++) sums[r][c] = Operands<P>::add_product(weight[c], g, sums[r][c]);
                    }
                } else {
                    V g[R];
                    FK_UNROLL
                    for (int r = 0; r < R; r++) g[r] = every(d[r * of.apart + u]);
                    FK_UNROLL
                    for (int c = 0; c < N; c++) {
                        V weight = load(w + c * L);
                        FK_UNROLL
                        for (int r = 0; r < R; r++) sums[r][c] = Operands<P>::add_product(weight, g[r], sums[r][c]);
                    }
                }
            }
        }
        FK_UNROLL
        for (int r = 0; r < R; r++)
            FK_UNROLL
            for (int c = 0; c < N; c++) store(out + r * n + (c0 + c) * L, sums[r][c]);
    });
}

// Gradients of weights: out[q H + u][k] += sum over n lanes of rows of panels[rows[q]][u][row] * z[row][k], where a
// panel holds [unit / L][row][L], with room for ROWS_TOGETHER rows.
template <class P, class T> __attribute__((noinline)) void add_outer(
    T *out, const T *panels, const int *rows, int blocks, int64_t H, const T *z, int64_t columns, int64_t n) {
    using V = typename Lanes<T>::V;
    constexpr int L = Lanes<T>::L, C = 3, U = ACCUMULATORS / C > L ? L : ACCUMULATORS / C;
    constexpr int64_t PANEL = ROWS_TOGETHER / Operands<P>::PER;
    const int64_t n_blocks = (H + L - 1) / L;
    for (int q = 0; q < blocks; q++)
        in_halves<U>(H, [&](int64_t u0, auto n_units) {
            constexpr int R = decltype(n_units)::value;
            const T *d = panels + (rows[q] * n_blocks + u0 / L) * PANEL * L + u0 % L;
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
                        for (int c = 0; c < N; c++) sums[j][c] = Operands<P>::add_product(g, in[c], sums[j][c]);
                    }
                }
                FK_UNROLL
                for (int j = 0; j < R; j++)
                    FK_UNROLL
                    for (int c = 0; c < N; c++) store(o + j * columns + c * L, sums[j][c]);
            });
        });
}

template <class P> struct Units : Window<typename Operands<P>::Number, Operands<P>::ONE> {
    using Of = Operands<P>;
    using T = typename Of::Number;
    using Base = Window<T, Of::ONE>;
    using V = typename Lanes<T>::V;
    static constexpr int PER = Of::PER;
    using Base::B, Base::F, Base::H, Base::S, Base::call, Base::L, Base::cell;

    const int64_t n_blocks, wide;  // of L units; the units filled up

    template <class Cell> Units(const fluxutils_call &c, Cell of)
        : Base(c, of, group_for(c, Numbers::of<Cell>())),
          n_blocks((c.H + L - 1) / L),
          wide((c.H + L - 1) / L * L),
          gates_forward(&Units::gates_forward_of<Cell>),
          gates_backward(&Units::gates_backward_of<Cell>) {}

    static int group_for(const fluxutils_call &c, const Numbers &cell) {
        const int64_t bytes = (cell.nx * c.F + cell.nh * c.H) * c.H * static_cast<int64_t>(sizeof(T));
        if (bytes <= WIDE_BYTES) return ROWS_AT_ONCE;
        if (c.B >= 2 * UNITS_GROUP) return UNITS_GROUP;
        // outputs do not depend on the groups: two threads take two series each, where no gradient follows
        return c.B <= ROWS_AT_ONCE && !c.saved && c.threads > 1 ? ROWS_AT_ONCE / 2 : ROWS_AT_ONCE;
    }
    // Groups are of about equal sizes, counted in rows that are computed at once where they have more.
    int64_t start_of(int64_t group) const {
        if (this->n_groups * ROWS_AT_ONCE >= B) return B * group / this->n_groups;
        const int64_t start = (B + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * group / this->n_groups * ROWS_AT_ONCE;
        return start < B ? start : B;
    }
    int64_t tile() const { return tile_for((B + this->n_groups - 1) / this->n_groups); }
    int64_t tile_of_inputs() const { return tile_for(ROWS_AT_ONCE); }  // rows are many there

    int64_t width(int64_t block) const { return block + 1 < n_blocks ? L : H - block * L; }

    // -- packing -----------------------------------------------------------------------------------------------------

    T *biases = nullptr, *of_x = nullptr, *of_h = nullptr;  // [block][row][L], of_x and of_h as pack_units() has them
    int64_t *places_x = nullptr, *places_h = nullptr;       // of the vectors of the weights among those of a row's sums
    T *zeros = nullptr, *weight_rows = nullptr;  // the latter are packed row by row

    void pack_biases() const {
        memset(biases, 0, n_blocks * cell.rows * L * sizeof(T));
        add_biases(biases, cell.rows, at<T>(call.b_x, 0), cell.x_rows, cell.nx, H);
        const int n = cell.nh < cell.h_biases ? cell.nh : cell.h_biases;
        add_biases(biases, cell.rows, at<T>(call.b_h, 0), cell.h_rows, n, H);
    }

    void find_places(int64_t *to, const int *rows, int blocks) const {
        for (int64_t i = 0; i < n_blocks * blocks; i++) to[i] = (i / blocks * cell.rows + rows[i % blocks]) * L;
    }

    // -- forwards ----------------------------------------------------------------------------------------------------

    struct ForwardRoom {
        T *sums, *c;  // [row][block][cell.rows][L] of the inputs of some steps; (series, wide)
        T *x, *h;     // lanes of rows of inputs and of states, (series, lanes(F)) and (series, wide / PER)
        ForwardRoom(Room &room, const Units &u)
            : sums(room.take<T>(u.rows_ahead() * u.n_blocks * u.cell.rows * L)),
              c(room.take<T>(UNITS_GROUP * u.wide)),
              x(room.take<T>(PER == 1 ? 0 : UNITS_GROUP * Of::lanes(u.F))),
              h(room.take<T>(PER == 1 ? 0 : UNITS_GROUP * u.wide / PER)) {}
    };

    // Steps times series whose products with the inputs are computed ahead; whole steps of a group.
    int64_t rows_ahead() const {
        int64_t rows = INPUT_BYTES / (n_blocks * cell.rows * L * static_cast<int64_t>(sizeof(T)));
        return rows < UNITS_GROUP ? UNITS_GROUP : rows;
    }

    // The sums of n rows of inputs, which are those of consecutive steps and series.
    void inputs_forward(const ForwardRoom &own, int64_t b0, int64_t series, int64_t first, int64_t n) const {
        const int64_t numbers = n_blocks * cell.rows * L;
        T *sums = own.sums;
        for (int64_t row = 0; row < n; row++) memcpy(sums + row * numbers, biases, numbers * sizeof(T));
        for (int64_t row = 0, R; row < n; row += R) {
            R = n - row < UNITS_GROUP ? n - row : UNITS_GROUP;
            const T *x[UNITS_GROUP];
            for (int r = 0; r < R; r++) {
                int64_t t = first + (row + r) / series, b = b0 + (row + r) % series;
                x[r] = at<T>(call.x, (t * B + b) * F);
                if (PER == 1) continue;
                T *packed = own.x + r * Of::lanes(F);
                Of::pack_row(packed, x[r], F);
                x[r] = packed;
            }
            add_to_sums<P, T>({sums + row * numbers, numbers, places_x, cell.nx * n_blocks}, x, of_x, Of::lanes(F), R,
                              tile_of_inputs(), false);
        }
    }

    // One step of some series of a group.
    void step_forward(const ForwardRoom &own, T *sums, int64_t t, int64_t b0, int64_t series, T *saved) const {
        const int64_t numbers = n_blocks * cell.rows * L;
        const T *before[UNITS_GROUP], *lanes[UNITS_GROUP];
        for (int64_t b = 0; b < series; b++) {
            before[b] = this->rows_before(t, b0 + b);
            if (!before[b]) before[b] = zeros;
            lanes[b] = PER == 1 ? before[b] : own.h + b * wide / PER;
        }
        if (cell.nh)
            add_to_sums<P, T>({sums, numbers, places_h, cell.nh * n_blocks}, lanes, of_h, Of::lanes(H), series, tile(),
                              t % 2);
        for (int64_t b = 0; b < series; b++)
            (this->*gates_forward)(sums + b * numbers, before[b], at<T>(call.y, (t * B + b0 + b) * H), own.c + b * wide,
                          own.h + b * wide / PER, saved, b, series);
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
        const int64_t b0 = start_of(group), series = start_of(group + 1) - b0;
        const int64_t steps = rows_ahead() / series, row = n_blocks * cell.rows * L;
        if (cell.has_c) this->states_from(own.c, call.c0, b0, series);
        for (int64_t b = 0; PER > 1 && cell.nh > 0 && b < series; b++) {
            const T *before = this->rows_before(0, b0 + b);
            Of::pack_row(own.h + b * wide / PER, before ? before : zeros, H);
        }
        T *saved = at<T>(call.saved, S * b0 * H * cell.saved);
        for (int64_t first = 0; first < S; first += steps) {
            const int64_t end = first + steps < S ? first + steps : S;
            inputs_forward(own, b0, series, first, (end - first) * series);
            for (int64_t t = first; t < end; t++) {
                step_forward(own, own.sums + (t - first) * series * row, t, b0, series, saved);
                if (saved) saved += H * cell.saved * series;
            }
        }
        for (int64_t b = 0; b < series; b++) {
            if (call.h) memcpy(at<T>(call.h, (b0 + b) * H), at<T>(call.y, ((S - 1) * B + b0 + b) * H), H * sizeof(T));
            if (cell.has_c) memcpy(at<T>(call.c, (b0 + b) * H), own.c + b * wide, H * sizeof(T));
        }
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
        find_places(places_x, cell.x_rows, cell.nx);
        find_places(places_h, cell.h_rows, cell.nh);
        pack_units(of_x, packed_rows(at<T>(call.w_x, 0), cell.nx * H, F), cell.nx, H, Of::lanes(F), tile_of_inputs());
        if (cell.nh)
            pack_units(of_h, packed_rows(at<T>(call.w_h, 0), cell.nh * H, H), cell.nh, H, Of::lanes(H), tile());
        fk_parallel(
            this->threads(), this->n_groups, [](void *w, int64_t i) { static_cast<Units *>(w)->units_forward(i); },
            this);
        return this->out_of_memory ? FK_OUT_OF_MEMORY : FK_OK;
    }

    // Rows of n numbers as rows of lanes.
    const T *packed_rows(const T *weights, int64_t n_rows, int64_t n) const {
        if (PER == 1) return weights;
        for (int64_t i = 0; i < n_rows; i++) Of::pack_row(weight_rows + i * Of::lanes(n), weights + i * n, n);
        return weight_rows;
    }

    void layout_forward(Room &room) {
        const int64_t x = cell.nx * Of::lanes(F), h = cell.nh * Of::lanes(H);
        biases = room.take<T>(n_blocks * cell.rows * L);
        of_x = room.take<T>(n_blocks * x * L);
        of_h = room.take<T>(n_blocks * h * L);
        places_x = room.take<int64_t>(n_blocks * cell.nx);
        places_h = room.take<int64_t>(n_blocks * cell.nh);
        zeros = room.take<T>(wide);
        weight_rows = room.take<T>(PER == 1 ? 0 : H * (x > h ? x : h));
    }

    // -- backwards ---------------------------------------------------------------------------------------------------

    // Rows of the weights, PER of them in one, filled up to whole vectors; the weights themselves where they are that.
    const T *rows_h = nullptr, *rows_x = nullptr;
    int64_t wide_x() const { return (F + L - 1) / L * L; }

    struct BackwardRoom {
        T *dh, *dc, *c0;   // (series, wide)
        T *d;              // (rows, cell.rows, wide / PER)
        T *panels;         // [cell.rows][block][row][L]: the same, with PER rows in one
        T *z_x, *z_h, *dx;  // (rows, columns), (rows, columns), with PER rows in one; (rows, wide_x)
        BackwardRoom(Room &room, const Units &u)
            : dh(room.take<T>(UNITS_GROUP * u.wide)),
              dc(room.take<T>(UNITS_GROUP * u.wide)),
              c0(room.take<T>(UNITS_GROUP * u.wide)),
              d(room.take<T>(ROWS_TOGETHER / PER * u.cell.rows * u.wide)),
              panels(room.take<T>(ROWS_TOGETHER / PER * u.cell.rows * u.wide)),
              z_x(room.take<T>(ROWS_TOGETHER / PER * u.x_columns() + L)),
              z_h(room.take<T>(ROWS_TOGETHER / PER * u.h_columns() + L)),
              dx(room.take<T>(ROWS_TOGETHER * u.wide_x())) {}
    };

    void fill_rows(const BackwardRoom &r, int64_t b0, int64_t series, int64_t first, int64_t n) const {
        V one = every(T(0));
        one[0] = 1;
        const int64_t x_columns = this->x_columns(), h_columns = this->h_columns();
        T *to_x = r.z_x, *to_h = r.z_h;
        for (int64_t row = 0; row < n; row += PER, to_x += x_columns, to_h += h_columns) {
            const T *x[PER], *h[PER];
            FK_UNROLL
            for (int i = 0; i < PER; i++) {
                const int64_t t = first + (row + i) / series, b = b0 + (row + i) % series;
                x[i] = row + i < n ? at<T>(call.x, (t * B + b) * F) : nullptr;
                h[i] = row + i < n ? this->rows_before(t, b) : nullptr;
            }
            Of::pack_rows(to_x, x, F);
            if (Of::ONE && !(cell.nh > 0 && this->same_rows())) store(to_x + F, one);
            if (cell.nh == 0) continue;
            T *states = this->same_rows() ? to_x + F : to_h;
            Of::pack_rows(states, h, H);
            if (Of::ONE) store(states + H, one);
        }
        if constexpr (PER > 1) Of::fill_panels(r.panels, r.d, cell.rows, n_blocks, n);
    }

    // Products of some rows of gradients with a weight's rows, a few at a time.
    static void back(T *out, bool add, RowGradients<T> of, const T *weights, int64_t n, int64_t rows) {
        constexpr int64_t FEW = 2 * columns_for(ROWS_AT_ONCE);
        const int64_t vectors = n / L, together = rows > ROWS_AT_ONCE ? FEW : vectors;
        for (int64_t c = 0; c < vectors; c += together)
            in_parts<ROWS_AT_ONCE>(rows, [&](int64_t row, auto constant) {
                RowGradients<T> some = of;
                some.d += row * of.apart;
                rows_back<P, decltype(constant)::value>(out + row * n + c * L, add, some, weights + c * L, n,
                                                        vectors - c < together ? vectors - c : together);
            });
    }

    void group_backward(int64_t group, const BackwardRoom &r, T *sums_of_part) const {
        const int64_t b0 = start_of(group), series = start_of(group + 1) - b0, steps = ROWS_TOGETHER / series;
        const int64_t apart = cell.rows * wide / PER, h_lanes = Of::lanes(H);
        T *of_biases = sums_of_part + this->weight_numbers();
        states_from(r.dh, call.dh, b0, series);
        if (cell.has_c) {
            states_from(r.dc, call.dc, b0, series);
            states_from(r.c0, call.c0, b0, series);
        }
        for (int64_t end = S; end > 0; end -= steps) {
            const int64_t first = end > steps ? end - steps : 0, rows = (end - first) * series;
            for (int64_t t = end - 1; t >= first; t--) {
                const int64_t row = (t - first) * series;
                (this->*gates_backward)(r, t, row, b0, series, of_biases);
                if (cell.nh > 0 && (t || call.dh0)) {
                    RowGradients<T> of{r.d + row * apart, apart, wide / PER, h_lanes, cell.h_rows, cell.nh};
                    back(r.dh, cell.direct, of, rows_h, wide, series);
                }
            }
            if (call.dx) {
                back(r.dx, false, {r.d, apart, wide / PER, h_lanes, cell.x_rows, cell.nx}, rows_x, wide_x(), rows);
                for (int64_t row = 0; row < rows; row++) {
                    int64_t t = first + row / series, b = b0 + row % series;
                    memcpy(at<T>(call.dx, (t * B + b) * F), r.dx + row * wide_x(), F * sizeof(T));
                }
            }
            if (!this->of_weights()) continue;
            fill_rows(r, b0, series, first, rows);
            const int64_t n = (rows + PER - 1) / PER;
            add_outer<P>(sums_of_part, r.panels, cell.x_rows, cell.nx, H, r.z_x, this->x_columns(), n);
            if (cell.nh && !this->same_rows())
                add_outer<P>(sums_of_part + cell.nx * H * this->x_columns(), r.panels, cell.h_rows, cell.nh, H, r.z_h,
                             this->h_columns(), n);
        }
        for (int64_t b = 0; b < series; b++) {
            if (call.dh0) memcpy(at<T>(call.dh0, (b0 + b) * H), r.dh + b * wide, H * sizeof(T));
            if (cell.has_c && call.dc0) memcpy(at<T>(call.dc0, (b0 + b) * H), r.dc + b * wide, H * sizeof(T));
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
        memset(own.z_x, 0, (ROWS_TOGETHER / PER * this->x_columns() + L) * sizeof(T));
        memset(own.z_h, 0, (ROWS_TOGETHER / PER * this->h_columns() + L) * sizeof(T));
        T *sums_of_part = this->sums + part * this->part_numbers();
        memset(sums_of_part, 0, this->part_numbers() * sizeof(T));
        const int64_t n = this->n_groups, parts = this->n_parts();
        for (int64_t g = n * part / parts; g < n * (part + 1) / parts; g++) group_backward(g, own, sums_of_part);
    }

    // (blocks, lanes(H), wide) of (blocks, H, n), or these themselves
    T *room_for_rows(Room &room, int64_t blocks, int64_t n, int64_t to) const {
        return room.take<T>(PER == 1 && n == to ? 0 : blocks * Of::lanes(H) * to);
    }
    const T *fill_up(T *room, const void *weights, int64_t blocks, int64_t n, int64_t to) const {
        const T *w = static_cast<const T *>(weights);
        if (PER == 1 && n == to) return w;
        memset(room, 0, blocks * Of::lanes(H) * to * sizeof(T));
        T *out = room;
        for (int64_t q = 0; q < blocks; q++)
            for (int64_t u = 0; u < H; u += PER, out += to) {
                const T *from[PER];
                for (int i = 0; i < PER; i++) from[i] = u + i < H ? w + (q * H + u + i) * n : nullptr;
                Of::pack_rows(out, from, n);
            }
        return room;
    }

    int32_t backward() {
        Room count{nullptr};
        T *h = nullptr, *x = nullptr;
        auto layout = [&](Room &room) {
            this->sums = room.take<T>(this->n_parts() * this->part_numbers());
            h = room_for_rows(room, cell.nh, H, wide);
            x = call.dx ? room_for_rows(room, cell.nx, F, wide_x()) : nullptr;
        };
        layout(count);
        Room room{static_cast<char *>(fk_scratch(0, count.used))};
        if (!room.start) return FK_OUT_OF_MEMORY;
        layout(room);
        if (cell.nh > 0) rows_h = fill_up(h, call.w_h, cell.nh, H, wide);
        if (call.dx) rows_x = fill_up(x, call.w_x, cell.nx, F, wide_x());
        fk_parallel(
            this->threads(), this->n_parts(),
            [](void *w, int64_t i) { static_cast<Units *>(w)->units_part_backward(i); }, this);
        if (this->out_of_memory) return FK_OUT_OF_MEMORY;
        this->add_up_parts();
        return FK_OK;
    }

    // -- what depends on the cell ------------------------------------------------------------------------------------

    void (Units::*gates_forward)(
        const T *sums, const T *before, T *after, T *c, T *h, T *saved, int64_t b, int64_t series) const;
    void (Units::*gates_backward)(
        const BackwardRoom &r, int64_t t, int64_t row, int64_t b0, int64_t series, T *of_biases) const;

    // What the units of one series make of their sums. saved is that of the step and the group, h the lanes of the row.
    template <class Cell> void gates_forward_of(
        const T *sums, const T *before, T *after, T *c, T *h, T *saved, int64_t b, int64_t series) const {
        constexpr int ROWS = Cell::ROWS, SAVED = Cell::SAVED;
        const T alpha = static_cast<T>(call.alpha);
        const int64_t units = H;
        for (int64_t unit = 0; unit < units; unit += L, sums += ROWS * L) {
            const int64_t n = units - unit < L ? units - unit : L;
            V a[ROWS], kept[SAVED + 1];
            FK_UNROLL
            for (int i = 0; i < ROWS; i++) a[i] = load(sums + i * L);
            Step<T> s;
            s.alpha = alpha;
            if (Cell::NEEDS_BEFORE) s.before = load_some(before + unit, n);
            if (Cell::HAS_C) s.c = load(c + unit);
            V out = Cell::template forward<T>(a, s, kept);
            store_some(after + unit, out, n);
            if (PER > 1) Of::put(h, unit, out, n);
            if (Cell::HAS_C) store(c + unit, s.c);
            if (!saved) continue;
            T *to = saved + unit * SAVED * series + b * SAVED * n;
            FK_UNROLL
            for (int i = 0; i < SAVED; i++) store_some(to + i * n, kept[i], n);
        }
    }

    // The gradients of the sums of one step; their sums over the series are added to those of the biases.
    template <class Cell> void gates_backward_of(
        const BackwardRoom &r, int64_t t, int64_t row, int64_t b0, int64_t series, T *of_biases) const {
        constexpr int ROWS = Cell::ROWS, SAVED = Cell::SAVED;
        const T *saved = at<T>(call.saved, (S * b0 + t * series) * H * SAVED);
        const T *saved_before = t ? saved - H * SAVED * series : nullptr;
        for (int64_t block = 0; block < n_blocks; block++) {
            const int64_t unit = block * L, n = width(block);
            V biases_of_block[ROWS];
            FK_UNROLL
            for (int i = 0; i < ROWS && !Of::ONE; i++) biases_of_block[i] = load(of_biases + i * wide + unit);
            for (int64_t b = 0; b < series; b++) {
                const int64_t from = unit * SAVED * series + b * SAVED * n;
                V kept[SAVED + 1], gradients[ROWS];
                FK_UNROLL
                for (int i = 0; i < SAVED; i++) {
                    kept[i] = load_some(saved + from + i * n, n);
                    // steps are read backwards, which a processor does not foresee
                    if (t > 1) __builtin_prefetch(saved + from + i * n - 2 * H * SAVED * series);
                }
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
                if (call.dy) {
                    const T *dy = at<T>(call.dy, (t * B + b0 + b) * H + unit);
                    s.dh = s.dh + load_some(dy, n);
                    if (t > 1) __builtin_prefetch(dy - 2 * B * H);
                }
                Cell::template backward<T>(kept, s, gradients);
                if (Cell::HAS_C) store(r.dc + b * wide + unit, s.dc);
                if (Cell::DIRECT) store(r.dh + b * wide + unit, s.direct);
                FK_UNROLL
                for (int i = 0; i < ROWS; i++) {
                    Of::put(r.d + ((row + b) * ROWS + i) * wide / PER, unit, gradients[i], n);
                    T *panel = r.panels + (i * n_blocks + block) * ROWS_TOGETHER * L;
                    if (PER == 1) store(panel + (row + b) * L, gradients[i]);
                    if (!Of::ONE) biases_of_block[i] = biases_of_block[i] + gradients[i];
                }
            }
            FK_UNROLL
            for (int i = 0; i < ROWS && !Of::ONE; i++) store(of_biases + i * wide + unit, biases_of_block[i]);
        }
    }
};

}  // namespace
}  // namespace FLUXUTILS_UNIT
