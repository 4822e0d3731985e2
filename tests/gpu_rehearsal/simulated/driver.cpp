// libcuda.so.1: the functions of the CUDA driver that ring_plugins and torch call, on the simulated devices.
//
// Stricter than the card in one point: where the driver needs a current context, a thread without one is told so.
#include <cstdio>
#include <cstring>

#include "device.h"

namespace sim = simulated;
using sim::Stream;

// The driver's events are the runtime's: a handle of one library may reach the other.
extern "C" {
int cudaEventCreateWithFlags(void**, unsigned);
int cudaEventRecord(void*, void*);
int cudaStreamWaitEvent(void*, void*, unsigned);
int cudaEventQuery(void*);
int cudaEventElapsedTime(float*, void*, void*);
int cudaEventDestroy(void*);
int cudaStreamSynchronize(void*);
const char* cudaGetErrorString(int);
}

static int begin(const char* function, bool needs_context = false) {
  if (int status = sim::called(function)) return status;
  if (needs_context && sim::current_context() < 0) {
    fprintf(stderr, "simulated CUDA: %s was called by a thread without a context\n", function);
    return sim::INVALID_CONTEXT;
  }
  return sim::device_failure();
}

#define BEGIN() \
  if (int status = begin(__func__)) return status
#define BEGIN_IN_CONTEXT() \
  if (int status = begin(__func__, true)) return status

// A context is its device's number and something that makes it no null pointer.
static void* context_of(int device) { return (void*)(uintptr_t)(0xC000 + device); }
static int device_of(void* context) { return (int)((uintptr_t)context - 0xC000); }

EXPORTED int cuInit(unsigned) {
  BEGIN();
  return sim::device_count() ? 0 : 100;
}

EXPORTED int cuDriverGetVersion(int* version) { return *version = 13000, 0; }

EXPORTED int cuGetErrorString(int status, const char** text) { return *text = cudaGetErrorString(status), 0; }

EXPORTED int cuDeviceGetCount(int* count) { return *count = sim::device_count(), 0; }

EXPORTED int cuDeviceGet(int* device, int index) {
  *device = index;
  return index < sim::device_count() ? 0 : sim::INVALID_DEVICE;
}

EXPORTED int cuDeviceGetUuid_v2(void* uuid, int device) {
  BEGIN();
  memset(uuid, sim::card_of(device) + 1, 16);
  return 0;
}

EXPORTED int cuDeviceGetPCIBusId(char* text, int length, int device) {
  BEGIN();
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");  // slices of one card have its bus
  const bool is_slice = visible && !strncmp(visible, "MIG-", 4);
  snprintf(text, length, "0000:%02x:00.0", is_slice ? 1 : sim::card_of(device) + 1);
  return 0;
}

EXPORTED int cuDeviceGetAttribute(int* value, int, int) { return *value = 0, 0; }

EXPORTED int cuPointerGetAttribute(void* found, int attribute, void* pointer) {
  BEGIN();
  const int device = sim::device_of_pointer(pointer);
  if (device < 0 || attribute != 9) return sim::INVALID_VALUE;  // 9: the device's number
  *(int*)found = device;
  return 0;
}

EXPORTED int cuMemGetAddressRange_v2(void** base, size_t* bytes, void* pointer) {
  sim::allocation_of(pointer, base, bytes);
  return 0;
}

// ---- contexts ----

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
  BEGIN();
  return *context = context_of(device), 0;
}

EXPORTED int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }

EXPORTED int cuCtxGetCurrent(void** context) {
  *context = sim::current_context() < 0 ? nullptr : context_of(sim::current_context());
  return 0;
}

EXPORTED int cuCtxSetCurrent(void* context) {
  if (context) sim::set_device(device_of(context));
  return 0;
}

EXPORTED int cuCtxPushCurrent_v2(void* context) {
  BEGIN();
  sim::push_context(device_of(context));
  return 0;
}

EXPORTED int cuCtxPopCurrent_v2(void** context) {
  const int device = sim::pop_context();
  *context = device < 0 ? nullptr : context_of(device);
  return device < 0 ? sim::INVALID_CONTEXT : 0;
}

EXPORTED int cuCtxSynchronize() {
  BEGIN_IN_CONTEXT();
  sim::synchronize_device(sim::current_context());
  return sim::device_failure();
}

EXPORTED int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN_IN_CONTEXT();
  return *least = 0, *greatest = -5, 0;
}

// ---- streams and events ----

EXPORTED int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  BEGIN_IN_CONTEXT();
  *stream = sim::new_stream(sim::current_context(), !(flags & 1), priority);
  return 0;
}

EXPORTED int cuStreamDestroy_v2(void* stream) {
  BEGIN();
  sim::destroy_stream((Stream*)stream);
  return 0;
}

EXPORTED int cuStreamSynchronize(void* stream) { return cudaStreamSynchronize(stream); }

EXPORTED int cuStreamIsCapturing(void* stream, int* status) { return *status = sim::is_capturing((Stream*)stream), 0; }

EXPORTED int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(sim::capture_mode(), *mode);
  return 0;
}

EXPORTED int cuEventCreate(void** event, unsigned flags) {
  BEGIN_IN_CONTEXT();
  return cudaEventCreateWithFlags(event, flags);
}

EXPORTED int cuEventRecord(void* event, void* stream) {
  BEGIN_IN_CONTEXT();
  return cudaEventRecord(event, stream);
}

EXPORTED int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  BEGIN();
  return cudaStreamWaitEvent(stream, event, flags);
}

EXPORTED int cuEventQuery(void* event) {
  BEGIN();
  return cudaEventQuery(event);
}

EXPORTED int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  return cudaEventElapsedTime(milliseconds, begin, end);
}

EXPORTED int cuEventDestroy_v2(void* event) {
  BEGIN();
  return cudaEventDestroy(event);
}
