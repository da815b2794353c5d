// Powers of two, for sigmoid and tanh.
#pragma once
#include "../fluxutils_py/exporting/step_numbers.h"
#include "simd.h"

#define FK_ENTRY(coefficient) coefficient,

namespace FLUXUTILS_UNIT {
namespace {

template <class T> struct Exp2;

template <> struct Exp2<float> {
    static constexpr float C[] = {STEP_EXP2_FLOAT(FK_ENTRY, FK_ENTRY)};
    static constexpr float SHIFTER = 12582912.0f;  // 1.5 * 2**23: what is added to it is rounded to an integer
    static constexpr int MANTISSA = 23;
    static constexpr uint32_t ONE = 0x3f800000;  // the bits of 1
    static constexpr float LIMIT = 30;          // so that the product of four of 1 + 2**t is finite
    static constexpr float AT_LIMIT = 0x1p30f;
};

template <> struct Exp2<double> {
    static constexpr double C[] = {STEP_EXP2_DOUBLE(FK_ENTRY, FK_ENTRY)};
    static constexpr double SHIFTER = 6755399441055744.0;  // 1.5 * 2**52
    static constexpr int MANTISSA = 52;
    static constexpr uint64_t ONE = 0x3ff0000000000000;
    static constexpr double LIMIT = 240, AT_LIMIT = 0x1p240;
};

// 2**t as s * (1 + p), s a power of two; t is taken into -limit...limit first. NaN stays NaN, in p.
template <class T> struct Power {
    using V = typename Lanes<T>::V;
    V s, p;

    FK_INLINE explicit Power(V t, T limit = Exp2<T>::LIMIT) {
        using E = Exp2<T>;
        using I = typename Lanes<T>::I;
        t = at_least(-limit, at_most(limit, t));
        V shifted = t + every(E::SHIFTER);
        V r = t - (shifted - every(E::SHIFTER));
        constexpr int n = sizeof(E::C) / sizeof(E::C[0]);
        V q = every(E::C[0]);
        FK_UNROLL
        for (int k = 1; k < n; k++) q = fma(q, r, every(E::C[k]));
        p = q * r;
        s = (V)(((I)shifted << E::MANTISSA) + E::ONE);
    }
    FK_INLINE V plus_one() const { return fma(s, p, s + every(T(1))); }    // 2**t + 1
    FK_INLINE V minus_one() const { return fma(s, p, s - every(T(1))); }  // 2**t - 1
};

constexpr double LOG2E = 1.4426950408889634;

// tanh(a) = (2**t - 1) / (2**t + 1) with t = 2 a log2(e)
template <class T> FK_INLINE Power<T> power_for_tanh(typename Lanes<T>::V a) {
    return Power<T>(a * every(T(2 * LOG2E)));
}
// sigmoid(a) = 1 / (1 + 2**t) with t = -a log2(e)
template <class T> FK_INLINE Power<T> power_for_sigmoid(typename Lanes<T>::V a, T limit = Exp2<T>::LIMIT) {
    return Power<T>(a * every(T(-LOG2E)), limit);
}
template <class T> FK_INLINE typename Lanes<T>::V tanh_of(typename Lanes<T>::V a) {
    auto e = power_for_tanh<T>(a);
    return e.minus_one() / e.plus_one();
}

// Saturated values, exact to the bit: the slopes v (1 - v) and 1 - v v are 0 only then, and an input of 1e9, by which
// they are multiplied, makes a large gradient of the smallest rest. A value that shares a division with others is off
// by its rounding; below the limit of the exponent, sigmoid would stay at 1e-9.
template <class T> FK_INLINE typename Lanes<T>::V zero_at_limit(
    typename Lanes<T>::V sigmoid, typename Lanes<T>::V plus_one) {
    return plus_one >= every(Exp2<T>::AT_LIMIT) ? every(T(0)) : sigmoid;
}
template <class T> FK_INLINE typename Lanes<T>::V settled_sigmoid(
    typename Lanes<T>::V sigmoid, typename Lanes<T>::V plus_one) {
    auto one = every(T(1));
    return plus_one == one ? one : zero_at_limit<T>(sigmoid, plus_one);
}
template <class T> FK_INLINE typename Lanes<T>::V settled_tanh(
    typename Lanes<T>::V tanh, typename Lanes<T>::V plus_one, typename Lanes<T>::V minus_one) {
    auto one = every(T(1));
    tanh = plus_one == one ? -one : tanh;
    return minus_one == plus_one ? one : tanh;
}

}  // namespace
}  // namespace FLUXUTILS_UNIT
