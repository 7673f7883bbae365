/* Host memory in the place of an Ascend NPU: the functions of CANN's runtime that torch_npu cannot do without.
 *
 * One device, whose memory is the host's; copies are memmove, streams and events are done at once. There is no kernel
 * in this file and none is looked for: the library that has the kernels (libopapi.so) and the function that compiles
 * them (aclSetCompileopt) are absent, so an op that reaches the device raises. No result can come from here.
 *
 * Signatures are those of the ACL headers in the torch_npu wheel (torch_npu/include/third_party/acl). Functions that
 * torch_npu is linked against and that are not written here are generated next to this file; they return 0.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, ERROR_NO_MEMORY = 207001, ERROR_NO_KERNEL = 100000 };

/* Everything that only reports success. Arguments are left unread, which the C calling conventions allow. */
#define NOTHING_TO_DO(name) \
  int name() { return SUCCESS; }

static const char *setting(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

/* --- the device ------------------------------------------------------------------------------------------------ */

static int context; /* its address is the one context */

NOTHING_TO_DO(aclInit)
NOTHING_TO_DO(aclFinalize)
NOTHING_TO_DO(aclrtSetDevice)
NOTHING_TO_DO(aclrtResetDevice)
NOTHING_TO_DO(aclrtSetCurrentContext)
int aclrtGetDeviceCount(uint32_t *count) {
  *count = 1;
  return SUCCESS;
}
int aclrtGetDevice(int32_t *device) {
  *device = 0;
  return SUCCESS;
}
int aclrtGetCurrentContext(void **current) {
  *current = &context;
  return SUCCESS;
}
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  *active = 1;
  return SUCCESS;
}
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
  *can = 0;
  return SUCCESS;
}
const char *aclrtGetSocName(void) { return setting("FUSEPLUG_HOST_NPU_SOC", "Ascend910B3"); }
const char *aclGetRecentErrMsg(void) { return "there is no NPU here: fuseplug's stand-in for CANN has no kernels"; }

static const char *version(void) { return setting("FUSEPLUG_HOST_NPU_CANN", "9.1.0"); }
int aclsysGetVersionStr(char *package, char *text) {
  strcpy(text, version());
  return SUCCESS;
}
typedef struct {
  char version[128], release[128], timestamp[128], build[128], architecture[128];
} PackageVersion;
int aclsysGetCANNVersion(int package, PackageVersion *found) {
  memset(found, 0, sizeof found->version);
  strncpy(found->version, version(), sizeof found->version - 1);
  return SUCCESS;
}

/* --- memory ---------------------------------------------------------------------------------------------------- */

static int allocate(void **memory, size_t size) {
  *memory = NULL;
  size = size ? size : 512;
  if (posix_memalign(memory, 512, size)) return ERROR_NO_MEMORY; /* the alignment of a device */
  memset(*memory, 0xff, size); /* NaN in every floating dtype: a read before the first write shows */
  return SUCCESS;
}
int aclrtMalloc(void **memory, size_t size, int policy) { return allocate(memory, size); }
int aclrtMallocAlign32(void **memory, size_t size, int policy) { return allocate(memory, size); }
int aclrtMallocHost(void **memory, size_t size) { return allocate(memory, size); }
int aclrtFree(void *memory) {
  free(memory);
  return SUCCESS;
}
int aclrtFreeHost(void *memory) { return aclrtFree(memory); }
int aclrtGetMemInfo(int attribute, size_t *unused, size_t *total) {
  *unused = *total = (size_t)64 << 30;
  return SUCCESS;
}
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  memmove(to, from, size);
  return SUCCESS;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
  return aclrtMemcpy(to, room, from, size, kind);
}
int aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
  memset(to, value, size);
  return SUCCESS;
}
int aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, void *stream) {
  return aclrtMemset(to, room, value, size);
}
/* Whose memory is it? Nobody registered it: plain memory of the host (type 2). */
int aclrtPointerGetAttributes(const void *memory, uint32_t *attributes) {
  memset(attributes, 0, 32);
  attributes[1] = 2;
  return SUCCESS;
}

/* --- streams and events: work is complete as soon as it is asked for ----------------------------------------------- */

static int handle(void **made) { return (*made = malloc(8)) ? SUCCESS : ERROR_NO_MEMORY; }

int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return handle(stream); }
int aclrtDestroyStream(void *stream) { return aclrtFree(stream); }
int aclrtDestroyStreamForce(void *stream) { return aclrtFree(stream); }
NOTHING_TO_DO(aclrtSynchronizeStream)
NOTHING_TO_DO(aclrtSynchronizeStreamWithTimeout)
NOTHING_TO_DO(aclrtSynchronizeDevice)
NOTHING_TO_DO(aclrtSynchronizeDeviceWithTimeout)
int aclrtStreamQuery(void *stream, uint32_t *status) {
  *status = 0; /* complete */
  return SUCCESS;
}
int aclrtStreamGetId(void *stream, int32_t *id) {
  *id = 0;
  return SUCCESS;
}
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtDestroyEvent(void *event) { return aclrtFree(event); }
int aclrtQueryEventStatus(void *event, uint32_t *status) {
  *status = 1; /* complete */
  return SUCCESS;
}
int aclrtQueryEventWaitStatus(void *event, uint32_t *status) {
  *status = 0; /* complete, in the enumeration of this one */
  return SUCCESS;
}
int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
  *milliseconds = 0;
  return SUCCESS;
}

/* --- settings: accepted, without effect --------------------------------------------------------------------------- */

NOTHING_TO_DO(aclrtSetDeviceSatMode)
NOTHING_TO_DO(aclrtSetOpExecuteTimeOut)
NOTHING_TO_DO(aclrtSetOpWaitTimeout)
NOTHING_TO_DO(aclrtSetStreamFailureMode)
NOTHING_TO_DO(aclrtSetStreamOverflowSwitch)
NOTHING_TO_DO(aclrtSetSysParamOpt)
NOTHING_TO_DO(aclrtCtxSetSysParamOpt)
int aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
  if (actual) *actual = timeout;
  return SUCCESS;
}
int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) {
  *flag = 0;
  return SUCCESS;
}
int aclrtGetSysParamOpt(int option, int64_t *value) {
  *value = 0;
  return SUCCESS;
}
int aclrtCtxGetSysParamOpt(int option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }

/* --- kernels: none -------------------------------------------------------------------------------------------------- */

#define NO_KERNEL(name)                                                       \
  int name() {                                                                \
    fprintf(stderr, #name ": there is no NPU here, so no kernel can run\n"); \
    return ERROR_NO_KERNEL;                                                   \
  }
NO_KERNEL(aclopCompileAndExecute)
NO_KERNEL(rtKernelLaunch)

#include "generated.inc"
