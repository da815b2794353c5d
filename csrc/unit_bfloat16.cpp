// The kernels with products of bfloat16, for a compiler and a processor that have AVX512-BF16. Units are in the lanes
// for any number of series: so the sums of a series are the same alone and in any batch.
#include "bfloat16.h"
#include "cell_numbers.h"

namespace FLUXUTILS_UNIT {
namespace {

template <class Fn> int32_t with_units(const void *p, const Fn &f) {
    const fluxutils_call &call = *static_cast<const fluxutils_call *>(p);
    return with_cell(call.cell, FK_BAD_ARGUMENT, [&](auto cell) { return f(Units<Bfloat16>(call, cell)); });
}

}  // namespace

extern const fk_unit unit;
const fk_unit unit = {
    nullptr,  // the numbers that a cell keeps are those of every unit
    [](const void *call) { return with_units(call, [](auto units) { return units.forward(); }); },
    [](const void *call) { return with_units(call, [](auto units) { return units.backward(); }); },
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace FLUXUTILS_UNIT
