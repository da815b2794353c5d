// Runs a program of step.h. Included once for floats and once for doubles, after step.h, in a namespace of its own.

// Not inlined, for the size of the library.
static __attribute__((noinline)) void add_products(const real *x, const real *w, real *y, int n_in, int n_out) {
    step_add_products(x, w, y, n_in, n_out);
}
static void start_sums(const real *x, const real *w, const real *bias, real *y, int n_in, int n_products, int n_out) {
    memcpy(y, bias, n_out * sizeof(real));
    add_products(x, w, y, n_in, n_products);
}

static bool has_c(int64_t cell) { return cell == FK_LSTM || cell == FK_FLSTM; }

// The operations that remember inputs.
static void run_past(const fluxutils_step_call &c, const fluxutils_step_operation &p, real *values, int64_t series) {
    const real *in = values + p.source, *w = static_cast<const real *>(p.w);
    real *out = values + p.target;
    const int n = static_cast<int>(p.n_in), n_out = static_cast<int>(p.n_out), rows = static_cast<int>(p.rows);
    const int n_past = static_cast<int>(p.n_past), apart = static_cast<int>(c.B * p.n_in);
    // of this series, from a state with `size` numbers for each
    auto state = [&](int k, int64_t size) { return static_cast<real *>(p.states[k]) + series * size; };
    switch (p.kind) {
        case FK_STEP_LAGS: step_lags(in, state(0, n), apart, p.numbers, rows, n_past, out, n); break;
        case FK_STEP_MEANS: step_exponential_means(in, w, state(0, n_out), state(1, n_out), out, n, n_out); break;
        case FK_STEP_ROLLING:
            step_rolling_statistics(in, state(0, n), apart, state(1, 1), p.numbers, rows, n_past, out, n);
            break;
        case FK_STEP_RUNNING:
            step_running_statistics(in, state(0, 1), state(1, n), state(2, n), state(3, n), state(4, n), state(5, n),
                                    state(6, n), state(7, n), out, n);
            break;
        case FK_STEP_KERNELS: {
            const int half = n_out / 2;
            double *t = static_cast<double *>(p.states[1]) + series;
            double *counts = static_cast<double *>(p.states[2]) + series * half;
            double *weighted = static_cast<double *>(p.states[3]) + series * half;
            step_causal_kernels(in, state(0, n), apart, t, counts, weighted, p.numbers, rows, n_past,
                                static_cast<const unsigned char *>(p.w_h), w, values + p.other, out, n, half);
            break;
        }
    }
}

// From what one series gets at this step, (F) doubles, to its outputs, in `values` at c.output.
static void run_series(const fluxutils_step_call &c, const double *x, int64_t series) {
    real *values = static_cast<real *>(c.values);
    for (int64_t f = 0; f < c.F; f++) values[f] = static_cast<real>(x[f]);
    const fluxutils_step_operation *p = c.operations, *end = p + c.n_operations;
    for (; p < end; p++) {
        const real *in = values + p->source, *w = static_cast<const real *>(p->w);
        const real *bias = static_cast<const real *>(p->bias);
        real *out = values + p->target, alpha = static_cast<real>(p->alpha);
        int n_in = static_cast<int>(p->n_in), n = static_cast<int>(p->n_out);
        switch (p->kind) {
            case FK_STEP_DENSE: start_sums(in, w, bias, out, n_in, n, n); break;
            case FK_STEP_CELL: {
                real *sums = values + p->other, *h = static_cast<real *>(p->states[0]) + series * n;
                real *s = has_c(p->cell) ? static_cast<real *>(p->states[1]) + series * n : nullptr;
                int x_rows = static_cast<int>(p->x_rows), h_rows = static_cast<int>(p->h_rows);
                int rows = static_cast<int>(p->rows);
                start_sums(in, w, bias, sums, n_in, x_rows * n, rows * n);
                const real *w_h = static_cast<const real *>(p->w_h);
                if (h_rows) add_products(h, w_h, sums + (rows - h_rows) * n, n, h_rows * n);
                bool exact = alpha != 0;
                switch (p->cell) {
                    case FK_LSTM: step_lstm(sums, h, s, n); break;
                    case FK_GRU: step_gru(sums, h, n); break;
                    case FK_RNN_TANH: step_rnn_tanh(sums, h, n); break;
                    case FK_RNN_RELU: step_rnn_relu(sums, h, n); break;
                    case FK_FLSTM: step_flstm(sums, h, s, n); break;
                    case FK_SGRU: exact ? step_gru(sums, h, n) : step_sgru_parabolic(sums, h, n); break;
                    case FK_MGU:
                    case FK_SMGU: exact ? step_mgu(sums, h, n) : step_mgu_parabolic(sums, h, n); break;
                    case FK_HFGRU: step_hfgru(sums, h, alpha, n); break;
                    case FK_MIN_GRU: step_min_gru(sums, h, n); break;
                    case FK_MIN_LSTM: step_min_lstm(sums, h, n); break;
                }
                memcpy(out, h, n * sizeof(real));
                break;
            }
            case FK_STEP_DIAGONAL: {
                real *h = static_cast<real *>(p->states[0]) + series * n;
                step_diagonal(w, in, h, n / 2);
                memcpy(out, h, n * sizeof(real));
                break;
            }
            case FK_STEP_ACTIVATION: step_activate(static_cast<int>(p->cell), alpha, in, out, n); break;
            case FK_STEP_GATED: step_gated(in, out, n); break;
            case FK_STEP_ADD: step_add(in, values + p->other, out, n); break;
            case FK_STEP_LAYER_NORM: step_layer_norm(in, w, bias, out, alpha, n); break;
            case FK_STEP_SCALE_SHIFT: step_scale_shift(in, w, bias, out, n); break;
            case FK_STEP_JOIN:
                memcpy(out, in, n_in * sizeof(real));
                memcpy(out + n_in, values + p->other, (n - n_in) * sizeof(real));
                break;
            case FK_STEP_DOTS: step_dots(in, w, bias, out, n_in, n); break;
            case FK_STEP_FADE: step_fade(in, values + p->other, alpha, out, static_cast<int>(p->rows), n); break;
            default: run_past(c, *p, values, series);
        }
    }
}

// Writes column `series` of the outputs; a series without input has NaN.
static void write_outputs(const fluxutils_step_call &c, int64_t series, bool is_gap) {
    real *y = static_cast<real *>(c.values) + c.output, *of_method = y + c.G;
    int G = static_cast<int>(c.G);
    if (is_gap)
        for (int g = 0; g < G; g++) y[g] = static_cast<real>(__builtin_nan(""));
    int64_t at = series, B = c.B;
    switch (c.method) {
        case FK_STEP_LABEL: static_cast<int64_t *>(c.y)[at] = step_argmax(y, G); return;
        case FK_STEP_DIFFERENCE: static_cast<real *>(c.y)[at] = y[1] - y[0]; return;
        case FK_STEP_FLOAT32:
            for (int g = 0; g < G; g++, at += B)
                static_cast<float *>(c.y)[at] = static_cast<float>(step_unscaled(y[g], c.mean[g], c.scale[g]));
            return;
        case FK_STEP_FLOAT64:
            for (int g = 0; g < G; g++, at += B)
                static_cast<double *>(c.y)[at] = step_unscaled(y[g], c.mean[g], c.scale[g]);
            return;
        case FK_STEP_PROBABILITIES:
        case FK_STEP_LOG_PROBABILITIES:
            for (int g = 0; g < G; g++) of_method[g] = y[g] - static_cast<real>(c.mean[g]);
            y = of_method;
            if (c.method == FK_STEP_PROBABILITIES)
                step_softmax(y, y, G);
            else
                step_log_softmax(y, y, G);
            break;
    }
    for (int g = 0; g < G; g++, at += B) static_cast<real *>(c.y)[at] = y[g];
}
