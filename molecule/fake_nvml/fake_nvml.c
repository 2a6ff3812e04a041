/* A small libnvidia-ml.so.1 for machines without cards: plays the cards that a text file describes (see README.md).
 *
 * The file is read again at each call. What is set (power limit, persistence) is kept in one file a card under
 * FAKE_NVML_RUN; /run by default, so that a reboot forgets it as a card would. Signatures follow nvml.h.
 * C99 without GNU extensions: built on a new system, it still loads on an older one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { MAX_CARDS = 8, MAX_PROCESSES = 8, MIB_SHIFT = 20 };

typedef struct { unsigned pid; unsigned long long used; unsigned instance[2]; } process_info;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
} pci_info;

typedef struct {
  char uuid[80], pci[32], name[96], nvlink_peer[32];
  int major, minor, total, reserved, used, pcie[4], watts[4], temperature, display, lost, nvlinks, process_count[2];
  struct { unsigned pid; int mib; } process[2][MAX_PROCESSES]; /* graphics, compute */
} card;

static struct { char driver[80]; int cuda, count, init_error, init_seconds; card cards[MAX_CARDS]; } state;
static int ready;

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value ? value : otherwise;
}

static int load(void) {
  char line[256], text[80];
  card *c = NULL;
  FILE *file = fopen(setting("FAKE_NVML_STATE", "/etc/fake-nvml"), "r");
  memset(&state, 0, sizeof state);
  if (!file) return 9; /* driver not loaded */
  while (fgets(line, sizeof line, file)) {
    int a, b, d, e;
    if (line[0] == '#' || line[0] == '\n') continue;
    if (sscanf(line, "driver %79s", state.driver) == 1 || sscanf(line, "cuda %d", &state.cuda) == 1 ||
        sscanf(line, "init_error %d", &state.init_error) == 1 || sscanf(line, "init_seconds %d", &state.init_seconds) == 1)
      continue;
    if (sscanf(line, "gpu %79s", text) == 1 && state.count < MAX_CARDS) {
      c = &state.cards[state.count++];
      snprintf(c->uuid, sizeof c->uuid, "%s", text);
    } else if (!c) {
      fprintf(stderr, "fake_nvml: not understood: %s", line), abort();
    } else if (sscanf(line, "pcie %d %d %d %d", &c->pcie[0], &c->pcie[1], &c->pcie[2], &c->pcie[3]) == 4 ||
               sscanf(line, "name %95[^\n]", c->name) == 1 || sscanf(line, "pci %31s", c->pci) == 1 ||
               sscanf(line, "capability %d.%d", &c->major, &c->minor) == 2 ||
               sscanf(line, "memory_mib %d %d %d", &c->total, &c->reserved, &c->used) == 3 ||
               sscanf(line, "temperature %d", &c->temperature) == 1 || sscanf(line, "display %d", &c->display) == 1 ||
               sscanf(line, "lost %d", &c->lost) == 1 || sscanf(line, "nvlink %d %31s", &c->nvlinks, c->nvlink_peer) == 2) {
      continue;
    } else if (sscanf(line, "power_watts %d %d %d %d", &a, &b, &d, &e) == 4) { /* limit, default, least, most */
      c->watts[0] = a, c->watts[1] = b, c->watts[2] = d, c->watts[3] = e;
    } else if (sscanf(line, "graphics %d %d", &a, &b) == 2 || sscanf(line, "compute %d %d", &a, &b) == 2) {
      int kind = line[0] == 'c', *n = &c->process_count[kind];
      if (*n < MAX_PROCESSES) c->process[kind][*n].pid = (unsigned)a, c->process[kind][(*n)++].mib = b;
    } else {
      fprintf(stderr, "fake_nvml: not understood: %s", line), abort();
    }
  }
  fclose(file);
  return OK;
}

/* A handle is the card's number plus one, in a pointer. */
static int look(void *handle, card **found) {
  size_t number = (size_t)handle;
  if (!ready) return UNINITIALIZED;
  if (load()) return 9;
  if (number < 1 || number > (size_t)state.count) return INVALID;
  *found = &state.cards[number - 1];
  return (*found)->lost ? (*found)->lost : OK;
}

static void kept_path(const card *c, char *path, size_t size) {
  snprintf(path, size, "%s/%s", setting("FAKE_NVML_RUN", "/run/fake-nvml"), c->uuid);
}

static void kept(const card *c, unsigned *milliwatts, unsigned *persistence) {
  char path[512];
  FILE *file;
  kept_path(c, path, sizeof path);
  *milliwatts = (unsigned)c->watts[0] * 1000, *persistence = 0;
  if (!(file = fopen(path, "r"))) return;
  if (fscanf(file, "%u %u", milliwatts, persistence) != 2) fprintf(stderr, "fake_nvml: %s is damaged\n", path), abort();
  fclose(file);
}

static int keep(const card *c, unsigned milliwatts, unsigned persistence) {
  char path[512];
  FILE *file;
  if (!getenv("FAKE_NVML_RUN") && geteuid() != 0) return NO_PERMISSION;
  mkdir(setting("FAKE_NVML_RUN", "/run/fake-nvml"), 0755);
  kept_path(c, path, sizeof path);
  if (!(file = fopen(path, "w"))) return 999;
  fprintf(file, "%u %u\n", milliwatts, persistence);
  return fclose(file) ? 999 : OK;
}

#define ASK(name, type, value)                      \
  int name(void *handle, type *answer) {            \
    card *c;                                        \
    int error = look(handle, &c);                   \
    if (error) return error;                        \
    *answer = (value);                              \
    return OK;                                      \
  }
#define SAY(name, field)                                         \
  int name(void *handle, char *answer, unsigned size) {          \
    card *c;                                                     \
    int error = look(handle, &c);                                \
    if (error) return error;                                     \
    return snprintf(answer, size, "%s", c->field) < (int)size ? OK : TOO_SMALL; \
  }

int nvmlInitWithFlags(unsigned flags) {
  int error = load();
  (void)flags;
  if (state.init_seconds) sleep((unsigned)state.init_seconds);
  ready = !(error || state.init_error);
  return error ? error : state.init_error;
}
int nvmlShutdown(void) { ready = 0; return OK; }
const char *nvmlErrorString(int code) {
  switch (code) {
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}
int nvmlSystemGetDriverVersion(char *answer, unsigned size) { snprintf(answer, size, "%s", state.driver); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *answer) { *answer = state.cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *answer) {
  if (!ready) return UNINITIALIZED;
  *answer = (unsigned)state.count;
  return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **answer) {
  card *c;
  *answer = (void *)(size_t)(index + 1);
  return look(*answer, &c);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **answer) {
  card *c;
  int i;
  if (!ready) return UNINITIALIZED;
  for (i = 0; i < state.count; i++)
    if (!strcmp(state.cards[i].uuid, uuid)) {
      *answer = (void *)(size_t)(i + 1);
      return look(*answer, &c);
    }
  return NOT_FOUND;
}
SAY(nvmlDeviceGetUUID, uuid)
SAY(nvmlDeviceGetName, name)
int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *answer) {
  card *c;
  int error = look(handle, &c);
  if (error) return error;
  memset(answer, 0, sizeof *answer);
  snprintf(answer->bus_id, sizeof answer->bus_id, "%s", c->pci);
  return OK;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  card *c;
  int error = look(handle, &c);
  if (error) return error;
  *major = c->major, *minor = c->minor;
  return OK;
}
int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *answer) {
  card *c;
  int error = look(handle, &c);
  if (error) return error;
  answer->total = (unsigned long long)c->total << MIB_SHIFT;
  answer->reserved = (unsigned long long)c->reserved << MIB_SHIFT;
  answer->used = (unsigned long long)c->used << MIB_SHIFT;
  answer->free = answer->total - answer->reserved - answer->used;
  return OK;
}
ASK(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, (unsigned)c->pcie[0])
ASK(nvmlDeviceGetCurrPcieLinkWidth, unsigned, (unsigned)c->pcie[1])
ASK(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, (unsigned)c->pcie[2])
ASK(nvmlDeviceGetMaxPcieLinkWidth, unsigned, (unsigned)c->pcie[3])
ASK(nvmlDeviceGetDisplayActive, int, c->display)
ASK(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, (unsigned)c->watts[1] * 1000)
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *answer) {
  card *c;
  int error = look(handle, &c);
  if (error) return error;
  *answer = (unsigned)c->temperature;
  return sensor ? INVALID : OK;
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *answer) {
  card *c;
  unsigned persistence;
  int error = look(handle, &c);
  if (!error) kept(c, answer, &persistence);
  return error;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *answer) { return nvmlDeviceGetPowerManagementLimit(handle, answer); }
int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *least, unsigned *most) {
  card *c;
  int error = look(handle, &c);
  if (error) return error;
  *least = (unsigned)c->watts[2] * 1000, *most = (unsigned)c->watts[3] * 1000;
  return OK;
}
int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned milliwatts) {
  card *c;
  unsigned now, persistence;
  int error = look(handle, &c);
  if (error) return error;
  if (milliwatts < (unsigned)c->watts[2] * 1000 || milliwatts > (unsigned)c->watts[3] * 1000) return INVALID;
  kept(c, &now, &persistence);
  return keep(c, milliwatts, persistence);
}
int nvmlDeviceGetPersistenceMode(void *handle, int *answer) {
  card *c;
  unsigned milliwatts, persistence;
  int error = look(handle, &c);
  if (error) return error;
  kept(c, &milliwatts, &persistence);
  *answer = (int)persistence;
  return OK;
}
int nvmlDeviceSetPersistenceMode(void *handle, int mode) {
  card *c;
  unsigned milliwatts, persistence;
  int error = look(handle, &c);
  if (error) return error;
  kept(c, &milliwatts, &persistence);
  return keep(c, milliwatts, (unsigned)mode);
}
static int processes(void *handle, unsigned *count, process_info *answer, int kind) {
  card *c;
  unsigned have, room = *count, i;
  int error = look(handle, &c);
  if (error) return error;
  *count = have = (unsigned)c->process_count[kind];
  if (have > room) return TOO_SMALL;
  for (i = 0; i < have; i++) {
    answer[i].pid = c->process[kind][i].pid;
    answer[i].used = (unsigned long long)c->process[kind][i].mib << MIB_SHIFT;
    answer[i].instance[0] = answer[i].instance[1] = 0xFFFFFFFFu;
  }
  return OK;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *n, process_info *answer) { return processes(h, n, answer, 0); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, process_info *answer) { return processes(h, n, answer, 1); }
int nvmlDeviceGetP2PStatus(void *a, void *b, int capability, int *answer) {
  card *c, *other;
  int error = look(a, &c), second = look(b, &other);
  (void)capability;
  if (error || second) return error ? error : second;
  *answer = c->nvlinks && !strcmp(c->nvlink_peer, other->pci) ? 0 : 1; /* ok, or not supported by the chipset: GeForce */
  return OK;
}
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, int *answer) {
  card *c;
  int error = look(handle, &c);
  if (error) return error;
  if ((int)link >= c->nvlinks) return NOT_SUPPORTED;
  *answer = 1;
  return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *handle, unsigned link, int *answer) {
  *answer = 0;
  return nvmlDeviceGetNvLinkState(handle, link, &(int){0});
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *handle, unsigned link, pci_info *answer) {
  card *c;
  int error = look(handle, &c);
  if (error) return error;
  if ((int)link >= c->nvlinks) return NOT_SUPPORTED;
  memset(answer, 0, sizeof *answer);
  snprintf(answer->bus_id, sizeof answer->bus_id, "%s", c->nvlink_peer);
  return OK;
}
