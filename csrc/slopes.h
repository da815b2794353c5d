// How the last state of a diagonal cell depends on the sums of each step: MinGRU and MinLSTM, whose units depend on their
// own past alone. It is the backward pass of each unit's last state.
#pragma once
#include "input_gated_cells.h"
#include "kernels.h"
#include "threads.h"
#include "units.h"

namespace FLUXUTILS_UNIT {
namespace {

// `saved` holds the sums (S, B, ROWS H), which the derivatives replace; `dh0` gets the derivatives with respect to h0.
template <class Cell, class T> struct Slopes {
    using V = typename Lanes<T>::V;
    static constexpr int L = Lanes<T>::L, ROWS = Cell::ROWS, SAVED = Cell::SAVED, GROUP = 16;
    static constexpr int64_t FOR_ONE_THREAD = 50000;  // sums; fewer are not worth waking another

    const fluxutils_call &call;
    const int64_t S, B, H;

    explicit Slopes(const fluxutils_call &c) : call(c), S(c.S), B(c.B), H(c.H) {}

    // From the last step to the first of the series b0 to before b1; dh0 holds the product of the later steps.
    void series(int64_t b0, int64_t b1) const {
        T *product = static_cast<T *>(call.dh0), *sums = static_cast<T *>(call.saved);
        const T *y = static_cast<const T *>(call.y), *h0 = static_cast<const T *>(call.h0);
        for (int64_t i = b0 * H; i < b1 * H; i++) product[i] = 1;
        for (int64_t t = S - 1; t >= 0; t--) {
            const T *before = t ? y + (t - 1) * B * H : h0;
            for (int64_t b = b0; b < b1; b++) {
                T *of_series = sums + (t * B + b) * ROWS * H;
                for (int64_t unit = 0; unit < H; unit += L)
                    units(of_series + unit, before ? before + b * H + unit : nullptr, product + b * H + unit,
                          H - unit < L ? H - unit : L);
            }
        }
    }

    FK_INLINE void units(T *sums, const T *before, T *product, int64_t n) const {
        V a[ROWS], kept[SAVED + 1], slopes[ROWS];
        FK_UNROLL
        for (int i = 0; i < ROWS; i++) a[i] = load_some(sums + i * H, n);
        Step<T> s;
        s.alpha = 0;
        s.before = before ? load_some(before, n) : every(T(0));
        Cell::template forward<T>(a, s, kept);
        s.dh = load_some(product, n);
        Cell::template backward<T>(kept, s, slopes);
        store_some(product, s.direct, n);
        FK_UNROLL
        for (int i = 0; i < ROWS; i++) store_some(sums + i * H, slopes[i], n);
    }

    int32_t run() {
        const int64_t threads = S * B * H * ROWS < FOR_ONE_THREAD ? 1 : call.threads;
        fk_parallel(
            threads, (B + GROUP - 1) / GROUP,
            [](void *p, int64_t i) {
                auto *all = static_cast<Slopes *>(p);
                const int64_t end = (i + 1) * GROUP < all->B ? (i + 1) * GROUP : all->B;
                all->series(i * GROUP, end);
            },
            this);
        return FK_OK;
    }
};

template <class Cell> int32_t slopes_of(const fluxutils_call &call) {
    if (call.type == FK_FLOAT32) return Slopes<Cell, float>(call).run();
    if (call.type == FK_FLOAT64) return Slopes<Cell, double>(call).run();
    return FK_BAD_ARGUMENT;
}

int32_t last_state_slopes(const fluxutils_call &call) {
    if (call.cell == FK_MIN_GRU) return slopes_of<MinGRU>(call);
    if (call.cell == FK_MIN_LSTM) return slopes_of<MinLSTM>(call);
    return FK_BAD_ARGUMENT;
}

}  // namespace
}  // namespace FLUXUTILS_UNIT
