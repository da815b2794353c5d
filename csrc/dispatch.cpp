// The entry points. This file is compiled for any processor of the family; the unit to be used is chosen when called.
#include "kernels.h"
#include "threads.h"

#if defined(__x86_64__)
namespace fk_avx2 {
extern const fk_unit unit;
}
namespace fk_avx512 {
extern const fk_unit unit;
}
#if defined(FLUXUTILS_BFLOAT16)  // the compiler knows its instructions
namespace fk_avx512_bf16 {
extern const fk_unit unit;
}
#endif
#elif defined(__aarch64__)
namespace fk_neon {
extern const fk_unit unit;
}
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))

static const fk_unit *unit_for(int64_t isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();  // also asks whether the system saves the wide registers
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (avx512 && (isa == FK_BEST || isa == FK_AVX512)) return &fk_avx512::unit;
    if (avx2 && (isa == FK_BEST || isa == FK_AVX2)) return &fk_avx2::unit;
#elif defined(__aarch64__)
    if (isa == FK_BEST || isa == FK_NEON) return &fk_neon::unit;
#endif
    return nullptr;
}

static const fk_unit *unit_for_bfloat16() {
#if defined(FLUXUTILS_BFLOAT16)
    if (unit_for(FK_AVX512) && __builtin_cpu_supports("avx512bf16")) return &fk_avx512_bf16::unit;
#endif
    return nullptr;
}

static const fk_unit *unit_for(const fluxutils_call *c) {
    return c->type == FK_BFLOAT16 ? unit_for_bfloat16() : unit_for(c->isa);
}

static bool valid(const fluxutils_call *c) {
    return c && c->version == FLUXUTILS_KERNELS_VERSION && c->S > 0 && c->B > 0 && c->F > 0 && c->H > 0 &&
           (c->type == FK_FLOAT32 || c->type == FK_FLOAT64 || c->type == FK_BFLOAT16);
}

EXPORT int32_t fluxutils_version(void) { return FLUXUTILS_KERNELS_VERSION; }

EXPORT int32_t fluxutils_isa(int32_t wanted) {
    if (wanted == FK_AVX512_BF16) return unit_for_bfloat16() ? FK_AVX512_BF16 : -1;
    const fk_unit *unit = unit_for(wanted);
    if (!unit) return -1;
#if defined(__x86_64__)
    return unit == &fk_avx512::unit ? FK_AVX512 : FK_AVX2;
#else
    return FK_NEON;
#endif
}

EXPORT int32_t fluxutils_kept_per_output(int32_t cell) {
    const fk_unit *unit = unit_for(FK_BEST);
    return unit ? unit->kept_per_output(cell) : -1;
}

EXPORT int32_t fluxutils_forward(const fluxutils_call *call) {
    if (!valid(call)) return FK_BAD_ARGUMENT;
    const fk_unit *unit = unit_for(call);
    return unit ? unit->forward(call) : FK_NO_SUCH_INSTRUCTIONS;
}

EXPORT int32_t fluxutils_backward(const fluxutils_call *call) {
    if (!valid(call)) return FK_BAD_ARGUMENT;
    const fk_unit *unit = unit_for(call);
    return unit ? unit->backward(call) : FK_NO_SUCH_INSTRUCTIONS;
}

EXPORT int32_t fluxutils_slopes(const fluxutils_call *call) {
    if (!valid(call) || !call->y || !call->saved || !call->dh0) return FK_BAD_ARGUMENT;
    const fk_unit *unit = unit_for(call->isa);
    return unit ? unit->slopes(call) : FK_NO_SUCH_INSTRUCTIONS;
}

static bool valid_linear(const fluxutils_linear_call *c) {
    return c && c->version == FLUXUTILS_KERNELS_VERSION && c->S > 0 && c->B > 0 && c->H > 0;
}

EXPORT int32_t fluxutils_linear_forward(const fluxutils_linear_call *call) {
    if (!valid_linear(call)) return FK_BAD_ARGUMENT;
    const fk_unit *unit = unit_for(call->isa);
    return unit ? unit->linear_forward(call) : FK_NO_SUCH_INSTRUCTIONS;
}

EXPORT int32_t fluxutils_linear_backward(const fluxutils_linear_call *call) {
    if (!valid_linear(call)) return FK_BAD_ARGUMENT;
    const fk_unit *unit = unit_for(call->isa);
    return unit ? unit->linear_backward(call) : FK_NO_SUCH_INSTRUCTIONS;
}

EXPORT int32_t fluxutils_causal_kernels(const fluxutils_causal_call *call) {
    if (!call || call->version != FLUXUTILS_KERNELS_VERSION || call->S <= 0 || call->B <= 0 || call->F <= 0)
        return FK_BAD_ARGUMENT;
    const fk_unit *unit = unit_for(call->isa);
    return unit ? unit->causal_kernels(call) : FK_NO_SUCH_INSTRUCTIONS;
}
