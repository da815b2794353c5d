// Calls of the kernels with random shapes, to be built together with them under a sanitizer: every buffer has exactly
// the length that csrc/kernels.h states, and lies on the heap, where a read or write beside it is an error. The result
// must be the same to the last bit for every instruction set and number of threads.
//
//     driver SEED CALLS [digests]
//
// With `digests` it prints a number for the bits of each result, for comparison with those of another processor.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <vector>

#include "../../../csrc/kernels.h"

static std::mt19937_64 generator;

static int64_t below(int64_t n) { return static_cast<int64_t>(generator() % n); }
static bool maybe() { return below(2); }
static int64_t size(std::initializer_list<int64_t> sizes) { return sizes.begin()[below(sizes.size())]; }

// n numbers at an address that need not be a multiple of a vector's length.
template <class T> struct Buffer {
    std::unique_ptr<T[]> memory;
    T *start = nullptr;
    int64_t n = 0;

    Buffer() = default;
    explicit Buffer(int64_t length) : n(length) {
        int64_t before = below(3);
        memory.reset(new T[before + n]);
        start = memory.get() + before;
        for (int64_t i = 0; i < n; i++) start[i] = T(NAN);  // whatever is not written shows
    }
    static Buffer random(int64_t n, bool wild) {
        Buffer b(n);
        std::uniform_real_distribution<double> numbers(-1.5, 1.5);
        for (int64_t i = 0; i < n; i++) b.start[i] = T(numbers(generator));
        const double others[] = {NAN, INFINITY, -INFINITY, 1e30, -1e30, 0, -0.0, 1e-40};
        if (wild)
            for (int k = 0; k < 3; k++) b.start[below(n)] = T(others[below(8)]);
        return b;
    }
};

template <class T> bool same(const Buffer<T> &a, const Buffer<T> &b) {
    for (int64_t i = 0; i < a.n; i++)
        if (memcmp(a.start + i, b.start + i, sizeof(T)) && !(isnan(a.start[i]) && isnan(b.start[i]))) return false;
    return true;
}

static std::vector<int32_t> instruction_sets() {
    std::vector<int32_t> found;
    for (int32_t isa : {FK_AVX2, FK_AVX512, FK_NEON})
        if (fluxutils_isa(isa) == isa) found.push_back(isa);
    return found;
}

static bool prints_digests = false;
static int64_t number_of_call = 0;

// FNV-1a over the bits; all NaNs count as one, since processors differ in those that they make.
template <class T> uint64_t digest(const Buffer<T> &b) {
    uint64_t found = 0xcbf29ce484222325;
    for (int64_t i = 0; i < b.n; i++) {
        unsigned char bytes[sizeof(T)] = {0xff};
        if (!isnan(b.start[i])) memcpy(bytes, b.start + i, sizeof(T));
        for (unsigned char byte : bytes) found = (found ^ byte) * 0x100000001b3;
    }
    return found;
}

// f(isa, threads, first) for each instruction set, each time with another number of threads.
template <class Run> bool alike(const std::vector<int32_t> &isas, const Run &run) {
    auto first = run(isas[0], 1);
    bool good = true;
    for (size_t i = 0; prints_digests && i < first.size(); i++)
        printf("call %lld, result %zu of %lld numbers of %zu bytes: %016llx\n", static_cast<long long>(number_of_call), i,
               static_cast<long long>(first[i].n), sizeof(*first[i].start),
               static_cast<unsigned long long>(digest(first[i])));
    for (int32_t isa : isas) {
        auto again = run(isa, 1 + below(3));
        for (size_t i = 0; i < first.size(); i++) {
            if (same(first[i], again[i])) continue;
            fprintf(stderr, "result %zu differs on instruction set %d\n", i, isa);
            good = false;
        }
    }
    return good;
}

static void check(int32_t code) {
    if (code == FK_OK) return;
    fprintf(stderr, "a call returns %d\n", code);
    exit(1);
}

static const int X_BLOCKS[] = {4, 3, 1, 1, 4, 1, 2, 1, 3, 2, 3}, H_BLOCKS[] = {4, 3, 1, 1, 4, 3, 2, 2, 3, 0, 0};

// Of products in bfloat16 there is one unit; numbers of threads must agree.
template <class T> bool window(const std::vector<int32_t> &isas, bool bfloat16 = false) {
    fluxutils_call call = {};
    call.version = FLUXUTILS_KERNELS_VERSION;
    call.cell = below(11);
    call.type = bfloat16 ? FK_BFLOAT16 : sizeof(T) == 4 ? FK_FLOAT32 : FK_FLOAT64;
    const int64_t S = call.S = size({1, 1, 2, 3, 7, 17, 35}), B = call.B = size({1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 70});
    const int64_t F = call.F = size({1, 1, 2, 3, 4, 5, 9, 17}), H = call.H = size({1, 2, 3, 4, 5, 7, 10, 13, 25, 33});
    call.alpha = maybe() ? 0 : 0.7;
    const int64_t x_rows = X_BLOCKS[call.cell] * H, h_rows = H_BLOCKS[call.cell] * H;
    const bool has_c = call.cell == FK_LSTM || call.cell == FK_FLSTM, wild = below(8) == 0;
    const bool one_bias = FK_FLSTM <= call.cell && call.cell <= FK_HFGRU, recurrent = h_rows > 0;
    std::vector<Buffer<T>> in;
    in.reserve(16);
    auto input = [&](bool present, int64_t n) -> const void * {
        if (!present) return nullptr;
        in.push_back(Buffer<T>::random(n, wild));
        return in.back().start;
    };
    call.x = input(true, S * B * F);
    call.h0 = input(maybe(), B * H), call.c0 = input(has_c && maybe(), B * H);
    call.w_x = input(true, x_rows * F), call.w_h = input(recurrent, h_rows * H);
    call.b_x = input(!one_bias && maybe(), x_rows), call.b_h = input(recurrent && maybe(), h_rows);
    call.dy = input(maybe(), S * B * H), call.dh = input(maybe(), B * H), call.dc = input(has_c && maybe(), B * H);
    const bool keeps = below(4), last = maybe();
    bool wanted[7];
    for (bool &w : wanted) w = maybe();
    return alike(isas, [&](int32_t isa, int64_t threads) {
        fluxutils_call c = call;
        c.isa = isa, c.threads = threads;
        std::vector<Buffer<T>> out;
        out.reserve(16);
        auto output = [&](bool present, int64_t n) -> void * {
            if (!present) return nullptr;
            out.emplace_back(n);
            return out.back().start;
        };
        c.y = output(true, S * B * H), c.h = output(last, B * H), c.c = output(has_c, B * H);
        Buffer<T> saved(S * B * H * fluxutils_kept_per_output(c.cell));
        c.saved = keeps ? saved.start : nullptr;
        check(fluxutils_forward(&c));
        if (!keeps) return out;
        c.dx = output(wanted[0], S * B * F);
        c.dh0 = output(wanted[1], B * H), c.dc0 = output(has_c && wanted[2], B * H);
        c.dw_x = output(wanted[3], x_rows * F), c.dw_h = output(recurrent && wanted[4], h_rows * H);
        c.db_x = output(!one_bias && wanted[5], x_rows), c.db_h = output(recurrent && wanted[6], h_rows);
        check(fluxutils_backward(&c));
        return out;
    });
}

template <class T> bool linear(const std::vector<int32_t> &isas) {
    fluxutils_linear_call call = {};
    call.version = FLUXUTILS_KERNELS_VERSION;
    const int64_t C = 1 + maybe();  // numbers per element
    call.type = C == 1 ? (sizeof(T) == 4 ? FK_FLOAT32 : FK_FLOAT64) : (sizeof(T) == 4 ? FK_COMPLEX64 : FK_COMPLEX128);
    const int64_t S = call.S = size({1, 2, 3, 63, 64, 65, 130}), B = call.B = size({1, 2, 3, 17, 66});
    const int64_t H = call.H = size({1, 2, 3, 10, 33, 65});
    const bool each_step = maybe(), each_series = maybe(), wild = below(8) == 0;
    call.a_series = each_series ? H : 0;
    call.a_step = each_step ? (each_series ? B : 1) * H : 0;
    const int64_t n_a = (each_step ? S : 1) * (each_series ? B : 1) * H * C;
    auto a = Buffer<T>::random(n_a, wild), b = Buffer<T>::random(S * B * H * C, wild);
    auto h0 = Buffer<T>::random(B * H * C, wild), dh = Buffer<T>::random(S * B * H * C, wild);
    for (int64_t i = 0; i < n_a; i++) a.start[i] *= T(0.5);
    call.a = a.start, call.b = b.start, call.dh = dh.start;
    if (maybe()) call.h0 = h0.start;
    const bool of_a = below(4), of_h0 = maybe();
    return alike(isas, [&](int32_t isa, int64_t threads) {
        fluxutils_linear_call c = call;
        c.isa = isa, c.threads = threads;
        std::vector<Buffer<T>> out;
        out.emplace_back(S * B * H * C);
        out.emplace_back(S * B * H * C);
        out.emplace_back(of_a ? n_a : 0);
        out.emplace_back(of_h0 ? B * H * C : 0);
        c.h = out[0].start, c.db = out[1].start;
        if (of_a) c.da = out[2].start;
        if (of_h0) c.dh0 = out[3].start;
        check(fluxutils_linear_forward(&c));
        check(fluxutils_linear_backward(&c));
        return out;
    });
}

extern "C" int32_t fluxutils_copy_window(
    void *out, int64_t type, const void *in, int64_t in_type, int64_t S, int64_t B, int64_t F, int64_t stride_s,
    int64_t stride_b, int64_t stride_f, int64_t threads);

// Out of an array of F C-ordered matrices, (N, T) or (T, N).
template <class To, class From> bool copy_of_window() {
    const int64_t S = size({1, 3, 4, 127, 129, 260}), B = size({1, 2, 5, 64, 67}), F = size({1, 2, 3, 4, 7});
    const int64_t later = below(3), rows = (maybe() ? B : S), steps_last = rows == B;
    const int64_t across = steps_last ? S + later : B + later, stride_f = rows * across;
    auto in = Buffer<From>::random(F * stride_f - later, false);  // the last row ends with the window
    Buffer<To> out(S * B * F);
    const int64_t stride_s = steps_last ? 1 : across, stride_b = steps_last ? across : 1;
    const int64_t type = sizeof(To) == 4 ? FK_FLOAT32 : FK_FLOAT64, in_type = sizeof(From) == 4 ? FK_FLOAT32 : FK_FLOAT64;
    check(fluxutils_copy_window(
        out.start, type, in.start, in_type, S, B, F, stride_s, stride_b, stride_f, 1 + below(3)));
    for (int64_t s = 0; s < S; s++)
        for (int64_t b = 0; b < B; b++)
            for (int64_t f = 0; f < F; f++)
                if (out.start[(s * B + b) * F + f] != To(in.start[s * stride_s + b * stride_b + f * stride_f])) {
                    fprintf(stderr, "a copy is wrong at step %d\n", static_cast<int>(s));
                    return false;
                }
    return true;
}

bool any_copy() {
    switch (below(3)) {
        case 0: return copy_of_window<float, float>();
        case 1: return copy_of_window<float, double>();
    }
    return copy_of_window<double, double>();
}

bool any_call(const std::vector<int32_t> &isas) {
    switch (below(8)) {
        case 0: return any_copy();
        case 1: return linear<float>(isas);
        case 2: return linear<double>(isas);
        case 3:
            if (fluxutils_isa(FK_AVX512_BF16) == FK_AVX512_BF16) return window<float>({FK_AVX512}, true);
    }
    return maybe() ? window<float>(isas) : window<double>(isas);
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 10) : 0;
    const int64_t calls = argc > 2 ? atoll(argv[2]) : 1000;
    prints_digests = argc > 3 && !strcmp(argv[3], "digests");
    const auto isas = instruction_sets();
    if (isas.empty()) {
        puts("this processor lacks the instructions of all kernels");
        return 0;
    }
    for (int64_t i = 0; i < calls; i++) {
        generator.seed(seed + i);  // of one call: `driver SEED 1` repeats it
        number_of_call = seed + i;
        if (!any_call(isas)) {
            fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed + i));
            return 1;
        }
    }
    const bool bfloat16 = fluxutils_isa(FK_AVX512_BF16) == FK_AVX512_BF16;
    printf("%lld calls on %zu instruction sets%s: clean\n", static_cast<long long>(calls), isas.size(),
           bfloat16 ? " and with bfloat16" : "");
    return 0;
}
