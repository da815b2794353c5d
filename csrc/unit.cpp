// All kernels, for the instruction set that the compiler is told. Compiled once for each, with FLUXUTILS_UNIT a name
// of its own: what lies in its namespace is never shared with another unit.
#include "window.h"

namespace FLUXUTILS_UNIT {
namespace {

enum What { BYTES, FORWARD, BACKWARD };

template <class Cell, class T> int64_t run(const fluxutils_call &call, What what) {
    Window<Cell, T> window(call);
    if (what == BYTES) return window.saved_numbers() * static_cast<int64_t>(sizeof(T));
    return what == FORWARD ? window.forward() : window.backward();
}

template <class T> int64_t with_type(const fluxutils_call &call, What what) {
    switch (call.cell) {
        case FK_LSTM: return run<LSTM, T>(call, what);
        case FK_GRU: return run<GRU, T>(call, what);
        case FK_RNN_TANH: return run<TanhRNN, T>(call, what);
        case FK_RNN_RELU: return run<ReluRNN, T>(call, what);
    }
    return what == BYTES ? -1 : FK_BAD_ARGUMENT;
}

int64_t with_call(const void *p, What what) {
    const fluxutils_call &call = *static_cast<const fluxutils_call *>(p);
    return call.type == FK_FLOAT32 ? with_type<float>(call, what) : with_type<double>(call, what);
}

}  // namespace

extern const fk_unit unit;
const fk_unit unit = {
    [](const void *call) { return with_call(call, BYTES); },
    [](const void *call) { return static_cast<int32_t>(with_call(call, FORWARD)); },
    [](const void *call) { return static_cast<int32_t>(with_call(call, BACKWARD)); },
};

}  // namespace FLUXUTILS_UNIT
