// libcudart.so.13: the functions of the CUDA runtime that torch calls, on the simulated devices.
//
// A kernel of torch's own cannot run here: launching one is an error that names it. torch's operators do not get that
// far, since operators.cpp computes them with their CPU implementations.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "device.h"

namespace sim = simulated;

namespace {

thread_local int last_error;

cudaError_t say(int status) {
  if (status && status != sim::NOT_READY) last_error = status;
  return (cudaError_t)status;
}

// Begin a call: an injected fault, or the failure of the device that every call reports from then on.
int begin(const char* function) {
  int status = sim::called(function);
  return say(status ? status : sim::device_failure());
}

#define BEGIN() \
  if (int status = begin(__func__)) return (cudaError_t)status

sim::Stream* stream_of(cudaStream_t stream) { return sim::stream_of(stream); }

}  // namespace

// ---- devices ----

EXPORTED cudaError_t cudaGetDeviceCount(int* count) {
  BEGIN();
  *count = sim::device_count();
  return say(*count ? 0 : 100);  // no device
}

EXPORTED cudaError_t cudaGetDevice(int* device) {
  *device = sim::current_device();
  return cudaSuccess;
}

EXPORTED cudaError_t cudaSetDevice(int device) {
  BEGIN();
  if (device < 0 || device >= sim::device_count()) return say(sim::INVALID_DEVICE);
  sim::set_device(device);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }

EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  BEGIN();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Simulated GPU %d", device);
  size_t free;
  sim::memory_info(device, &free, &p->totalGlobalMem);
  memset(&p->uuid, sim::card_of(device) + 1, 16);
  p->major = 9, p->minor = 0, p->pciBusID = sim::card_of(device) + 1;
  p->multiProcessorCount = 4, p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->maxBlocksPerMultiProcessor = 32, p->l2CacheSize = 1 << 20;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 4; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }

EXPORTED cudaError_t cudaDeviceSynchronize() {
  BEGIN();
  if (const int status = sim::reject_while_capturing()) return say(status);
  sim::synchronize_device(sim::current_device());
  return say(sim::device_failure());
}

// ---- errors ----

EXPORTED cudaError_t cudaGetLastError() {
  const int status = last_error;
  last_error = 0;
  return (cudaError_t)status;
}

EXPORTED cudaError_t cudaPeekAtLastError() { return (cudaError_t)last_error; }

EXPORTED const char* cudaGetErrorString(cudaError_t status) {
  static thread_local auto& text = *new std::string;  // torch may ask while the process ends
  if (status == cudaSuccess) return "no error";
  text = (int)status == sim::OUT_OF_MEMORY ? "out of memory" : sim::failure_text();
  text = "simulated CUDA error " + std::to_string((int)status) + (text.empty() ? "" : ": " + text);
  return text.c_str();
}

EXPORTED const char* cudaGetErrorName(cudaError_t status) { return cudaGetErrorString(status); }

// ---- memory ----

EXPORTED cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  BEGIN();
  if (const int status = sim::reject_while_capturing()) return say(status);
  return say(sim::allocate(pointer, bytes, sim::current_device()));
}

EXPORTED cudaError_t cudaFree(void* pointer) {
  BEGIN();
  return say(sim::release(pointer));
}

EXPORTED cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  BEGIN();
  return say(sim::allocate_pinned(pointer, bytes));
}

EXPORTED cudaError_t cudaFreeHost(void* pointer) { return say(sim::release_pinned(pointer)); }

EXPORTED cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  BEGIN();
  sim::pin(pointer, bytes);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostUnregister(void* pointer) {
  sim::unpin(pointer);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  BEGIN();
  sim::memory_info(sim::current_device(), free, total);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* pointer) {
  memset(found, 0, sizeof *found);
  const int device = sim::device_of_pointer(pointer);
  if (device >= 0) {
    found->type = cudaMemoryTypeDevice, found->device = device, found->devicePointer = (void*)pointer;
  } else if (sim::is_pinned(pointer)) {
    found->type = cudaMemoryTypeHost, found->devicePointer = found->hostPointer = (void*)pointer;
  }
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  BEGIN();
  sim::copy(to, from, bytes, stream_of(stream));
  return say(sim::device_failure());
}

EXPORTED cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  BEGIN();
  sim::copy(to, from, bytes, stream_of(stream));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  BEGIN();
  sim::copy(to, from, bytes, stream_of(nullptr));
  sim::synchronize(stream_of(nullptr));
  return say(sim::device_failure());
}

EXPORTED cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  BEGIN();
  sim::enqueue(stream_of(stream), [=] { memset(to, value, bytes); });
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// ---- streams ----

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  BEGIN();
  *stream = (cudaStream_t)sim::new_stream(sim::current_device(), !(flags & cudaStreamNonBlocking), priority);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  sim::destroy_stream(stream_of(stream));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  BEGIN();
  if (const int status = sim::synchronize(stream_of(stream))) return say(status);
  return say(sim::device_failure());
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
  BEGIN();
  if (const int status = sim::reject_while_capturing()) return say(status);
  return sim::is_idle(stream_of(stream)) ? cudaSuccess : cudaErrorNotReady;
}

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = sim::priority_of(stream_of(stream));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const bool captures = stream && sim::is_capturing(stream_of(stream));
  *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, size_t*) {
  if (id) *id = stream ? sim::capture_id(stream_of(stream)) : 0;
  return cudaStreamIsCapturing(stream, status);
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const int before = sim::capture_mode();
  sim::capture_mode() = *mode, *mode = (cudaStreamCaptureMode)before;
  return cudaSuccess;
}

// ---- graphs ----

EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  BEGIN();
  return say(stream ? sim::begin_capture(stream_of(stream), mode) : sim::CAPTURE_UNSUPPORTED);
}

EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  BEGIN();
  return say(sim::end_capture(stream_of(stream), (sim::Graph**)graph));
}

EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return say(sim::NOT_SUPPORTED);
  *count = sim::nodes_of((sim::Graph*)graph);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  BEGIN();
  *made = (cudaGraphExec_t)sim::copy_of((sim::Graph*)graph);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(made, graph, flags);
}

EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  BEGIN();
  sim::replay((sim::Graph*)graph, stream_of(stream));
  return say(sim::device_failure());
}

EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return sim::destroy_graph((sim::Graph*)graph), cudaSuccess; }

EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy((cudaGraph_t)graph); }

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  BEGIN();
  sim::enqueue(stream_of(stream), [=] { function(argument); });
  return cudaSuccess;
}

// ---- events: a handle to the mark of the last record ----

struct Event {
  bool timed;
  std::mutex mutex;  // threads may ask while another records
  sim::MarkPointer last;

  explicit Event(bool timed) : timed(timed) {}

  sim::MarkPointer mark() {
    std::lock_guard<std::mutex> lock(mutex);
    return last;
  }

  void record(sim::Stream* stream) {
    std::lock_guard<std::mutex> lock(mutex);
    last = sim::mark(stream);
  }
};

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  BEGIN();
  *event = (cudaEvent_t) new Event(!(flags & cudaEventDisableTiming));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  BEGIN();
  ((Event*)event)->record(stream_of(stream));
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  BEGIN();
  return say(sim::wait(stream_of(stream), ((Event*)event)->mark()));
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  BEGIN();
  const auto mark = ((Event*)event)->mark();
  if (const int status = sim::reject_while_capturing()) return say(status);
  if (mark && mark->capture) return say(sim::CAPTURED_EVENT);
  return !mark || mark->passed ? say(sim::device_failure()) : cudaErrorNotReady;
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  BEGIN();
  if (const int status = sim::synchronize(((Event*)event)->mark())) return say(status);
  return say(sim::device_failure());
}

EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const auto first = ((Event*)begin)->mark(), second = ((Event*)end)->mark();
  if (!first || !second || !((Event*)begin)->timed || !((Event*)end)->timed) return say(sim::INVALID_HANDLE);
  if (!first->passed || !second->passed) return cudaErrorNotReady;
  *milliseconds = (second->at - first->at) * 1e3;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

// ---- kernels ----

static std::unordered_map<const void*, const char*>& kernels() {
  static auto* kept = new std::unordered_map<const void*, const char*>;  // filled before main, by torch's libraries
  return *kept;
}

static cudaError_t refuse(const void* function, cudaStream_t stream) {
  auto found = kernels().find(function);
  const char* mangled = found == kernels().end() ? "of an unknown name" : found->second;
  if (strstr(mangled, "spin_kernel")) {  // torch.cuda._sleep
    sim::enqueue(stream_of(stream), [] { usleep(5000); });
    return cudaSuccess;
  }
  char* name = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
  sim::set_failure_text("nothing simulates the kernel " + std::string(name ? name : mangled).substr(0, 400));
  fprintf(stderr, "simulated CUDA: %s\n", sim::failure_text().c_str());
  std::free(name);
  return say(sim::NOT_SUPPORTED);
}

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

EXPORTED void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels()[host] = name;
}

static thread_local void* pushed_stream;

EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void* stream) { return pushed_stream = stream, 0; }

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3(1, 1, 1), *shared = 0, *(void**)stream = pushed_stream;
  return cudaSuccess;
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return refuse(function, stream);
}

EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return refuse((const void*)kernel, stream);
}

EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024, found->numRegs = 32;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 2, cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
  return *blocks = 2, cudaSuccess;
}

// torch asks for driver functions by name; it can do without, and uses the runtime's instead.
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  if (found) *found = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorUnknown;
}
