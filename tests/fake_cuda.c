/* The few entry points of libcuda that scripts/hold_card.py calls, over a card that is only counted.
 *
 * FAKE_CUDA_FREE      bytes free once a context is there (0)      FAKE_CUDA_DEVICES  number of cards (1)
 * FAKE_CUDA_LARGEST   an allocation above it fails (none does)    FAKE_CUDA_INIT     what cuInit returns (0)
 * FAKE_CUDA_OVERHEAD  bytes that each allocation takes more (0)   FAKE_CUDA_BROKEN   what cuMemAlloc returns (0)
 * FAKE_CUDA_LOG       file that gets the free bytes when the context is given back
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BLOCKS 65536

static size_t sizes[MAX_BLOCKS], used;
static int n_blocks, has_context, current;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static size_t left(void) { return number("FAKE_CUDA_FREE", 0) - used; }

int cuInit(unsigned flags) { return flags ? 1 : (int)number("FAKE_CUDA_INIT", 0); }

int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : NULL;
    return *name ? 0 : 1;
}

int cuDeviceGetCount(int *count) {
    *count = (int)number("FAKE_CUDA_DEVICES", 1);
    return 0;
}

int cuDeviceGet(int *device, int index) {
    *device = 40 + index; /* a handle is not an index */
    return 0;
}

int cuDeviceGetUuid(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(16 * (i % 8) + device - 40);
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    current = device;
    *context = &has_context;
    return 0;
}

int cuCtxSetCurrent(void *context) {
    has_context = context == &has_context;
    return has_context ? 0 : 201;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    if (!has_context) return 201;
    *free_bytes = left();
    *total_bytes = number("FAKE_CUDA_FREE", 0);
    return 0;
}

int cuMemAlloc_v2(unsigned long long *address, size_t size) {
    if (!has_context) return 201;
    if (number("FAKE_CUDA_BROKEN", 0)) return (int)number("FAKE_CUDA_BROKEN", 0);
    size_t taken = size + number("FAKE_CUDA_OVERHEAD", 0);
    if (taken > left() || size > number("FAKE_CUDA_LARGEST", (size_t)-1) || n_blocks == MAX_BLOCKS) return 2;
    sizes[n_blocks] = taken;
    used += taken;
    *address = 0x7f0000000000ull + (unsigned long long)n_blocks++; /* more than 32 bits, as on a card */
    return 0;
}

int cuMemFree_v2(unsigned long long address) {
    unsigned long long i = address - 0x7f0000000000ull;
    if (i >= (unsigned long long)n_blocks || !sizes[i]) return 1;
    used -= sizes[i];
    sizes[i] = 0;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    const char *path = getenv("FAKE_CUDA_LOG");
    if (device != current) return 1;
    if (path) {
        FILE *log = fopen(path, "w");
        fprintf(log, "%zu", left());
        fclose(log);
    }
    return 0;
}
