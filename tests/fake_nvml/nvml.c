/* A stand-in for NVIDIA's management library: two GPUs with known figures, connected by NVLink. The
 * second one does not report its power. Only what Tutti calls. */
#include <string.h>

typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

static int devices[2] = {0, 1};

static int index_of(void *device) { return *(int *)device; }

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  if (index > 1) return INVALID_ARGUMENT;
  *device = &devices[index];
  return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
  strncpy(name, index_of(device) ? "Fake GPU B" : "Fake GPU A", length);
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
  strncpy(uuid, index_of(device) ? "GPU-bbbb" : "GPU-aaaa", length);
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
  rates->gpu = index_of(device) ? 0 : 75;
  rates->memory = 10;
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
  memory->total = 80ull << 30;
  memory->used = index_of(device) ? 1ull << 30 : 20ull << 30;
  memory->reserved = 0;
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
  (void)sensor;
  *celsius = index_of(device) ? 31 : 64;
  return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
  if (index_of(device)) return NOT_SUPPORTED;
  *milliwatts = 350500;
  return SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *from, void *to, int index, int *status) {
  if (from == to) return INVALID_ARGUMENT;
  *status = index == 2 /* NVLink */ ? 0 : 5;
  return SUCCESS;
}
