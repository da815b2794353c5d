// Between tensors, whose rows are series, and arrays of W lanes, one series per lane: (n, W).
#pragma once
#include "simd.h"

namespace FLUXUTILS_UNIT {
namespace {

// Series that are computed together, in two vectors, or in one where no more than L are left. All strides are W.
template <class T> constexpr int W = 2 * Lanes<T>::L;

template <class T> FK_INLINE void full_to_lanes(T *to, const T *from, int64_t n, int vectors) {
    constexpr int L = Lanes<T>::L, N = N_BLOCK<T>;
    for (int v = 0; v < vectors; v++, to += L, from += L * n) {
        if (n < N) {
            for (int64_t k = 0; k < n; k++)
                for (int l = 0; l < L; l++) to[k * W<T> + l] = from[l * n + k];
            continue;
        }
        for (int64_t k = 0; k < n; k += N) {
            if (k > n - N) k = n - N;  // the last block overlaps the one before
            typename Lanes<T>::V block[N];
            FK_UNROLL
            for (int j = 0; j < N; j++) block[j] = quads(from + j * n + k, N * n);
            transpose(block);
            FK_UNROLL
            for (int j = 0; j < N; j++) store(to + (k + j) * W<T>, block[j]);
        }
    }
}

template <class T> FK_INLINE void full_from_lanes(T *to, const T *from, int64_t n, int vectors) {
    constexpr int L = Lanes<T>::L, N = N_BLOCK<T>;
    for (int v = 0; v < vectors; v++, to += L * n, from += L) {
        if (n < N) {
            for (int64_t k = 0; k < n; k++)
                for (int l = 0; l < L; l++) to[l * n + k] = from[k * W<T> + l];
            continue;
        }
        for (int64_t k = 0; k < n; k += N) {
            if (k > n - N) k = n - N;
            typename Lanes<T>::V block[N];
            FK_UNROLL
            for (int j = 0; j < N; j++) block[j] = load(from + (k + j) * W<T>);
            transpose(block);
            FK_UNROLL
            for (int j = 0; j < N; j++) put_quads(to + j * n + k, N * n, block[j]);
        }
    }
}

// From rows (live, n), of which null means zeros. Lanes without a series get the last one's numbers: any that are no
// trouble will do. room: (W, n).
template <class T> void to_lanes(T *to, const T *from, int64_t n, int live, T *room) {
    constexpr int L = Lanes<T>::L;
    if (!from) {
        memset(to, 0, n * W<T> * sizeof(T));
        return;
    }
    int vectors = live > L ? 2 : 1;
    if (live < vectors * L) {
        memcpy(room, from, live * n * sizeof(T));
        for (int b = live; b < vectors * L; b++) memcpy(room + b * n, from + (live - 1) * n, n * sizeof(T));
        from = room;
    }
    full_to_lanes(to, from, n, vectors);
}

template <class T> void from_lanes(T *to, const T *from, int64_t n, int live, T *room) {
    constexpr int L = Lanes<T>::L;
    int vectors = live > L ? 2 : 1;
    bool full = live == vectors * L;
    full_from_lanes(full ? to : room, from, n, vectors);
    if (!full) memcpy(to, room, live * n * sizeof(T));
}

// (n, W) to (n, live) and back; lanes without a series are left alone.
template <class T> void squeeze(T *to, const T *from, int64_t n, int live) {
    for (int64_t k = 0; k < n; k++) memcpy(to + k * live, from + k * W<T>, live * sizeof(T));
}
template <class T> void spread(T *to, const T *from, int64_t n, int live) {
    for (int64_t k = 0; k < n; k++) memcpy(to + k * W<T>, from + k * live, live * sizeof(T));
}

}  // namespace
}  // namespace FLUXUTILS_UNIT
