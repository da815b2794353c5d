// Sums of products for W series at a time. Every sum is one chain of fma() in a fixed order, lane by lane.
#pragma once
#include "lanes.h"

namespace FLUXUTILS_UNIT {
namespace {

template <int N> struct Int {
    static constexpr int value = N;
};

// f(Int<n>), n from 1 to MAX being known at run time.
template <int MAX, class Fn> FK_INLINE void with_constant(int64_t n, const Fn &f) {
    if constexpr (MAX > 1) {
        if (n < MAX) return with_constant<MAX - 1>(n, f);
    }
    f(Int<MAX>{});
}

// As few parts of n as possible, none longer than MAX, of about equal lengths.
template <int MAX> FK_INLINE int64_t n_parts_of(int64_t n) { return (n + MAX - 1) / MAX; }
FK_INLINE int64_t part_length(int64_t n, int64_t parts, int64_t i) { return n / parts + (i < n % parts); }

// These parts of 0...n: f(start, length), or, their lengths known to the compiler, f(start, Int<length>).
template <int MAX, class Fn> FK_INLINE void in_parts_of_length(int64_t n, const Fn &f) {
    int64_t parts = n_parts_of<MAX>(n), start = 0;
    for (int64_t i = 0; i < parts; i++) {
        int64_t length = part_length(n, parts, i);
        f(start, length);
        start += length;
    }
}
template <int MAX, class Fn> FK_INLINE void in_parts(int64_t n, const Fn &f) {
    in_parts_of_length<MAX>(n, [&](int64_t start, int64_t length) {
        with_constant<MAX>(length, [&](auto constant) { f(start, constant); });
    });
}

// sums[j][v] += sum over k < n of weights[k][j] * in[k][v]
template <int R, int V, class T> FK_INLINE void add_products(
    typename Lanes<T>::V (&sums)[R][V], const T *in, int64_t in_apart, const T *weights, int64_t weights_apart,
    int64_t n) {
    for (int64_t k = 0; k < n; k++, in += in_apart, weights += weights_apart) {
        typename Lanes<T>::V x[V];
        FK_UNROLL
        for (int v = 0; v < V; v++) x[v] = load(in + v * Lanes<T>::L);
        FK_UNROLL
        for (int j = 0; j < R; j++) {
            auto w = every(weights[j]);
            FK_UNROLL
            for (int v = 0; v < V; v++) sums[j][v] = fma(w, x[v], sums[j][v]);
        }
    }
}

// out[j] = biases[j] + sums over k of w_x[k][j] * x[k] and of w_h[k][j] * h[k], for j < n, which are computed R at a time:
// `packed` has the R biases, R weights for each x, and R for each h.
template <class T, int V> __attribute__((noinline)) void sums_of_units(
    T *out, const T *packed, const T *x, int64_t n_x, const T *h, int64_t n_h, int64_t n) {
    constexpr int L = Lanes<T>::L;
    in_parts<ACCUMULATORS / 2>(n, [&](int64_t, auto constant) {
        constexpr int R = decltype(constant)::value;
        typename Lanes<T>::V sums[R][V];
        FK_UNROLL
        for (int j = 0; j < R; j++)
            FK_UNROLL
            for (int v = 0; v < V; v++) sums[j][v] = every(packed[j]);
        add_products<R, V, T>(sums, x, W<T>, packed + R, R, n_x);
        add_products<R, V, T>(sums, h, W<T>, packed + R * (1 + n_x), R, n_h);
        packed += R * (1 + n_x + n_h);
        FK_UNROLL
        for (int j = 0; j < R; j++, out += W<T>)
            FK_UNROLL
            for (int v = 0; v < V; v++) store(out + v * L, sums[j][v]);
    });
}

// From sum to sum of the gradients d of all units: not by a power of two, or all would be in the same places of a cache.
template <class T> FK_INLINE int64_t lanes_apart(int64_t H) { return (H + 1) * W<T>; }

// out[j] (+)= sum over blocks q and units u of weights[q H + u][j] * d[rows[q]][u], for j < n
template <class T, int V> __attribute__((noinline)) void back_through(
    T *out, bool add, const T *d, const int *rows, int blocks, const T *weights, int64_t H, int64_t n) {
    constexpr int L = Lanes<T>::L;
    in_parts<ACCUMULATORS / 2>(n, [&](int64_t j0, auto constant) {
        constexpr int R = decltype(constant)::value;
        typename Lanes<T>::V sums[R][V];
        FK_UNROLL
        for (int j = 0; j < R; j++)
            FK_UNROLL
            for (int v = 0; v < V; v++) sums[j][v] = add ? load(out + (j0 + j) * W<T> + v * L) : every(T(0));
        for (int q = 0; q < blocks; q++)
            add_products<R, V, T>(sums, d + rows[q] * lanes_apart<T>(H), W<T>, weights + q * H * n + j0, n, H);
        FK_UNROLL
        for (int j = 0; j < R; j++)
            FK_UNROLL
            for (int v = 0; v < V; v++) store(out + (j0 + j) * W<T> + v * L, sums[j][v]);
    });
}

// Gradients of weights: out[q H + u][k] += sum over steps and series of d[rows[q]][u] * z[k], with vectors over the
// columns k. d: (steps, PARTS, sums_of_unit, lanes_apart), z: (steps, PARTS W, columns), columns a multiple of L.
template <class T, int PARTS> __attribute__((noinline)) void add_outer_products(
    T *out, const T *d, int sums_of_unit, const int *rows, int blocks, const T *z, int64_t H, int64_t columns,
    int64_t steps, int live) {
    constexpr int L = Lanes<T>::L;
    const int64_t apart = sums_of_unit * lanes_apart<T>(H);
    in_parts<2>(columns / L, [&](int64_t c0, auto n_columns) {
        constexpr int C = decltype(n_columns)::value;
        for (int q = 0; q < blocks; q++)
            in_parts<ACCUMULATORS / 2>(H, [&](int64_t u0, auto n_units) {
                constexpr int R = decltype(n_units)::value;
                typename Lanes<T>::V sums[R][C];
                FK_UNROLL
                for (int j = 0; j < R; j++)
                    FK_UNROLL
                    for (int c = 0; c < C; c++) sums[j][c] = every(T(0));
                const T *from = d + rows[q] * lanes_apart<T>(H) + u0 * W<T>, *z_from = z + c0 * L;
                for (int64_t part = 0; part < steps * PARTS; part++, from += apart, z_from += W<T> * columns) {
                    const int64_t left = live - part % PARTS * W<T>;
                    const T *zb = z_from, *end = from + (left < W<T> ? left : W<T>);
                    for (const T *db = from; db < end; db++, zb += columns) {
                        typename Lanes<T>::V x[C];
                        FK_UNROLL
                        for (int c = 0; c < C; c++) x[c] = load(zb + c * L);
                        FK_UNROLL
                        for (int j = 0; j < R; j++) {
                            auto g = every(db[j * W<T>]);
                            FK_UNROLL
                            for (int c = 0; c < C; c++) sums[j][c] = fma(g, x[c], sums[j][c]);
                        }
                    }
                }
                FK_UNROLL
                for (int j = 0; j < R; j++)
                    FK_UNROLL
                    for (int c = 0; c < C; c++) {
                        T *o = out + (q * H + u0 + j) * columns + (c0 + c) * L;
                        store(o, load(o) + sums[j][c]);
                    }
            });
    });
}

// Copies n numbers by whole vectors: up to L - 1 more are written, and read unless they lie at or behind `end`.
template <class T> FK_INLINE void copy_over(T *to, const T *from, int64_t n, const T *end) {
    constexpr int L = Lanes<T>::L;
    int64_t k = 0;
    for (; k < n && from + k + L <= end; k += L) store(to + k, load(from + k));
    for (; k < n; k++) to[k] = from[k];
}

}  // namespace
}  // namespace FLUXUTILS_UNIT
