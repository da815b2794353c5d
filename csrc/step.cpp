// One step of a few series through a whole model, from the header that a model's C file holds. Other than in a unit of
// the kernels, the compiler may join products and sums; and on x86 it is compiled for AVX2 alone, since longer vectors
// wait for the weights all the same (LSTM of 64 units: .65 us for .6 with AVX-512).
#include <stdint.h>
#include <string.h>

#include "kernels.h"

// Declared here, not by a header of the C++ library: see simd.h.
extern "C" {
double exp(double), expm1(double), log(double), log1p(double), erf(double), sqrt(double);
double cos(double), sin(double), pow(double, double);
float expf(float), expm1f(float), logf(float), log1pf(float), erff(float), sqrtf(float), cosf(float), sinf(float);
}
#define STEP_DECLARED
#define real float  // in exported files, the type stands in its place

namespace {

namespace in_float {
#include "../fluxutils_py/exporting/step.h"
#include "step_run.h"
}  // namespace in_float

#undef real
#undef STEP_MATH
#undef STEP_SHIFTER
#undef STEP_MANTISSA
#undef STEP_ONE
#undef STEP_LIMIT
#undef STEP_EXP2
#define real double
#define STEP_DOUBLE

namespace in_double {
#include "../fluxutils_py/exporting/step.h"
#include "step_run.h"
}  // namespace in_double

// One series through the scalers, in place.
void scale_inputs(const fluxutils_step_call &c, double *x) {
    const int F = static_cast<int>(c.F);
    for (int64_t i = 0; i < c.n_scalers; i++) {
        const fluxutils_step_scaler &s = c.scalers[i];
        switch (s.kind) {
            case FK_STEP_STANDARDIZE: in_double::step_standardize(x, s.mean, s.scale, F); break;
            case FK_STEP_WINSORIZE: in_double::step_winsorize(x, s.lower, s.upper, s.mean, s.scale, F); break;
            case FK_STEP_FILL: in_double::step_fill(x, s.mean, F); break;
            case FK_STEP_ROUND:
                if (c.type == FK_FLOAT32)
                    for (int f = 0; f < F; f++) x[f] = static_cast<float>(x[f]);
                break;
        }
    }
}

// Copies the inputs of all series, scaled, to (B, F). A series without any number gets zeros and a mark in `gaps`. False
// if a number is infinite, or so large that its square may be, or missing where others are there.
bool read_inputs(const fluxutils_step_call &c) {
    const double limit = c.type == FK_FLOAT32 ? 1e17 : 1e152;
    for (int64_t b = 0; b < c.B; b++) {
        double *x = c.inputs + b * c.F;
        for (int64_t f = 0; f < c.F; f++) x[f] = c.x[f * c.B + b];
        scale_inputs(c, x);
        int64_t n_missing = 0;
        for (int64_t f = 0; f < c.F; f++) {
            if (x[f] >= -limit && x[f] <= limit) continue;
            if (x[f] == x[f]) return false;
            n_missing++;
        }
        if (n_missing && n_missing < c.F) return false;
        c.gaps[b] = n_missing != 0;
        if (n_missing) memset(x, 0, c.F * sizeof(double));
    }
    return true;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int32_t fluxutils_step(const fluxutils_step_call *call) {
    if (!call || call->version != FLUXUTILS_KERNELS_VERSION || call->B < 1 || call->F < 1 || call->G < 1)
        return FK_BAD_ARGUMENT;
    const fluxutils_step_call &c = *call;
    if (!read_inputs(c)) return FK_NOT_FINITE;  // no state has moved yet
    for (int64_t b = 0; b < c.B; b++) {
        const double *x = c.inputs + b * c.F;
        if (c.type == FK_FLOAT32) {
            in_float::run_series(c, x, b), in_float::write_outputs(c, b, c.gaps[b]);
        } else {
            in_double::run_series(c, x, b), in_double::write_outputs(c, b, c.gaps[b]);
        }
    }
    return FK_OK;
}
