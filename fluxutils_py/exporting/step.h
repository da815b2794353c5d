/* One step of one series, on packed weights: what a stream computes, and what a model's C file holds.
 *
 * C99 and C++, with no library but that of math.h, and without any memory of its own: the caller gives all arrays.
 * With STEP_DOUBLE all numbers are doubles, else floats. Each function is a loop over units that are neighbours in
 * memory: plain -O3 makes vectors of the products, with -fno-trapping-math (which changes no result) of the cells too.
 * Not for -ffast-math, which breaks the rounding of step_power2.
 *
 * Matrices are transposed: weights (n_in, n_out), those of a cell (n_in, rows, H), row after row of H units. A cell has
 * several sums per unit; those of the inputs are the first rows, those of the recurrent products the last ones, in this
 * order:
 *   LSTM, FLSTM              i, f, g, o (both products go to all)
 *   GRU, HFGRU               n of x, r, z, n of h (inputs: the first three; state: the last three)
 *   SGRU                     n of x, r, z, n of h (inputs: the first; state: the last three)
 *   MGU, SMGU                n of x, z, n of h (inputs: the first two, or the first; state: the last two)
 *   MinGRU; MinLSTM          z, candidate; f, i, candidate (inputs only)
 * First step_dense() for the inputs with the biases of all rows, then step_add_products() for the state, then the cell,
 * which changes h (and c) in place.
 */
#ifndef STEP_DECLARED /* by whoever has declared the few functions of math.h */
#include <math.h>
#endif
#include <stdint.h>
#include "step_numbers.h"

#ifndef STEP_RESTRICT
#if defined(__cplusplus) && defined(__GNUC__)
#define STEP_RESTRICT __restrict
#elif defined(__cplusplus)
#define STEP_RESTRICT
#else
#define STEP_RESTRICT restrict
#endif
#endif

#ifdef STEP_DOUBLE
typedef uint64_t step_integer;
#define STEP_MATH(name) name
#define STEP_SHIFTER 6755399441055744.0 /* 1.5 * 2**52: what is added to it is rounded to an integer */
#define STEP_MANTISSA 52
#define STEP_ONE UINT64_C(0x3ff0000000000000) /* the bits of 1 */
#define STEP_LIMIT 1000
#define STEP_EXP2 STEP_EXP2_DOUBLE
#else
typedef uint32_t step_integer;
#define STEP_MATH(name) name##f
#define STEP_SHIFTER 12582912.0f /* 1.5 * 2**23 */
#define STEP_MANTISSA 23
#define STEP_ONE UINT32_C(0x3f800000)
#define STEP_LIMIT 125
#define STEP_EXP2 STEP_EXP2_FLOAT
#endif
#define STEP_FIRST(coefficient) q = coefficient;
#define STEP_NEXT(coefficient) q = q * r + coefficient;
#define STEP_LOG2E ((real)1.4426950408889634)

/* -- activations ----------------------------------------------------------------------------------------------------- */

typedef struct {
    real scale, part;
} step_power; /* scale * (1 + part) */

/* 2**t, of t within the limit, to rounding; NaN stays NaN. */
static inline step_power step_power2(real t) {
    union {
        real value;
        step_integer bits;
    } shifted, scale;
    step_power power;
    real r, q;
    t = t > STEP_LIMIT ? (real)STEP_LIMIT : t;
    t = t < -STEP_LIMIT ? (real)-STEP_LIMIT : t;
    shifted.value = t + STEP_SHIFTER;
    r = t - (shifted.value - STEP_SHIFTER);
    STEP_EXP2(STEP_FIRST, STEP_NEXT)
    scale.bits = (shifted.bits << STEP_MANTISSA) + STEP_ONE;
    power.scale = scale.value;
    power.part = q * r;
    return power;
}

static inline real step_exp(real a) {
    step_power e = step_power2(a * STEP_LOG2E);
    return e.scale * e.part + e.scale;
}

static inline real step_sigmoid(real a) {
    step_power e = step_power2(a * -STEP_LOG2E);
    return 1 / (e.scale * e.part + (e.scale + 1));
}

static inline real step_tanh(real a) {
    step_power e = step_power2(a * (2 * STEP_LOG2E));
    return (e.scale * e.part + (e.scale - 1)) / (e.scale * e.part + (e.scale + 1));
}

/* The activations of FluxUtils.jl: psigmoid and ptanh, made of parabolas. */
static inline real step_parabolic_sigmoid(real a) {
    real u = a * (real)(1 / STEP_REACH), size;
    u = u > 1 ? 1 : u;
    u = u < -1 ? -1 : u;
    size = u < 0 ? -u : u;
    return (real)0.5 + u * (1 - (real)0.5 * size);
}

static inline real step_parabolic_tanh(real a) {
    real to_knee = (real)STEP_KNEE - (a < 0 ? -a : a), size;
    to_knee = to_knee < 0 ? 0 : to_knee;
    size = (real)STEP_PLATEAU - (real)STEP_BEND * (to_knee * to_knee);
    return a > 0 ? size : -size;
}

enum {
    STEP_RELU, STEP_TANH, STEP_SIGMOID, STEP_SILU, STEP_LEAKY_RELU, STEP_ELU, STEP_SOFTPLUS, STEP_GELU,
    STEP_PARABOLIC_SIGMOID, STEP_PARABOLIC_TANH, STEP_CLAMP
};

/* y = f(x), n numbers; alpha is the slope of STEP_LEAKY_RELU, the height of STEP_ELU and the bound of STEP_CLAMP. x
 * and y may be one array. */
static inline void step_activate(int function, real alpha, const real *x, real *y, int n) {
    int i;
    switch (function) {
        case STEP_RELU:
            for (i = 0; i < n; i++) y[i] = x[i] < 0 ? 0 : x[i];
            break;
        case STEP_TANH:
            for (i = 0; i < n; i++) y[i] = step_tanh(x[i]);
            break;
        case STEP_SIGMOID:
            for (i = 0; i < n; i++) y[i] = step_sigmoid(x[i]);
            break;
        case STEP_SILU:
            for (i = 0; i < n; i++) y[i] = x[i] * step_sigmoid(x[i]);
            break;
        case STEP_LEAKY_RELU:
            for (i = 0; i < n; i++) y[i] = x[i] < 0 ? alpha * x[i] : x[i];
            break;
        case STEP_ELU:
            for (i = 0; i < n; i++) y[i] = x[i] < 0 ? alpha * STEP_MATH(expm1)(x[i]) : x[i];
            break;
        case STEP_SOFTPLUS: /* of torch: the identity from 20 on */
            for (i = 0; i < n; i++) y[i] = x[i] > 20 ? x[i] : STEP_MATH(log1p)(STEP_MATH(exp)(x[i]));
            break;
        case STEP_GELU:
            for (i = 0; i < n; i++) y[i] = x[i] * ((real)0.5 * (1 + STEP_MATH(erf)(x[i] * (real)0.70710678118654752)));
            break;
        case STEP_PARABOLIC_SIGMOID:
            for (i = 0; i < n; i++) y[i] = step_parabolic_sigmoid(x[i]);
            break;
        case STEP_PARABOLIC_TANH:
            for (i = 0; i < n; i++) y[i] = step_parabolic_tanh(x[i]);
            break;
        case STEP_CLAMP:
            for (i = 0; i < n; i++) {
                const real above = x[i] < -alpha ? -alpha : x[i];
                y[i] = above > alpha ? alpha : above;
            }
            break;
    }
}

/* silu of the first n numbers times the last n. */
static inline void step_gated(const real *STEP_RESTRICT x, real *STEP_RESTRICT y, int n) {
    int i;
    for (i = 0; i < n; i++) y[i] = x[i] * step_sigmoid(x[i]) * x[n + i];
}

/* -- products -------------------------------------------------------------------------------------------------------- */

/* y[r] += sum over k of x[k] w[k][r], r < n_out. Four rows of w at once, since y is loaded and stored for each. */
static inline void step_add_products(
    const real *STEP_RESTRICT x, const real *STEP_RESTRICT w, real *STEP_RESTRICT y, int n_in, int n_out) {
    const int fours = n_in - n_in % 4;
    int k, r;
    for (k = 0; k < fours; k += 4) {
        const real x0 = x[k], x1 = x[k + 1], x2 = x[k + 2], x3 = x[k + 3];
        const real *STEP_RESTRICT w0 = w + k * n_out;
        const real *STEP_RESTRICT w1 = w0 + n_out;
        const real *STEP_RESTRICT w2 = w1 + n_out;
        const real *STEP_RESTRICT w3 = w2 + n_out;
        for (r = 0; r < n_out; r++) y[r] = x3 * w3[r] + (x2 * w2[r] + (x1 * w1[r] + (x0 * w0[r] + y[r])));
    }
    for (k = fours; k < n_in; k++) {
        const real xk = x[k];
        const real *STEP_RESTRICT wk = w + k * n_out;
        for (r = 0; r < n_out; r++) y[r] = xk * wk[r] + y[r];
    }
}

/* y = bias + products, of n_out numbers, of which the products are the first n_products. */
static inline void step_dense(
    const real *STEP_RESTRICT x, const real *STEP_RESTRICT w, const real *STEP_RESTRICT bias, real *STEP_RESTRICT y,
    int n_in, int n_products, int n_out) {
    int r;
    for (r = 0; r < n_out; r++) y[r] = bias[r];
    step_add_products(x, w, y, n_in, n_products);
}

/* step_dense() of few outputs from many inputs, with weights (n_out, n_in): sixteen sums at a time. */
static inline void step_dots(
    const real *STEP_RESTRICT x, const real *STEP_RESTRICT w, const real *STEP_RESTRICT bias, real *STEP_RESTRICT y,
    int n_in, int n_out) {
    const int whole = n_in - n_in % 16;
    int i, k, r;
    for (r = 0; r < n_out; r++) {
        const real *STEP_RESTRICT row = w + r * n_in;
        real sums[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, total = 0;
        for (k = 0; k < whole; k += 16)
            for (i = 0; i < 16; i++) sums[i] += x[k + i] * row[k + i];
        for (k = whole; k < n_in; k++) total += x[k] * row[k];
        for (i = 0; i < 16; i++) total += sums[i];
        y[r] = bias[r] + total;
    }
}

/* -- cells: from the sums a (rows, H) to the new state h, c (H) ------------------------------------------------------ */

static inline void step_lstm(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, real *STEP_RESTRICT c, int H) {
    int u;
    for (u = 0; u < H; u++) {
        real i = step_sigmoid(a[u]), f = step_sigmoid(a[H + u]), g = step_tanh(a[2 * H + u]);
        real cell = f * c[u] + i * g;
        c[u] = cell;
        h[u] = step_sigmoid(a[3 * H + u]) * step_tanh(cell);
    }
}

static inline void step_flstm(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, real *STEP_RESTRICT c, int H) {
    int u;
    for (u = 0; u < H; u++) {
        real i = step_parabolic_sigmoid(a[u]), f = step_parabolic_sigmoid(a[H + u]);
        real cell = f * c[u] + i * step_parabolic_tanh(a[2 * H + u]);
        c[u] = cell;
        h[u] = step_parabolic_sigmoid(a[3 * H + u]) * step_parabolic_tanh(cell);
    }
}

static inline void step_rnn_tanh(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    int u;
    for (u = 0; u < H; u++) h[u] = step_tanh(a[u]);
}

static inline void step_rnn_relu(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    int u;
    for (u = 0; u < H; u++) h[u] = a[u] < 0 ? 0 : a[u];
}

/* GRU, and SGRU with exact activations. */
static inline void step_gru(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    int u;
    for (u = 0; u < H; u++) {
        real r = step_sigmoid(a[H + u]), z = step_sigmoid(a[2 * H + u]);
        real n = step_tanh(r * a[3 * H + u] + a[u]);
        h[u] = z * (h[u] - n) + n;
    }
}

static inline void step_sgru_parabolic(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    int u;
    for (u = 0; u < H; u++) {
        real r = step_parabolic_sigmoid(a[H + u]), z = step_parabolic_sigmoid(a[2 * H + u]);
        real n = step_parabolic_tanh(r * a[3 * H + u] + a[u]);
        h[u] = z * (h[u] - n) + n;
    }
}

/* MGU and SMGU, with exact activations or those of parabolas. */
static inline void step_mgu(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    int u;
    for (u = 0; u < H; u++) {
        real z = step_sigmoid(a[H + u]), n = step_tanh(z * a[2 * H + u] + a[u]);
        h[u] = z * (h[u] - n) + n;
    }
}

static inline void step_mgu_parabolic(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    int u;
    for (u = 0; u < H; u++) {
        real z = step_parabolic_sigmoid(a[H + u]), n = step_parabolic_tanh(z * a[2 * H + u] + a[u]);
        h[u] = z * (h[u] - n) + n;
    }
}

static inline void step_hfgru(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, real alpha, int H) {
    int u;
    for (u = 0; u < H; u++) {
        real r = step_sigmoid(a[H + u]), z = alpha * step_sigmoid(a[2 * H + u]);
        real n = step_tanh(r * a[3 * H + u] + a[u]);
        h[u] = z * (n - h[u]) + h[u];
    }
}

/* (1 - share) a + share b, without their difference, which may be too large for a number. */
static inline real step_between(real share, real a, real b) { return share * b + (a - share * a); }

static inline void step_min_gru(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    int u;
    for (u = 0; u < H; u++) h[u] = step_between(step_sigmoid(a[u]), h[u], a[H + u]);
}

/* f / (f + i) is 1 / (1 + i / f) with i / f = (1 + 2**-f) / (1 + 2**-i). Of two closed gates only the difference
 * counts: both exponents are lowered until the smaller is at a limit, so that the quotient stays. */
static inline void step_min_lstm(const real *STEP_RESTRICT a, real *STEP_RESTRICT h, int H) {
    const real limit = STEP_LIMIT / 2;
    int u;
    for (u = 0; u < H; u++) {
        real f = a[u] * -STEP_LOG2E, i = a[H + u] * -STEP_LOG2E;
        real smaller = f < i ? f : i, excess = smaller > limit ? smaller - limit : 0, keep;
        step_power of_f = step_power2(f - excess), of_i = step_power2(i - excess);
        real inverse_f = of_f.scale * of_f.part + (of_f.scale + 1);
        real inverse_i = of_i.scale * of_i.part + (of_i.scale + 1);
        keep = inverse_i / (inverse_f + inverse_i);
        h[u] = step_between(keep, a[2 * H + u], h[u]);
    }
}

/* LRU: h = lambda h + added, of n complex numbers in pairs. */
static inline void step_diagonal(const real *STEP_RESTRICT lambda, const real *STEP_RESTRICT added,
                                 real *STEP_RESTRICT h, int n) {
    int i;
    for (i = 0; i < n; i++) {
        real re = h[2 * i], im = h[2 * i + 1];
        h[2 * i] = lambda[2 * i] * re - lambda[2 * i + 1] * im + added[2 * i];
        h[2 * i + 1] = lambda[2 * i] * im + lambda[2 * i + 1] * re + added[2 * i + 1];
    }
}

/* -- the rest of a network ------------------------------------------------------------------------------------------- */

static inline void step_add(const real *x, const real *y, real *sum, int n) {
    int i;
    for (i = 0; i < n; i++) sum[i] = x[i] + y[i];
}

/* y = x times the limit less the largest absolute level, from 0 to 1. */
static inline void step_fade(const real *x, const real *level, real limit, real *y, int n_levels, int n) {
    real largest = 0, factor;
    int i;
    for (i = 0; i < n_levels; i++) {
        const real size = level[i] < 0 ? -level[i] : level[i];
        if (size > largest) largest = size;
    }
    factor = limit - largest;
    factor = factor < 0 ? 0 : factor > 1 ? 1 : factor;
    for (i = 0; i < n; i++) y[i] = factor * x[i];
}

/* Layer normalisation, with eps inside the root. */
static inline void step_layer_norm(const real *STEP_RESTRICT x, const real *STEP_RESTRICT weight,
                                   const real *STEP_RESTRICT bias, real *STEP_RESTRICT y, real eps, int n) {
    real mean = 0, squares = 0, inverse;
    int i;
    for (i = 0; i < n; i++) mean += x[i];
    mean /= (real)n;
    for (i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
    inverse = 1 / STEP_MATH(sqrt)(squares / (real)n + eps);
    for (i = 0; i < n; i++) y[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
}

/* y = x scale + shift for each feature: batch normalisation in evaluation. */
static inline void step_scale_shift(const real *STEP_RESTRICT x, const real *STEP_RESTRICT scale,
                                    const real *STEP_RESTRICT shift, real *STEP_RESTRICT y, int n) {
    int i;
    for (i = 0; i < n; i++) y[i] = x[i] * scale[i] + shift[i];
}

/* -- the past of each feature ------------------------------------------------------------------------------------------
 *
 * `past` holds the last n_past inputs, the oldest first, each of n numbers and `apart` from the one before.
 */

static inline void step_remember(const real *x, real *past, int apart, int n_past, int n) {
    int i, k;
    for (k = 1; k < n_past; k++)
        for (i = 0; i < n; i++) past[(k - 1) * apart + i] = past[k * apart + i];
    if (n_past)
        for (i = 0; i < n; i++) past[(n_past - 1) * apart + i] = x[i];
}

/* The inputs of so many steps ago, (n_lags, n). */
static inline void step_lags(const real *x, real *past, int apart, const int *lags, int n_lags, int n_past, real *y, int n) {
    int i, k;
    for (k = 0; k < n_lags; k++) {
        const real *from = lags[k] ? past + (n_past - lags[k]) * apart : x;
        for (i = 0; i < n; i++) y[k * n + i] = from[i];
    }
    step_remember(x, past, apart, n_past, n);
}

/* Exponentially weighted means, (n_out / n, n), from sums of weighted inputs and of weights. */
static inline void step_exponential_means(
    const real *STEP_RESTRICT x, const real *STEP_RESTRICT factors, real *STEP_RESTRICT sums, real *STEP_RESTRICT weights,
    real *STEP_RESTRICT y, int n, int n_out) {
    int i, k;
    for (k = 0; k < n_out; k += n)
        for (i = 0; i < n; i++) {
            const real keep = factors[k + i];
            sums[k + i] = keep * sums[k + i] + (1 - keep) * x[i];
            weights[k + i] = keep * weights[k + i] + (1 - keep);
            y[k + i] = sums[k + i] / weights[k + i];
        }
}

/* Means, deviations and slopes of the last `span` steps: y is (n_spans, 3, n); t the number of steps before. */
static inline void step_rolling_statistics(
    const real *x, real *past, int apart, real *t, const int *spans, int n_spans, int n_past, real *y, int n) {
    int i, j, k;
    t[0] += 1;
    for (k = 0; k < n_spans; k++) {
        real *mean = y + 3 * k * n, *deviation = mean + n, *slope = deviation + n;
        const int count = t[0] < (real)spans[k] ? (int)t[0] : spans[k];
        const real size = (real)count;
        real spread = size * (size * size - 1) / 12;
        spread = spread < (real)1e-3 ? (real)1e-3 : spread;
        for (i = 0; i < n; i++) mean[i] = x[i];
        for (j = 1; j < count; j++)
            for (i = 0; i < n; i++) mean[i] += past[(n_past - j) * apart + i];
        for (i = 0; i < n; i++) mean[i] /= size, deviation[i] = slope[i] = 0;
        for (j = 0; j < count; j++) {
            const real *value = j ? past + (n_past - j) * apart : x;
            const real place = (size - 1) / 2 - (real)j;
            for (i = 0; i < n; i++) {
                const real away = value[i] - mean[i];
                deviation[i] += away * away;
                slope[i] += place * away;
            }
        }
        for (i = 0; i < n; i++) deviation[i] = STEP_MATH(sqrt)(deviation[i] / size), slope[i] /= spread;
    }
    step_remember(x, past, apart, n_past, n);
}

/* Statistics of all steps so far: y is (7, n) and the logarithm of the number of steps. */
static inline void step_running_statistics(
    const real *x, real *t, real *first, real *last, real *largest, real *smallest, real *sums, real *squares,
    real *changes, real *y, int n) {
    const int is_new = t[0] == 0;
    real before, number;
    int i;
    t[0] += 1;
    number = t[0];
    before = number > 2 ? number - 1 : 1;
    for (i = 0; i < n; i++) {
        const real value = x[i];
        real away, change, mean, variance;
        if (is_new) first[i] = last[i] = largest[i] = smallest[i] = value;
        away = value - first[i];
        change = value - last[i];
        last[i] = value;
        largest[i] = value > largest[i] ? value : largest[i];
        smallest[i] = value < smallest[i] ? value : smallest[i];
        sums[i] += away;
        squares[i] += away * away;
        changes[i] += change < 0 ? -change : change;
        mean = sums[i] / number;
        variance = squares[i] / number - mean * mean;
        y[i] = first[i] + mean;
        y[n + i] = variance > 0 ? STEP_MATH(sqrt)(variance) : 0;
        y[2 * n + i] = largest[i];
        y[3 * n + i] = smallest[i];
        y[4 * n + i] = value;
        y[5 * n + i] = first[i];
        y[6 * n + i] = changes[i] / before;
    }
    y[7 * n] = STEP_MATH(log)(number);
}

/* -- causal kernels: nine taps, of which three weigh 2 and six -1 ------------------------------------------------------- */

enum { STEP_TAPS = 9, STEP_LANES = 16, STEP_KERNELS = 84 };

/* Counts the outputs above the biases of one dilation, as the step of number t. */
static inline void step_count_hits(
    const real *STEP_RESTRICT out, const real *STEP_RESTRICT biases, double t, double *STEP_RESTRICT counts,
    double *STEP_RESTRICT weighted, int per_kernel) {
    double hits[STEP_KERNELS];
    int j, k;
    if (per_kernel == 1) {
        for (k = 0; k < STEP_KERNELS; k++) hits[k] = out[k] > biases[k] ? 1.0 : 0.0;
        for (k = 0; k < STEP_KERNELS; k++) counts[k] += hits[k], weighted[k] += hits[k] * t;
        return;
    }
    for (k = 0; k < STEP_KERNELS; k++)
        for (j = 0; j < per_kernel; j++) {
            const double hit = out[k] > biases[k * per_kernel + j] ? 1.0 : 0.0;
            counts[k * per_kernel + j] += hit;
            weighted[k * per_kernel + j] += hit * t;
        }
}

/* The sums of the features that a kernel adds up, at each tap, in the order of the features; returns that of all taps.
 * Without products: nothing that a compiler could round otherwise. */
static inline real step_sum_channels(const real *taps, const unsigned char *channels, real *sums, int n_in) {
    real nine;
    int f, j;
    for (j = 0; j < STEP_LANES; j++) sums[j] = 0;
    for (f = 0; f < n_in; f++)
        if (channels[f])
            for (j = 0; j < STEP_LANES; j++) sums[j] += taps[f * STEP_LANES + j];
    nine = sums[0] + sums[1];
    for (j = 2; j < STEP_TAPS; j++) nine += sums[j];
    return nine;
}

/* The outputs of all kernels of one dilation, of taps (n_in, STEP_LANES). */
static inline void step_convolve(const real *taps, const unsigned char *channels, real *out, int n_in) {
    const unsigned char *summed = 0;
    real sums[STEP_LANES], nine = 0;
    int f, p, q, r, k = 0;
    for (p = 0; p < STEP_TAPS; p++)
        for (q = p + 1; q < STEP_TAPS; q++)
            for (r = q + 1; r < STEP_TAPS; r++, k++) {
                int is_other = !summed;
                real three;
                for (f = 0; f < n_in && !is_other; f++) is_other = summed[f] != channels[k * n_in + f];
                if (is_other) {
                    summed = channels + k * n_in;
                    nine = step_sum_channels(taps, summed, sums, n_in);
                }
                three = sums[p] + sums[q] + sums[r];
                out[k] = (three + three) + three - nine;
            }
}

/* How often, and how late, outputs of kernels exceeded biases: y is (2, n). `plan` is the dilation and the number of
 * biases of each of its kernels, in turn; `taps` is room for n_in STEP_LANES numbers; t, counts and weighted of n biases
 * are the state. */
static inline void step_causal_kernels(
    const real *x, real *past, int apart, double *t, double *STEP_RESTRICT counts, double *STEP_RESTRICT weighted,
    const int *plan, int n_dilations, int n_past, const unsigned char *channels, const real *biases, real *taps,
    real *STEP_RESTRICT y, int n_in, int n) {
    real out[STEP_KERNELS];
    double number, squared;
    int f, i, j, start = 0;
    t[0] += 1;
    number = t[0];
    for (i = 0; i < n_dilations; i++) {
        const int dilation = plan[2 * i], per_kernel = plan[2 * i + 1];
        for (f = 0; f < n_in; f++)
            for (j = 0; j < STEP_LANES; j++) {
                const int ago = (STEP_TAPS - 1 - j) * dilation;
                real value = 0;
                if (ago == 0) value = x[f];
                if (ago > 0) value = past[(n_past - ago) * apart + f];
                taps[f * STEP_LANES + j] = value;
            }
        step_convolve(taps, channels + i * STEP_KERNELS * n_in, out, n_in);
        step_count_hits(out, biases + start, number, counts + start, weighted + start, per_kernel);
        start += STEP_KERNELS * per_kernel;
    }
    squared = number * number;
    for (i = 0; i < n; i++) y[i] = (real)(counts[i] / number);
    for (i = 0; i < n; i++) y[n + i] = (real)(2 * weighted[i] / squared);
    step_remember(x, past, apart, n_past, n_in);
}

/* -- scalers, in double, so that a large mean costs no digits --------------------------------------------------------- */

static inline void step_standardize(double *x, const double *mean, const double *scale, int n) {
    int i;
    for (i = 0; i < n; i++) x[i] = (x[i] - mean[i]) / scale[i];
}

/* Clamp, then standardise; NaN becomes 0. */
static inline void step_winsorize(
    double *x, const double *lower, const double *upper, const double *mean, const double *scale, int n) {
    int i;
    for (i = 0; i < n; i++) {
        double value = x[i] < lower[i] ? lower[i] : x[i];
        value = value > upper[i] ? upper[i] : value;
        value = (value - mean[i]) / scale[i];
        x[i] = value == value ? value : 0;
    }
}

/* Values for NaN. */
static inline void step_fill(double *x, const double *values, int n) {
    int i;
    for (i = 0; i < n; i++) x[i] = x[i] == x[i] ? x[i] : values[i];
}

/* -- outputs --------------------------------------------------------------------------------------------------------- */

/* Outputs in the units of the targets. */
static inline double step_unscaled(real y, double mean, double scale) { return (double)y * scale + mean; }

/* The place of the largest number; that of the first NaN if there is one. */
static inline int step_argmax(const real *x, int n) {
    int i, best = 0;
    for (i = 1; i < n && x[best] == x[best]; i++)
        if (x[i] > x[best] || x[i] != x[i]) best = i;
    return best;
}

static inline void step_log_softmax(const real *x, real *y, int n) {
    real largest = x[step_argmax(x, n)], sum = 0;
    int i;
    for (i = 0; i < n; i++) sum += STEP_MATH(exp)(x[i] - largest);
    sum = STEP_MATH(log)(sum);
    for (i = 0; i < n; i++) y[i] = x[i] - largest - sum;
}

static inline void step_softmax(const real *x, real *y, int n) {
    int i;
    step_log_softmax(x, y, n);
    for (i = 0; i < n; i++) y[i] = STEP_MATH(exp)(y[i]);
}

/* -- what only files of C use ------------------------------------------------------------------------------------------ */

static inline void step_copy(const real *from, real *to, int n) {
    int i;
    for (i = 0; i < n; i++) to[i] = from[i];
}

/* step_add_products() with weights of 8 bits, and a scale for each of the n_out sums: eight sums at a time. */
static inline void step_add_products_int8(
    const real *STEP_RESTRICT x, const signed char *STEP_RESTRICT w, const real *STEP_RESTRICT scale,
    real *STEP_RESTRICT y, int n_in, int n_out) {
    const int eights = n_out - n_out % 8;
    int i, k, r;
    for (r = 0; r < eights; r += 8) {
        real sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (k = 0; k < n_in; k++) {
            const real xk = x[k];
            const signed char *STEP_RESTRICT wk = w + k * n_out + r;
            for (i = 0; i < 8; i++) sums[i] += xk * (real)wk[i];
        }
        for (i = 0; i < 8; i++) y[r + i] += scale[r + i] * sums[i];
    }
    for (r = eights; r < n_out; r++) {
        real sum = 0;
        for (k = 0; k < n_in; k++) sum += x[k] * (real)w[k * n_out + r];
        y[r] += scale[r] * sum;
    }
}

static inline void step_dense_int8(
    const real *STEP_RESTRICT x, const signed char *STEP_RESTRICT w, const real *STEP_RESTRICT scale,
    const real *STEP_RESTRICT bias, real *STEP_RESTRICT y, int n_in, int n_products, int n_out) {
    step_copy(bias, y, n_out);
    step_add_products_int8(x, w, scale, y, n_in, n_products);
}

/* Whether a number is infinite. */
static inline int step_any_infinite(const double *x, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (x[i] == x[i] && x[i] - x[i] != 0) return 1;
    return 0;
}

/* The last number before it for NaN, `start` where there is none yet. */
static inline void step_forward_fill(double *x, double *last, const double *start, int n) {
    int i;
    for (i = 0; i < n; i++) {
        last[i] = x[i] == x[i] ? x[i] : last[i];
        x[i] = last[i] == last[i] ? last[i] : start[i];
    }
}

static inline void step_widen(const real *from, double *to, int n) {
    int i;
    for (i = 0; i < n; i++) to[i] = (double)from[i];
}

static inline void step_narrow(const double *from, real *to, int n) {
    int i;
    for (i = 0; i < n; i++) to[i] = (real)from[i];
}

/* y scale + mean: outputs in the units of the targets. */
static inline void step_unstandardize(double *y, const double *mean, const double *scale, int n) {
    int i;
    for (i = 0; i < n; i++) y[i] = y[i] * scale[i] + mean[i];
}

/* Returns 0 if all inputs are finite; 1 if all are missing (NaN), and puts zeros for them; else -1. */
static inline int step_check(real *x, int n) {
    int i, n_missing = 0;
    for (i = 0; i < n; i++) {
        if (x[i] != x[i])
            n_missing++;
        else if (x[i] - x[i] != 0)
            return -1;
    }
    if (n_missing == 0) return 0;
    if (n_missing < n) return -1;
    for (i = 0; i < n; i++) x[i] = 0;
    return 1;
}
