#include "board.h"

#include <climits>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace nccl {

static constexpr size_t HEADER = (sizeof(Board) + 4095) / 4096 * 4096;

char* Board::mailbox(int rank) { return (char*)this + HEADER + (size_t)rank * MAILBOX; }

char* Board::pair_box(int from, int to) {
  return (char*)this + HEADER + MOST_RANKS * MAILBOX + ((size_t)from * MOST_RANKS + to) * PAIR_BOX;
}

Board* Board::open(const std::string& name, int size) {
  const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  // Pages that nobody touches take no memory. A new file is zeros, which is how a board begins.
  const size_t bytes = HEADER + MOST_RANKS * MAILBOX + (size_t)MOST_RANKS * MOST_RANKS * PAIR_BOX;
  if (file < 0 || size > MOST_RANKS || ftruncate(file, bytes)) return nullptr;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return mapped == MAP_FAILED ? nullptr : (Board*)mapped;
}

void Visitor::ring() {
  board->bell++;
  syscall(SYS_futex, &board->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Sleep until the bell rings, or for 20 ms: an abort rings no bell.
static void sleep_until_bell(Board* board, int seen) {
  timespec limit{0, 20'000'000};
  syscall(SYS_futex, &board->bell, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void Visitor::nap() { sleep_until_bell(board, board->bell); }

int Visitor::lost() {
  for (int other = 0; other < size; other++)
    if (board->processes[other] && kill(board->processes[other], 0)) return other;
  return -1;
}

bool Visitor::meet() {
  const long mine = ++arrivals;
  board->arrived[rank] = mine;
  ring();
  for (int other = 0; other < size; other++)
    for (;;) {
      const int seen = board->bell;
      if (board->arrived[other] >= mine) break;
      if (aborted) return false;
      sleep_until_bell(board, seen);
    }
  return !aborted;
}

}  // namespace nccl
