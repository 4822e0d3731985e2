#include "collectives.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unistd.h>

void ncclComm::fail(int status, const std::string& why) {
  last_error = why;
  state = status;
  fprintf(stderr, "simulated NCCL: rank %d of %d: %s\n", visitor.rank, visitor.size, why.c_str());
}

namespace nccl {
namespace {

// Whether all ranks are in the same collective. On a card that goes unnoticed: the ranks hang, or get wrong numbers.
bool same_on_all_ranks(const Call& call) {
  static const char* names[] = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"};
  Visitor& visitor = call.communicator->visitor;
  Board* board = visitor.board;
  snprintf(board->calls[visitor.rank], sizeof board->calls[0], "%s of %zu elements, type %d, op %d, root %d", names[call.kind],
           call.count, call.type, std::min<int>(call.reduction, REDUCTIONS), call.root);
  if (!visitor.meet()) return false;
  bool same = true;
  for (int rank = 0; rank < visitor.size; rank++)
    if (same && strcmp(board->calls[rank], board->calls[visitor.rank])) {
      same = false;
      call.communicator->fail(INTERNAL_ERROR, std::string("different collectives: ") + board->calls[visitor.rank] +
                                                  " here, " + board->calls[rank] + " on rank " + std::to_string(rank));
    }
  return visitor.meet() && same;
}

// What this rank's elements are multiplied by before they are combined.
double factor_of(const Call& call) {
  if (call.reduction == AVERAGE) return 1.0 / call.communicator->visitor.size;
  auto found = call.communicator->factors.find(call.reduction);
  if (found == call.communicator->factors.end()) return 1;
  if (!found->second.second) return found->second.first;
  double factor = 0;  // the number is in memory of the device, in the type of the elements
  if (call.type == DOUBLE) return *(const double*)found->second.second;
  if (call.type == FLOAT) factor = *(const float*)found->second.second;
  return factor;
}

}  // namespace

void run_collective(const Call& call) {
  ncclComm* communicator = call.communicator;
  Visitor& visitor = communicator->visitor;
  Board* board = visitor.board;
  if (!same_on_all_ranks(call)) return;
  const size_t bytes = width(call.type), most = MAILBOX / bytes;
  const double factor = factor_of(call);
  const int reduction = call.reduction > AVERAGE ? SUM : call.reduction;
  const bool combines = call.kind == ALL_REDUCE || call.kind == REDUCE || call.kind == REDUCE_SCATTER;
  const bool sends = call.kind != BROADCAST || visitor.rank == call.root;
  const bool receives = call.kind != REDUCE || visitor.rank == call.root;
  std::vector<char*> parts;
  for (int rank = 0; rank < visitor.size; rank++) parts.push_back(board->mailbox(rank));
  // A reduce-scatter is a reduction to each rank in turn, of that rank's part.
  const int turns = call.kind == REDUCE_SCATTER ? visitor.size : 1;
  for (int turn = 0; turn < turns; turn++)
    for (size_t begin = 0; begin < call.count; begin += most) {
      const size_t count = std::min(most, call.count - begin);
      char* own = parts[visitor.rank];
      if (sends) memcpy(own, (const char*)call.source + (turn * call.count + begin) * bytes, count * bytes);
      if (combines && factor != 1) scale(own, count, call.type, factor);
      if (!visitor.meet()) return;
      char* into = (char*)call.destination + begin * bytes;
      if (call.kind == BROADCAST)
        memcpy(into, parts[call.root], count * bytes);
      else if (call.kind == ALL_GATHER)
        for (int rank = 0; rank < visitor.size; rank++) memcpy(into + rank * call.count * bytes, parts[rank], count * bytes);
      else if (receives && (call.kind != REDUCE_SCATTER || turn == visitor.rank))
        if (!reduce(into, parts.data(), visitor.size, count, call.type, reduction))
          communicator->fail(INVALID_ARGUMENT, "type " + std::to_string(call.type) + " cannot be combined here");
      if (!visitor.meet()) return;
    }
}

void run_transfers(const std::vector<Call>& calls) {
  Visitor& visitor = calls[0].communicator->visitor;
  Board* board = visitor.board;
  std::vector<size_t> done(calls.size(), 0);
  for (bool all = false; !all && !visitor.aborted;) {
    bool progress = false;
    all = true;
    for (size_t i = 0; i < calls.size(); i++) {
      const Call& call = calls[i];
      const size_t bytes = call.count * width(call.type);
      if (done[i] == bytes) continue;
      all = false;
      // The earlier call to the same peer comes first.
      bool waits = false;
      for (size_t j = 0; j < i; j++)
        waits |= calls[j].kind == call.kind && calls[j].root == call.root && done[j] < calls[j].count * width(calls[j].type);
      if (waits) continue;
      const bool sends = call.kind == SEND;
      const int from = sends ? visitor.rank : call.root, to = sends ? call.root : visitor.rank;
      Pair& pair = board->pairs[from][to];
      char* box = board->pair_box(from, to);
      const long written = pair.written, read = pair.read;
      const size_t place = (sends ? written : read) % PAIR_BOX;
      size_t now = std::min(bytes - done[i], PAIR_BOX - place);
      now = std::min(now, sends ? PAIR_BOX - (size_t)(written - read) : (size_t)(written - read));
      if (!now) continue;
      if (sends)
        memcpy(box + place, (const char*)call.source + done[i], now), pair.written += now;
      else
        memcpy((char*)call.destination + done[i], box + place, now), pair.read += now;
      done[i] += now;
      progress = true;
    }
    if (progress)
      visitor.ring();
    else if (!all)
      usleep(100);
  }
}

}  // namespace nccl
