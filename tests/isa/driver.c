/* Run kernels outside Python, on fixtures: files that hold a kernel's tables without addresses, and its arrays.
 *
 *     driver [--threads] [--short BUFFER BYTES] FIXTURE...
 *
 * For each FIXTURE, writes its output arrays to FIXTURE.out. --threads: the workers are threads; otherwise they take
 * turns. --short: BUFFER is allocated BYTES too small, a fault that a memory checker must find.
 * `fixtures.py` writes the files, and kernels.inc: a line KERNEL(name) for each kernel that is linked in.
 * Every array is an allocation of exactly its extent, scratch is never written here when a checker watches.
 */
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#ifdef MEMCHECK
#include <valgrind/memcheck.h>
#endif
#if defined(__SANITIZE_ADDRESS__) || __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define HIDE(p, n) __asan_poison_memory_region(p, n)
#define SHOW(p, n) __asan_unpoison_memory_region(p, n)
#elif defined(MEMCHECK)
#define HIDE(p, n) VALGRIND_MAKE_MEM_NOACCESS(p, n)
#define SHOW(p, n) VALGRIND_MAKE_MEM_DEFINED(p, n)
#else
#define HIDE(p, n) ((void)(p))
#define SHOW(p, n) ((void)(p))
#endif

typedef int64_t (*Kernel)(int64_t table, int64_t worker);

#define KERNEL(name) int64_t name(int64_t, int64_t);
#include "kernels.inc"
#undef KERNEL
static const struct { const char *name; Kernel run; } kernels[] = {
#define KERNEL(name) {#name, name},
#include "kernels.inc"
#undef KERNEL
};

enum { ABSENT, INPUT, OUTPUT, SCRATCH };
enum { NONE, TABLES, FIRST_BUFFER, MOST_BUFFERS = 32, MOST_WORKERS = 16 };
static const int64_t MAGIC = 0x31585446; /* "FTX1" */
static const uint32_t POISON = 0xFFC0DEAD; /* in outputs: what remains of it was never written */

typedef struct { int64_t kind, size, origin; } Buffer; /* origin: of the address that tables mean, from its start */
typedef struct { int64_t magic, cells, items, counter, workers, flush, buffers, hidden; char kernel[128]; } Header;
typedef struct { int64_t buffer, lo, hi; } Range; /* bytes that nobody may touch */
typedef struct { Kernel run; int64_t *table; const Header *header; int64_t worker, fault; } Job;

static void fail(const char *what, const char *name) {
    fprintf(stderr, "driver: %s: %s\n", what, name);
    exit(2);
}

static void read_all(void *to, size_t size, FILE *file) {
    if (size && fread(to, 1, size, file) != size) fail("too short", "fixture");
}

static void *allocate(const Buffer *buffer, int64_t size) {
    void *p = NULL;
    if (buffer->kind == ABSENT) return NULL;
    if (buffer->kind != SCRATCH) return malloc((size_t)size);
    if (posix_memalign(&p, 64, (size_t)size)) fail("no memory", "scratch");
#if !defined(MEMCHECK) && !__has_feature(memory_sanitizer)
    memset(p, 0xFF, (size_t)size); /* NaN: what is read before it is written shows */
#endif
    return p;
}

static int64_t claimed(const Job *job) {
    return __atomic_load_n(job->table + job->header->counter, __ATOMIC_RELAXED);
}

static pthread_barrier_t start; /* of threads: the first must not be done before the last is there */

static void *work(void *argument) {
    Job *job = argument;
    pthread_barrier_wait(&start);
    while (!job->fault && claimed(job) < job->header->items) {
        job->fault = job->run((int64_t)(intptr_t)job->table, job->worker);
        sched_yield(); /* so that several workers meet in a tile, also on one core */
    }
    return NULL;
}

/* What a kernel calls while it waits: the symbol that simd/lower.py names, and simd/jit.py provides. */
void tilewise_yield(void);
void tilewise_yield(void) { sched_yield(); }

/* The caller's environment: subnormals are zeros. Returns the control register. */
static uint64_t flush(int on) {
#if defined(__x86_64__)
    if (on) _mm_setcsr(_mm_getcsr() | 0x8040);
    return _mm_getcsr() & ~0x3Fu; /* without the flags of what happened */
#elif defined(__aarch64__)
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    if (on) {
        fpcr |= UINT64_C(1) << 24;
        __asm__ volatile("msr fpcr, %0" : : "r"(fpcr));
    }
    return fpcr;
#else
    (void)on;
    return 0;
#endif
}

static void unflush(uint64_t before) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

static int run_workers(Job *jobs, const Header *header, int threads) {
    pthread_t ids[MOST_WORKERS];
    int64_t fault = 0;
    if (!header->items) { /* a kernel without work items */
        fault = jobs[0].run((int64_t)(intptr_t)jobs[0].table, 0);
    } else if (threads) {
        if (pthread_barrier_init(&start, NULL, (unsigned)header->workers)) fail("no barrier", header->kernel);
        for (int64_t w = 0; w < header->workers; w++)
            if (pthread_create(&ids[w], NULL, work, &jobs[w])) fail("no thread", header->kernel);
        for (int64_t w = 0; w < header->workers; w++) pthread_join(ids[w], NULL);
        pthread_barrier_destroy(&start);
    } else { /* a run ends after `batch` work items, so each worker gets its turn */
        for (int64_t w = 0; !fault && claimed(jobs) < header->items; w = (w + 1) % header->workers)
            fault = jobs[w].run((int64_t)(intptr_t)jobs[w].table, w);
    }
    for (int64_t w = 0; w < header->workers; w++) fault = fault ? fault : jobs[w].fault;
    if (fault) fprintf(stderr, "driver: %s: access out of bounds at %#" PRIx64 "\n", header->kernel, (uint64_t)fault);
    return fault ? 3 : 0;
}

/* Run in a caller's environment that must be the same afterwards, and must have been the one that was asked for. */
static int run_in_environment(Job *jobs, const Header *header, int threads) {
    uint64_t before = flush(0), set = flush(header->flush != 0);
    volatile float tiny = 1e-30f;
    volatile float product = tiny * 1e-10f; /* 1e-40, a subnormal */
    int status = run_workers(jobs, header, threads), kept = flush(0) == set;
    unflush(before);
    if (header->flush && product != 0.0f) fail("subnormals are not flushed", header->kernel);
    if (!kept) fail("the caller's environment was not restored", header->kernel);
    return status;
}

static void write_outputs(const char *path, const Buffer *buffers, void **memory, int64_t count) {
    char name[4096];
    if (snprintf(name, sizeof name, "%s.out", path) >= (int)sizeof name) fail("name too long", path);
    FILE *file = fopen(name, "wb");
    if (!file) fail("cannot write", name);
    for (int64_t i = 0; i < count; i++) {
        if (buffers[i].kind != OUTPUT || !buffers[i].size) continue;
#ifdef MEMCHECK
        if (VALGRIND_CHECK_MEM_IS_DEFINED(memory[i], (size_t)buffers[i].size))
            fprintf(stderr, "driver: output %" PRId64 " of %s depends on undefined memory\n", i, path);
#endif
        if (fwrite(memory[i], 1, (size_t)buffers[i].size, file) != (size_t)buffers[i].size) fail("cannot write", name);
    }
    if (fclose(file)) fail("cannot write", name);
}

static int run_fixture(const char *path, int threads, int64_t short_buffer, int64_t short_bytes) {
    Header header;
    Buffer buffers[MOST_BUFFERS];
    void *memory[MOST_BUFFERS] = {0};
    int64_t address[MOST_BUFFERS + FIRST_BUFFER] = {0};
    FILE *file = fopen(path, "rb");
    if (!file) fail("cannot read", path);
    read_all(&header, sizeof header, file);
    if (header.magic != MAGIC || header.buffers > MOST_BUFFERS || header.workers > MOST_WORKERS) fail("bad", path);
    size_t bytes = (size_t)header.cells * sizeof(int64_t), ranges = (size_t)header.hidden * sizeof(Range);
    int64_t *table = malloc(bytes), *base = malloc(bytes);
    Range *hidden = malloc(ranges + 1);
    read_all(table, bytes, file);
    read_all(base, bytes, file);
    read_all(buffers, (size_t)header.buffers * sizeof(Buffer), file);
    read_all(hidden, ranges, file);
    for (int64_t i = 0; i < header.buffers; i++) {
        int64_t size = buffers[i].size, given = size - (i == short_buffer ? short_bytes : 0);
        char *p = memory[i] = allocate(&buffers[i], given);
        if (buffers[i].kind == INPUT) {
            read_all(p, (size_t)given, file);
            fseek(file, (long)(size - given), SEEK_CUR);
        }
        for (int64_t x = 0; buffers[i].kind == OUTPUT && x + 4 <= given; x += 4) memcpy(p + x, &POISON, 4);
        address[FIRST_BUFFER + i] = p ? (int64_t)(intptr_t)p + buffers[i].origin : 0;
    }
    fclose(file);
    address[TABLES] = (int64_t)(intptr_t)table;
    for (int64_t i = 0; i < header.cells; i++) table[i] += address[base[i]];
    for (int64_t i = 0; i < header.hidden; i++)
        HIDE((char *)memory[hidden[i].buffer] + hidden[i].lo, (size_t)(hidden[i].hi - hidden[i].lo));
    Job jobs[MOST_WORKERS] = {{0}};
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        for (int64_t w = 0; w < header.workers && !strcmp(kernels[i].name, header.kernel); w++)
            jobs[w] = (Job){kernels[i].run, table, &header, w, 0};
    if (!jobs[0].run) fail("unknown kernel", header.kernel);
    int status = run_in_environment(jobs, &header, threads);
    for (int64_t i = 0; i < header.hidden; i++)
        SHOW((char *)memory[hidden[i].buffer] + hidden[i].lo, (size_t)(hidden[i].hi - hidden[i].lo));
    if (!status) write_outputs(path, buffers, memory, header.buffers);
    for (int64_t i = 0; i < header.buffers; i++) free(memory[i]);
    free(table), free(base), free(hidden);
    return status;
}

int main(int count, char **arguments) {
    int threads = 0, status = 0, i = 1;
    int64_t short_buffer = -1, short_bytes = 0;
    for (; i < count && !strncmp(arguments[i], "--", 2); i++) {
        if (!strcmp(arguments[i], "--threads")) threads = 1;
        else if (!strcmp(arguments[i], "--short") && i + 2 < count) {
            short_buffer = strtoll(arguments[++i], NULL, 10);
            short_bytes = strtoll(arguments[++i], NULL, 10);
        } else fail("unknown option", arguments[i]);
    }
    for (; i < count && !status; i++) status = run_fixture(arguments[i], threads, short_buffer, short_bytes);
    return status;
}
