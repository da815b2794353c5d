// The cells of FluxUtils.jl: an LSTM with activations made of parabolas, and relatives of the GRU with fewer gates or
// products, whose activations are those too or the exact ones.
#pragma once
#include "cells.h"

namespace FLUXUTILS_UNIT {
namespace {

template <class T> FK_INLINE typename Lanes<T>::V magnitude(typename Lanes<T>::V a) {
    using I = typename Lanes<T>::I;
    constexpr decltype(Exp2<T>::ONE) all_but_sign = ~0ull >> (65 - 8 * sizeof(T));
    return (typename Lanes<T>::V)((I)a & all_but_sign);
}

// A gate or a candidate: `keep` makes of a sum what is kept for the backward pass, `of` makes the value of that, `slope`
// the derivative by the sum.

// psigmoid and ptanh of nn/activations.py.
template <class T> struct ParabolicGate {
    using V = typename Lanes<T>::V;
    static constexpr T PER_REACH = T(1 / STEP_REACH);
    static FK_INLINE V keep(V a) { return at_least(T(-1), at_most(T(1), a * every(PER_REACH))); }
    static FK_INLINE V of(V u) { return fma(u, fma(magnitude<T>(u), every(T(-0.5)), every(T(1))), every(T(0.5))); }
    static FK_INLINE V slope(V u) { return (every(T(1)) - magnitude<T>(u)) * every(PER_REACH); }
};
template <class T> struct ParabolicCandidate {
    using V = typename Lanes<T>::V;
    static constexpr T KNEE = T(STEP_KNEE), PLATEAU = T(STEP_PLATEAU), BEND = T(STEP_BEND);
    static FK_INLINE V to_knee(V a) { return at_least(T(0), every(KNEE) - magnitude<T>(a)); }
    static FK_INLINE V keep(V a) { return a; }
    static FK_INLINE V of(V a) {
        V w = to_knee(a), size = fma(w * w, every(-BEND), every(PLATEAU));
        return a > every(T(0)) ? size : -size;
    }
    static FK_INLINE V slope(V a) { return to_knee(a) * every(2 * BEND); }
};

template <class T> struct ExactGate {
    using V = typename Lanes<T>::V;
    static FK_INLINE V keep(V a) {
        V plus_one = power_for_sigmoid<T>(a).plus_one();
        return zero_at_limit<T>(every(T(1)) / plus_one, plus_one);
    }
    static FK_INLINE V of(V value) { return value; }
    static FK_INLINE V slope(V value) { return value * (every(T(1)) - value); }
};
template <class T> struct ExactCandidate {
    using V = typename Lanes<T>::V;
    static FK_INLINE V keep(V a) { return tanh_of<T>(a); }
    static FK_INLINE V of(V value) { return value; }
    static FK_INLINE V slope(V value) { return fma(-value, value, every(T(1))); }
};

struct FLSTM {
    static constexpr int ROWS = 4, X_ROWS[] = {0, 1, 2, 3}, H_ROWS[] = {0, 1, 2, 3}, H_BIASES = 0;
    static constexpr int SAVED = 5;  // i, f, g, o; c
    static constexpr bool HAS_C = true, NEEDS_BEFORE = false, NEEDS_AFTER = false, DIRECT = false;

    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        using Gate = ParabolicGate<T>;
        using Candidate = ParabolicCandidate<T>;
        saved[0] = Gate::keep(a[0]), saved[1] = Gate::keep(a[1]), saved[3] = Gate::keep(a[3]);
        saved[2] = Candidate::keep(a[2]);
        s.c = fma(Gate::of(saved[1]), s.c, Gate::of(saved[0]) * Candidate::of(saved[2]));
        saved[4] = s.c;
        return Gate::of(saved[3]) * Candidate::of(s.c);
    }

    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        using Gate = ParabolicGate<T>;
        using Candidate = ParabolicCandidate<T>;
        auto dc = fma(s.dh * Gate::of(saved[3]), Candidate::slope(s.c), s.dc);
        d[0] = dc * Candidate::of(saved[2]) * Gate::slope(saved[0]);
        d[1] = dc * s.c_before * Gate::slope(saved[1]);
        d[2] = dc * Gate::of(saved[0]) * Candidate::slope(saved[2]);
        d[3] = s.dh * Candidate::of(s.c) * Gate::slope(saved[3]);
        s.dc = dc * Gate::of(saved[1]);
    }
};

// Sums: r and z, or the one gate that is both; n of x; n of h. alpha is 0 for the parabolas.
struct SGRURows {
    static constexpr int GATES = 2, X_ROWS[] = {2}, H_ROWS[] = {0, 1, 3}, H_BIASES = 2;
};
struct MGURows {
    static constexpr int GATES = 1, X_ROWS[] = {0, 1}, H_ROWS[] = {0, 2}, H_BIASES = 0;
};
struct SMGURows {
    static constexpr int GATES = 1, X_ROWS[] = {1}, H_ROWS[] = {0, 2}, H_BIASES = 1;
};

template <class Rows> struct Gated : Rows {
    static constexpr int G = Rows::GATES, ROWS = G + 2, SAVED = G + 2;  // gates, n, n of h
    static constexpr bool HAS_C = false, NEEDS_BEFORE = true, NEEDS_AFTER = false, DIRECT = true;

    template <class Gate, class Candidate, class T> static FK_INLINE typename Lanes<T>::V forward_by(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        for (int g = 0; g < G; g++) saved[g] = Gate::keep(a[g]);
        auto r = Gate::of(saved[0]), z = Gate::of(saved[G - 1]);
        saved[G] = Candidate::keep(fma(r, a[G + 1], a[G]));
        saved[G + 1] = a[G + 1];
        auto n = Candidate::of(saved[G]);
        return fma(z, s.before - n, n);
    }
    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        return s.alpha == 0 ? forward_by<ParabolicGate<T>, ParabolicCandidate<T>, T>(a, s, saved)
                            : forward_by<ExactGate<T>, ExactCandidate<T>, T>(a, s, saved);
    }

    template <class Gate, class Candidate, class T> static FK_INLINE void backward_by(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        auto r = Gate::of(saved[0]), z = Gate::of(saved[G - 1]), n = Candidate::of(saved[G]);
        s.direct = s.dh * z;
        d[G] = s.dh * (every(T(1)) - z) * Candidate::slope(saved[G]);
        d[G + 1] = d[G] * r;
        auto dr = d[G] * saved[G + 1], dz = s.dh * (s.before - n);
        d[0] = (G == 1 ? dr + dz : dr) * Gate::slope(saved[0]);
        if (G == 2) d[G - 1] = dz * Gate::slope(saved[G - 1]);
    }
    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        s.alpha == 0 ? backward_by<ParabolicGate<T>, ParabolicCandidate<T>, T>(saved, s, d)
                     : backward_by<ExactGate<T>, ExactCandidate<T>, T>(saved, s, d);
    }
};

using SGRU = Gated<SGRURows>;
using MGU = Gated<MGURows>;
using SMGU = Gated<SMGURows>;

// Of the state, a step replaces the share alpha z.
struct HFGRU {
    static constexpr int ROWS = 4, X_ROWS[] = {0, 1, 2}, H_ROWS[] = {0, 1, 3}, H_BIASES = 0;
    static constexpr int SAVED = 4;  // r, z, n of x, n of h
    static constexpr bool HAS_C = false, NEEDS_BEFORE = true, NEEDS_AFTER = false, DIRECT = true;

    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        saved[0] = ExactGate<T>::keep(a[0]), saved[1] = ExactGate<T>::keep(a[1]);
        saved[2] = ExactCandidate<T>::keep(fma(saved[0], a[3], a[2]));
        saved[3] = a[3];
        return fma(every(s.alpha) * saved[1], saved[2] - s.before, s.before);
    }

    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        auto r = saved[0], z = saved[1], n = saved[2], alpha = every(s.alpha), share = alpha * z;
        s.direct = s.dh * (every(T(1)) - share);
        d[2] = s.dh * share * ExactCandidate<T>::slope(n);
        d[3] = d[2] * r;
        d[0] = d[2] * saved[3] * ExactGate<T>::slope(r);
        d[1] = s.dh * (n - s.before) * alpha * ExactGate<T>::slope(z);
    }
};

}  // namespace
}  // namespace FLUXUTILS_UNIT
