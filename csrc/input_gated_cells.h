// MinGRU and MinLSTM of Feng et al. (2024): gates and candidate depend on the input alone, so that there are no
// recurrent weights.
#pragma once
#include "gated_cells.h"

namespace FLUXUTILS_UNIT {
namespace {

struct InputGated {
    static constexpr int H_ROWS[] = {-1}, H_BIASES = 0;
    static constexpr bool HAS_C = false, NEEDS_BEFORE = true, NEEDS_AFTER = false, DIRECT = true;

    // (1 - share) a + share b, without their difference, which may be too large for a number.
    template <class T> static FK_INLINE typename Lanes<T>::V between(
        typename Lanes<T>::V share, typename Lanes<T>::V a, typename Lanes<T>::V b) {
        return fma(share, b, fma(-share, a, a));
    }
};

struct MinGRU : InputGated {
    static constexpr int ROWS = 2, X_ROWS[] = {0, 1};
    static constexpr int SAVED = 2;  // z, candidate

    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        saved[0] = ExactGate<T>::keep(a[0]), saved[1] = a[1];
        return between<T>(saved[0], s.before, saved[1]);
    }

    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        auto z = saved[0], candidate = saved[1];
        d[1] = s.dh * z;
        s.direct = s.dh - d[1];
        d[0] = s.dh * (candidate - s.before) * ExactGate<T>::slope(z);
    }
};

struct MinLSTM : InputGated {
    static constexpr int ROWS = 3, X_ROWS[] = {0, 1, 2};
    static constexpr int SAVED = 4;  // f / (f + i), 1 - f, 1 - i, candidate

    // With F = 1 / f and I = 1 / i, f / (f + i) is I / (F + I). Of two closed gates only the difference counts: both
    // exponents are lowered until the smaller is at the limit.
    template <class T> static FK_INLINE typename Lanes<T>::V forward(
        const typename Lanes<T>::V a[], Step<T> &s, typename Lanes<T>::V saved[]) {
        constexpr T LIMIT = 2 * Exp2<T>::LIMIT;  // F * I is finite
        using V = typename Lanes<T>::V;
        V one = every(T(1)), to_exponent = every(T(-LOG2E));
        V exponent_f = a[0] * to_exponent, exponent_i = a[1] * to_exponent;
        V smaller = exponent_f < exponent_i ? exponent_f : exponent_i;
        V at_limit = every(Exp2<T>::LIMIT);
        exponent_f = smaller > at_limit ? (exponent_f - smaller) + at_limit : exponent_f;
        exponent_i = smaller > at_limit ? (exponent_i - smaller) + at_limit : exponent_i;
        V F = Power<T>(exponent_f, LIMIT).plus_one(), I = Power<T>(exponent_i, LIMIT).plus_one();
        V inverse = one / (F * I);
        saved[0] = F >= I * every(Exp2<T>::AT_LIMIT) ? every(T(0)) : I / (F + I);
        saved[1] = (F - one) * I * inverse, saved[2] = (I - one) * F * inverse;
        saved[3] = a[2];
        return between<T>(saved[0], saved[3], s.before);
    }

    template <class T> static FK_INLINE void backward(
        const typename Lanes<T>::V saved[], Step<T> &s, typename Lanes<T>::V d[]) {
        auto keep = saved[0], candidate = saved[3];
        s.direct = s.dh * keep;
        d[2] = s.dh - s.direct;
        auto slope = s.direct * (s.before - candidate) * (every(T(1)) - keep);
        d[0] = slope * saved[1];
        d[1] = -(slope * saved[2]);
    }
};

}  // namespace
}  // namespace FLUXUTILS_UNIT
