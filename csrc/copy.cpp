// Copies windows out of arrays of any memory order: (S, B, F) with strides, to contiguous memory, converted on the way.
//
// The features of a series at one step are neighbours in the copy. Where the array has neighbours along time or along
// series instead, this is a transposition: runs of it are gathered into a buffer that fits the L1 cache, and leave it as
// pieces of rows of the copy. Neither side is touched at a stride alone, which at powers of two would use few of the
// cache's sets.
#include "kernels.h"
#include "threads.h"
#include <string.h>

namespace {

constexpr int64_t RUN = 128, COLUMNS = 64, APART = RUN + 16;  // of the buffer (COLUMNS, RUN)
constexpr int64_t AHEAD = 6;                                   // columns that are fetched before they are needed
constexpr int64_t PER_THREAD = 1 << 16;                        // values for which a thread is worth its start

typedef float F4 __attribute__((vector_size(16)));
typedef float F4Anywhere __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t I4 __attribute__((vector_size(16)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, I4{__VA_ARGS__})
#endif

// out[r * apart + c] = buffer[c][r]: `columns` neighbours in each of n rows.
template <class T> void write_rows(T *out, int64_t apart, const T *buffer, int64_t n, int64_t columns) {
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < columns; c++) out[r * apart + c] = buffer[c * APART + r];
}

template <> void write_rows(float *out, int64_t apart, const float *buffer, int64_t n, int64_t columns) {
    int64_t r = 0;
    for (; r + 4 <= n; r += 4) {
        float *to = out + r * apart;
        const float *from = buffer + r;
        int64_t c = 0;
        for (; c + 4 <= columns; c += 4, from += 4 * APART, to += 4) {
            F4 v[4];
            for (int j = 0; j < 4; j++) v[j] = *(const F4Anywhere *)(from + j * APART);
            F4 low0 = SHUFFLE(v[0], v[1], 0, 4, 1, 5), high0 = SHUFFLE(v[0], v[1], 2, 6, 3, 7);
            F4 low1 = SHUFFLE(v[2], v[3], 0, 4, 1, 5), high1 = SHUFFLE(v[2], v[3], 2, 6, 3, 7);
            *(F4Anywhere *)to = SHUFFLE(low0, low1, 0, 1, 4, 5);
            *(F4Anywhere *)(to + apart) = SHUFFLE(low0, low1, 2, 3, 6, 7);
            *(F4Anywhere *)(to + 2 * apart) = SHUFFLE(high0, high1, 0, 1, 4, 5);
            *(F4Anywhere *)(to + 3 * apart) = SHUFFLE(high0, high1, 2, 3, 6, 7);
        }
        for (; c < columns; c++, from += APART, to++)
            for (int j = 0; j < 4; j++) to[j * apart] = from[j];
    }
    for (; r < n; r++)
        for (int64_t c = 0; c < columns; c++) out[r * apart + c] = buffer[c * APART + r];
}

// Columns are pairs (i, j), j the faster; run r of a column lies at from + i * stride_i + j * stride_j + r.
struct Plan {
    int64_t runs, I, J;
    int64_t stride_i, stride_j, stride_outer;  // of the array, in values
    int64_t out_run, out_outer;                // of the copy, between values of a run, and between outer blocks
    int64_t outer, run_parts, column_parts;
};

template <class T, class S> struct Copy {
    const Plan *plan;
    T *out;
    const S *in;

    static void task(void *context, int64_t index) {
        const Copy &copy = *(const Copy *)context;
        const Plan &p = *copy.plan;
        int64_t columns = p.I * p.J;
        int64_t c0 = index % p.column_parts * COLUMNS, r0 = index / p.column_parts % p.run_parts * RUN;
        int64_t outer = index / p.column_parts / p.run_parts;
        int64_t n = p.runs - r0 < RUN ? p.runs - r0 : RUN, m = columns - c0 < COLUMNS ? columns - c0 : COLUMNS;
        const S *in = copy.in + outer * p.stride_outer + r0;
        int64_t i = c0 / p.J, j = c0 % p.J, next_i = (c0 + AHEAD) / p.J, next_j = (c0 + AHEAD) % p.J;
        T buffer[COLUMNS * APART];
        for (int64_t c = 0; c < m; c++) {
            const S *from = in + i * p.stride_i + j * p.stride_j;
            if (next_i < p.I)
                for (int64_t r = 0; r < n; r += 64 / (int64_t)sizeof(S))
                    __builtin_prefetch(in + next_i * p.stride_i + next_j * p.stride_j + r);
            for (int64_t r = 0; r < n; r++) buffer[c * APART + r] = (T)from[r];
            if (++j == p.J) j = 0, i++;
            if (++next_j == p.J) next_j = 0, next_i++;
        }
        write_rows(copy.out + outer * p.out_outer + r0 * p.out_run + c0, p.out_run, buffer, n, m);
    }

    void run(int64_t threads) {
        int64_t n = plan->outer * plan->run_parts * plan->column_parts;
        int64_t worth = plan->outer * plan->runs * plan->I * plan->J / PER_THREAD;
        if (threads > worth) threads = worth > 1 ? worth : 1;
        fk_parallel(threads, n, task, this);
    }
};

}  // namespace

// Types as in kernels.h; strides of the array in values, of which that of the steps or that of the series is 1.
extern "C" __attribute__((visibility("default"))) int32_t fluxutils_copy_window(
    void *out, int64_t type, const void *in, int64_t in_type, int64_t S, int64_t B, int64_t F, int64_t stride_s,
    int64_t stride_b, int64_t stride_f, int64_t threads) {
    Plan p;
    if (stride_s == 1) {
        p = {S, B, F, stride_b, stride_f, 0, B * F, 0, 1, 0, 0};
    } else if (stride_b == 1) {
        p = {B, 1, F, 0, stride_f, stride_s, F, B * F, S, 0, 0};
    } else {
        return FK_BAD_ARGUMENT;
    }
    p.run_parts = (p.runs + RUN - 1) / RUN;
    p.column_parts = (p.I * p.J + COLUMNS - 1) / COLUMNS;
    if (type == FK_FLOAT32 && in_type == FK_FLOAT32) {
        Copy<float, float>{&p, (float *)out, (const float *)in}.run(threads);
    } else if (type == FK_FLOAT32 && in_type == FK_FLOAT64) {
        Copy<float, double>{&p, (float *)out, (const double *)in}.run(threads);
    } else if (type == FK_FLOAT64 && in_type == FK_FLOAT64) {
        Copy<double, double>{&p, (double *)out, (const double *)in}.run(threads);
    } else {
        return FK_BAD_ARGUMENT;
    }
    return FK_OK;
}
