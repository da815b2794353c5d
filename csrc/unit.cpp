// All kernels, for the instruction set that the compiler is told. Compiled once for each, with FLUXUTILS_UNIT a name
// of its own: what lies in its namespace is never shared with another unit.
#include "causal.h"
#include "cell_numbers.h"
#include "linear.h"
#include "slopes.h"
#include "units.h"

namespace FLUXUTILS_UNIT {
namespace {

// f(Window) for a call.
template <class Fn> int32_t with_window(const void *p, const Fn &f) {
    const fluxutils_call &call = *static_cast<const fluxutils_call *>(p);
    return with_cell(call.cell, FK_BAD_ARGUMENT, [&](auto cell) -> int32_t {
        if (units_in_lanes(call)) {
            if (call.type == FK_FLOAT32) return f(Units<float>(call, cell));
            return f(Units<double>(call, cell));
        }
        if (call.type == FK_FLOAT32) return f(Window<float>(call, cell));
        return f(Window<double>(call, cell));
    });
}

}  // namespace

extern const fk_unit unit;
const fk_unit unit = {
    [](int32_t cell) { return with_cell(cell, -1, [](auto c) -> int32_t { return decltype(c)::SAVED; }); },
    [](const void *call) { return with_window(call, [](auto window) { return window.forward(); }); },
    [](const void *call) { return with_window(call, [](auto window) { return window.backward(); }); },
    [](const void *call) { return linear_forward(*static_cast<const fluxutils_linear_call *>(call)); },
    [](const void *call) { return linear_backward(*static_cast<const fluxutils_linear_call *>(call)); },
    [](const void *call) { return causal_kernels(*static_cast<const fluxutils_causal_call *>(call)); },
    [](const void *call) { return last_state_slopes(*static_cast<const fluxutils_call *>(call)); },
};

}  // namespace FLUXUTILS_UNIT
