// Single steps of random models, to be built together with csrc/step.cpp under a sanitizer: every buffer has exactly the
// length that csrc/kernels.h states. A series in a batch must get the same bits as alone.
//
//     steps SEED CALLS
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <list>
#include <memory>
#include <random>
#include <vector>

#include "../../../csrc/kernels.h"

static std::mt19937_64 generator;

static int64_t below(int64_t n) { return static_cast<int64_t>(generator() % n); }

// Buffers on the heap, one by one, so that a read or write beside one is an error.
struct Heap {
    std::vector<std::unique_ptr<char[]>> blocks;

    template <class T> T *random(int64_t n) {
        blocks.emplace_back(new char[n * sizeof(T)]);
        T *start = reinterpret_cast<T *>(blocks.back().get());
        std::uniform_real_distribution<double> numbers(-1.5, 1.5);
        for (int64_t i = 0; i < n; i++) start[i] = T(numbers(generator));
        return start;
    }
};

// rows of sums, those of the inputs and of the state: as exporting/step.h has them
static const int ROWS[11][3] = {{4, 4, 4}, {4, 3, 3}, {1, 1, 1}, {1, 1, 1}, {4, 4, 4}, {4, 1, 3},
                                {3, 2, 2}, {3, 1, 2}, {4, 3, 3}, {2, 2, 0}, {3, 3, 0}};

static int64_t n_states_of(const fluxutils_step_operation &p) {
    return p.kind == FK_STEP_CELL && (p.cell == FK_LSTM || p.cell == FK_FLSTM) ? 2 : 1;
}

template <class T> static bool run_model(int64_t call_number) {
    Heap heap;
    const int64_t F = 1 + below(9), B = 1 + below(4), n_operations = 1 + below(5);
    std::vector<fluxutils_step_operation> operations;
    std::list<std::vector<void *>> blocks_of_states;
    auto states_of = [&](int64_t n_states, int64_t size) {
        blocks_of_states.emplace_back();
        for (int64_t k = 0; k < n_states; k++) blocks_of_states.back().push_back(heap.random<T>(size));
        return blocks_of_states.back().data();
    };
    int64_t place = F, n = F, source = 0;
    for (int64_t i = 0; i < n_operations; i++) {
        fluxutils_step_operation p = {};
        p.kind = below(8), p.source = source, p.n_in = n, p.target = place, p.n_out = n, p.alpha = 0.25 * below(3);
        if (p.kind == FK_STEP_GATED && n % 2) p.kind = FK_STEP_DENSE;
        if (p.kind == FK_STEP_DIAGONAL && n % 2) p.kind = FK_STEP_CELL;
        if (p.kind == FK_STEP_GATED) p.n_out = n / 2;
        if (p.kind == FK_STEP_DENSE || p.kind == FK_STEP_CELL) p.n_out = 1 + below(40);
        const int64_t m = p.n_out;
        place += m;
        if (p.kind == FK_STEP_DENSE) {
            p.w = heap.random<T>(n * m), p.bias = heap.random<T>(m);
        } else if (p.kind == FK_STEP_CELL) {
            p.cell = below(11);
            p.rows = ROWS[p.cell][0], p.x_rows = ROWS[p.cell][1], p.h_rows = ROWS[p.cell][2];
            p.w = heap.random<T>(n * p.x_rows * m), p.w_h = heap.random<T>(m * p.h_rows * m);
            p.bias = heap.random<T>(p.rows * m), p.other = place;
            place += p.rows * m;
            p.states = states_of(n_states_of(p), B * m);
        } else if (p.kind == FK_STEP_ACTIVATION) {
            p.cell = below(10);
        } else if (p.kind == FK_STEP_ADD) {
            p.other = source;
        } else if (p.kind != FK_STEP_GATED) {
            p.w = heap.random<T>(m), p.bias = heap.random<T>(m);
            if (p.kind == FK_STEP_DIAGONAL) p.states = states_of(1, B * m);
            if (p.kind == FK_STEP_LAYER_NORM) p.alpha = 1e-5;
        }
        source = p.target, n = m;
        operations.push_back(p);
    }
    // the outputs are copied to the end, where there is room for a second set of them
    fluxutils_step_operation last = {};
    last.kind = FK_STEP_ACTIVATION, last.cell = 1, last.source = source, last.n_out = n, last.target = place;
    operations.push_back(last);

    fluxutils_step_scaler scaler = {below(3), heap.random<double>(F), heap.random<double>(F), heap.random<double>(F),
                                    heap.random<double>(F)};
    const int64_t methods[] = {FK_STEP_RAW, FK_STEP_FLOAT32, FK_STEP_FLOAT64, FK_STEP_LABEL, FK_STEP_PROBABILITIES,
                               FK_STEP_LOG_PROBABILITIES, FK_STEP_DIFFERENCE};
    fluxutils_step_call c = {};
    c.version = FLUXUTILS_KERNELS_VERSION, c.type = sizeof(T) == 8 ? FK_FLOAT64 : FK_FLOAT32;
    c.B = B, c.F = F, c.G = n, c.n_scalers = below(2), c.scalers = &scaler;
    c.n_operations = operations.size(), c.operations = operations.data();
    c.method = methods[below(n == 2 ? 7 : 6)];
    double *x = heap.random<double>(F * B);
    const bool is_gap = below(4) == 0, is_filled = c.n_scalers && scaler.kind != FK_STEP_STANDARDIZE;
    if (is_gap)
        for (int64_t f = 0; f < F; f++) x[f * B] = NAN;
    c.x = x, c.inputs = heap.random<double>(B * F), c.gaps = heap.random<int64_t>(B);
    c.values = heap.random<T>(place + 2 * n), c.output = place;
    c.mean = heap.random<double>(n), c.scale = heap.random<double>(n);
    const bool is_one = c.method == FK_STEP_LABEL || c.method == FK_STEP_DIFFERENCE;
    const bool is_wide = c.method == FK_STEP_LABEL || c.method == FK_STEP_FLOAT64;
    const int64_t size = is_wide ? 8 : c.method == FK_STEP_FLOAT32 ? 4 : sizeof(T);
    const int64_t n_outputs = is_one ? 1 : n;
    char *y = heap.random<char>(n_outputs * B * size);
    c.y = y;

    // the last series alone, from copies of its states
    fluxutils_step_call alone = c;
    std::vector<fluxutils_step_operation> copies = operations;
    for (auto &p : copies) {
        if (!p.states) continue;
        const int64_t bytes = p.n_out * sizeof(T), n_states = n_states_of(p);
        void *const *given = p.states;
        p.states = states_of(n_states, p.n_out);
        for (int64_t k = 0; k < n_states; k++)
            memcpy(p.states[k], static_cast<char *>(given[k]) + (B - 1) * bytes, bytes);
    }
    double *column = heap.random<double>(F);
    for (int64_t f = 0; f < F; f++) column[f] = x[f * B + B - 1];
    char *y_alone = heap.random<char>(n_outputs * size);
    alone.B = 1, alone.x = column, alone.operations = copies.data(), alone.y = y_alone;

    const bool is_refused = fluxutils_step(&c) != FK_OK;
    if (is_refused || c.gaps[0] != (is_gap && !is_filled)) {
        fprintf(stderr, "call %lld: refused, or a wrong gap\n", static_cast<long long>(call_number));
        return false;
    }
    if (fluxutils_step(&alone)) return false;  // it uses the same room
    for (int64_t g = 0; g < n_outputs; g++)
        if (memcmp(y + (g * B + B - 1) * size, y_alone + g * size, size)) {
            fprintf(stderr, "call %lld: a series alone gets other bits\n", static_cast<long long>(call_number));
            return false;
        }
    return true;
}

int main(int, char **arguments) {
    generator.seed(strtoull(arguments[1], nullptr, 10));
    const int64_t calls = strtoll(arguments[2], nullptr, 10);
    for (int64_t i = 0; i < calls; i++)
        if (!(below(2) ? run_model<float>(i) : run_model<double>(i))) return 1;
    printf("%lld steps of random models\n", static_cast<long long>(calls));
    return 0;
}
