/* Reads memory with all threads and nothing else: what bandwidth figures are measured against. */
#include "kernels.h"

namespace {

const int64_t PIECE = 1 << 20;

typedef uint64_t pair __attribute__((vector_size(16), aligned(1), may_alias)); /* one register on every processor */

struct read_job {
  const char *data;
  int64_t bytes;
  uint64_t sums[64];
};

void read_piece(void *context, int32_t job, int32_t worker) {
  read_job *r = (read_job *)context;
  int64_t begin = job * PIECE, end = begin + PIECE < r->bytes ? begin + PIECE : r->bytes;
  pair lanes[4] = {};
  for (int64_t at = begin; at + 64 <= end; at += 64) {
    const pair *words = (const pair *)(r->data + at);
    __builtin_prefetch(r->data + at + 4096);
    for (int i = 0; i < 4; i++) lanes[i] ^= words[i];
  }
  pair all = lanes[0] ^ lanes[1] ^ lanes[2] ^ lanes[3];
  __atomic_fetch_xor(&r->sums[worker % 64], all[0] ^ all[1], __ATOMIC_RELAXED);
}

}  // namespace

uint64_t infer_read(infer_pool *pool, const void *data, int64_t bytes) {
  read_job job = {(const char *)data, bytes, {}};
  uint64_t sum = 0;
  infer_parallel(pool, (int32_t)((bytes + PIECE - 1) / PIECE), read_piece, &job);
  for (uint64_t s : job.sums) sum ^= s;
  return sum;
}
