// Streams are threads: each does its work in order, while the caller goes on; only events order two of them.
//
// With RING_SIMULATED_LAG=N a stream naps for up to N microseconds before every other piece of work, so that work that
// is not ordered by an event runs in an order that differs from run to run: a wait that is missing shows as a wrong
// number. An event that is recorded again stays where it was for those who wait for it already: each record makes a
// mark of its own.
//
// A stream that captures keeps its work for a graph, with what each piece comes after; a replay takes any order that this
// allows, so that an edge that is missing shows as a wrong number, too.
//
// Legacy default streams wait for all work of the device's blocking streams and these for theirs, as on a card.
#include <cstdlib>
#include <deque>
#include <map>
#include <set>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#include "device.h"

namespace simulated {
namespace {

double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

std::atomic<bool> stopping{false};
std::atomic<int> under_way{0};
std::atomic<int> failure{0};
std::mutex text_mutex;
std::string text;

// One lock for all marks: they are few, and whoever waits for one is a thread that has nothing else to do.
std::mutex marks_mutex;
std::condition_variable marks_passed;

void pass(const MarkPointer& mark) {
  std::lock_guard<std::mutex> lock(marks_mutex);
  mark->at = now();
  mark->passed = true;
  marks_passed.notify_all();
}

void hold(const MarkPointer& mark) {
  if (mark->passed) return;
  std::unique_lock<std::mutex> lock(marks_mutex);
  while (!mark->passed && !stopping) marks_passed.wait_for(lock, std::chrono::milliseconds(100));
}

}  // namespace

struct Graph {
  struct Node {
    std::function<void()> work;
    std::set<int> after;
  };
  std::vector<Node> nodes;
};

struct Capture {
  unsigned long long id;
  Stream* origin;
  int mode;
  std::thread::id thread;  // that began it
  std::set<Stream*> streams;
  Graph graph;
  int failure = SUCCESS;
};

struct Stream {
  Stream(int device, bool blocking, int priority) : device(device), priority(priority), blocking(blocking) {}
  int device, priority;
  bool blocking;
  std::mutex mutex;
  std::condition_variable came;
  std::deque<std::function<void()>> queue;
  bool busy = false, ends = false;
  std::shared_ptr<Capture> capture;  // guarded by `captures`
  std::set<int> last;                // of the graph: what the next piece of work comes after

  void put(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.push_back(std::move(work));
    came.notify_one();
  }

  void run() {
    const long lag = setting("LAG", 0);
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex);
        busy = false;
        came.wait(lock, [this] { return !queue.empty() || ends; });
        if (queue.empty()) break;
        work = std::move(queue.front());
        queue.pop_front();
        busy = true;
      }
      if (lag && random_below(2)) usleep(random_below(lag));
      if (stopping) continue;
      under_way++;
      if (!stopping) work();
      under_way--;
    }
    delete this;
  }
};

namespace {

struct Streams {
  std::mutex mutex;
  std::set<Stream*> all;
  std::map<int, Stream*> legacy;
};

Streams& streams() {
  static Streams* kept = new Streams;  // for ever: threads use it until the process ends
  return *kept;
}

// No vector: torch asks for the current device after the main thread's thread-local objects are destroyed.
struct Contexts {
  int depth;
  int devices[64];
};
thread_local Contexts contexts;

std::mutex captures;
std::set<std::shared_ptr<Capture>> open_captures;

// Whether a stream captured the work.
bool capture(Stream* stream, const std::function<void()>& work) {
  std::lock_guard<std::mutex> lock(captures);
  if (!stream->capture) return false;
  auto& nodes = stream->capture->graph.nodes;
  nodes.push_back({work, stream->last});
  stream->last = {(int)nodes.size() - 1};
  return true;
}

Stream* start(int device, bool blocking, int priority) {
  auto* stream = new Stream(device, blocking, priority);
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

// Order a legacy stream after the blocking streams of its device, or one of these after it.
void order_implicitly(Stream* stream) {
  if (!stream->blocking) return;
  std::vector<Stream*> before;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    Stream* legacy = streams().legacy.count(stream->device) ? streams().legacy[stream->device] : nullptr;
    if (stream != legacy) {
      if (legacy) before.push_back(legacy);
    } else {
      for (Stream* other : streams().all)
        if (other->blocking && other->device == stream->device && other != legacy) before.push_back(other);
    }
  }
  for (Stream* other : before) {
    auto passed = std::make_shared<Mark>();
    other->put([passed] { pass(passed); });
    stream->put([passed] { hold(passed); });
  }
}

}  // namespace

int current_context() { return contexts.depth ? contexts.devices[contexts.depth - 1] : -1; }

int current_device() { return contexts.depth ? current_context() : 0; }

void set_device(int index) {
  count("contexts of device " + std::to_string(index));  // CUDA 12 creates one where there is none
  if (!contexts.depth) contexts.depth = 1;
  contexts.devices[contexts.depth - 1] = index;
}

void push_context(int index) {
  if (contexts.depth == 64) abort();  // pushed and never popped
  contexts.devices[contexts.depth++] = index;
}

int pop_context() {
  const int last = current_context();
  if (contexts.depth) contexts.depth--;
  return last;
}

Stream* new_stream(int device, bool blocking, int priority) {
  Stream* stream = start(device, blocking, priority);
  std::lock_guard<std::mutex> lock(streams().mutex);
  streams().all.insert(stream);
  return stream;
}

void destroy_stream(Stream* stream) {
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(stream);
  }
  std::lock_guard<std::mutex> lock(stream->mutex);
  stream->ends = true;  // once its queue is done
  stream->came.notify_one();
}

Stream* stream_of(void* handle) {
  // 1 and 2 are cudaStreamLegacy and cudaStreamPerThread; nothing here uses the second.
  if ((uintptr_t)handle > 2) return (Stream*)handle;
  std::lock_guard<std::mutex> lock(streams().mutex);
  Stream*& legacy = streams().legacy[current_device()];
  if (!legacy) {
    legacy = start(current_device(), true, 0);
    streams().all.insert(legacy);
  }
  return legacy;
}

int device_of(Stream* stream) { return stream->device; }

int priority_of(Stream* stream) { return stream->priority; }

void enqueue(Stream* stream, std::function<void()> work) {
  const std::function<void()> guarded = [work = std::move(work)] {
    if (const int status = called("kernel")) fail_device(status, "a fault was injected on the device");
    if (!failure) work();
  };
  if (capture(stream, guarded)) return;
  order_implicitly(stream);
  stream->put(guarded);
}

MarkPointer mark(Stream* stream) {
  auto made = std::make_shared<Mark>();
  {
    std::lock_guard<std::mutex> lock(captures);
    if (stream->capture) {
      made->capture = stream->capture, made->after = stream->last;
      return made;
    }
  }
  order_implicitly(stream);
  stream->put([made] { pass(made); });
  return made;
}

int wait(Stream* stream, const MarkPointer& mark) {
  if (!mark) return SUCCESS;
  {
    std::lock_guard<std::mutex> lock(captures);
    if (stream->capture && stream->capture != mark->capture) return stream->capture->failure = CAPTURE_ISOLATION;
    if (mark->capture) {
      if (!open_captures.count(mark->capture)) return CAPTURED_EVENT;
      stream->capture = mark->capture;  // it joins
      stream->capture->streams.insert(stream);
      stream->last.insert(mark->after.begin(), mark->after.end());
      return SUCCESS;
    }
  }
  stream->put([mark] { hold(mark); });
  return SUCCESS;
}

int synchronize(const MarkPointer& mark) {
  count("host waits");
  if (mark && mark->capture) return CAPTURED_EVENT;
  if (mark) hold(mark);
  return SUCCESS;
}

int synchronize(Stream* stream) {
  {
    std::lock_guard<std::mutex> lock(captures);
    if (stream->capture) return stream->capture->failure = CAPTURE_UNSUPPORTED;
  }
  return synchronize(mark(stream));
}

void synchronize_device(int device) {
  std::vector<MarkPointer> last;
  {
    std::lock_guard<std::mutex> lock(streams().mutex);
    for (Stream* stream : streams().all)
      if (stream->device == device) {
        last.push_back(std::make_shared<Mark>());
        stream->put([made = last.back()] { pass(made); });
      }
  }
  count("host waits");
  for (const auto& mark : last) hold(mark);
}

bool is_idle(Stream* stream) {
  std::lock_guard<std::mutex> lock(stream->mutex);
  return stream->queue.empty() && !stream->busy;
}

bool is_capturing(Stream* stream) { return capture_id(stream) != 0; }

unsigned long long capture_id(Stream* stream) {
  std::lock_guard<std::mutex> lock(captures);
  return stream->capture ? stream->capture->id : 0;
}

int& capture_mode() {
  static thread_local int mode = 0;
  return mode;
}

int begin_capture(Stream* stream, int mode) {
  static unsigned long long last_id;
  std::lock_guard<std::mutex> lock(captures);
  if (stream->capture) return CAPTURE_UNSUPPORTED;
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++last_id, stream->capture->origin = stream, stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  stream->capture->streams = {stream};
  stream->last.clear();
  open_captures.insert(stream->capture);
  return SUCCESS;
}

int end_capture(Stream* stream, Graph** made) {
  *made = nullptr;
  std::lock_guard<std::mutex> lock(captures);
  const auto ended = stream->capture;
  if (!ended || ended->origin != stream) return CAPTURE_UNSUPPORTED;
  const auto& nodes = ended->graph.nodes;
  std::set<int> joined = stream->last;  // and all that is before it
  for (int node = (int)nodes.size() - 1; node >= 0; node--)
    if (joined.count(node)) joined.insert(nodes[node].after.begin(), nodes[node].after.end());
  for (Stream* other : ended->streams) {
    for (const int node : other->last)
      if (!joined.count(node) && !ended->failure) ended->failure = CAPTURE_UNJOINED;
    other->capture = nullptr, other->last.clear();
  }
  open_captures.erase(ended);
  Graph graph;
  std::swap(graph, ended->graph);  // marks keep the capture, but what was captured is the graph's alone
  if (ended->failure) return ended->failure == CAPTURE_UNJOINED ? CAPTURE_UNJOINED : CAPTURE_INVALIDATED;
  *made = new Graph(std::move(graph));
  return SUCCESS;
}

int reject_while_capturing() {
  const int own = capture_mode();
  if (own == 2) return SUCCESS;
  std::lock_guard<std::mutex> lock(captures);
  int status = SUCCESS;
  for (const auto& capture : open_captures) {
    const bool is_mine = capture->thread == std::this_thread::get_id();
    if (is_mine ? capture->mode != 2 : capture->mode + own == 0) status = capture->failure = CAPTURE_UNSUPPORTED;
  }
  return status;
}

size_t nodes_of(const Graph* graph) { return graph->nodes.size(); }

Graph* copy_of(const Graph* graph) { return new Graph(*graph); }

void destroy_graph(Graph* graph) { delete graph; }

void replay(const Graph* graph, Stream* stream) {
  std::vector<int> ready, left;
  std::vector<std::vector<int>> followers(graph->nodes.size());
  for (int node = 0; node < (int)graph->nodes.size(); node++) {
    left.push_back((int)graph->nodes[node].after.size());
    for (const int before : graph->nodes[node].after) followers[before].push_back(node);
    if (!left[node]) ready.push_back(node);
  }
  while (!ready.empty()) {
    std::swap(ready[random_below((long)ready.size())], ready.back());
    const int node = ready.back();
    ready.pop_back();
    order_implicitly(stream);
    stream->put(graph->nodes[node].work);
    for (const int next : followers[node])
      if (!--left[next]) ready.push_back(next);
  }
}

void stop_streams() {
  stopping = true;
  marks_passed.notify_all();
  for (int naps = 0; under_way && naps < 1000; naps++) usleep(1000);
}

void fail_device(int status, const std::string& why) {
  failure = status;
  set_failure_text(why);
}

int device_failure() { return failure; }

std::string failure_text() {
  std::lock_guard<std::mutex> lock(text_mutex);
  return text;
}

void set_failure_text(const std::string& why) {
  std::lock_guard<std::mutex> lock(text_mutex);
  text = why;
}

}  // namespace simulated
