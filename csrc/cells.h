// What one unit of each cell computes in one step, forwards and backwards, for a vector of series.
//
// A cell has ROWS sums per unit. X_ROWS says to which of them the blocks of the input weights add, in the order of
// torch's layers, H_ROWS the same of the recurrent weights ({-1}: there are none), of whose blocks the first H_BIASES
// have a bias. SAVED numbers are kept for the backward pass. What backward also needs: HAS_C the second state (the last
// of those saved), NEEDS_BEFORE the output of the step before, NEEDS_AFTER that of the step itself. DIRECT: a part of
// dh goes to the state before without weights.
//
// forward: sums a -> h, c, saved. backward: dh, dc -> gradients d of the sums, of c before, and the direct part.
#pragma once
#include "exp2.h"

namespace FLUXUTILS_UNIT {
namespace {

template <class T> struct Step {
    using V = typename Lanes<T>::V;
    V before, after;  // outputs
    V c;              // forward: of the step before, then of this one; backward: of this one
    V c_before;
    V dh, dc;  // backward: dc of this step, then of the one before
    V direct;
    T alpha;
};

struct LSTM {
    static constexpr int ROWS = 4, X_ROWS[] = {0, 1, 2, 3}, H_ROWS[] = {0, 1, 2, 3}, H_BIASES = 4;
    static constexpr int SAVED = 5;  // i, f, g, o; c
    static constexpr bool HAS_C = true, NEEDS_BEFORE = false, NEEDS_AFTER = false, DIRECT = false;

    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        using V = typename Lanes<T>::V;
        auto ei = power_for_sigmoid<T>(a[0]), ef = power_for_sigmoid<T>(a[1]), eo = power_for_sigmoid<T>(a[3]);
        auto eg = power_for_tanh<T>(a[2]);
        V di = ei.plus_one(), df = ef.plus_one(), dg = eg.plus_one(), d_o = eo.plus_one();
        V ig = di * dg, fo = df * d_o;
        V inverse = every(T(1)) / (ig * fo);  // one division for four
        V by_ig = inverse * fo, by_fo = inverse * ig;
        V i = settled_sigmoid<T>(by_ig * dg, di), f = settled_sigmoid<T>(by_fo * d_o, df);
        V o = settled_sigmoid<T>(by_fo * df, d_o), above = eg.minus_one();
        V g = settled_tanh<T>(by_ig * di * above, dg, above);
        s.c = fma(f, s.c, i * g);
        saved[0] = i, saved[1] = f, saved[2] = g, saved[3] = o, saved[4] = s.c;
        return o * tanh_of<T>(s.c);
    }

    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        using V = typename Lanes<T>::V;
        V i = saved[0], f = saved[1], g = saved[2], o = saved[3];
        V one = every(T(1)), squashed = tanh_of<T>(s.c);
        V through = s.dh * o;
        V dc = fma(through, fma(-squashed, squashed, one), s.dc);
        d[0] = dc * g * (i * (one - i));
        d[1] = dc * s.c_before * (f * (one - f));
        d[2] = dc * i * fma(-g, g, one);
        d[3] = s.dh * squashed * (o * (one - o));
        s.dc = dc * f;
    }
};

struct GRU {
    static constexpr int ROWS = 4, X_ROWS[] = {0, 1, 2}, H_ROWS[] = {0, 1, 3}, H_BIASES = 3;
    static constexpr int SAVED = 4;  // r, z, n of x, n of h
    static constexpr bool HAS_C = false, NEEDS_BEFORE = true, NEEDS_AFTER = false, DIRECT = true;

    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        using V = typename Lanes<T>::V;
        V dr = power_for_sigmoid<T>(a[0]).plus_one(), dz = power_for_sigmoid<T>(a[1]).plus_one();
        V inverse = every(T(1)) / (dr * dz);
        V r = settled_sigmoid<T>(inverse * dz, dr), z = settled_sigmoid<T>(inverse * dr, dz);
        V n = tanh_of<T>(fma(r, a[3], a[2]));
        saved[0] = r, saved[1] = z, saved[2] = n, saved[3] = a[3];
        return fma(z, s.before - n, n);
    }

    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        using V = typename Lanes<T>::V;
        V r = saved[0], z = saved[1], n = saved[2], one = every(T(1));
        s.direct = s.dh * z;
        d[2] = s.dh * (one - z) * fma(-n, n, one);
        d[3] = d[2] * r;
        d[0] = d[2] * saved[3] * (r * (one - r));
        d[1] = s.dh * (s.before - n) * (z * (one - z));
    }
};

struct RNNBase {
    static constexpr int ROWS = 1, X_ROWS[] = {0}, H_ROWS[] = {0}, H_BIASES = 1, SAVED = 0;
    static constexpr bool HAS_C = false, NEEDS_BEFORE = false, NEEDS_AFTER = true, DIRECT = false;
};

struct TanhRNN : RNNBase {
    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &, typename Lanes<T>::V[]) {
        return tanh_of<T>(a[0]);
    }
    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V[], Step<T> &s, typename Lanes<T>::V d[]) {
        d[0] = s.dh * fma(-s.after, s.after, every(T(1)));
    }
};

struct ReluRNN : RNNBase {
    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &, typename Lanes<T>::V[]) {
        return at_least(T(0), a[0]);
    }
    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V[], Step<T> &s, typename Lanes<T>::V d[]) {
        auto zero = every(T(0));
        d[0] = s.after <= zero ? zero : s.dh;
    }
};

}  // namespace
}  // namespace FLUXUTILS_UNIT
