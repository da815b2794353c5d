// The C interface of the kernels: plain C, no headers of torch or Python. The library is loaded with ctypes.
//
// A call is described by one structure, whose first field is the version of its layout. All tensors are contiguous;
// weights have the layout of torch's layers: blocks of H rows, one after the other.
#pragma once
#include <stdint.h>

#define FLUXUTILS_KERNELS_VERSION 6

#ifdef __cplusplus
extern "C" {
#endif

enum {  // cells
    FK_LSTM = 0, FK_GRU = 1, FK_RNN_TANH = 2, FK_RNN_RELU = 3,
    FK_FLSTM = 4, FK_SGRU = 5, FK_MGU = 6, FK_SMGU = 7, FK_HFGRU = 8,
    FK_MIN_GRU = 9, FK_MIN_LSTM = 10,  // without w_h and b_h
};
enum { FK_FLOAT32 = 0, FK_FLOAT64 = 1, FK_COMPLEX64 = 2, FK_COMPLEX128 = 3,  // types, complex in pairs
       FK_BFLOAT16 = 4 };  // all tensors are float32; what is multiplied in matrix products is rounded to bfloat16
enum { FK_BEST = 0, FK_AVX2 = 1, FK_AVX512 = 2, FK_NEON = 3,        // instruction sets
       FK_AVX512_BF16 = 4 };  // which a call of FK_BFLOAT16 uses, whatever its isa

// What a call returns.
enum { FK_OK = 0, FK_BAD_ARGUMENT = 1, FK_NO_SUCH_INSTRUCTIONS = 2, FK_OUT_OF_MEMORY = 3, FK_NOT_FINITE = 4 };

// S steps, B series, F features, H units. A pointer that may be null says so.
typedef struct {
    int64_t version, cell, type, isa, threads;
    int64_t S, B, F, H;
    double alpha;  // of HFGRU; of SGRU, MGU and SMGU: not 0 for the exact activations
    const void *x, *h0, *c0;             // (S, B, F), (B, H), (B, H); null states are zero
    const void *w_x, *w_h, *b_x, *b_h;   // (KX H, F), (KH H, H), (KX H), (KH H); null biases are zero; from FLSTM to
                                         // HFGRU there is one bias, b_h
    void *y, *h, *c;                     // (S, B, H), and the last state (B, H), (B, H); h may be null
    void *saved;                         // S B H fluxutils_kept_per_output() numbers for the backward pass, or null
    const void *dy, *dh, *dc;            // gradients of y, h, c; each may be null
    void *dx, *dh0, *dc0;                // gradients to compute; each may be null
    void *dw_x, *dw_h, *db_x, *db_h;     // each may be null
} fluxutils_call;

int32_t fluxutils_version(void);
int32_t fluxutils_isa(int32_t wanted);                   // the set that would be used, or -1 if this machine lacks it
int32_t fluxutils_kept_per_output(int32_t cell);         // numbers kept for the backward pass, for each output
int32_t fluxutils_forward(const fluxutils_call *);
int32_t fluxutils_backward(const fluxutils_call *);

// Derivatives of the last state of FK_MIN_GRU or FK_MIN_LSTM with respect to the sums of each step and to h0. A unit
// depends on its own past alone, so that there is one number for each. Of the call it reads y and h0; `saved` holds the
// sums (S, B, KX H), which the derivatives replace; dh0 (B, H) is written.
int32_t fluxutils_slopes(const fluxutils_call *);

// The linear recurrence h[t] = a[t] * h[t - 1] + b[t] of (S, B, H). a has a_step numbers from one step to the next and
// a_series from one series to the next; 0: all have the same.
typedef struct {
    int64_t version, type, isa, threads;
    int64_t S, B, H, a_step, a_series;
    const void *a, *b, *h0;  // h0 (B, H), null: zero
    void *h;                 // (S, B, H)
    const void *dh;          // gradient of h
    void *da, *db, *dh0;     // gradients to compute; da, which has the shape of a, and dh0 may be null
} fluxutils_linear_call;

// Kernels of nn/causal_kernels.py over windows (S, B, F).
typedef struct {
    int64_t version, type, isa, threads;
    int64_t S, B, F, n_past, n_dilations, n_biases;
    const int64_t *plan;              // (n_dilations, 2): the dilation, and the biases of each of its 84 kernels
    const uint8_t *channels;          // (84 n_dilations, F): 1 where a kernel adds up a feature
    const void *biases;               // (n_biases)
    const void *x, *past;             // (S, B, F), (n_past, B, F)
    const double *t, *counts, *weighted;        // (B), (B, n_biases) twice
    void *y;                          // (S, B, 2 n_biases), or null
    void *new_past;
    double *new_counts, *new_weighted;
} fluxutils_causal_call;

int32_t fluxutils_causal_kernels(const fluxutils_causal_call *);

int32_t fluxutils_linear_forward(const fluxutils_linear_call *);
int32_t fluxutils_linear_backward(const fluxutils_linear_call *);

// One step of B series through a model: a list of operations on `values`, numbers of the model's type, of which the first
// F are the inputs. An operation reads at `source` and writes n_out numbers to `target`. Weights are laid out as step.h
// says, with a bias of n_out numbers, of cells rows * n_out.
enum {
    FK_STEP_DENSE = 0,       // w (n_in, n_out), bias
    FK_STEP_CELL = 1,        // w (n_in, x_rows n_out), w_h (n_out, h_rows n_out), bias; states h, c (B, n_out); sums at `other`
    FK_STEP_DIAGONAL = 2,    // w: n_out / 2 complex eigenvalues; state h (B, n_out)
    FK_STEP_ACTIVATION = 3,  // `cell` is the function, of the enumeration in step.h
    FK_STEP_GATED = 4,       // of 2 n_out numbers
    FK_STEP_ADD = 5,         // plus those at `other`
    FK_STEP_LAYER_NORM = 6,  // w and bias, alpha is eps
    FK_STEP_SCALE_SHIFT = 7,  // w and bias
    // with `rows` integers in `numbers`, and states as in nn/time_features.py and nn/causal_kernels.py
    FK_STEP_LAGS = 8,         // `numbers` are the lags
    FK_STEP_MEANS = 9,        // w: factors
    FK_STEP_ROLLING = 10,     // `numbers` are the spans
    FK_STEP_RUNNING = 11,
    FK_STEP_KERNELS = 12,     // `numbers`: rows pairs of the plan; w: biases; w_h: channels (uint8); taps at `other`
    FK_STEP_JOIN = 13,        // n_in numbers, then those at `other`
    FK_STEP_DOTS = 14,        // as FK_STEP_DENSE, with w (n_out, n_in)
    FK_STEP_FADE = 15         // `rows` levels at `other`, alpha is the limit
};
typedef struct {
    int64_t kind, cell, source, other, target, n_in, n_out, rows, x_rows, h_rows, n_past;
    double alpha;
    const void *w, *w_h, *bias;
    void *const *states;   // of all series, as torch has them: the series in axis 1
    const int32_t *numbers;
} fluxutils_step_operation;

enum { FK_STEP_STANDARDIZE = 0, FK_STEP_WINSORIZE = 1, FK_STEP_FILL = 2,  // the last with `mean` as values
       FK_STEP_ROUND = 3 };  // to the model's type
typedef struct {
    int64_t kind;
    const double *mean, *scale, *lower, *upper;  // (F)
} fluxutils_step_scaler;

// What y is: outputs (G, B) of the model's type, or in the units of targets, as float32 or float64; labels (1, B) as
// int64; probabilities of outputs less `mean`, and their logarithms; the difference of two scores, (1, B).
enum {
    FK_STEP_RAW = 0, FK_STEP_FLOAT32 = 1, FK_STEP_FLOAT64 = 2, FK_STEP_LABEL = 3, FK_STEP_PROBABILITIES = 4,
    FK_STEP_LOG_PROBABILITIES = 5, FK_STEP_DIFFERENCE = 6
};
typedef struct {
    int64_t version, type, B, F, G;
    int64_t n_scalers, n_operations, method;
    const fluxutils_step_scaler *scalers;
    const fluxutils_step_operation *operations;
    const double *x;             // (F, B)
    double *inputs;              // room for (B, F)
    int64_t *gaps;               // (B), set to 1 for series whose inputs are all NaN: they get zeros, and NaN as outputs
    void *values;                // room for all values of a series
    int64_t output;              // place of the G outputs, and of G numbers of room after them
    const double *mean, *scale;  // of targets, (G)
    void *y;
} fluxutils_step_call;

// Only where fluxutils_isa(FK_BEST) finds a set. FK_NOT_FINITE: an input is infinite, or so large that its square may be,
// or missing beside others; no state has changed then.
int32_t fluxutils_step(const fluxutils_step_call *);

#ifdef __cplusplus
}
#endif
