/* A stand-in for NVIDIA's management library: GPUs with known figures, connected by NVLink. Those
 * with odd indices do not report their power. Which GPUs there are says the file GPUS: a UUID in
 * each line, or `lost` for one that has fallen off the bus. Without the file there are two. Only
 * what Tutti calls. */
#include <stdio.h>
#include <string.h>

typedef struct { unsigned int gpu, memory; } utilization_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } memory_v2_t;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };
enum { GPUS_MAX = 4, UUID_SIZE = 96 };

static int devices[GPUS_MAX] = {0, 1, 2, 3};

static int index_of(void *device) { return *(int *)device; }
static int is_odd(void *device) { return index_of(device) % 2; }

/* Reads the UUIDs of all GPUs, and returns how many there are. */
static unsigned int read_gpus(char uuids[GPUS_MAX][UUID_SIZE]) {
  unsigned int count = 0;
  FILE *file = fopen(GPUS, "r");
  if (file == NULL) {
    strcpy(uuids[0], "GPU-aaaa");
    strcpy(uuids[1], "GPU-bbbb");
    return 2;
  }
  while (count < GPUS_MAX && fscanf(file, "%95s", uuids[count]) == 1) count++;
  fclose(file);
  return count;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_SUPPORTED ? "Not Supported" : "Error"; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
  char uuids[GPUS_MAX][UUID_SIZE] = {{0}};
  *count = read_gpus(uuids);
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  char uuids[GPUS_MAX][UUID_SIZE] = {{0}};
  if (index >= read_gpus(uuids)) return INVALID_ARGUMENT;
  if (strcmp(uuids[index], "lost") == 0) return GPU_IS_LOST;
  *device = &devices[index];
  return SUCCESS;
}

int nvmlDeviceGetName(void *device, char *name, unsigned int length) {
  strncpy(name, is_odd(device) ? "Fake GPU B" : "Fake GPU A", length);
  return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
  char uuids[GPUS_MAX][UUID_SIZE] = {{0}};
  read_gpus(uuids);
  snprintf(uuid, length, "%s", uuids[index_of(device)]);
  return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization_t *rates) {
  rates->gpu = is_odd(device) ? 0 : 75;
  rates->memory = 10;
  return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, memory_v2_t *memory) {
  memory->total = 80ull << 30;
  memory->used = is_odd(device) ? 1ull << 30 : 20ull << 30;
  memory->reserved = 0;
  memory->free = memory->total - memory->used;
  return SUCCESS;
}

int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *celsius) {
  (void)sensor;
  *celsius = is_odd(device) ? 31 : 64;
  return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned int *milliwatts) {
  if (is_odd(device)) return NOT_SUPPORTED;
  *milliwatts = 350500;
  return SUCCESS;
}

int nvmlDeviceGetP2PStatus(void *from, void *to, int index, int *status) {
  if (from == to) return INVALID_ARGUMENT;
  *status = index == 2 /* NVLink */ ? 0 : 5;
  return SUCCESS;
}
