// Threads that sleep until there is work. The caller wakes them, works along, and waits only for those that have taken
// up work: one that the system has not scheduled yet misses the call and costs nothing. A caller that finds the threads
// busy with another's call works alone. After a fork the child starts threads of its own.
//
// Where torch has OpenMP threads of GNU's library they are asked instead, in the same process: after an operation of
// torch they spin for milliseconds, and other threads would wait for the cores meanwhile (benchmarks/bench_fit.py: 1.4
// of torch's time in place of .8 for 128 units).
#include "threads.h"

#include <pthread.h>
#include <stdlib.h>

#include <new>

namespace {

struct Pool {
    pthread_mutex_t use = PTHREAD_MUTEX_INITIALIZER;  // held by the caller whose call it is
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t work = PTHREAD_COND_INITIALIZER;
    pthread_cond_t done = PTHREAD_COND_INITIALIZER;
    int64_t workers = 0;
    // under the lock:
    int64_t places = 0;  // workers that may still join
    int64_t joined = 0;  // at work
    void (*task)(void *, int64_t) = nullptr;
    void *context = nullptr;
    int64_t n = 0;
    // without:
    int64_t next = 0;
};

typedef void (*OpenMP)(void (*task)(void *), void *context, unsigned threads, unsigned flags);  // GOMP_parallel

OpenMP openmp = nullptr;
Pool *pool = nullptr;
pthread_once_t once = PTHREAD_ONCE_INIT;

// One thread's share of the tasks: whichever is next, until none is left.
void run_tasks(void (*task)(void *, int64_t), void *context, int64_t n, int64_t *next) {
    for (;;) {
        int64_t i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (i >= n) return;
        task(context, i);
    }
}

void work_on(Pool *p) { run_tasks(p->task, p->context, p->n, &p->next); }

void *worker(void *own) {
    Pool *p = static_cast<Pool *>(own);
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->places == 0) pthread_cond_wait(&p->work, &p->lock);
        p->places--;
        p->joined++;
        pthread_mutex_unlock(&p->lock);
        work_on(p);
        pthread_mutex_lock(&p->lock);
        if (--p->joined == 0) pthread_cond_signal(&p->done);
    }
    return nullptr;
}

void renew() {  // also in the child of a fork, where the threads of the old pool are not, and its locks may be held
    void *memory = malloc(sizeof(Pool));
    pool = memory ? new (memory) Pool : nullptr;
    openmp = nullptr;
}

void start() {
    renew();
    pthread_atfork(nullptr, nullptr, renew);
}

void add_workers(Pool *p, int64_t wanted) {
    while (p->workers < wanted) {
        pthread_attr_t detached;
        pthread_t thread;
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        int failed = pthread_create(&thread, &detached, worker, p);
        pthread_attr_destroy(&detached);
        if (failed) return;
        p->workers++;
    }
}

struct Shared {
    void (*task)(void *, int64_t);
    void *context;
    int64_t n, next;
};

void share(void *context) {
    Shared *s = static_cast<Shared *>(context);
    run_tasks(s->task, s->context, s->n, &s->next);
}

struct Memory {
    void *memory[2] = {nullptr, nullptr};
    size_t bytes[2] = {0, 0};
    ~Memory() {
        free(memory[0]);
        free(memory[1]);
    }
};

thread_local Memory own;

}  // namespace

void fk_parallel(int64_t threads, int64_t n, void (*task)(void *, int64_t), void *context) {
    pthread_once(&once, start);
    Pool *p = pool;
    int64_t helpers = (threads < n ? threads : n) - 1;
    if (helpers > 0 && openmp) {
        Shared shared = {task, context, n, 0};
        openmp(share, &shared, (unsigned)threads, 0);  // a team of torch's size: another one would be built anew
        return;
    }
    if (helpers < 1 || !p || pthread_mutex_trylock(&p->use)) {
        for (int64_t i = 0; i < n; i++) task(context, i);
        return;
    }
    add_workers(p, helpers);
    pthread_mutex_lock(&p->lock);
    p->task = task;
    p->context = context;
    p->n = n;
    p->next = 0;
    p->places = helpers < p->workers ? helpers : p->workers;
    pthread_mutex_unlock(&p->lock);
    for (int64_t i = 0; i < helpers; i++) pthread_cond_signal(&p->work);
    work_on(p);
    pthread_mutex_lock(&p->lock);
    p->places = 0;
    while (p->joined) pthread_cond_wait(&p->done, &p->lock);
    pthread_mutex_unlock(&p->lock);
    pthread_mutex_unlock(&p->use);
}

void *fk_scratch(int slot, size_t bytes) {
    if (own.bytes[slot] < bytes) {
        free(own.memory[slot]);
        own.bytes[slot] = 0;
        if (posix_memalign(&own.memory[slot], 64, bytes)) return own.memory[slot] = nullptr;
        own.bytes[slot] = bytes;
    }
    return own.memory[slot];
}

// GOMP_parallel of the OpenMP library that torch has loaded, before any call. Only the first counts: in the child of a
// fork, which loads this library anew, those threads are not.
extern "C" __attribute__((visibility("default"))) void fluxutils_use_openmp(void *gomp_parallel) {
    pthread_once(&once, start);
    static bool told = false;
    if (!told) openmp = reinterpret_cast<OpenMP>(gomp_parallel);
    told = true;
}
