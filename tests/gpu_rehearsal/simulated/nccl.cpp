// libnccl.so.2: communicators and groups. The functions keep NCCL's contracts: a nonblocking communicator answers "in
// progress" and lets a thread connect or queue; a call outside of a group is a group of one; an abort ends kernels that
// wait for a peer; using a communicator that was destroyed is an error.
//
// A rank that has died is waited for until the communicator is aborted, as kernels do. With RING_SIMULATED_PEER_ERRORS=1
// its end also shows as an asynchronous error, as where a network connects the ranks.
//
// Finalizing, destroying and aborting wait until no CUDA graph refers to the communicator, for ever if the script keeps
// one. With RING_SIMULATED_ABORT_HANGS=1 no abort returns, as in NCCL 2.25.1.
//
// RING_SIMULATED_FAULTS may name "ncclKernel": from its Nth kernel on a communicator reports that status as its
// asynchronous error, and the kernel waits until it is aborted.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "collectives.h"

namespace sim = simulated;
using nccl::Call;

struct ncclUniqueId {
  unsigned char bytes[128];
};

struct Config {  // the beginning of ncclConfig_t, which all releases share
  size_t size;
  unsigned magic, version;
  int blocking;
};

namespace {

thread_local int depth;
thread_local auto& group = *new std::vector<Call>;  // torch may call while the process ends

bool is_usable(ncclComm* communicator, const char* function) {
  if (communicator && !communicator->dead) return true;
  fprintf(stderr, "simulated NCCL: %s was called with a communicator that was destroyed or never made\n", function);
  return false;
}

void run_later(std::function<void()> work) {
  sim::count("NCCL threads");
  std::thread(std::move(work)).detach();
}

void wait_for_graphs(ncclComm* communicator) {
  while (communicator->graphs.use_count() > 1) usleep(1000);
}

// Meet the others, and let whoever is first in the board remove its name.
void connect(ncclComm* communicator) {
  const bool met = communicator->visitor.meet();
  if (communicator->visitor.rank == 0) shm_unlink(communicator->name.c_str());
  if (met) communicator->state = NCCL_SUCCESS;
}

int new_communicator(ncclComm** made, const std::string& name, int size, int rank, const Config* config, int device = -1) {
  if (size < 1 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  auto* communicator = new ncclComm;  // never freed: a late call is to be told, not to crash
  communicator->name = name;
  communicator->device = device < 0 ? sim::current_device() : device;
  const char* forced = getenv("NCCL_COMM_BLOCKING");
  communicator->blocking = forced && *forced ? *forced == '1' : !config || config->blocking != 0;
  communicator->visitor.board = nccl::Board::open(name, size);
  communicator->visitor.rank = rank;
  communicator->visitor.size = size;
  if (!communicator->visitor.board) return SYSTEM_ERROR;
  communicator->visitor.board->processes[rank] = getpid();
  *made = communicator;
  if (communicator->blocking) {
    connect(communicator);
    return communicator->state;
  }
  communicator->state = IN_PROGRESS;
  run_later([=] { connect(communicator); });
  return IN_PROGRESS;
}

std::string board_name(const ncclUniqueId& id) {
  char name[64] = "/simulated-nccl-";  // not "ring": tests watch for files of that name, and may run side by side
  for (int i = 0; i < 8; i++) snprintf(name + strlen(name), 3, "%02x", id.bytes[i]);
  return name;
}

// One kernel on its stream, after the communicator's last one wherever that was. A communicator that was aborted skips it.
void launch(ncclComm* communicator, sim::Stream* stream, std::function<void()> kernel) {
  sim::count("NCCL kernels");
  const bool captures = sim::is_capturing(stream);  // each replay is a kernel
  if (!captures) communicator->under_way++;
  const bool is_last_captured = communicator->last && communicator->last->capture;
  if (communicator->last_stream != stream && captures == is_last_captured) sim::wait(stream, communicator->last);
  sim::enqueue(stream, [=, graph = captures ? communicator->graphs : nullptr] {
    if (captures) communicator->under_way++;
    if (const int status = sim::called("ncclKernel")) {
      communicator->fail(status, "an injected fault");
      while (!communicator->visitor.aborted) communicator->visitor.nap();
    }
    if (!communicator->visitor.aborted) kernel();
    communicator->under_way--;
  });
  communicator->last_stream = stream, communicator->last = sim::mark(stream);
}

// What a card's driver takes to launch kernels: RING_SIMULATED_LAUNCH microseconds, which the calling thread computes.
void spend_launch_time() {
  static const auto time = std::chrono::microseconds(sim::setting("LAUNCH", 0));
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
  }
}

void queue(std::vector<Call> calls) {
  spend_launch_time();
  std::map<std::pair<ncclComm*, sim::Stream*>, std::vector<Call>> transfers;
  for (const Call& call : calls)
    if (call.kind == nccl::SEND || call.kind == nccl::RECEIVE)
      transfers[{call.communicator, call.stream}].push_back(call);
    else
      launch(call.communicator, call.stream, [call] { nccl::run_collective(call); });
  for (auto& [where, together] : transfers)
    launch(where.first, where.second, [together = together] { nccl::run_transfers(together); });
}

// With RING_SIMULATED_LAZY=1 a communicator connects its members at its first group, as NCCL 2.22 does for each algorithm.
void connect_at_first_use(ncclComm* communicator) {
  if (!sim::setting("LAZY", 0) || communicator->is_connected) return;
  communicator->is_connected = communicator->visitor.meet();
}

int end_group() {
  std::vector<Call> calls = std::move(group);
  group.clear();
  bool nonblocking = false;
  for (const Call& call : calls) nonblocking |= !call.communicator->blocking;
  if (!nonblocking) {
    for (const Call& call : calls) connect_at_first_use(call.communicator);
    queue(std::move(calls));
    return NCCL_SUCCESS;
  }
  for (const Call& call : calls) call.communicator->state = IN_PROGRESS;
  run_later([calls = std::move(calls)] {
    usleep(sim::random_below(sim::setting("LAG", 0)));
    for (const Call& call : calls) connect_at_first_use(call.communicator);
    queue(calls);
    for (const Call& call : calls) {
      int in_progress = IN_PROGRESS;
      call.communicator->state.compare_exchange_strong(in_progress, NCCL_SUCCESS);
    }
  });
  return IN_PROGRESS;
}

// A kernel of a card cannot read memory of the host or of another card: say so where the call is.
bool is_reachable(const Call& call, const void* pointer, bool used) {
  if (!used || !call.count || sim::device_of_pointer(pointer) == call.communicator->device) return true;
  call.communicator->fail(INVALID_ARGUMENT, "memory that is not on the communicator's device");
  return false;
}

int add(const char* function, Call call) {
  if (const int status = sim::called(function)) return status;
  ncclComm* communicator = call.communicator;
  if (!is_usable(communicator, function)) return INVALID_ARGUMENT;
  if (communicator->state != NCCL_SUCCESS && communicator->state != IN_PROGRESS) return communicator->state;
  if (communicator->state == IN_PROGRESS && depth == 0) return INVALID_USAGE;
  const bool is_root = call.root == communicator->visitor.rank;
  const bool reads = call.kind != nccl::RECEIVE && (call.kind != nccl::BROADCAST || is_root);
  const bool writes = call.kind != nccl::SEND && (call.kind != nccl::REDUCE || is_root);
  if (!is_reachable(call, call.source, reads) || !is_reachable(call, call.destination, writes)) return INVALID_ARGUMENT;
  if (!nccl::width(call.type) || call.root < 0 || call.root >= communicator->visitor.size) return INVALID_ARGUMENT;
  if (sim::device_of(call.stream) != communicator->device) {
    communicator->fail(INVALID_ARGUMENT, "a stream of another device");
    return INVALID_ARGUMENT;
  }
  sim::count("NCCL bytes", call.count * nccl::width(call.type));
  group.push_back(call);
  return depth ? NCCL_SUCCESS : end_group();
}

}  // namespace

#define BEGIN() \
  if (int status = sim::called(__func__)) return status
#define BEGIN_WITH(communicator) \
  BEGIN(); \
  if (!is_usable(communicator, __func__)) return INVALID_ARGUMENT

// ---- about the library ----

EXPORTED int ncclGetVersion(int* version) { return *version = (int)sim::setting("NCCL", 22907), NCCL_SUCCESS; }

EXPORTED const char* ncclGetErrorString(int status) {
  static const char* texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                "NCCL operation in progress"};
  return status >= 0 && status < 8 ? texts[status] : "unknown result code";
}

EXPORTED const char* ncclGetLastError(ncclComm* communicator) { return communicator ? communicator->last_error.c_str() : ""; }

EXPORTED int ncclGetUniqueId(ncclUniqueId* id) {
  BEGIN();
  const int file = open("/dev/urandom", O_RDONLY);
  const bool read_all = read(file, id->bytes, sizeof id->bytes) == sizeof id->bytes;
  close(file);
  return read_all ? NCCL_SUCCESS : SYSTEM_ERROR;
}

// ---- communicators ----

EXPORTED int ncclCommInitRankConfig(ncclComm** made, int size, ncclUniqueId id, int rank, Config* config) {
  BEGIN();
  return new_communicator(made, board_name(id), size, rank, config);
}

EXPORTED int ncclCommInitRank(ncclComm** made, int size, ncclUniqueId id, int rank) {
  BEGIN();
  return new_communicator(made, board_name(id), size, rank, nullptr);
}

EXPORTED int ncclCommInitRankScalable(ncclComm** made, int size, int rank, int, ncclUniqueId* ids, Config* config) {
  BEGIN();
  return new_communicator(made, board_name(ids[0]), size, rank, config);
}

EXPORTED int ncclCommSplit(ncclComm* parent, int color, int key, ncclComm** made, Config* config) {
  BEGIN_WITH(parent);
  nccl::Visitor& visitor = parent->visitor;
  nccl::Board* board = visitor.board;
  board->colors[visitor.rank] = color, board->keys[visitor.rank] = key;
  if (!visitor.meet()) return SYSTEM_ERROR;
  int size = 0, rank = 0;
  for (int other = 0; other < visitor.size; other++) {
    if (board->colors[other] != color) continue;
    size++;
    rank += std::make_pair(board->keys[other], other) < std::make_pair(key, visitor.rank);
  }
  if (!visitor.meet()) return SYSTEM_ERROR;
  const std::string name = parent->name + "-" + std::to_string(parent->splits++) + "-" + std::to_string(color);
  *made = nullptr;
  return color < 0 ? NCCL_SUCCESS : new_communicator(made, name, size, rank, config);
}

// A communicator of those that are not excluded, who call this. With a flag of 1 the kernels of the old one end first; it
// can only be aborted then. The handle of the new one is written when it is connected.
EXPORTED int ncclCommShrink(ncclComm* parent, int* excluded, int count, ncclComm** made, Config* config, int flags) {
  BEGIN_WITH(parent);
  std::string name = parent->name + "-without";
  int rank = parent->visitor.rank;
  for (int i = 0; i < count; i++) {
    name += "-" + std::to_string(excluded[i]);
    if (excluded[i] == parent->visitor.rank) return INVALID_ARGUMENT;
    rank -= excluded[i] < parent->visitor.rank;
  }
  if (flags & 1) parent->visitor.aborted = true;
  auto shrink = [=] {
    for (int naps = 0; parent->under_way && naps < 5000; naps++) usleep(1000);
    ncclComm* smaller = nullptr;
    Config blocking{sizeof(Config), 0, 0, 1};
    const int status = new_communicator(&smaller, name, parent->visitor.size - count, rank, &blocking, parent->device);
    if (smaller) smaller->blocking = parent->blocking;
    *made = smaller;
    return parent->state = status;
  };
  if (parent->blocking) return shrink();
  parent->state = IN_PROGRESS;
  run_later([=] { shrink(); });
  return IN_PROGRESS;
}

EXPORTED int ncclCommCount(ncclComm* communicator, int* count) { return *count = communicator->visitor.size, NCCL_SUCCESS; }

EXPORTED int ncclCommUserRank(ncclComm* communicator, int* rank) { return *rank = communicator->visitor.rank, NCCL_SUCCESS; }

EXPORTED int ncclCommGetAsyncError(ncclComm* communicator, int* status) {
  BEGIN_WITH(communicator);
  if (communicator->state == NCCL_SUCCESS && sim::setting("PEER_ERRORS", 0) && communicator->visitor.lost() >= 0)
    communicator->fail(REMOTE_ERROR, "the connection to rank " + std::to_string(communicator->visitor.lost()) + " was closed");
  *status = communicator->state;
  return NCCL_SUCCESS;
}

EXPORTED int ncclCommAbort(ncclComm* communicator) {
  BEGIN_WITH(communicator);
  communicator->visitor.aborted = true;
  if (communicator->visitor.rank == 0) shm_unlink(communicator->name.c_str());  // if it never connected
  for (int naps = 0; communicator->under_way && naps < 5000; naps++) usleep(1000);  // the kernels end
  while (sim::setting("ABORT_HANGS", 0)) sleep(1);
  wait_for_graphs(communicator);
  communicator->dead = true;
  return NCCL_SUCCESS;
}

// Ends once all kernels are done, here and on the others.
EXPORTED int ncclCommFinalize(ncclComm* communicator) {
  BEGIN_WITH(communicator);
  auto finish = [=] {
    while (communicator->under_way && !communicator->visitor.aborted) usleep(200);
    wait_for_graphs(communicator);
    communicator->visitor.meet();
    communicator->state = NCCL_SUCCESS;
  };
  if (communicator->blocking) return finish(), NCCL_SUCCESS;
  communicator->state = IN_PROGRESS;
  run_later(finish);
  return IN_PROGRESS;
}

EXPORTED int ncclCommDestroy(ncclComm* communicator) {
  BEGIN_WITH(communicator);
  wait_for_graphs(communicator);
  communicator->dead = true;
  return NCCL_SUCCESS;
}

// ---- groups and calls ----

EXPORTED int ncclGroupStart() {
  BEGIN();
  depth++;
  return NCCL_SUCCESS;
}

EXPORTED int ncclGroupEnd() {
  const int status = sim::called(__func__);
  if (!depth) return INVALID_USAGE;
  if (--depth) return NCCL_SUCCESS;
  if (status) return group.clear(), status;
  return group.empty() ? NCCL_SUCCESS : end_group();
}

EXPORTED int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, ncclComm* c, void* stream) {
  return add(__func__, {nccl::ALL_REDUCE, from, to, count, type, op, 0, c, sim::stream_of(stream)});
}

EXPORTED int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, ncclComm* c, void* stream) {
  return add(__func__, {nccl::REDUCE, from, to, count, type, op, root, c, sim::stream_of(stream)});
}

EXPORTED int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm* c, void* stream) {
  return add(__func__, {nccl::BROADCAST, from, to, count, type, 0, root, c, sim::stream_of(stream)});
}

EXPORTED int ncclBcast(void* memory, size_t count, int type, int root, ncclComm* c, void* stream) {
  return add(__func__, {nccl::BROADCAST, memory, memory, count, type, 0, root, c, sim::stream_of(stream)});
}

EXPORTED int ncclAllGather(const void* from, void* to, size_t count, int type, ncclComm* c, void* stream) {
  return add(__func__, {nccl::ALL_GATHER, from, to, count, type, 0, 0, c, sim::stream_of(stream)});
}

EXPORTED int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, ncclComm* c, void* stream) {
  return add(__func__, {nccl::REDUCE_SCATTER, from, to, count, type, op, 0, c, sim::stream_of(stream)});
}

EXPORTED int ncclSend(const void* from, size_t count, int type, int peer, ncclComm* c, void* stream) {
  return add(__func__, {nccl::SEND, from, nullptr, count, type, 0, peer, c, sim::stream_of(stream)});
}

EXPORTED int ncclRecv(void* to, size_t count, int type, int peer, ncclComm* c, void* stream) {
  return add(__func__, {nccl::RECEIVE, nullptr, to, count, type, 0, peer, c, sim::stream_of(stream)});
}

EXPORTED int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence, ncclComm* communicator) {
  BEGIN_WITH(communicator);
  *op = 1000 + (int)communicator->factors.size();
  double number = 0;  // residence 1: read now, on the host
  if (residence == 1) number = type == nccl::DOUBLE ? *(double*)scalar : *(float*)scalar;
  communicator->factors[*op] = {number, residence == 1 ? nullptr : scalar};
  return NCCL_SUCCESS;
}

EXPORTED int ncclRedOpDestroy(int, ncclComm*) { return NCCL_SUCCESS; }

// ---- memory ----

EXPORTED int ncclMemAlloc(void** pointer, size_t bytes) {
  BEGIN();
  return sim::allocate(pointer, bytes, sim::current_device()) ? UNHANDLED_CUDA_ERROR : NCCL_SUCCESS;
}

EXPORTED int ncclMemFree(void* pointer) {
  BEGIN();
  return sim::release(pointer) ? UNHANDLED_CUDA_ERROR : NCCL_SUCCESS;
}

EXPORTED int ncclCommRegister(ncclComm* communicator, void* memory, size_t, void** handle) {
  BEGIN_WITH(communicator);
  return *handle = memory, NCCL_SUCCESS;
}

EXPORTED int ncclCommDeregister(ncclComm*, void*) { return NCCL_SUCCESS; }

EXPORTED int ncclCommWindowRegister(ncclComm* communicator, void* memory, size_t, void** handle, int) {
  BEGIN_WITH(communicator);
  return *handle = memory, NCCL_SUCCESS;
}

EXPORTED int ncclCommWindowDeregister(ncclComm*, void*) { return NCCL_SUCCESS; }
