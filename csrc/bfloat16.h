// Products of bfloat16 in pairs, with sums of float (AVX512-BF16). A lane of 32 bits holds two operands, whose products
// are added to the lane's sum. Numbers are rounded to the nearest, of two the even one; NaN stays NaN; subnormal
// operands count as zero, as the instructions have it. The same cells, and all that is no product, compute in float.
#pragma once
#include "units.h"

namespace FLUXUTILS_UNIT {
namespace {

struct Bfloat16 {};

template <> struct Operands<Bfloat16> {
    using Number = float;  // of sums; it also carries a lane of operands, whose bits are never computed with
    using V = VF;
    static constexpr int PER = 2, ONE = 0;  // biases have gradients of float

    static FK_INLINE VF add_product(VF weight, VF in, VF sum) {
        return (VF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)in);
    }
    static constexpr int64_t lanes(int64_t n) { return (n + 1) / 2; }

    // Lanes that hold no number are zero, whatever the unit's own sums are: their products must not be NaN.
    static FK_INLINE void put(float *row, int64_t unit, VF v, int64_t n) {
        __m256i half = (__m256i)_mm512_maskz_cvtneps_pbh(first_lanes(n), (__m512)v);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(row + unit / 2), half);
    }

    static __attribute__((noinline)) void pack_row(float *to, const float *from, int64_t n) {
        for (int64_t k = 0; k < n; k += 16) {
            __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)load_some(from + k, n - k));
            _mm256_mask_storeu_epi16(to + k / 2, first_lanes(2 * lanes(n - k)), half);
        }
    }

    static __attribute__((noinline)) void pack_rows(float *to, const float *const *from, int64_t n) {
        alignas(64) static constexpr uint16_t BY_TURNS[32] = {
            0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i by_turns = _mm512_load_si512(BY_TURNS);
        for (int64_t k = 0; k < n; k += 16) {
            VF a = from[0] ? load_some(from[0] + k, n - k) : every(0.f);
            VF b = from[1] ? load_some(from[1] + k, n - k) : every(0.f);
            __m512i one_after_other = (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
            _mm512_storeu_si512(to + k, _mm512_permutexvar_epi16(by_turns, one_after_other));
        }
    }

    // The panels of n rows of gradients, two rows in one: a row that lacks another is paired with zeros.
    static __attribute__((noinline)) void fill_panels(
        float *panels, const float *d, int64_t sums, int64_t n_blocks, int64_t n) {
        const int64_t vectors = sums * n_blocks;
        for (int64_t i = 0; i < vectors; i++, panels += ROWS_TOGETHER / 2 * 16) {
            const __m256i *a = reinterpret_cast<const __m256i *>(d) + i, *b = a + vectors;
            for (int64_t row = 0; row < n; row += 2, a += 2 * vectors, b += 2 * vectors) {
                __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(a)), high = _mm512_setzero_si512();
                if (row + 1 < n) high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(b)), 16);
                _mm512_storeu_si512(panels + row / 2 * 16, _mm512_or_si512(low, high));
            }
        }
    }
};

}  // namespace
}  // namespace FLUXUTILS_UNIT
