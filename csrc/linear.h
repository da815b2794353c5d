// The linear recurrence h[t] = a[t] * h[t - 1] + b[t], forwards and backwards.
//
// Series and units are one row of N = B H lanes, divided into blocks; one thread takes a block from its first step to
// its last. The gradient of an `a` that serves several steps or series is a sum over them in their order, in runs of
// RUN, whatever the threads.
#pragma once
#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace FLUXUTILS_UNIT {
namespace {

FK_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FK_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// A lane is C numbers: one if real, two if complex.
template <class T, int C> struct Linear {
    static constexpr int BLOCK = 256 / sizeof(T);      // numbers
    static constexpr int RUN = 64;                     // of a long sum: rounding then hardly grows with its length
    static constexpr int64_t FOR_ONE_THREAD = 50000;   // numbers; fewer are not worth waking another

    const fluxutils_linear_call &call;
    const int64_t S, row, width;  // numbers of a step, and of a series in it
    const T *a, *b, *h0, *dh;
    T *h, *da, *db, *dh0;

    explicit Linear(const fluxutils_linear_call &c)
        : call(c),
          S(c.S),
          row(c.B * c.H * C),
          width(c.H * C),
          a(static_cast<const T *>(c.a)),
          b(static_cast<const T *>(c.b)),
          h0(static_cast<const T *>(c.h0)),
          dh(static_cast<const T *>(c.dh)),
          h(static_cast<T *>(c.h)),
          da(static_cast<T *>(c.da)),
          db(static_cast<T *>(c.db)),
          dh0(static_cast<T *>(c.dh0)) {}

    // -- a lane: to = x * y + z, and the same with x conjugate ------------------------------------------------------

    static FK_INLINE void multiply_add(T *to, const T *x, const T *y, const T *z) {
        if (C == 1) {
            *to = fma(*x, *y, *z);
        } else {
            T re = fma(x[0], y[0], fma(-x[1], y[1], z[0])), im = fma(x[0], y[1], fma(x[1], y[0], z[1]));
            to[0] = re, to[1] = im;
        }
    }
    static FK_INLINE void conjugate_multiply_add(T *to, const T *x, const T *y, const T *z) {
        if (C == 1) {
            *to = fma(*x, *y, *z);
        } else {
            T re = fma(x[0], y[0], fma(x[1], y[1], z[0])), im = fma(x[0], y[1], fma(-x[1], y[0], z[1]));
            to[0] = re, to[1] = im;
        }
    }

    // -- blocks: n numbers from `start` on of each step ---------------------------------------------------------------

    // f(start, n) for one block; n is a constant for all but the last, for the compiler to make vectors of.
    template <class Fn> FK_INLINE void with_block(int64_t block, const Fn &f) const {
        int64_t start = block * BLOCK;
        if (row - start >= BLOCK)
            f(start, BLOCK);
        else
            f(start, static_cast<int>(row - start));
    }

    // The numbers of `a` for a block: where they lie, or repeated in `room` if all series share them.
    FK_INLINE const T *factors(int64_t t, int64_t start, int n, T *room) const {
        const T *of_step = a + t * call.a_step * C;
        if (call.a_series) return of_step + start;
        int64_t k = start % width;
        for (int i = 0; i < n; i++) {
            room[i] = of_step[k];
            if (++k == width) k = 0;
        }
        return room;
    }
    bool constant() const { return call.a_step == 0; }

    void block_forward(int64_t block) const {
        with_block(block, [&](int64_t start, int n) {
            T state[BLOCK] = {}, room[BLOCK];
            if (h0) memcpy(state, h0 + start, n * sizeof(T));
            const T *x = factors(0, start, n, room);
            for (int64_t t = 0; t < S; t++) {
                if (t && !constant()) x = factors(t, start, n, room);
                const T *in = b + t * row + start;
                for (int i = 0; i < n; i += C) multiply_add(state + i, x + i, state + i, in + i);
                memcpy(h + t * row + start, state, n * sizeof(T));
            }
        });
    }

    // Gradients of b and h0, and of an `a` that only this block has: `sums` or da.
    void block_backward(int64_t block) const {
        with_block(block, [&](int64_t start, int n) {
            const T zeros[BLOCK] = {};
            T g[BLOCK] = {}, run[BLOCK] = {}, sum[BLOCK] = {}, room[BLOCK];
            const T *x = factors(S - 1, start, n, room);
            for (int64_t t = S - 1; t >= 0; t--) {
                const T *given = dh + t * row + start;
                if (t < S - 1)  // rounded before the sum, as where time is cut into calls
                    for (int i = 0; i < n; i += C) conjugate_multiply_add(g + i, x + i, g + i, zeros + i);
                for (int i = 0; i < n; i++) g[i] += given[i];
                memcpy(db + t * row + start, g, n * sizeof(T));
                const T *before = t ? h + (t - 1) * row + start : h0 ? h0 + start : zeros;
                if (da && constant()) {
                    for (int i = 0; i < n; i += C) conjugate_multiply_add(run + i, before + i, g + i, run + i);
                    if (t % RUN == 0) add_run(sum, run, n);
                } else if (da && call.a_series) {
                    T *own = da + t * row + start;
                    for (int i = 0; i < n; i += C) conjugate_multiply_add(own + i, before + i, g + i, zeros + i);
                }
                if (!constant()) x = factors(t, start, n, room);
            }
            if (dh0)
                for (int i = 0; i < n; i += C) conjugate_multiply_add(dh0 + start + i, x + i, g + i, zeros + i);
            if (da && constant()) memcpy((call.a_series ? da : sums) + start, sum, n * sizeof(T));
        });
    }

    static FK_INLINE void add_run(T *sum, T *run, int64_t n) {
        for (int64_t i = 0; i < n; i++) {
            sum[i] += run[i];
            run[i] = 0;
        }
    }

    // -- gradients of an `a` that all series share --------------------------------------------------------------------

    T *sums = nullptr;           // of each series over its steps (B, H), for an `a` that all steps share
    bool out_of_memory = false;

    // to (H) = the sum over series of add(run, series)
    template <class Fn> void over_series(T *to, T *run, const Fn &add) const {
        memset(to, 0, width * sizeof(T));
        memset(run, 0, width * sizeof(T));
        for (int64_t s = 0; s < call.B; s++) {
            add(s);
            if ((s + 1) % RUN == 0 || s + 1 == call.B) add_run(to, run, width);
        }
    }

    void step_over_series(int64_t t) {
        T *run = static_cast<T *>(fk_scratch(1, 2 * width * sizeof(T))), *zeros = run + width;
        if (!run) {
            out_of_memory = true;
            return;
        }
        memset(zeros, 0, width * sizeof(T));
        over_series(da + t * width, run, [&](int64_t s) {
            const T *g = db + t * row + s * width;
            const T *before = t ? h + (t - 1) * row + s * width : h0 ? h0 + s * width : zeros;
            for (int64_t i = 0; i < width; i += C) conjugate_multiply_add(run + i, before + i, g + i, run + i);
        });
    }

    // -----------------------------------------------------------------------------------------------------------------

    int64_t n_blocks() const { return (row + BLOCK - 1) / BLOCK; }
    int64_t threads() const { return S * row < FOR_ONE_THREAD ? 1 : call.threads; }

    int32_t forward() {
        fk_parallel(
            threads(), n_blocks(), [](void *l, int64_t i) { static_cast<Linear *>(l)->block_forward(i); }, this);
        return FK_OK;
    }

    int32_t backward() {
        const bool shared = da && !call.a_series;
        if (shared && constant()) {
            sums = static_cast<T *>(fk_scratch(0, (row + width) * sizeof(T)));
            if (!sums) return FK_OUT_OF_MEMORY;
        }
        fk_parallel(
            threads(), n_blocks(), [](void *l, int64_t i) { static_cast<Linear *>(l)->block_backward(i); }, this);
        if (shared && constant())
            over_series(da, sums + row, [&](int64_t s) {
                T *run = sums + row;
                for (int64_t i = 0; i < width; i++) run[i] += sums[s * width + i];
            });
        else if (shared)
            fk_parallel(
                threads(), S, [](void *l, int64_t t) { static_cast<Linear *>(l)->step_over_series(t); }, this);
        return out_of_memory ? FK_OUT_OF_MEMORY : FK_OK;
    }
};

int32_t linear_forward(const fluxutils_linear_call &c) {
    switch (c.type) {
        case FK_FLOAT32: return Linear<float, 1>(c).forward();
        case FK_FLOAT64: return Linear<double, 1>(c).forward();
        case FK_COMPLEX64: return Linear<float, 2>(c).forward();
        case FK_COMPLEX128: return Linear<double, 2>(c).forward();
    }
    return FK_BAD_ARGUMENT;
}

int32_t linear_backward(const fluxutils_linear_call &c) {
    switch (c.type) {
        case FK_FLOAT32: return Linear<float, 1>(c).backward();
        case FK_FLOAT64: return Linear<double, 1>(c).backward();
        case FK_COMPLEX64: return Linear<float, 2>(c).backward();
        case FK_COMPLEX128: return Linear<double, 2>(c).backward();
    }
    return FK_BAD_ARGUMENT;
}

}  // namespace
}  // namespace FLUXUTILS_UNIT
