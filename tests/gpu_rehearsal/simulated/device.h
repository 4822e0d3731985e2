// The simulated GPUs of one process, below the runtime, the driver and NCCL: streams, events, memory, faults, counts.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace simulated {

// Statuses have the same numbers in the runtime and in the driver.
enum Status {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_READY = 600,
  LAUNCH_FAILURE = 719,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_UNJOINED = 904,
  CAPTURE_ISOLATION = 905,
  CAPTURED_EVENT = 907,
};

// ---- settings.cpp: environment variables, faults and counts ----

// A number from RING_SIMULATED_`name`.
long setting(const char* name, long otherwise);
// Counts a call, and returns the status that RING_SIMULATED_FAULTS injects at it: 0 for none. `what` is a function of a
// library, or "kernel", which is asked as each piece of work begins on a stream.
int called(const char* what);
void count(const std::string& what, long more = 1);
long random_below(long bound);

// ---- stream.cpp ----

struct Capture;

// A point in a stream's work; it has passed when all work before it is done. One that was captured never passes: it names
// the pieces of work of a graph that are before it.
struct Mark {
  std::shared_ptr<Capture> capture;
  std::set<int> after;
  std::atomic<bool> passed{false};
  double at = 0;
};
using MarkPointer = std::shared_ptr<Mark>;

struct Stream;

// The current device of this thread, and the stack of contexts that the driver keeps; -1 where it has none yet.
int current_context();
int current_device();  // the runtime's: device 0 where there is none yet
void set_device(int index);
void push_context(int index);
int pop_context();

Stream* new_stream(int device, bool blocking, int priority);
void destroy_stream(Stream* stream);
// The stream of a handle, where null is the legacy default stream of the current device.
Stream* stream_of(void* handle);
int device_of(Stream* stream);
int priority_of(Stream* stream);

// Queue work; the caller goes on at once.
void enqueue(Stream* stream, std::function<void()> work);
MarkPointer mark(Stream* stream);
int wait(Stream* stream, const MarkPointer& mark);
// Host waits.
int synchronize(const MarkPointer& mark);
int synchronize(Stream* stream);
void synchronize_device(int device);
bool is_idle(Stream* stream);
// No further work begins, and what is under way has ended: called before the libraries that it uses are unloaded.
void stop_streams();

// ---- graphs: work that a stream was given while it captured, and what each piece comes after ----

struct Graph;

bool is_capturing(Stream* stream);
unsigned long long capture_id(Stream* stream);
int begin_capture(Stream* stream, int mode);
int end_capture(Stream* stream, Graph** made);
// The mode of this thread: 0 global, 1 of this thread, 2 relaxed.
int& capture_mode();
// A call that must not be made while a stream captures: it invalidates the capture. Threads in mode 1, such as torch's
// watchdog that asks for events, may make it beside other threads' captures, and those in mode 2 always.
int reject_while_capturing();
size_t nodes_of(const Graph* graph);
Graph* copy_of(const Graph* graph);
void destroy_graph(Graph* graph);
// Queue its work in any order that its dependencies allow, another one each time.
void replay(const Graph* graph, Stream* stream);

// Work on a device failed: every later call says so, as after an illegal access on a card.
void fail_device(int status, const std::string& why);
int device_failure();
// The text of the last failure, for error messages.
std::string failure_text();
void set_failure_text(const std::string& why);

// ---- memory.cpp ----

// Those that CUDA_VISIBLE_DEVICES shows, of RING_SIMULATED_DEVICES that there are; and which of these a device is.
int device_count();
int card_of(int device);
int allocate(void** pointer, size_t bytes, int device);
int release(void* pointer);
int allocate_pinned(void** pointer, size_t bytes);
int release_pinned(void* pointer);
// Index of the device whose memory it is; for memory of the host -1, or 0 with RING_SIMULATED_HOST_MEMORY=1.
int device_of_pointer(const void* pointer);
bool is_pinned(const void* pointer);
void pin(const void* pointer, size_t bytes);
void unpin(const void* pointer);
void allocation_of(const void* pointer, void** base, size_t* bytes);
void memory_info(int device, size_t* free, size_t* total);
// Every byte of memory that nobody has written yet, or that was freed: floats read it as NaN.
constexpr int POISON = 0xFF;

// What cudaMemcpyAsync does: memory of the host that is not pinned is read, or written, before it returns.
void copy(void* destination, const void* source, size_t bytes, Stream* stream);

}  // namespace simulated
