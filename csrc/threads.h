// A few threads that share out the tasks of one call, and memory that each thread keeps for the next call.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Runs task(context, 0) ... task(context, n - 1), on at most `threads` threads, the caller among them.
void fk_parallel(int64_t threads, int64_t n, void (*task)(void *context, int64_t index), void *context);

// Memory of the calling thread, aligned to 64 bytes, its content undefined; null if there is none. Slot 0 belongs to
// the call, slot 1 to a task. Valid until the thread asks for the same slot again.
void *fk_scratch(int slot, size_t bytes);

// What a unit, compiled for one instruction set, offers.
struct fk_unit {
    int32_t (*kept_per_output)(int32_t cell);
    int32_t (*forward)(const void *call);
    int32_t (*backward)(const void *call);
    int32_t (*linear_forward)(const void *call);
    int32_t (*linear_backward)(const void *call);
    int32_t (*causal_kernels)(const void *call);
    int32_t (*slopes)(const void *call);
};
