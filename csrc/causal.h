// Causal kernels: convolutions by additions, compared with biases, and counts of how often and how late they exceed
// them. One thread takes a series from its first step to its last.
//
// All sums have the order of nn/causal_kernels.py and no fma, so that outputs have the bits of torch: an output that is
// rounded otherwise could pass a bias in one of the two and not in the other.
#pragma once
#include <string.h>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace FLUXUTILS_UNIT {
namespace {

template <class T> struct Causal {
    static constexpr int TAPS = 9, KERNELS = 84;
    static constexpr int64_t CHUNK = 1024;  // steps in memory at once, besides the past
    static constexpr int64_t FEW = 16;      // steps that are not worth vectors over time

    const fluxutils_causal_call &call;
    const int64_t S, B, F, n_past, n_biases;
    bool out_of_memory = false;

    explicit Causal(const fluxutils_causal_call &c)
        : call(c), S(c.S), B(c.B), F(c.F), n_past(c.n_past), n_biases(c.n_biases) {}

    int64_t n_kernels() const { return KERNELS * call.n_dilations; }
    int64_t dilation(int64_t i) const { return call.plan[2 * i]; }
    int64_t per_kernel(int64_t i) const { return call.plan[2 * i + 1]; }

    // Memory of a task: inputs (F, n_past + CHUNK), and of one kernel the sum of its channels, of nine taps, and its
    // outputs; or the outputs (steps, kernels) of few steps.
    struct Room {
        T *x, *channel_sum, *nine, *out, *of_steps;
        int64_t apart;
    };

    bool take_room(Room &room) const {
        room.apart = n_past + (S < CHUNK ? S : CHUNK);
        const int64_t of_channels = room.apart + 16 * F;
        int64_t numbers = (F + 2) * room.apart + of_channels + FEW * n_kernels();
        T *p = static_cast<T *>(fk_scratch(1, numbers * sizeof(T)));
        if (!p) return false;
        room.x = p;
        room.channel_sum = room.x + F * room.apart;
        room.nine = room.channel_sum + of_channels;
        room.out = room.nine + room.apart;
        room.of_steps = room.out + room.apart;
        return true;
    }

    // -- one series ---------------------------------------------------------------------------------------------------

    void series(int64_t b) {
        Room room;
        if (!take_room(room)) {
            out_of_memory = true;
            return;
        }
        const double *t0 = call.t + b;
        double *counts = call.new_counts + b * n_biases, *weighted = call.new_weighted + b * n_biases;
        memcpy(counts, call.counts + b * n_biases, n_biases * sizeof(double));
        memcpy(weighted, call.weighted + b * n_biases, n_biases * sizeof(double));
        load_past(room, b);
        for (int64_t start = 0; start < S; start += CHUNK) {
            const int64_t n = S - start < CHUNK ? S - start : CHUNK;
            load_inputs(room, b, start, n);
            if (call.y || n < FEW)
                each_step(room, b, start, n, *t0, counts, weighted);
            else
                all_steps(room, n, *t0 + start, counts, weighted);
            keep_past(room, n);
        }
        store_past(room, b);
    }

    void load_past(Room &room, int64_t b) const {
        const T *past = static_cast<const T *>(call.past) + b * F;
        for (int64_t k = 0; k < n_past; k++)
            for (int64_t f = 0; f < F; f++) room.x[f * room.apart + k] = past[k * B * F + f];
    }
    void load_inputs(Room &room, int64_t b, int64_t start, int64_t n) const {
        const T *x = static_cast<const T *>(call.x) + (start * B + b) * F;
        for (int64_t k = 0; k < n; k++)
            for (int64_t f = 0; f < F; f++) room.x[f * room.apart + n_past + k] = x[k * B * F + f];
    }
    void keep_past(Room &room, int64_t n) const {
        for (int64_t f = 0; f < F; f++) memmove(room.x + f * room.apart, room.x + f * room.apart + n, n_past * sizeof(T));
    }
    void store_past(const Room &room, int64_t b) const {
        T *past = static_cast<T *>(call.new_past) + b * F;
        for (int64_t k = 0; k < n_past; k++)
            for (int64_t f = 0; f < F; f++) past[k * B * F + f] = room.x[f * room.apart + k];
    }

    // -- convolutions -------------------------------------------------------------------------------------------------

    // The sum of a kernel's channels at n steps of each tap, `apart` from tap to tap, and the sum of nine taps at each
    // step; both stay for kernels with the same channels. Taps that overlap in time are one run of numbers.
    void sum_channels(const Room &room, const uint8_t *channels, int64_t d, int64_t n, int64_t apart) const {
        const bool one_run = apart == d;
        const int64_t pieces = one_run ? 1 : TAPS, length = one_run ? (TAPS - 1) * d + n : n;
        T *sum = room.channel_sum;
        for (int64_t piece = 0; piece < pieces; piece++) {
            T *to = sum + piece * apart;
            const T *x = room.x + n_past - (TAPS - 1 - piece) * d;
            for (int64_t k = 0; k < length; k++) to[k] = x[k] * channels[0];
            for (int64_t f = 1; f < F; f++)
                if (channels[f])
                    for (int64_t k = 0; k < length; k++) to[k] += x[f * room.apart + k];
        }
        for (int64_t k = 0; k < n; k++) room.nine[k] = sum[k] + sum[k + apart];
        for (int j = 2; j < TAPS; j++)
            for (int64_t k = 0; k < n; k++) room.nine[k] += sum[k + j * apart];
    }

    // f(kernel, out) for the outputs of each kernel at n steps.
    template <class Fn> void convolve(const Room &room, int64_t n, const Fn &f) const {
        for (int64_t i = 0, kernel = 0; i < call.n_dilations; i++) {
            const uint8_t *summed = nullptr;
            const int64_t d = dilation(i), apart = n < d ? n : d;
            for (int p = 0; p < TAPS; p++)
                for (int q = p + 1; q < TAPS; q++)
                    for (int r = q + 1; r < TAPS; r++, kernel++) {
                        const uint8_t *channels = call.channels + kernel * F;
                        if (!summed || memcmp(summed, channels, F)) sum_channels(room, channels, d, n, apart);
                        summed = channels;
                        const T *a = room.channel_sum + p * apart, *b = room.channel_sum + q * apart;
                        const T *c = room.channel_sum + r * apart;
                        for (int64_t k = 0; k < n; k++) room.out[k] = T(3) * (a[k] + b[k] + c[k]) - room.nine[k];
                        f(i, kernel, room.out);
                    }
        }
    }

    // The outputs of all kernels at one step, whose taps fit into one vector.
    void convolve_step(const Room &room, T *out) const {
        constexpr int64_t WIDE = 16;
        T *taps = room.channel_sum;  // (F, WIDE), of a dilation
        for (int64_t i = 0, kernel = 0; i < call.n_dilations; i++) {
            const uint8_t *summed = nullptr;
            T sum[WIDE], nine = 0;
            for (int64_t f = 0; f < F; f++) {
                const T *x = room.x + f * room.apart + n_past - (TAPS - 1) * dilation(i);
                for (int64_t j = 0; j < WIDE; j++) taps[f * WIDE + j] = j < TAPS ? x[j * dilation(i)] : T(0);
            }
            for (int p = 0; p < TAPS; p++)
                for (int q = p + 1; q < TAPS; q++)
                    for (int r = q + 1; r < TAPS; r++, kernel++) {
                        const uint8_t *channels = call.channels + kernel * F;
                        if (!summed || memcmp(summed, channels, F)) {
                            for (int64_t j = 0; j < WIDE; j++) sum[j] = taps[j] * channels[0];
                            for (int64_t f = 1; f < F; f++)
                                if (channels[f])
                                    for (int64_t j = 0; j < WIDE; j++) sum[j] += taps[f * WIDE + j];
                            nine = sum[0] + sum[1];
                            for (int j = 2; j < TAPS; j++) nine += sum[j];
                            summed = channels;
                        }
                        out[kernel] = T(3) * (sum[p] + sum[q] + sum[r]) - nine;
                    }
        }
    }

    // -- counting -----------------------------------------------------------------------------------------------------

    // Without outputs: sums over time, in integers.
    void all_steps(const Room &room, int64_t n, double before, double *counts, double *weighted) const {
        const T *bias = static_cast<const T *>(call.biases);
        convolve(room, n, [&](int64_t i, int64_t, const T *out) {
            for (int64_t j = 0; j < per_kernel(i); j++, bias++, counts++, weighted++) {
                const T limit = *bias;
                int32_t hits = 0, places = 0;  // places: sums of numbers from 1 to CHUNK
                for (int32_t k = 0; k < n; k++) {
                    const int32_t hit = out[k] > limit;
                    hits += hit;
                    places += hit * (k + 1);
                }
                *counts += hits;
                *weighted += before * hits + places;
            }
        });
    }

    // With outputs, or where steps are few: step by step, over all biases.
    void each_step(
        const Room &room, int64_t b, int64_t start, int64_t n, double t0, double *counts, double *weighted) const {
        for (int64_t first = 0; first < n; first += FEW) {
            const int64_t some = n - first < FEW ? n - first : FEW;
            Room part = room;
            part.x += first;
            if (some == 1)
                convolve_step(part, room.of_steps);
            else
                convolve(part, some, [&](int64_t, int64_t kernel, const T *out) {
                    for (int64_t k = 0; k < some; k++) room.of_steps[k * n_kernels() + kernel] = out[k];
                });
            for (int64_t k = 0; k < some; k++) {
                const int64_t step = start + first + k;
                count_step(room.of_steps + k * n_kernels(), t0 + step + 1, counts, weighted);
                if (call.y) pool(static_cast<T *>(call.y) + (step * B + b) * 2 * n_biases, t0 + step + 1, counts, weighted);
            }
        }
    }

    void count_step(const T *out, double t, double *counts, double *weighted) const {
        const T *bias = static_cast<const T *>(call.biases);
        for (int64_t i = 0; i < call.n_dilations; i++) {
            const int64_t n = per_kernel(i), total = KERNELS * n;
            double hits[KERNELS];
            if (n == 1) {
                for (int64_t j = 0; j < KERNELS; j++) hits[j] = out[j] > bias[j] ? 1.0 : 0.0;
                for (int64_t j = 0; j < KERNELS; j++) counts[j] += hits[j], weighted[j] += hits[j] * t;
            } else {
                for (int64_t kernel = 0; kernel < KERNELS; kernel++)
                    for (int64_t j = 0; j < n; j++) {
                        const double hit = out[kernel] > bias[kernel * n + j] ? 1.0 : 0.0;
                        counts[kernel * n + j] += hit;
                        weighted[kernel * n + j] += hit * t;
                    }
            }
            out += KERNELS, bias += total, counts += total, weighted += total;
        }
    }

    void pool(T *y, double t, const double *counts, const double *weighted) const {
        const double squared = t * t;
        for (int64_t i = 0; i < n_biases; i++) y[i] = static_cast<T>(counts[i] / t);
        for (int64_t i = 0; i < n_biases; i++) y[n_biases + i] = static_cast<T>(2 * weighted[i] / squared);
    }

    int32_t run() {
        fk_parallel(call.threads, B, [](void *c, int64_t b) { static_cast<Causal *>(c)->series(b); }, this);
        return out_of_memory ? FK_OUT_OF_MEMORY : FK_OK;
    }
};

int32_t causal_kernels(const fluxutils_causal_call &c) {
    if (c.type == FK_FLOAT32) return Causal<float>(c).run();
    if (c.type == FK_FLOAT64) return Causal<double>(c).run();
    return FK_BAD_ARGUMENT;
}

}  // namespace
}  // namespace FLUXUTILS_UNIT
