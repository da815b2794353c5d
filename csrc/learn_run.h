// Learns from a program of step.h: gradients of one step, sensitivities of diagonal layers (nn/sensitivities.py), updates.
// Included once for floats and once for doubles, after step_run.h, in the same namespace.

typedef real several __attribute__((vector_size(32), aligned(sizeof(real)), may_alias));

static real dot(const real *x, const real *y, int n) {
    constexpr int L = sizeof(several) / sizeof(real);
    const int whole = n - n % (2 * L);
    several sums = {}, others = {};
    real total = 0;
    for (int k = 0; k < whole; k += 2 * L) {
        sums += *reinterpret_cast<const several *>(x + k) * *reinterpret_cast<const several *>(y + k);
        others += *reinterpret_cast<const several *>(x + k + L) * *reinterpret_cast<const several *>(y + k + L);
    }
    for (int k = whole; k < n; k++) total += x[k] * y[k];
    sums += others;
    for (int i = 0; i < L; i++) total += sums[i];
    return total;
}

// y += a x
static void add_multiple(real a, const real *STEP_RESTRICT x, real *STEP_RESTRICT y, int n) {
    for (int i = 0; i < n; i++) y[i] += a * x[i];
}

// y = a x
static void write_multiple(real a, const real *STEP_RESTRICT x, real *STEP_RESTRICT y, int n) {
    for (int i = 0; i < n; i++) y[i] = a * x[i];
}

// -- the steps of diagonal layers ---------------------------------------------------------------------------------------

// From the sums of a cell (rows, H) and h before it: what of h is kept, and its derivatives with respect to the sums,
// both (rows, H).
static void cell_slopes(int64_t cell, const real *STEP_RESTRICT a, const real *STEP_RESTRICT h, real *STEP_RESTRICT kept,
                        real *STEP_RESTRICT slopes, int H) {
    if (cell == FK_MIN_GRU) {
        for (int u = 0; u < H; u++) {
            const real z = step_sigmoid(a[u]), keep = 1 - z;
            kept[u] = kept[H + u] = keep;
            slopes[u] = (a[H + u] - h[u]) * keep * z;
            slopes[H + u] = z;
        }
        return;
    }
    const real limit = STEP_LIMIT / 2;
    for (int u = 0; u < H; u++) {  // as step_min_lstm()
        const real f = a[u] * -STEP_LOG2E, i = a[H + u] * -STEP_LOG2E;
        const real smaller = f < i ? f : i, excess = smaller > limit ? smaller - limit : 0;
        const step_power of_f = step_power2(f - excess), of_i = step_power2(i - excess);
        const real inverse_f = of_f.scale * of_f.part + (of_f.scale + 1);
        const real inverse_i = of_i.scale * of_i.part + (of_i.scale + 1);
        const real keep = inverse_i / (inverse_f + inverse_i), take = inverse_f / (inverse_f + inverse_i);
        const real common = (h[u] - a[2 * H + u]) * keep * take;
        kept[u] = kept[H + u] = kept[2 * H + u] = keep;
        slopes[u] = common * step_sigmoid(-a[u]);
        slopes[H + u] = -common * step_sigmoid(-a[H + u]);
        slopes[2 * H + u] = take;
    }
}

// Moves sensitivities on by a step, E = kept E + slopes x, and adds d E to the gradient; n numbers.
static void move_sensitivity(const real *STEP_RESTRICT kept, const real *STEP_RESTRICT slopes, real x,
                             const real *STEP_RESTRICT d, real *STEP_RESTRICT E, real *STEP_RESTRICT gradient, int n) {
    for (int r = 0; r < n; r++) {
        const real moved = kept[r] * E[r] + slopes[r] * x;
        E[r] = moved;
        gradient[r] += d[r] * moved;
    }
}

static void learn_cell(const fluxutils_step_operation &p, const fluxutils_learn_operation &o, const real *values, real *d,
                       int64_t series) {
    const int n = static_cast<int>(p.n_out), n_in = static_cast<int>(p.n_in), n_rows = static_cast<int>(p.rows) * n;
    const real *x = values + p.source, *w = static_cast<const real *>(p.w);
    real *before = static_cast<real *>(o.room), *kept = before + n, *slopes = kept + n_rows, *d_rows = slopes + n_rows;
    cell_slopes(p.cell, values + p.other, before, kept, slopes, n);
    for (int r = 0; r < n_rows; r += n) memcpy(d_rows + r, d + p.target, n * sizeof(real));
    if (o.sensitivities[0]) {
        real *of_w = static_cast<real *>(o.sensitivities[0]) + series * n_in * n_rows;
        real *of_bias = static_cast<real *>(o.sensitivities[1]) + series * n_rows;
        real *d_w = static_cast<real *>(o.gradients[0]), *d_bias = static_cast<real *>(o.gradients[1]);
        for (int k = 0; k < n_in; k++)
            move_sensitivity(kept, slopes, x[k], d_rows, of_w + k * n_rows, d_w + k * n_rows, n_rows);
        move_sensitivity(kept, slopes, 1, d_rows, of_bias, d_bias, n_rows);
    }
    if (!o.to_source) return;
    for (int r = 0; r < n_rows; r++) d_rows[r] *= slopes[r];
    for (int k = 0; k < n_in; k++) d[p.source + k] += dot(w + k * n_rows, d_rows, n_rows);
}

// Of what follows from the parameters of a diagonal layer: exp(nu), exp(theta) and exp(gamma), (3, n), behind h.
static real *exponentials(const fluxutils_learn_operation &o, int n) { return static_cast<real *>(o.room) + 2 * n; }

// `product` is the operation before it.
static void learn_diagonal(const fluxutils_step_operation &p, const fluxutils_step_operation &product,
                           const fluxutils_learn_operation &o, const real *values, real *d, int64_t series) {
    const int n = static_cast<int>(p.n_out) / 2, n_in = static_cast<int>(product.n_in);
    const real *x = values + product.source, *added = values + p.source, *lambda = static_cast<const real *>(p.w);
    const real *before = static_cast<const real *>(o.room), *d_h = d + p.target;
    if (o.to_source) memcpy(d + p.source, d_h, 2 * n * sizeof(real));
    if (!o.sensitivities[0]) return;
    const real *decay = exponentials(o, n), *angle = decay + n, *gain = angle + n;
    real *STEP_RESTRICT by_nu = static_cast<real *>(o.sensitivities[0]) + series * 6 * n;
    real *STEP_RESTRICT by_theta = by_nu + 2 * n;
    real *STEP_RESTRICT by_gamma = by_theta + 2 * n;
    real *STEP_RESTRICT d_nu = static_cast<real *>(o.gradients[0]);
    real *STEP_RESTRICT d_theta = static_cast<real *>(o.gradients[1]);
    real *STEP_RESTRICT d_gamma = static_cast<real *>(o.gradients[2]);
    for (int j = 0; j < n; j++) {
        const int r = 2 * j, i = r + 1;
        const real re = lambda[r], im = lambda[i], d_re = d_h[r], d_im = d_h[i];
        // h before the step times lambda: what the logarithm of the eigenvalue adds
        const real turned_re = re * before[r] - im * before[i], turned_im = re * before[i] + im * before[r];
        const real nu_re = re * by_nu[r] - im * by_nu[i] - decay[j] * turned_re;
        const real nu_im = re * by_nu[i] + im * by_nu[r] - decay[j] * turned_im;
        const real theta_re = re * by_theta[r] - im * by_theta[i] - angle[j] * turned_im;
        const real theta_im = re * by_theta[i] + im * by_theta[r] + angle[j] * turned_re;
        const real gamma_re = re * by_gamma[r] - im * by_gamma[i] + added[r];
        const real gamma_im = re * by_gamma[i] + im * by_gamma[r] + added[i];
        by_nu[r] = nu_re, by_nu[i] = nu_im, by_theta[r] = theta_re, by_theta[i] = theta_im;
        by_gamma[r] = gamma_re, by_gamma[i] = gamma_im;
        d_nu[j] += d_re * nu_re + d_im * nu_im;
        d_theta[j] += d_re * theta_re + d_im * theta_im;
        d_gamma[j] += d_re * gamma_re + d_im * gamma_im;
    }
    real *STEP_RESTRICT of_w = static_cast<real *>(o.sensitivities[1]) + series * 2 * n * n_in;
    real *STEP_RESTRICT d_w = static_cast<real *>(o.gradients[3]);
    for (int j = 0; j < n; j++, of_w += 2 * n_in, d_w += 2 * n_in) {
        const real re = lambda[2 * j], im = lambda[2 * j + 1], d_re = d_h[2 * j], d_im = d_h[2 * j + 1];
        for (int k = 0; k < n_in; k++) {
            const real E_re = re * of_w[k] - im * of_w[n_in + k] + gain[j] * x[k];
            const real E_im = re * of_w[n_in + k] + im * of_w[k];
            of_w[k] = E_re, of_w[n_in + k] = E_im;
            d_w[k] += d_re * E_re + d_im * E_im;
            d_w[n_in + k] += d_im * E_re - d_re * E_im;
        }
    }
}

// Eigenvalues and scaled weights of a diagonal layer, from its parameters.
static void follow_parameters(const fluxutils_step_operation &p, const fluxutils_step_operation &product,
                              const fluxutils_learn_operation &o) {
    const int n = static_cast<int>(p.n_out) / 2, n_in = static_cast<int>(product.n_in);
    real *lambda = static_cast<real *>(const_cast<void *>(p.w)), *w = static_cast<real *>(const_cast<void *>(product.w));
    const real *w_in = static_cast<const real *>(o.parameters[3]);
    real *decay = exponentials(o, n), *angle = decay + n, *gain = angle + n;
    for (int j = 0; j < n; j++) gain[j] = step_exp(static_cast<const real *>(o.parameters[2])[j]);
    for (int j = 0; j < n; j++) {  // to the last digit, which adds up over many steps
        decay[j] = STEP_MATH(exp)(static_cast<const real *>(o.parameters[0])[j]);
        angle[j] = STEP_MATH(exp)(static_cast<const real *>(o.parameters[1])[j]);
        const real modulus = STEP_MATH(exp)(-decay[j]);
        lambda[2 * j] = modulus * STEP_MATH(cos)(angle[j]), lambda[2 * j + 1] = modulus * STEP_MATH(sin)(angle[j]);
    }
    for (int k = 0; k < n_in; k++)
        for (int j = 0; j < n; j++) {
            w[2 * (k * n + j)] = gain[j] * w_in[2 * j * n_in + k];
            w[2 * (k * n + j) + 1] = gain[j] * w_in[(2 * j + 1) * n_in + k];
        }
}

// -- other operations ----------------------------------------------------------------------------------------------------

// The first series writes the gradient of the weights, others add to it.
static void learn_dense(const fluxutils_step_operation &p, const fluxutils_learn_operation &o, const real *values, real *d,
                        bool is_first) {
    const int n = static_cast<int>(p.n_out), n_in = static_cast<int>(p.n_in);
    const real *x = values + p.source, *w = static_cast<const real *>(p.w), *d_out = d + p.target;
    real *d_w = static_cast<real *>(o.gradients[0]), *d_bias = static_cast<real *>(o.gradients[1]), *d_in = d + p.source;
    auto *outer = is_first ? write_multiple : add_multiple;
    if (p.kind == FK_STEP_DOTS) {
        for (int r = 0; r < n; r++) {
            if (d_w) outer(d_out[r], x, d_w + r * n_in, n_in);
            if (o.to_source) add_multiple(d_out[r], w + r * n_in, d_in, n_in);
        }
    } else {
        for (int k = 0; k < n_in; k++) {
            if (d_w) outer(x[k], d_out, d_w + k * n, n);
            if (o.to_source) d_in[k] += dot(w + k * n, d_out, n);
        }
    }
    if (d_bias) add_multiple(1, d_out, d_bias, n);
}

static void learn_layer_norm(const fluxutils_step_operation &p, const fluxutils_learn_operation &o, const real *values,
                             real *d) {
    const int n = static_cast<int>(p.n_out);
    const real *x = values + p.source, *w = static_cast<const real *>(p.w), *d_out = d + p.target;
    real *d_w = static_cast<real *>(o.gradients[0]), *d_bias = static_cast<real *>(o.gradients[1]), *d_in = d + p.source;
    real mean = 0, squares = 0, of_mean = 0, of_scale = 0;
    for (int i = 0; i < n; i++) mean += x[i];
    mean /= static_cast<real>(n);
    for (int i = 0; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
    const real inverse = 1 / STEP_MATH(sqrt)(squares / static_cast<real>(n) + static_cast<real>(p.alpha));
    for (int i = 0; i < n; i++) {
        const real scaled = (x[i] - mean) * inverse;
        if (d_w) d_w[i] += d_out[i] * scaled;
        of_mean += d_out[i] * w[i], of_scale += d_out[i] * w[i] * scaled;
    }
    if (d_bias) add_multiple(1, d_out, d_bias, n);
    if (!o.to_source) return;
    of_mean /= static_cast<real>(n), of_scale /= static_cast<real>(n);
    for (int i = 0; i < n; i++)
        d_in[i] += inverse * (d_out[i] * w[i] - of_mean - (x[i] - mean) * inverse * of_scale);
}

static real activation_slope(int64_t function, real alpha, real x, real y) {
    switch (function) {
        case STEP_RELU: return x > 0 ? 1 : 0;
        case STEP_TANH: return 1 - y * y;
        case STEP_SIGMOID: return y * (1 - y);
        case STEP_SILU: {
            const real s = step_sigmoid(x);
            return s + y * (1 - s);
        }
        case STEP_LEAKY_RELU: return x > 0 ? 1 : alpha;
    }
    return 0;
}

// Of operations that have no weights, to their inputs.
static void pass_on(const fluxutils_step_operation &p, const fluxutils_learn_operation &o, const real *values, real *d) {
    const int n = static_cast<int>(p.n_out);
    const real *x = values + p.source, *d_out = d + p.target, alpha = static_cast<real>(p.alpha);
    real *d_in = d + p.source;
    switch (p.kind) {
        case FK_STEP_ACTIVATION:
            for (int i = 0; i < n; i++)
                d_in[i] += d_out[i] * activation_slope(p.cell, alpha, x[i], values[p.target + i]);
            break;
        case FK_STEP_GATED:
            for (int i = 0; i < n; i++) {
                const real s = step_sigmoid(x[i]);
                d_in[i] += d_out[i] * x[n + i] * (s + x[i] * s * (1 - s));
                d_in[n + i] += d_out[i] * x[i] * s;
            }
            break;
        case FK_STEP_ADD:
            if (o.to_source) add_multiple(1, d_out, d_in, n);
            if (o.to_other) add_multiple(1, d_out, d + p.other, n);
            break;
        case FK_STEP_SCALE_SHIFT:
            for (int i = 0; i < n; i++) d_in[i] += d_out[i] * static_cast<const real *>(p.w)[i];
            break;
        case FK_STEP_FADE: {
            real largest = 0;
            for (int i = 0; i < static_cast<int>(p.n_in); i++) {
                const real level = values[p.other + i], size = level < 0 ? -level : level;
                if (size > largest) largest = size;
            }
            const real left = alpha - largest;
            add_multiple(left < 0 ? 0 : left > 1 ? 1 : left, d_out, d_in, n);
            break;
        }
    }
}

// -- the whole step --------------------------------------------------------------------------------------------------------

// The losses of a series, summed, and the gradient of their mean over all that are known with respect to outputs y.
static double squared_errors(const fluxutils_learn_call &l, int64_t series, double n_known, const real *y, real *d) {
    double total = 0;
    for (int64_t g = 0; g < l.step->G; g++) {
        const double truth = l.truth[g * l.step->B + series];
        if (truth != truth) continue;
        const real error = y[g] - static_cast<real>((truth - l.mean[g]) / l.scale[g]);
        total += static_cast<double>(error) * error;
        d[g] = error * static_cast<real>(2 / n_known);
    }
    return total;
}

static double cross_entropy(const fluxutils_learn_call &l, int64_t series, double n_known, const real *y, real *d) {
    const double truth = l.truth[series];
    if (truth != truth) return 0;
    const int G = static_cast<int>(l.step->G), code = static_cast<int>(truth);
    step_log_softmax(y, d, G);
    const double loss = -d[code];
    for (int g = 0; g < G; g++) d[g] = (STEP_MATH(exp)(d[g]) - (g == code)) / static_cast<real>(n_known);
    return loss;
}

// Runs a series, and adds to the gradients; returns the sum of its losses.
static double learn_series(const fluxutils_learn_call &l, int64_t series, double n_known) {
    const fluxutils_step_call &c = *l.step;
    const fluxutils_step_operation *p = c.operations;
    const fluxutils_learn_operation *o = l.operations;
    for (int64_t i = 0; i < c.n_operations; i++)
        if (o[i].room) memcpy(o[i].room, static_cast<real *>(p[i].h) + series * p[i].n_out, p[i].n_out * sizeof(real));
    run_series(c, c.inputs + series * c.F, series);

    const real *values = static_cast<const real *>(c.values), *y = values + c.output;
    real *d = static_cast<real *>(l.slopes);
    memset(d, 0, (c.output + c.G) * sizeof(real));
    const double total = l.of_loss == FK_CROSS_ENTROPY ? cross_entropy(l, series, n_known, y, d + c.output)
                                                       : squared_errors(l, series, n_known, y, d + c.output);
    for (int64_t i = c.n_operations - 1; i >= 0; i--) {
        if (!o[i].has_gradient) continue;
        switch (p[i].kind) {
            case FK_STEP_DENSE:
            case FK_STEP_DOTS: learn_dense(p[i], o[i], values, d, series == 0); break;
            case FK_STEP_CELL: learn_cell(p[i], o[i], values, d, series); break;
            case FK_STEP_DIAGONAL: learn_diagonal(p[i], p[i - 1], o[i], values, d, series); break;
            case FK_STEP_LAYER_NORM: learn_layer_norm(p[i], o[i], values, d); break;
            default: pass_on(p[i], o[i], values, d);
        }
    }
    return total;
}

// What Adam divides its means by after t updates.
struct Corrections {
    double t, beta1, beta2, first, root;
};

// Updates a parameter as the optimizers of torch do, with its gradient times a factor. `known` is that of the last
// parameter: powers take as long as 30 weights.
static void update(const fluxutils_learn_parameter &q, double factor, Corrections &known) {
    real *STEP_RESTRICT value = static_cast<real *>(q.value);
    real *STEP_RESTRICT first = static_cast<real *>(q.first);
    real *STEP_RESTRICT second = static_cast<real *>(q.second);
    const real *STEP_RESTRICT gradient = static_cast<const real *>(q.gradient);
    const int n = static_cast<int>(q.n);
    const real scale = static_cast<real>(factor), rate = static_cast<real>(q.rate), beta1 = static_cast<real>(q.beta1);
    if (q.kind == FK_SGD) {
        for (int i = 0; i < n; i++) {
            real g = scale * gradient[i] + static_cast<real>(q.decay) * value[i];
            if (first) g = first[i] = beta1 * first[i] + g;
            value[i] -= rate * g;
        }
        return;
    }
    *q.n_updates += 1;
    const double t = *q.n_updates;
    if (known.t != t || known.beta1 != q.beta1 || known.beta2 != q.beta2)
        known = {t, q.beta1, q.beta2, 1 - pow(q.beta1, t), 1 / sqrt(1 - pow(q.beta2, t))};
    const real size = static_cast<real>(q.rate / known.first), root = static_cast<real>(known.root);
    const real eps = static_cast<real>(q.eps);
    const real new1 = static_cast<real>(1 - q.beta1), new2 = static_cast<real>(1 - q.beta2);
    const real beta2 = static_cast<real>(q.beta2);
    const real kept = static_cast<real>(q.kind == FK_ADAMW ? 1 - q.rate * q.decay : 1);
    const real decay = static_cast<real>(q.kind == FK_ADAMW ? 0 : q.decay);
    for (int i = 0; i < n; i++) {
        const real g = scale * gradient[i] + decay * value[i];
        const real m = first[i] + new1 * (g - first[i]), v = beta2 * second[i] + new2 * (g * g);
        first[i] = m, second[i] = v;
        value[i] = kept * value[i] - size * m / (STEP_MATH(sqrt)(v) * root + eps);
    }
}

static void follow_all(const fluxutils_learn_call &l) {
    const fluxutils_step_operation *p = l.step->operations;
    for (int64_t i = 1; i < l.step->n_operations; i++)
        if (p[i].kind == FK_STEP_DIAGONAL && l.operations[i].sensitivities[0]) follow_parameters(p[i], p[i - 1], l.operations[i]);
}

// All series, whose inputs have been read, and the update; false if the loss or the gradient is not finite.
static bool learn(fluxutils_learn_call &l) {
    const fluxutils_step_call &c = *l.step;
    double n_known = 0;
    const int64_t n_truths = (l.of_loss == FK_CROSS_ENTROPY ? 1 : c.G) * c.B;
    for (int64_t i = 0; i < n_truths; i++) n_known += l.truth[i] == l.truth[i];
    for (int64_t i = 0; i < l.n_parameters; i++)
        if (!l.parameters[i].is_written) memset(l.parameters[i].gradient, 0, l.parameters[i].n * sizeof(real));
    l.loss = 0;
    for (int64_t b = 0; b < c.B; b++) l.loss += learn_series(l, b, n_known > 0 ? n_known : 1);
    if (n_known == 0) return true;
    l.loss = static_cast<real>(l.loss / n_known), l.norm = 0;
    for (int64_t i = 0; i < l.n_parameters; i++) {
        const real *g = static_cast<const real *>(l.parameters[i].gradient);
        l.norm += dot(g, g, static_cast<int>(l.parameters[i].n));
    }
    l.norm = static_cast<real>(sqrt(l.norm));
    if (l.loss - l.loss != 0 || l.norm - l.norm != 0) return false;
    const double factor = l.clip > 0 && l.norm > l.clip ? l.clip / (l.norm + 1e-6) : 1;
    Corrections known = {};
    for (int64_t i = 0; i < l.n_parameters; i++) update(l.parameters[i], factor, known);
    follow_all(l);
    return true;
}
