// From the number of a cell to its type.
#pragma once
#include "input_gated_cells.h"
#include "kernels.h"

namespace FLUXUTILS_UNIT {
namespace {

// f(Cell) for the cell of that number; `otherwise` if there is none.
template <class Fn> int32_t with_cell(int64_t cell, int32_t otherwise, const Fn &f) {
    switch (cell) {
        case FK_LSTM: return f(LSTM{});
        case FK_GRU: return f(GRU{});
        case FK_RNN_TANH: return f(TanhRNN{});
        case FK_RNN_RELU: return f(ReluRNN{});
        case FK_FLSTM: return f(FLSTM{});
        case FK_SGRU: return f(SGRU{});
        case FK_MGU: return f(MGU{});
        case FK_SMGU: return f(SMGU{});
        case FK_HFGRU: return f(HFGRU{});
        case FK_MIN_GRU: return f(MinGRU{});
        case FK_MIN_LSTM: return f(MinLSTM{});
    }
    return otherwise;
}

}  // namespace
}  // namespace FLUXUTILS_UNIT
