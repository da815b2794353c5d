// The C interface of the kernels: plain C, no headers of torch or Python. The library is loaded with ctypes.
//
// A call is described by one structure, whose first field is the version of its layout. All tensors are contiguous;
// weights have the layout of torch's layers: blocks of H rows, one after the other.
#pragma once
#include <stdint.h>

#define FLUXUTILS_KERNELS_VERSION 2

#ifdef __cplusplus
extern "C" {
#endif

enum {  // cells
    FK_LSTM = 0, FK_GRU = 1, FK_RNN_TANH = 2, FK_RNN_RELU = 3,
    FK_FLSTM = 4, FK_SGRU = 5, FK_MGU = 6, FK_SMGU = 7, FK_HFGRU = 8,
    FK_MIN_GRU = 9, FK_MIN_LSTM = 10,  // without w_h and b_h
};
enum { FK_FLOAT32 = 0, FK_FLOAT64 = 1, FK_COMPLEX64 = 2, FK_COMPLEX128 = 3 };  // types, complex in pairs
enum { FK_BEST = 0, FK_AVX2 = 1, FK_AVX512 = 2, FK_NEON = 3 };        // instruction sets

// What a call returns.
enum { FK_OK = 0, FK_BAD_ARGUMENT = 1, FK_NO_SUCH_INSTRUCTIONS = 2, FK_OUT_OF_MEMORY = 3 };

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

#ifdef __cplusplus
}
#endif
